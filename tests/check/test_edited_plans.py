"""A plan that was edited, or made for another model, is what follows from the model or is refused before it changes."""

from __future__ import annotations

import copy
import importlib
import json
import os
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from operator import itemgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from interrupts import fake_world
from mesh_toys import mesh_of
from plan_mutants import SUBJECTS, outcome_of, subject, try_mutants
from slow_cases import marked
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

import autoplan
from autoplan.check.audit import gate
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.decide.written_plans.plan_file import plan_from_dict, plan_to_dict
from autoplan.execute.fits import model_hash
from autoplan.values import UNKNOWN, Plan
from autoplan.values.plan import digest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("llama", "bamba")


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SUBJECTS if name not in QUICK)]
)
def test_random_mutants_are_refused_or_exact(name: str) -> None:
    """tests/fuzz/edited_plans.py tries thousands."""
    outcome = try_mutants(subject(name), 25, seed=1)
    assert outcome.problems == []
    assert outcome.counts["refused on load"] and outcome.counts["refused on apply"] and outcome.counts["exact"]


# ------------------------------------------------------------------------------------------------ by hand

Edit = Callable[[dict[str, Any]], Any]


def rule_of(data: dict[str, Any], part: str) -> dict[str, Any]:
    return next(one for one in data["runtime"]["parameters"] if part in one["pattern"])


def instruction(data: dict[str, Any], **wanted: Any) -> dict[str, Any]:
    return next(
        one
        for one in data["runtime"]["instructions"]
        if all(str(value) in str(one.get(name)) for name, value in wanted.items())
    )


EDITS: dict[str, Edit] = {
    "no sum after the mlp": lambda d: d["runtime"]["instructions"].remove(
        instruction(d, do="AllReduce", pattern="mlp")
    ),
    "a sum twice": lambda d: d["runtime"]["instructions"].append(copy.deepcopy(instruction(d, do="AllReduce"))),
    "no gradient sum": lambda d: d["runtime"]["instructions"].remove(instruction(d, do="AllReduceGradient")),
    "a mean for a sum": lambda d: instruction(d, do="AllReduce", pattern="mlp").update(do="MeanOverRanks"),
    "a sum elsewhere": lambda d: instruction(d, do="AllReduce", pattern="mlp").update(
        pattern="model.layers.*.mlp.up_proj"
    ),
    "a sum of one block": lambda d: instruction(d, do="AllReduce", pattern="mlp").update(
        pattern="model.layers.0.mlp.down_proj"
    ),
    "a weight left whole": lambda d: d["runtime"]["parameters"].remove(rule_of(d, "up_proj")),
    "rows for columns": lambda d: rule_of(d, "down_proj").update(dim=0),
    "two layouts swapped": lambda d: rule_of(d, "q_proj").update(layout=rule_of(d, "o_proj")["layout"] + "*1"),
    "finer heads": lambda d: rule_of(d, "q_proj").update(layout="16!*4"),
    "a gradient not summed": lambda d: rule_of(d, "k_proj").update(gradient="sum"),
    "an entry's style": lambda d: d["entries"][1].update(style="replicate"),
    "an entry lost": lambda d: d["entries"].pop(),
    "sequence parallel": lambda d: d.update(sequence_parallel=True),
    "no head split": lambda d: d["runtime"].update(
        instructions=[one for one in d["runtime"]["instructions"] if one["do"] != "SplitLogits"]
    ),
    "a block less": lambda d: d["layers"][0]["fqns"].pop(),
    "no made_for": lambda d: (d.pop("made_for"), d["runtime"]["instructions"].pop()),
    "no content": lambda d: (d["made_for"].pop("content"), d["runtime"]["instructions"].pop()),
}


def refusal(data: dict[str, Any], model: nn.Module) -> str:
    """What the error says; the model is untouched."""
    with fake_world(2), pytest.raises(AutoplanError) as error:
        autoplan.parallelize(model, mesh_of(tp=2), plan_from_dict(data))
    assert autoplan.applied(model) is None
    return str(error.value)


VARIANTS = ["a sum twice", "a mean for a sum", "a sum of one block", "an entry lost", "no content"]  # of other edits


@pytest.mark.parametrize("name", marked(EDITS, slow=VARIANTS))
def test_an_edited_plan_is_refused(name: str) -> None:
    made = subject("llama")
    data = copy.deepcopy(made.data)
    EDITS[name](data)
    said = refusal(data, made.build())
    assert "plan" in said
    if "was edited" in said:
        assert "autoplan plan MODEL --tp 2 " in said and "autoplan.plan(model, tp_size=2)" in said and "should" in said


