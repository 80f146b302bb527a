"""Public names of transformers that the code rests on: the installed version has all, and one that goes is seen."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from autoplan.check.verify import checks
from autoplan.check.verify.subject import Subject
from autoplan.hf import names
from autoplan.hf.driving import lacks
from autoplan.hf.names import ATTENTION, CACHE, NAMES, TARGETS, ForeignName, not_known, vanished, version_findings
from autoplan.hf.source import resolve

HF = Path(names.__file__).parent


def test_the_installed_version_has_every_name() -> None:
    assert [str(name) for name in vanished()] == []


@pytest.mark.parametrize(
    "name",
    [
        ForeignName("argument", (("cach", ""), ("past_keys", "")), "causal_lm"),
        ForeignName("output", (("last_hidden_statue", ""),)),
        ForeignName("member", (("get_input_embedding_table", ""),)),
        ForeignName("field", (("number_of_heads_in_all", ""),), "seq2seq"),
        ForeignName("function", (("create_causal_masks", ""),)),
        ForeignName("module", (("modeling_utilities", ""),)),
        ForeignName("argument", (("pixel_values_of_none", ""),), "image_text"),
    ],
    ids=lambda name: name.kind,
)
def test_a_name_that_no_class_has_is_seen(name: ForeignName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "NAMES", (*NAMES, name))
    assert vanished() == (name,)


def test_a_mapping_is_looked_at_by_itself() -> None:
    """What speech models take does not stand for what models of masked text take."""
    assert names._stands(ForeignName("argument", (("input_features", ""),), "speech"))
    assert not names._stands(ForeignName("argument", (("input_features", ""),), "masked_lm"))


def test_every_name_that_conventions_hold_is_in_the_table() -> None:
    """What verify, loss and checkpoints are driven by: text in conventions.py and driving.py that is such a name."""
    known = {word for name in NAMES for word in name.words}
    trees = [ast.parse((HF / file).read_text(encoding="utf-8")) for file in ("conventions.py", "driving.py")]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    later = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)
             and isinstance(node.func, ast.Name) and node.func.id == "_later"]  # fmt: skip
    ours = {argument.value for call in later for argument in call.args if isinstance(argument, ast.Constant)}
    texts = {node.value for node in nodes if re.fullmatch(r"[a-z][a-z_0-9]+", str(node.value))}
    words = {"drop", "noise", "jitter", "dropout", "label", "target", "token_id", "eager", "sdpa", "config",
             "decoder_", "peft", "transformers", "save_embedding_layers", "selected_adapters", "batched_mm",
             "grouped_mm", "accelerate", "auto_map", "output_", "return_dict", "tp_", "transformers_version",
             "warnings_issued", "inference"}  # fmt: skip
    assert texts - known - words - ours == {"peft_config", "get_base_model"}, "peft's own; enter others in hf/names.py"


NEWER = ("transformers 9.9.0 is newer than 5.24",)


def test_what_this_version_may_call_otherwise_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ForeignName("argument", (("remembered_keys", "9.8 and later"), ("remembered", "before")), "causal_lm")
    assert not_known(gone) == "", "tested versions have all names: an absent one is a fact about the model"
    monkeypatch.setattr(names, "untested", lambda: NEWER)
    assert not_known(CACHE) == ""
    said = not_known(gone)
    assert (
        said.startswith("not known: no class of causal_lm") and "remembered_keys (9.8 and later) or remembered" in said
    )
    assert [finding.message for finding in version_findings()] == [*NEWER]
    monkeypatch.setattr(names, "NAMES", (*NAMES, gone))
    assert [finding.message for finding in version_findings()] == [*NEWER, said]


def test_verify_says_that_a_check_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a version that calls its cache otherwise: the check does not say that the model takes none."""
    model = resolve("bert").tiny()
    assert (lacks(model, CACHE), lacks(model, TARGETS)) == (
        "the model has no cache argument",
        "the model has no labels argument",
    )
    assert lacks(model, ATTENTION) == "the model has only one attention implementation"
    monkeypatch.setattr(names, "untested", lambda: NEWER)
    monkeypatch.setattr(names, "_stands", lambda name: False)
    absent = {check.name: check.absent(Subject(model, {})) for check in checks.CHECKS}
    assert absent["cache"].startswith("not known: no class of causal_lm in the installed transformers has the argument")
    assert absent["loss"].startswith("not known") and lacks(model, ATTENTION).startswith("not known")
