"""Plan files come back exactly, refuse what they cannot mean, and execute nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_instructions import filled
from example_plans import llama_plan, odd_plan
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoplan.common.errors import AutoplanError, PlanFileError
from autoplan.decide.written_plans.plan_file import load_plan, names_plan_file, plan_from_dict, plan_to_dict
from autoplan.values import CallSite, CellCall, Entry, Finding, LengthCall, NormCall, Plan, Replicated, Runtime, replace
from autoplan.values.reasons import DoesNotDivide, OfDim

PLANS = {"llama": llama_plan(), "odd": odd_plan(), "empty": Plan("nothing", 1)}
SUFFIXES = ("yaml", "yml", "json")


def written(plan: Plan, folder: Path, suffix: str = "yaml") -> Path:
    path = folder / f"plan.{suffix}"
    plan.save(path)
    return path


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", PLANS)
def test_round_trip_is_exact(name: str, suffix: str, tmp_path: Path) -> None:
    loaded = load_plan(written(PLANS[name], tmp_path, suffix))
    assert loaded == PLANS[name]
    assert repr(loaded) == repr(PLANS[name])  # tuples stay tuples, 1 stays apart from True and 1.0
    hash(loaded.entries)  # a list anywhere inside would raise


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_field_of_every_type_comes_back(suffix: str, tmp_path: Path) -> None:
    """Whatever is added to `autoplan.values` is covered here without a word."""
    plan: Plan = replace(filled(Plan), cp_size=1)  # which stands beside no other split: test_context.py has it
    assert plan.runtime.instructions[0].cuts and plan.runtime.instructions[0].site.width == 7
    assert load_plan(written(plan, tmp_path, suffix)) == plan


text = st.text(st.characters(codec="utf-8"), max_size=20)


@settings(max_examples=60, deadline=None)
@example(model="\x85", reason="a\nb", units="\u2028", where="\r", size=0)  # line breaks to YAML
@given(model=text, reason=text, units=text, where=text, size=st.integers(0, 10**15))
def test_any_text_survives(
    tmp_path_factory: pytest.TempPathFactory, model: str, reason: str, units: str, where: str, size: int
) -> None:
    entry = Entry("a", (units,), "colwise", reason, "r", "user", reason, units, (where,))
    plan = Plan(model, 2, entries=(entry,), replicated=(Replicated(where, size, reason),))
    plan = replace(plan, findings=(Finding(units, "note", where, reason),))
    folder = tmp_path_factory.mktemp("plans")
    for suffix in ("yaml", "json"):
        assert load_plan(written(plan, folder, suffix)) == plan


def test_file_begins_with_its_version_and_the_contract_keys(tmp_path: Path) -> None:
    lines = written(llama_plan(), tmp_path).read_text().splitlines()
    assert lines[0] == "autoplan: 2"
    keys = [line.split(":")[0] for line in lines if line[:1].isalpha()]
    contract = ["autoplan", "model", "tp_size", "sequence_parallel", "entries", "replicated", "layers", "proof"]
    assert keys == [*contract, "source", "legal_tp", "findings", "communication", "runtime", "obstacles", "made_for"]
    assert list(llama_plan().to_dict()) == keys
    assert list(json.loads(written(llama_plan(), tmp_path, "json").read_text())) == keys


def test_file_reads_well(tmp_path: Path) -> None:
    """Short things stand on one line, no line runs far, nothing refers elsewhere."""
    content = written(llama_plan(), tmp_path).read_text()
    assert "legal_tp: [1, 2, 4, 8]" in content
    assert "  - {pattern: model.layers.*.self_attn.q_proj.weight, dim: 0, layout: 32!*128}" in content
    assert "&id" not in content and "!!" not in content
    assert max(map(len, content.splitlines())) <= 124


def broken(**changes: Any) -> dict[str, Any]:
    data = plan_to_dict(llama_plan())
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        target: Any = data
        for step in path:
            target = target[int(step) if step.isdigit() else step]
        if value is KeyError:
            del target[last]
        else:
            target[int(last) if last.isdigit() else last] = value
    return data


# what is wrong -> words that must be said: what, where, what to do
BROKEN = {
    "no version": (broken(autoplan=KeyError), ["not an autoplan plan", "autoplan plan MODEL"]),
    "future version": (broken(autoplan=3), ["format 3", "reads format 2", "update autoplan"]),
    "the version before": (broken(autoplan=1), ["format 1", "`autoplan plan MODEL --tp 8 -o FILE`"]),
    "version is text": (broken(autoplan="2"), ["format '2'", "make it again"]),
    "version is a truth value": (broken(autoplan=True), ["format True"]),
    "missing keys": (broken(entries=KeyError, proof=KeyError), ["lacks `entries`, `proof`", "truncated"]),
    "missing field": (broken(entries__1__style=KeyError), ["entries[1]", "'style' is missing"]),
    "misspelt field": (broken(entries__0__unit="8"), ["entries[0]", "unknown key 'unit'", "did you mean 'units'"]),
    "unknown key": (broken(colour="red"), ["unknown key 'colour'", "the keys here are model"]),
    "wrong type": (broken(tp_size="eight"), ["tp_size", "a whole number", "'eight'"]),
    "float for int": (broken(tp_size=8.0), ["tp_size", "a whole number", "8.0"]),
    "truth for int": (broken(tp_size=True), ["tp_size", "a whole number", "True"]),
    "tp too small": (broken(tp_size=0), ["tp_size is 0"]),
    "list expected": (broken(entries={}), ["entries", "a list", "{}"]),
    "mapping expected": (broken(entries__0="q_proj"), ["entries[0]", "the keys of entry", "'q_proj'"]),
    "bad choice": (broken(layers__0__kind="tower"), ["layers[0].kind", "one of decoder, encoder", "'tower'"]),
    "null": (broken(runtime=None), ["runtime", "the keys of runtime", "None"]),
    "deep": (broken(runtime__instructions__0__side="left"), ["instructions[0].side", "one of input, output", "'left'"]),
    "no name": (broken(runtime__instructions__0__do=KeyError), ["instructions[0]", "{do: its name", "'pattern'"]),
    "bad name": (
        broken(runtime__instructions__1__do="AllReduced"),
        ["instructions[1].do", "'AllReduced'", "'AllReduce'"],
    ),
    "bad layout": (broken(runtime__parameters__0__layout="8!!"), ["runtime.parameters[0].layout", "'8!!'"]),
    "no reason": (broken(replicated__0__why=["whole"]), ["replicated[0].why[0]", "{kind: its name", "'whole'"]),
    "misspelt reason": (
        broken(replicated__0__why=[{"kind": "DoesntDivide", "size": 5, "ranks": 2}]),
        ["replicated[0].why[0].kind", "'DoesntDivide'", "did you mean 'DoesNotDivide'"],
    ),
    "reason without its numbers": (
        broken(replicated__0__why=[{"kind": "DoesNotDivide", "size": 5}]),
        ["replicated[0].why[0]", "'ranks' is missing"],
    ),
    "not a mapping": ([1, 2], ["not an autoplan plan"]),
    "nothing": (None, ["not an autoplan plan"]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_data_is_one_clear_error(case: str) -> None:
    data, words = BROKEN[case]
    with pytest.raises(PlanFileError) as caught:
        plan_from_dict(data, "plan file p.yaml")
    message = str(caught.value)
    assert "p.yaml" in message and "→" in message
    for word in words:
        assert word in message


def test_unbroken_data_is_read() -> None:
    """The table above means something only if its starting point is right."""
    assert plan_from_dict(broken()) == llama_plan()


def test_a_reason_stands_in_a_file_as_text_and_as_a_value() -> None:
    why = (OfDim(1, 5, DoesNotDivide(5, 2)),)
    plan = Plan("m", 2, replicated=(Replicated("w", 1, "router: dim 1 (5): …", ("router",), why),))
    (row,) = plan_to_dict(plan)["replicated"]
    assert row["reason"] == "router: dim 1 (5): …" and row["roles"] == ["router"]
    assert row["why"] == [
        {"kind": "OfDim", "dim": 1, "size": 5, "why": {"kind": "DoesNotDivide", "size": 5, "ranks": 2}, "rows": 0}
    ]
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_files_from_before_reasons_were_values_load() -> None:
    data = plan_to_dict(llama_plan())
    for row in data["replicated"]:
        del row["why"], row["roles"]
    for row in data["findings"]:
        del row["kind"]
    assert plan_from_dict(data) == llama_plan()


def test_files_from_before_calls_said_what_is_known_of_their_functions_load() -> None:
    """What their functions do was known, and is known still. Of a function that nobody knows it must be said."""

    def file(plan: Plan) -> dict[str, Any]:
        data = plan_to_dict(plan)
        for one in data["runtime"]["instructions"]:
            for told in ("statistics", "divides", "gates", "states"):
                one.pop(told, None)
        return data

    calls = (
        NormCall("a", CallSite("layer_norm", "forward:1:0"), 1, 8, 2),
        NormCall("b", CallSite("rms_norm", "forward:1:0"), 1, 8, 1),
        LengthCall("c", CallSite("normalize", "forward:1:0"), (-1,), True, True),
        LengthCall("d", CallSite("norm", "forward:1:0"), (-1,), True, False),
        CellCall("e", CallSite("lstm_cell", "forward:1:0"), "4*8!", 4, 2),
        CellCall("f", CallSite("rnn_tanh_cell", "forward:1:0"), "8!", 1, 1),
    )
    plan = replace(llama_plan(), runtime=Runtime(instructions=calls))
    assert plan_from_dict(plan_to_dict(plan)).runtime == plan_from_dict(file(plan)).runtime == plan.runtime
    unknown = replace(plan, runtime=Runtime(instructions=(replace(calls[0], site=CallSite("mine", "forward:1:0")),)))
    assert plan_from_dict(plan_to_dict(unknown)).runtime == unknown.runtime
    with pytest.raises(PlanFileError, match="'statistics' is missing"):
        plan_from_dict(file(unknown))


CORRUPT = {
    "p.yaml": ("autoplan: 1\nmodel: [unclosed", "cannot parse"),
    "tab.yaml": ("autoplan: 1\n\tmodel: x", "cannot parse"),
    "twice.yaml": ("autoplan: 1\ntp_size: 2\ntp_size: 4", "duplicate key 'tp_size'"),
    "twice.json": ('{"autoplan": 1, "tp_size": 2, "tp_size": 4}', "duplicate key 'tp_size'"),
    "cut.json": ('{"autoplan": 1, "mod', "cannot parse"),
    "empty.yaml": ("", "not an autoplan plan"),
    "code.yaml": ("autoplan: !!python/object/apply:os.system ['touch executed']", "cannot parse"),
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_files(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content, words = CORRUPT[name]
    (tmp_path / name).write_text(content)
    with pytest.raises(PlanFileError, match=words) as caught:
        load_plan(tmp_path / name)
    assert name in str(caught.value) and "→" in str(caught.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["gone.yaml", "plan.toml", "plan", "folder.yaml", "binary.yaml"])
def test_files_that_are_none(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanFileError, match=name):
        load_plan(tmp_path / name)


@pytest.mark.parametrize("name", ["plan.txt", "nowhere/plan.yaml", "."])
def test_bad_targets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanFileError):
        llama_plan().save(name)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_come_back_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="cannot be written"):
        replace(llama_plan(), legal_tp=[1, 2]).save(tmp_path / "plan.yaml")  # type: ignore[arg-type]
    assert not (tmp_path / "plan.yaml").exists()


def test_names_of_plan_files(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    assert names_plan_file(written(llama_plan(), tmp_path)) and names_plan_file("gone.yaml")
    assert not names_plan_file("llama") and not names_plan_file("org/model-3.1") and not names_plan_file(tmp_path)
    assert not names_plan_file(tmp_path / "folder.json")


def test_other_yaml_tools_can_read_it(tmp_path: Path) -> None:
    data = yaml.safe_load(written(odd_plan(), tmp_path).read_text())
    assert data == json.loads(written(odd_plan(), tmp_path, "json").read_text())


def test_errors_are_of_the_family() -> None:
    assert issubclass(PlanFileError, AutoplanError) and issubclass(AutoplanError, ValueError)