def test_without_the_second_derivation_an_edit_is_silently_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "held_against_model", lambda model, plan: plan)
    made = subject("llama")
    data = copy.deepcopy(made.data)
    EDITS["no gradient sum"](data)
    assert outcome_of(made, data)[0] == "wrong"


def test_texts_may_be_edited() -> None:
    made = subject("llama")
    data = copy.deepcopy(made.data)
    data["entries"][0]["reason"] = "because I say so"
    data["model"] = "our llama"
    plan = plan_from_dict(data)
    assert gate.held_against_model(made.model, plan) is plan


def test_a_file_that_does_not_say_what_it_was_is_derived_once_more() -> None:
    made = subject("llama")
    data = copy.deepcopy(made.data)
    del data["made_for"]
    plan = plan_from_dict(data)
    assert plan.made_for.content == UNKNOWN
    found = gate.held_against_model(made.model, plan)
    assert found is not plan and found.runtime == made.plan.runtime and found.proof.ok


def test_a_plan_put_together_in_python_passes() -> None:
    made = subject("llama")
    plan = Plan("mine", 2, runtime=made.plan.runtime)
    assert gate.held_against_model(made.model, plan) is plan


def test_a_plan_survives_its_file() -> None:
    for name in QUICK:
        plan = subject(name).plan
        again = plan_from_dict(plan_to_dict(plan))
        assert again.made_for.content == plan.made_for.content == digest(again) and again == plan


def test_reading_an_edited_file_as_a_source_holds_it_against_the_model_too(tmp_path: Any) -> None:
    made = subject("llama")
    path = tmp_path / "plan.yaml"
    made.plan.save(path)
    assert autoplan.plan(made.build(), 2, source=path) == made.plan
    lines = path.read_text().replace("do: AllReduce,", "do: MeanOverRanks,")
    path.write_text(lines)
    with pytest.raises(PlanMismatchError, match="was edited after it was made.*MeanOverRanks"):
        autoplan.plan(made.build(), 2, source=path)


# ------------------------------------------------------------------------------------------------ another model


def llama(heads: int) -> Any:
    """The same weights with other heads: no shape tells."""
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
    return AutoModelForCausalLM.from_config(LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, **sizes))


class Mlp(nn.Module):
    def __init__(self, scale: float = 1.0, parts: int = 2) -> None:
        super().__init__()
        self.scale, self.parts = scale, parts
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * self.scale


