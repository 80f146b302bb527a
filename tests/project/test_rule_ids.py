"""Python knows no rule by its id: what a rule is to others stands in its document, so that a rule can be renamed.

So for every folder of rules/ whose documents have ids: roles, plans written by hand, schemes of quantised weights.
Renaming is tried on the rules that exports ask something of, and on all schemes: what is made stays what it was.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packing import random_parts
from quantised_models import METHODS as QUANTISED
from quantised_models import weights_of

import autoplan
from autoplan.common.files import rule_files
from autoplan.common.files.rule_files import rules_folder, scheme_files
from autoplan.decide.rulebook import read
from autoplan.decide.rulebook.read import EXPORTS, GENERIC, load_rules
from autoplan.decide.written_plans.read import load_plans
from autoplan.execute.quantised.formats import dequantise
from autoplan.hf.quantised.methods import method_of
from autoplan.hf.source import resolve

torch.set_num_threads(1)
PACKAGE = Path(autoplan.__file__).parent
ROLES = frozenset(rule.id for rule in load_rules()) - {GENERIC}  # the reader's own word for what no rule names
PLANS = frozenset(plan.id for plan in load_plans())
SCHEMES = frozenset(scheme_files())
# These rooms see entries and their rules. Elsewhere "attention" is a kind of call, which is no rule.
SEE_RULES = ("decide", "emit", "check/audit", "cli")
# Some schemes are called as their method is in transformers' configs. Who reads these may know the methods.
METHODS = SCHEMES & {str(data["method"]) for data in scheme_files().values()}
SEE_METHODS = "hf/"
# The folders whose documents have no ids: what is fed to a model type, kernels and GPUs by the names that others have
# for them (the latter are words that users say).
NO_IDS = {"inputs", "kernels", "devices"}


def known_in(place: str) -> frozenset[str]:
    """Ids that a file may know: plain words where no rules are seen, methods where configs are read."""
    plain = frozenset(name for name in ROLES if "-" not in name)
    return (frozenset() if place.startswith(SEE_RULES) else plain) | (
        METHODS if place.startswith(SEE_METHODS) else frozenset()
    )


def ids_in(text: str, place: str) -> Iterator[str]:
    """Ids among the string constants of a file."""
    ids, allowed = ROLES | PLANS | SCHEMES, known_in(place)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value in ids:
                if node.value not in allowed:
                    yield f"{node.lineno}: {node.value!r}"
            else:
                words = re.findall(r"(?<![\w-])[\w]+(?:-[\w]+)+(?![\w-])", node.value)
                yield from (f"{node.lineno}: {word!r} in a text" for word in words if word in ids)


def test_no_python_file_names_a_rule() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        found += [f"{place}:{line}" for line in ids_in(path.read_text("utf-8"), place)]
    assert found == []


def test_every_folder_of_rules_is_looked_for() -> None:
    folders = {path.name for path in rules_folder().iterdir() if path.is_dir()}
    assert folders == {"roles", "plans", "quantised"} | NO_IDS


@pytest.mark.parametrize(
    ("text", "place", "count"),
    [
        ('_ENDS = ("lm-head", "tied-head")', "emit/a.py", 2),
        ('_ENDS = ("lm-head", "tied-head")', "ops/a.py", 2),
        ('hint = "the rule head-norm goes on"', "emit/a.py", 1),
        ('if entry.rule == "attention":\n    pass', "emit/a.py", 1),
        ('if call.reduce == "attention":\n    pass', "ops/a.py", 0),
        ('hint = "a lm-head-like thing"', "emit/a.py", 0),
        ('if weight.scheme.id == "gptq":\n    pass', "execute/a.py", 1),
        ('if data["quant_method"] == "gptq":\n    pass', "hf/quantised/a.py", 0),
        ('_READ = {"fp8-blocks": 1}', "hf/quantised/a.py", 1),
        ('if plan.id == "qwen2-sequence-classification":\n    pass', "hf/a.py", 1),
    ],
)
def test_the_scan_can_fail(text: str, place: str, count: int) -> None:
    assert len(list(ids_in(text, place))) == count


# What a rule is to other systems, and models that show all of it.
MODELS = ("llama", "gemma2", "qwen3", "phi3", "mixtral", "deepseek_v3")


def exports_of(model_type: str) -> dict[str, str]:
    clone = resolve(model_type).tiny(dtype=torch.float64, experts="batched_mm")
    plan = autoplan.plan(clone, 2, source="inferred", prove="none")
    targets = ("hf", "vllm", "deepspeed")
    return {target: plan.export(target, clone, drop=True) for target in targets} | {
        "roles": " ".join(sorted({read.exported_as(entry.rule) for entry in plan.entries}))
    }


@pytest.fixture
def renamed_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the rules in which every one that says what it is to others has another id."""
    shutil.copytree(rules_folder() / "roles", tmp_path / "roles")
    told = {rule.id for rule in load_rules() if rule.exported_as or rule.holds_experts}
    for path in (tmp_path / "roles").glob("*.toml"):
        text = path.read_text("utf-8")
        for name in told:
            text = text.replace(f'"{name}"', f'"x-{name}"')
        path.write_text(text, "utf-8")
        if path.stem in told:
            path.rename(path.with_stem(f"x-{path.stem}"))
    monkeypatch.setattr(read, "rules_folders", lambda: (tmp_path,))
    yield
    monkeypatch.undo()


def test_renaming_rules_changes_no_export(request: pytest.FixtureRequest) -> None:
    before = {model: exports_of(model) for model in MODELS}
    request.getfixturevalue("renamed_rules")
    assert not ROLES & {rule.id for rule in load_rules() if rule.exported_as}
    assert {model: exports_of(model) for model in MODELS} == before
    shown = {word for found in before.values() for word in found["roles"].split(" ")}
    assert shown >= {word for words in EXPORTS for word in words.split(" ")}


def test_renaming_schemes_changes_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: weights_of(method_of(data), {"a.weight": (96, 64)})[0] for name, data in QUANTISED.items()}
    parts = {name: random_parts(weight) for name, weight in known.items()}
    before = {name: dequantise(weight, parts[name], weight.shape) for name, weight in known.items()}
    for path in (rules_folder() / "quantised").glob("*.toml"):
        (tmp_path / "quantised").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "quantised" / f"x-{path.name}")
    monkeypatch.setattr(rule_files, "rules_folder", lambda: tmp_path)
    for name, data in QUANTISED.items():
        (weight,) = weights_of(method_of(data), {"a.weight": (96, 64)})
        assert weight.scheme.id == f"x-{known[name].scheme.id}"
        assert weight.tensors == known[name].tensors
        assert torch.equal(dequantise(weight, parts[name], weight.shape), before[name]), name
