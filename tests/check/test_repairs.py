"""An audit names the culprit: the cause is the first finding, in the words of the plan's dialect, and its fix works.

Wrong plans are made of right ones (`helpers/wrong_plans.py`). The sample here is quick; `slow` does all of them.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mistakes
import pytest
import torch
import yaml
from corpus.toys import ATTENTION, GOOD, MLP, Attention, FusedAttention, decoder
from drawn_plans import mistake_of
from drawn_words import drawn
from scored_audits import score
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from transformers import LlamaConfig
from wrong_plans import DIALECTS, MUTATIONS, SEQUENCE_MUTATIONS, Mutation, as_torch, sequence_plan, wrong_plan

import autoplan
from autoplan.check.audit import audit_source
from autoplan.check.audit.rows import write_fixed
from autoplan.cli.app import main
from autoplan.values import AllReduce, IntegerEdit, Plan, Report, replace

CASES = [
    pytest.param(dialect, mutation, id=f"{dialect}-{mutation.name.replace(' ', '_')}", marks=pytest.mark.slow)
    for dialect in DIALECTS
    for mutation in MUTATIONS
    if dialect in mutation.dialects
]
QUICK = ("o_proj the other way", "w3 missing", "two mistakes")


def audited(dialect: str, mutation: Mutation) -> tuple[Report, Any]:
    plan, model = wrong_plan(mutation, dialect), mutation.model()
    return autoplan.audit(model, plan, mutation.tp_size), model


def is_about(report: Report, number: int, cause: str) -> bool:
    """Is a finding about these modules? DeepSpeed's keys are expressions on parameters."""
    plain = {
        re.sub(r"\\[.d]\+?|\[0-9\]\+|[\^$]", "", place).replace(".*", "") for place in report.findings[number].about
    }
    wanted = cause.replace(".*", "").replace(".", "")
    return any(place == cause or place.replace(".", "") in (wanted, f"{wanted}weight") for place in [
        *report.findings[number].about, *plain])  # fmt: skip


@pytest.mark.parametrize(("dialect", "mutation"), CASES)
def test_the_cause_is_first_and_its_fix_works(dialect: str, mutation: Mutation) -> None:
    report, model = audited(dialect, mutation)
    shown = [(f.level, f.check, f.where, f.message[:80], f.hint[:120]) for f in report.findings[:4]]
    assert any(is_about(report, 0, cause) for cause in mutation.causes), shown
    assert "!" not in report.findings[0].message, shown  # how our plan files write a cut
    if mutation.name.startswith("two"):  # two mistakes give two findings
        assert all(is_about(report, 0, cause) or is_about(report, 1, cause) for cause in mutation.causes), shown
    assert report.fixed is not None, shown
    again = autoplan.audit(model, report.fixed, mutation.tp_size)
    assert again.ok and again.details["outcome"] == "exact", again


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", QUICK)
def test_causes_in_each_dialect(dialect: str, name: str) -> None:
    (mutation,) = [mutation for mutation in MUTATIONS if mutation.name == name]
    test_the_cause_is_first_and_its_fix_works(dialect, mutation)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["automodel", "torchtitan"])
@pytest.mark.parametrize("name", [name for name in SEQUENCE_MUTATIONS if name != "head takes whole"])
def test_causes_under_sequence_parallelism(how: str, name: str) -> None:
    """(A head that takes the norm's output for whole is exact: the norm hands on a DTensor, which says what it is.)"""
    spoil, causes = SEQUENCE_MUTATIONS[name]
    report = autoplan.audit(decoder(), spoil(sequence_plan(how)), 2)
    assert any(is_about(report, 0, cause) for cause in causes), report
    assert autoplan.audit(decoder(), report.fixed, 2).ok