class Mixed(Mlp):
    """Code that reads the whole width, in a forward of which no call is rewritten."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).softmax(-1)) * self.scale


X = {"x": torch.linspace(-1, 1, 2 * 5 * 8).view(2, 5, 8)}


def test_another_number_of_heads_is_noticed() -> None:
    plan = autoplan.plan(llama(8), 2, prove="none")
    other = llama(4)
    assert plan.made_for.model == model_hash(llama(8)) != model_hash(other)
    said = refusal(plan_to_dict(plan), other)
    assert "made for other code or other sizes" in said and "8!*4" in said and "4!*8" in said


def test_other_code_with_the_same_weights_is_noticed() -> None:
    plan = autoplan.plan(Mlp(), 2, inputs=X, prove="none")
    said = refusal(plan_to_dict(plan), Mixed())
    assert "made for other code or other sizes" in said and "MODEL --tp 2" in said


def test_what_does_not_steer_the_code_changes_nothing() -> None:
    model = Mlp()
    known = model_hash(model)
    for other in (Mlp().eval(), Mlp().double(), Mlp().to("meta")):
        assert model_hash(other) == known
    tokens = llama(4)
    tokens.config.pad_token_id = 7
    assert model_hash(tokens) == model_hash(llama(4))
    model.__class__ = type("Wrapped", (Mlp,), {})
    assert model_hash(model) == known and model_hash(Mlp(parts=4)) != known and model_hash(Mixed()) != known


class Way(Enum):
    one = 1
    other = 2


class Settings:
    def __init__(self, kind: str) -> None:
        self.kind = kind


def _scaled(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x * by


@dataclass(slots=True)
class Slots:
    kind: str


def _cached(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lru_cache(_scaled(by))


VARIANTS: dict[str, tuple[Any, Any]] = {
    "bool": (True, False),
    "string": ("sum", "mean"),
    "float": (0.5, 0.25),
    "None": (None, "mean"),
    "enum": (Way.one, Way.other),
    "dtype": (torch.float32, torch.float64),
    "tuple": ((1.0, "a"), (1.0, "b")),
    "set": ({"a", "b"}, {"a", "c"}),
    "dict": ({"norm": {"eps": 1e-5}}, {"norm": {"eps": 1e-6}}),
    "function": (torch.sin, torch.cos),
    "function of torch": (nn.functional.gelu, nn.functional.relu),
    "lambda": (lambda x: x * 2, lambda x: x * 3),
    "closure": (_scaled(2.0), _scaled(3.0)),
    "partial": (partial(torch.add, alpha=2), partial(torch.add, alpha=3)),
    "object": (Settings("a"), Settings("b")),
    "namespace": (SimpleNamespace(kind="a"), SimpleNamespace(kind="b")),
    "class": (nn.GELU, nn.ReLU),
    "number of numpy": (np.float32(0.5), np.float32(0.25)),
    "array": (np.array([1, 2]), np.array([1, 3])),
    "decimal": (Decimal("0.5"), Decimal("0.25")),
    "queue": (deque(["a"]), deque(["b"])),
    "item": (itemgetter(0), itemgetter(1)),
    "pattern": (re.compile("a"), re.compile("b")),
    "op": (torch.ops.aten.relu, torch.ops.aten.sigmoid),
    "method of tensors": (torch.Tensor.relu, torch.Tensor.sigmoid),
    "slots": (Slots("a"), Slots("b")),
    "cached function": (_cached(2.0), _cached(3.0)),
    "compiled function": tuple(torch.compile(_scaled(by), backend="eager") for by in (2.0, 3.0)),
    "module in a list": ([nn.LeakyReLU(0.1)], [nn.LeakyReLU(0.2)]),
}


@pytest.mark.parametrize("name", ["setting", "_private"])
@pytest.mark.parametrize("kind", VARIANTS)
def test_a_value_that_code_may_read_belongs_to_the_plan(kind: str, name: str) -> None:
    def made(value: Any) -> Mlp:
        model = Mlp()
        setattr(model, name, value)
        return model

    one, other = VARIANTS[kind]
    assert model_hash(made(one)) == model_hash(made(one)) != model_hash(made(other))


def test_classes_and_the_functions_that_they_call_belong_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    known = model_hash(Mlp())
    monkeypatch.setattr(Mlp, "mode", "other", raising=False)
    assert model_hash(Mlp()) != known
    monkeypatch.undo()
    monkeypatch.setattr(Mlp, "helper", lambda self, x: x, raising=False)
    assert model_hash(Mlp()) != known
    monkeypatch.undo()
    assert model_hash(Mlp()) == known


HELD = "class Held:\n    {}\nclass Base(Mlp):\n    held = Held()"
CODE = {
    "of an object that is held": HELD.format("def __call__(self, x): return x.{}()"),
    "of a property": HELD.format("kind = property(lambda self: '{}')"),
    "of a base of its class": f"class Kind:\n    kind = '{{}}'\n{HELD.replace('Held:', 'Held(Kind):').format('pass')}",
    "of an enum": "class Way(Enum):\n    one = '{}'\nclass Base(Mlp):\n    way = Way.one",
    "of a helper's module": "class Base(Mlp):\n    def forward(self, x): return helpers.mixed(x)",
}


@pytest.mark.parametrize("kind", CODE)
def test_code_of_what_a_model_holds_or_calls_belongs_to_the_plan(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(word: str) -> nn.Module:
        helpers = ModuleType("helpers_of_a_model")
        exec(f"def mixed(x): return x.{word}()", vars(helpers))
        space = {"Mlp": Mlp, "Enum": Enum, "helpers": helpers, "__name__": "of_a_model"}
        exec(CODE[kind].format(word), space)
        return cast(nn.Module, cast(Any, space["Base"])())

    assert model_hash(made("relu")) == model_hash(made("relu")) != model_hash(made("sigmoid"))


def test_what_is_read_of_a_model_is_the_same_in_every_process() -> None:
    """In one with another order of sets, too."""
    code = "import sys; sys.path[:0] = ['tests', 'tests/helpers', 'tests/check']; import test_edited_plans as here\n"
    code += "print(here.model_hash(here.with_all_variants()))"
    env = {**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=ROOT)
    assert done.stdout.split()[-1] == model_hash(with_all_variants())


def with_all_variants() -> Mlp:
    model: Any = Mlp()
    model.setting = [value for pair in VARIANTS.values() for value in pair]
    return model  # type: ignore[no-any-return]


class Finder:
    """As editable installs put one before all others: an import runs its code."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        return None