def test_a_norm_that_alone_takes_the_sequence_for_cut_is_the_cause() -> None:
    """The plan is made one without sequence parallelism again, not one with it everywhere."""
    right = as_torch(GOOD)
    report = autoplan.audit(decoder(), {**right, "layers.*.post_norm": SequenceParallel()}, 2)
    assert is_about(report, 0, "layers.*.post_norm"), report
    assert report.fixed.keys() == right.keys()


@pytest.mark.parametrize("how", ["automodel", "torchtitan"])
def test_a_stream_of_dtensors_is_corrected_to_one(how: str) -> None:
    right = sequence_plan(how)
    for style in right.values():
        if isinstance(style, RowwiseParallel):
            style.use_local_output = False
    wrong = {**right, "layers.*.mlp.w2": RowwiseParallel()}
    report = autoplan.audit(decoder(), wrong, 2)
    assert is_about(report, 0, "layers.*.mlp.w2"), report
    assert not report.fixed["layers.*.mlp.w2"].use_local_output


@pytest.mark.parametrize("how", ["automodel", "torchtitan"])
def test_one_layer_is_corrected_and_the_sequence_stays_cut(how: str) -> None:
    right = sequence_plan(how)
    rows = {f"layers.{number}.attn.k_proj": right["layers.*.attn.k_proj"] for number in (0, 1, 3)}
    wrong = {key: style for key, style in right.items() if key != "layers.*.attn.k_proj"} | rows
    report = autoplan.audit(decoder(layers=4), wrong, 2)
    assert report.findings[0].about == ("layers.2.attn.k_proj",), report
    assert [f.where for f in report.findings if f.level == "error" and not f.is_consequence] == ["layers.2.attn.k_proj"]
    assert report.fixed.keys() == {*wrong, "layers.2.attn.k_proj"}


@pytest.mark.parametrize("how", ["automodel", "torchtitan"])
def test_a_right_plan_stays_right_where_a_key_matches_nothing(how: str) -> None:
    """Automodel's plan of llama has rows for packed projections that transformers' llama lacks."""
    report = autoplan.audit(decoder(), {**sequence_plan(how), "layers.*.mlp.w13": RowwiseParallel()}, 2)
    assert report.ok and report.details["outcome"] == "exact", report
    assert [finding.check for finding in report.findings if finding.level == "warn"].count("dead-keys") == 1


def test_a_stream_whose_length_is_read_must_be_of_dtensors() -> None:
    """torchtitan's plan on transformers' llama, which makes its rotary table as long as the embeddings are."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    rename = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}
    inner = {"attn": "self_attn", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    inner |= {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    wrong = {
        rename.get(key) or "model." + ".".join(inner.get(part, part) for part in key.split(".")): style
        for key, style in sequence_plan("automodel").items()
    }
    report = autoplan.audit(config, wrong, 2)
    rows = {"model.embed_tokens", "model.layers.*.self_attn.o_proj", "model.layers.*.mlp.down_proj"}
    assert {place for finding in report.findings[:3] for place in finding.about} == rows, report
    assert "a rank's own length" in report.findings[0].message
    assert report.fixed.keys() == wrong.keys()
    assert all(not report.fixed[key].use_local_output for key in rows)


def test_a_replicated_style_of_automodel_sums_gradients() -> None:
    class ReplicatedWithGradAllReduce(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return module  # Automodel marks it here; its training loop sums

    norms = {f"layers.*.attn.{name}_norm": ReplicatedWithGradAllReduce() for name in "qk"}
    report = autoplan.audit(decoder(partial(Attention, norm="head")), {**as_torch(GOOD), **norms}, 2)
    assert report.ok and report.details["outcome"] == "exact", report
    assert {report.details["verdicts"][key] for key in norms} == {"same"}


def test_norms_of_heads_get_a_style_of_torch_that_sums_their_gradients() -> None:
    model = decoder(partial(Attention, norm="head"))
    report = autoplan.audit(model, as_torch(GOOD), 2)
    norms = {key for key, style in report.fixed.items() if isinstance(style, SequenceParallel)}
    assert norms == {"layers.*.attn.q_norm", "layers.*.attn.k_norm"}, report
    assert report.fixed.keys() - norms == GOOD.keys()
    fixed = autoplan.audit(model, report.fixed, 2)
    assert fixed.ok and "sequence" not in [finding.check for finding in fixed.findings], "heads are no sequence"


def test_rows_that_need_each_other_are_no_cause_of_a_mistake_elsewhere() -> None:
    """Each row of an MLP is wrong without the others: all of them or none."""
    plan = {**as_torch(ATTENTION), "layers.*.attn.o_proj": RowwiseParallel(input_layouts=Shard(1))}
    report = autoplan.audit(decoder(), plan, 2)
    assert is_about(report, 0, "layers.*.attn.o_proj") and report.fixed.keys() == plan.keys(), report


def test_tied_ends_are_corrected_together() -> None:
    model = decoder(tied=True)
    report = autoplan.audit(model, {**GOOD, "head": "rowwise"}, 2)
    assert is_about(report, 0, "head"), report
    assert report.fixed == GOOD


def test_a_dead_key_is_likened_only_to_what_has_no_row() -> None:
    """Such keys are written for blocks of another kind: `gate` for dense layers in a model of experts."""
    report = autoplan.audit(decoder(), {**GOOD, "layers.*.mlp.gate": "colwise"}, 2)
    (dead,) = [finding for finding in report.findings if finding.check == "dead-keys"]
    assert dead.where == "layers.*.mlp.gate" and "mlp.w" not in dead.hint


def without_instruction(plan: Plan, kind: type, name: str) -> Plan:
    kept = tuple(i for i in plan.runtime.instructions if not (isinstance(i, kind) and name in i.pattern))
    assert kept != plan.runtime.instructions
    return replace(plan, runtime=replace(plan.runtime, instructions=kept))


@pytest.mark.slow
@pytest.mark.parametrize("dialect", mistakes.DIALECTS)
def test_mistakes_in_plans_of_real_models(dialect: str) -> None:
    """Drawn at random; `benchmarks/audited_mistakes.py` makes them all, in more architectures."""
    marks: Counter[str] = Counter()
    for name in ("llama", "phi3", "deepseek_v3"):
        model = mistakes.Model.of(name)
        right = None if dialect == "plan file" else mistakes.right_plan(model, dialect)
        if right is None and dialect != "plan file":
            continue  # it is for decoders in the shape of llama alone
        made = mistakes.mistakes_in_file(model, 0) if right is None else mistakes.mistakes(model, right, 0)
        assert audit_source(model.source, model.plan if right is None else right.written(right.rows), 2).ok
        for mistake in random.Random(name).sample(made, 3):
            outcome = score(model, dialect, mistake)[0].split()
            marks.update(["exact"] if outcome[0] == "exact," else ["wrong", *outcome])
    assert marks["wrong"] and marks["rejected"] == marks["wrong"], marks
    assert min(marks["cause"], marks["words"], marks["fixed"]) >= 0.9 * marks["wrong"] - 1, marks


DRAWN = {
    ("llama", "automodel", "inputs by position"): "hidden_states",  # what takes its input by keyword is told by keyword
    ("gpt_oss", "hf", "sinks whole"): "colwise_gather_output",
    ("mistral", "deepspeed", "all by rows"): "column",
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dialect", "kind"), DRAWN)
def test_plans_that_are_wrong_as_users_write_them(model: str, dialect: str, kind: str) -> None:
    """`benchmarks/audited_mistakes.py --by-hand held` audits all of them."""
    (one,) = [one for one in drawn() if (one.model, one.dialect, one.kind) == (model, dialect, kind)]
    outcome, said = score(mistakes.Model.of(model), dialect, mistake_of(one))
    assert outcome == "rejected cause words fixed", said
    report = audit_source(mistakes.Model.of(model).source, mistake_of(one).plan, 2)
    assert DRAWN[model, dialect, kind] in report.findings[0].hint, said
    causes = [finding for finding in report.findings if finding.level == "error" and not finding.is_consequence]
    assert len(causes) == (2 if kind == "all by rows" else 1), said


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.softmax(nn.functional.linear(x, self.weight), -1).sum(-1, keepdim=True)


def test_a_spec_for_what_autotp_never_cuts_is_dead() -> None:
    model = decoder()
    for layer in model.layers:
        layer.mlp = nn.Sequential(Router(), layer.mlp)
    plan = DIALECTS["deepspeed"]({"layers.*.attn.q_proj": "colwise", "layers.*.attn.k_proj": "colwise",
                                  "layers.*.attn.v_proj": "colwise", "layers.*.attn.o_proj": "rowwise",
                                  "layers.*.mlp.0": "colwise"})  # fmt: skip
    report = autoplan.audit(model, plan, 2)
    (dead,) = [finding for finding in report.findings if finding.check == "dead-keys"]
    assert report.ok and report.details["outcome"] == "exact" and "Router" in dead.message, report


def test_a_weight_of_fewer_rows_than_ranks_is_not_cut_by_autotp() -> None:
    """Such a plan is not run: AutoTP's rules for uneven sizes are not emulated. One rank would hold no row."""
    model = decoder()
    for layer in model.layers:
        layer.mlp = nn.Sequential(Gate(), layer.mlp)
    report = autoplan.audit(model, DIALECTS["deepspeed"]({"layers.*.mlp.0.w": "colwise"}), 2)
    assert is_about(report, 0, "layers.*.mlp.0.w") and "1 row, not divisible by tp=2" in report.findings[0].message
    assert not report.ok and "layers.*.mlp.0.w" in report.findings[0].hint, report


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(32, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.sigmoid(self.w(x))


def test_a_rule_for_a_dim_that_is_not_there() -> None:
    model = decoder()
    plan = with_rule(autoplan.plan(model, tp_size=2, prove="none"), "w1.weight", dim=2)
    report = autoplan.audit(model, plan, 2)
    assert not report.ok and "w1" in report.findings[0].where and autoplan.audit(model, report.fixed, 2).ok, report


class Inside(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_layers_of_one_axis_in_two_containers_are_one_part() -> None:
    """Each by itself can be made right by gathering; together one row is wrong."""
    model = decoder()
    for layer in model.layers:
        layer.mlp.w2 = Inside(layer.mlp.w2)
    right = {**GOOD, "layers.*.mlp.w2.inner": "rowwise"}
    del right["layers.*.mlp.w2"]
    report = autoplan.audit(model, {**right, "layers.*.mlp.w2.inner": "colwise"}, 2)
    assert report.findings[0].about == ("layers.*.mlp.w2.inner",), report
    assert report.fixed == right


def test_a_row_for_modules_of_one_layer_has_no_layer_number() -> None:
    """transformers looks up every number as `*`: a key with one in it would match nothing."""
    model = decoder()
    model.layers[1].mlp = Inside(model.layers[1].mlp)
    right = {**GOOD, **{key.replace("mlp.", "mlp.inner."): style for key, style in MLP.items()}}
    wrong = {key: style for key, style in right.items() if key != "layers.*.mlp.inner.w3"}
    report = autoplan.audit(model, wrong, 2)
    assert report.findings[0].about == ("layers.*.mlp.inner.w3",), report
    assert report.fixed == right


def doubled(plan: Plan, kind: type) -> Plan:
    """The first instruction of a kind is there twice."""
    again = replace(plan.runtime.of(kind)[0])
    return replace(plan, runtime=replace(plan.runtime, instructions=(*plan.runtime.instructions, again)))


def with_rule(plan: Plan, name: str, **changes: Any) -> Plan:
    rules = tuple(replace(rule, **changes) if name in rule.pattern else rule for rule in plan.runtime.parameters)
    assert rules != plan.runtime.parameters
    return replace(plan, runtime=replace(plan.runtime, parameters=rules))


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        pytest.param(lambda plan: with_rule(plan, "w2.weight", dim=None, layout=None), "mlp.w2", id="cut"),
        pytest.param(
            lambda plan: with_rule(plan, "qkv", layout="96!"), "qkv_proj", id="packed", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda plan: without_instruction(plan, IntegerEdit, ""), "attn", id="count", marks=pytest.mark.slow
        ),
        pytest.param(lambda plan: without_instruction(plan, AllReduce, "w2"), "w2", id="sum", marks=pytest.mark.slow),
        pytest.param(lambda plan: doubled(plan, AllReduce), "o_proj", id="twice"),
    ],
)
def test_a_plan_file_that_was_spoiled(spoil: Callable[[Plan], Plan], cause: str) -> None:
    model = decoder(FusedAttention)
    report = autoplan.audit(model, spoil(autoplan.plan(model, tp_size=2, prove="none")), 2)
    assert not report.ok and cause in report.findings[0].where, report
    assert autoplan.audit(model, report.fixed, 2).ok