def test_what_an_import_runs_is_no_path_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs once in a process, and ranks may do it in different calls: their plans would differ."""

    class Importing(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sys.modules.pop("colorsys", None)
            import colorsys

            made: torch.Tensor = super().forward(x) * colorsys.ONE_THIRD
            return made

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    paths = str(autoplan.plan(Importing(), tp_size=2).paths)
    assert "Importing.forward" in paths and "find_spec" not in paths


def test_a_plan_that_is_made_in_an_import_has_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"import autoplan, {__name__} as here\nPLAN = autoplan.plan(here.Mlp(), tp_size=2)\n"
    (tmp_path / "planned_in_an_import.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    assert "Mlp.forward" in str(importlib.import_module("planned_in_an_import").PLAN.paths)


def test_a_plan_from_python_that_was_changed_there_is_held_against_the_model_too() -> None:
    made = subject("llama")
    runtime = replace(made.plan.runtime, instructions=made.plan.runtime.instructions[1:])
    with pytest.raises(PlanMismatchError, match="was edited"):
        gate.held_against_model(made.model, replace(made.plan, runtime=runtime))


def test_a_plan_for_context_parallelism_is_derived_as_one() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128))
    plan = autoplan.plan(model, cp_size=2, prove="none")
    older = replace(plan, made_for=replace(plan.made_for, model="other code"))
    derived = gate.held_against_model(model, older)
    assert (derived.tp_size, derived.cp_size) == (1, 2) and derived.runtime == plan.runtime


def test_an_audit_names_what_parallelize_refuses(tmp_path: Path) -> None:
    """A style that was edited beside layouts that were not; and a plan of another model, which `verify` refuses too."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config, other = (kind(**sizes, num_hidden_layers=2, vocab_size=160) for kind in (LlamaConfig, Qwen3Config))
    edited = plan_to_dict(autoplan.plan(config, 2))
    next(entry for entry in edited["entries"] if entry["pattern"].endswith("up_proj"))["style"] = "rowwise"
    report = autoplan.audit(config, plan_from_dict(edited), 2)
    cause = report.findings[0]
    assert not report.ok and cause.about == ("model.layers.*.mlp.up_proj",) and "style: colwise" in cause.hint
    assert "exact on 2 simulated ranks" in report.details["ran"] and report.fixed is not None
    foreign = autoplan.plan(other, 2)
    report = autoplan.audit(config, foreign, 2)
    assert not report.ok and any("q_norm" in f.proof or "k_norm" in f.proof for f in report.findings)
    with pytest.raises(PlanMismatchError, match="matches no"):
        autoplan.verify(config, foreign, 2)


AUDITED: dict[str, tuple[Edit, str, str]] = {  # an edit, where its one cause is, and what to write
    "a dim of another size": (
        lambda d: rule_of(d, "down_proj").update(dim=0), "model.layers.*.mlp.down_proj.weight", "dim: 1"
    ),
    "a flag": (lambda d: d.update(sequence_parallel=True), "sequence_parallel", "sequence_parallel: false"),
    "a section": (lambda d: d["runtime"].update(instructions=[]), "runtime.instructions", "corrected plan"),
    "a sum of one block": (EDITS["a sum of one block"], "model.layers.*.mlp.down_proj", "pattern: model.layers.*"),
    "another path": (
        lambda d: [
            row.update(pattern=row["pattern"].replace(".mlp.", ".ffn."))
            for row in (*d["entries"], *d["runtime"]["parameters"], *d["runtime"]["instructions"])
        ],
        "model.layers.*.ffn.up_proj", "write 'mlp' for 'ffn'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AUDITED)
def test_an_audit_tells_what_was_edited(name: str, tmp_path: Path) -> None:
    edit, where, fix = AUDITED[name]
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
        vocab_size=160,
    )  # fmt: skip
    data = plan_to_dict(autoplan.plan(config, 2, prove="none"))
    edit(data)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    report = autoplan.audit(config, str(file), 2)
    causes = [finding for finding in report.findings if finding.level == "error" and not finding.is_consequence]
    assert len(causes) == 1 and where in causes[0].about and fix in causes[0].hint, causes
    assert report.findings[0] == causes[0] and report.fixed is not None and autoplan.audit(config, report.fixed, 2).ok