def test_an_edited_plan_that_cannot_be_tried_is_an_error() -> None:
    """The tiny clone has other sizes than the model, so its numbers say nothing; `parallelize` refuses the plan."""
    config = LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=16)
    right = autoplan.plan(config, 2, prove="none")
    assert autoplan.audit(config, right, 2).ok
    report = autoplan.audit(config, without_instruction(right, AllReduce, "down_proj"), 2)
    assert not report.ok and "down_proj" in report.findings[0].where, report
    assert report.findings[0].hint.startswith("add {do: AllReduce,")
    assert report.fixed.runtime == right.runtime and autoplan.audit(config, report.fixed, 2).ok


WRONG = wrong_plan(next(m for m in MUTATIONS if m.name == "o_proj the other way"), "torch")


def test_fix_writes_the_corrected_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """In the same dialect: torch's objects as Python, which is read back by its dotted path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ("audit", "corpus.toys:decoder", "--no-memory", "--plan")
    for arguments, code in (
        ((*command, "test_repairs:WRONG", "--fix", "-o", str(tmp_path / "fixed_styles.py")), 1),
        ((*command, "fixed_styles:PLAN"), 0),
        ((*command, "test_repairs:WRONG", "--fix"), 2),
    ):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        assert ended.value.code == code, capsys.readouterr()
    text = (tmp_path / "fixed_styles.py").read_text()
    assert (
        "'layers.*.attn.o_proj': RowwiseParallel()," in text and "ColwiseParallel(output_layouts=Replicate())" in text
    )
    assert "give -o FILE" in capsys.readouterr().err


def test_automodel_ties_tied_ends_again() -> None:
    """parallelize_module makes two of a tied weight; Automodel, whose plan this is, ties them before it trains."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=160, tie_word_embeddings=True)
    table = type("VocabParallelEmbedding", (RowwiseParallel,), {"__module__": "nemo_automodel.components"})
    ends = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    report = autoplan.audit(config, {"model.embed_tokens": table(input_layouts=Replicate()), **ends}, 2)
    assert report.ok, report
    assert not autoplan.audit(config, {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate()), **ends}, 2).ok


@pytest.mark.parametrize("ending", ["json", "yaml", "py"])
def test_a_config_of_deepspeed_with_numbers_and_flags_is_written(tmp_path: Path, ending: str) -> None:
    specs = [{"patterns": [".*up.weight$"], "partition_type": "column"}]
    config = {"tp_size": 2, "autotp": True, "seed": None, "partition_config": {"layer_specs": specs}}
    write_fixed(config, tmp_path / f"fixed.{ending}", "a config")
    text = (tmp_path / f"fixed.{ending}").read_text()
    assert (ast.literal_eval(text.partition("PLAN = ")[2]) if ending == "py" else yaml.safe_load(text)) == config
