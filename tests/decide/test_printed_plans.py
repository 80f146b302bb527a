"""What a person reads: the table, the explanation of one path, the difference of two plans."""

from __future__ import annotations

import json

import pytest
from example_plans import llama_plan, odd_plan
from rich.cells import cell_len

from autoplan.common.errors import AutoplanError
from autoplan.emit.explain import explain
from autoplan.emit.tables.terminal import plain_text, plan_view, report_view
from autoplan.values import Cost, Entry, Finding, Plan, Proof, Replicated, Report, Stack, Trial, replace

PLANS = {"llama": llama_plan(), "odd": odd_plan(), "empty": Plan("nothing", 1)}

LLAMA_AT_100 = """\
LlamaForCausalLM · tp 8 · inferred · valid tp: 1, 2, 4, 8

Split
module              style              units           sums over ranks
model.embed_tokens  embedding_rowwise  128256 rows     output (forward)
model.layers.*.self_attn
  q_proj            colwise            32 heads × 128  input gradient (backward)
  k_proj            colwise            8 heads × 128   shared with q_proj
  v_proj            colwise            8 heads × 128   shared with q_proj
  o_proj            rowwise            32 heads × 128  output (forward)
model.layers.*.mlp
  gate_proj         colwise            14336 features  input gradient (backward)
  up_proj           colwise            14336 features  shared with gate_proj
  down_proj         rowwise            14336 features  output (forward)
lm_head             colwise            128256 rows     input gradient (backward)

Why
rule                  roles              reason
vocabulary-embedding  token embedding    each rank looks up the ids it owns; the sum over ranks is
                                         the row
separate-qkv          query, key, value  each rank computes the scores of its own heads; no head
                                         reads another
attention-output      attention output   contracts over the heads that its rank holds: one sum
gated-mlp             gate, up           gate and up read one whole activation and meet in a
                                         product, so splitting both splits the product
                      down               contracts over the split features: one sum
vocabulary-head       vocabulary head    logits leave the model split by vocabulary

Replicated on every rank: 72.0 KiB
a norm over the whole residual: every rank needs all of it
  32.0 KiB  model.layers.*.input_layernorm.weight
  32.0 KiB  model.layers.*.post_attention_layernorm.weight
   8.0 KiB  model.norm.weight

Layers
model.layers  decoder  4 blocks  model.layers.*

Findings
note  tied-weights · lm_head
      the head is not tied to the embedding

Proven on the graph by permutation law, graph replay: 27 of 27 axes pass; 402 of 402 values replayed"""


def test_the_table_to_the_letter() -> None:
    assert plain_text(plan_view(llama_plan()), 100) == LLAMA_AT_100


def test_a_wide_terminal_shows_role_and_cut() -> None:
    shown = plain_text(plan_view(llama_plan()), 140)
    assert (
        "module              style              role              units           cut        sums over ranks" in shown
    )
    assert (
        "  q_proj            colwise            query             32 heads × 128  0:32!*128  input gradient (backward)"
        in shown
    )
    assert "! is sharded over the ranks" in shown


@pytest.mark.parametrize("width", [80, 95, 110, 160, 240])
@pytest.mark.parametrize("name", PLANS)
def test_every_width_holds_everything(name: str, width: int) -> None:
    plan = PLANS[name]
    shown = plain_text(plan_view(plan), width)
    assert max(cell_len(line) for line in shown.splitlines()) <= width
    words = " ".join(shown.split())
    for entry in plan.entries:
        parent, _, leaf = entry.pattern.rpartition(".")
        assert leaf in words and parent in words and entry.style in words
    for reason in {entry.reason for entry in plan.entries if entry.reason}:
        assert all(word in words for word in reason.split())
    for finding in plan.findings:
        assert finding.where in words and finding.message in words and finding.hint in words


def test_modules_of_a_block_stand_together_with_the_sums_that_they_share() -> None:
    """Entries of two stacks come in turns: a query of each, a key of each."""
    shared = (Cost("sum", "input-gradient", shared_with=("q",)),)
    layer = replace(llama_plan().entries[1], reduces=(Cost("sum", "input-gradient", shared_with=("k",)),))
    turns = [
        replace(layer, pattern=f"{stack}.block.*.attn.{leaf}", reduces=shared if leaf == "k" else layer.reduces)
        for leaf in "qk"
        for stack in ("encoder", "decoder")
    ]
    shown = plain_text(plan_view(replace(llama_plan(), entries=tuple(turns))), 140).split("Why")[0]
    assert shown.count("encoder.block.*.attn") == shown.count("decoder.block.*.attn") == 1
    assert shown.count("input gradient (backward)") == shown.count("shared with q") == 2


def test_depth_does_not_lengthen_the_table() -> None:
    assert len(str(llama_plan(layers=4)).splitlines()) == len(str(llama_plan(layers=126)).splitlines())


def test_a_reason_is_said_once() -> None:
    shown = plain_text(plan_view(llama_plan()), 200)
    for reason in {entry.reason for entry in llama_plan().entries}:
        assert shown.count(reason) == 1


def test_columns_that_differ_nowhere_are_left_out() -> None:
    assert "source" not in str(llama_plan()).split("Why")[0]
    mixed = plain_text(plan_view(odd_plan()), 160)
    assert "handwritten" in mixed and "unproven" in mixed


def test_very_long_paths_and_layouts_still_fit() -> None:
    path = ".".join(["encoder_of_a_tower"] * 9)
    layout = "|".join(["128!*64"] * 12)
    entry = Entry(path, ("w",), "packed_colwise", "r", "rule", "inferred", "because", "128 heads", (f"0:{layout}",))
    shown = plain_text(plan_view(Plan("m", 2, entries=(entry,))), 80)
    assert max(map(len, shown.splitlines())) <= 80
    assert path.rpartition(".")[0] in shown.replace("\n", "")


def test_markup_in_names_is_text() -> None:
    plan = replace(llama_plan(), model="[bold]m[/bold]", findings=(Finding("c", "warn", "[red]", "[/x]"),))
    assert "[bold]m[/bold]" in str(plan) and "[red]" in str(plan) and "[/x]" in str(plan)


@pytest.mark.parametrize(
    ("proof", "words"),
    [
        (Proof("none", 1, False), "Not proven."),
        (Proof("graph", 2, True), "Proven on the graph."),
        (
            Proof("graph", 2, True, trial=Trial("passed", ranks=4)),
            "Proven on 4 simulated ranks: a tiny clone's results are equal; its graph has nothing to check",
        ),
        (Proof("ranks", 4, False, ("forward",), "off"), "Proof failed on 4 simulated ranks by forward: off"),
    ],
)
def test_the_last_line_is_the_proof(proof: Proof, words: str) -> None:
    assert str(replace(llama_plan(), proof=proof)).splitlines()[-1] == words


def test_whole_parameters_are_sorted_by_weight() -> None:
    whole = (Replicated("small", 1, "b"), Replicated("h.0.w", 2048, "a"), Replicated("h.1.w", 2048, "a"))
    shown = str(Plan("m", 2, replicated=whole, layers=(Stack("h", "other", ("h.0", "h.1")),)))
    assert "Replicated on every rank: 4.0 KiB" in shown
    assert shown.index("h.*.w") < shown.index("small")


# ------------------------------------------------------------------------------------------------ explain

LLAMA_ANSWERS = {
    "model.layers.3.mlp.up_proj": ["planned as model.layers.*.mlp.up_proj", "colwise", "gated-mlp", "1792 of 14336"],
    "model.layers.3.mlp.up_proj.weight": ["planned as model.layers.*.mlp.up_proj", "weight dim 0"],
    "model.layers.*.self_attn.q_proj": ["4 of 32 × 128 = 512 of 4096; rank 0: 0–511", "hidden_states is summed"],
    "model.layers.2": ["self_attn.q_proj: colwise", "mlp.down_proj: rowwise", "layers.2.input_layernorm", "8.0 KiB"],
    "model.norm": ["whole", "model.norm.weight (8.0 KiB): a norm over the whole residual"],
    "model.layers.*.input_layernorm.weight": ["× 4"],
    "lm_head": ["logits stay sharded", "16032 of 128256"],
    "": ["model.embed_tokens: embedding_rowwise", "lm_head: colwise"],
}


@pytest.mark.parametrize("path", LLAMA_ANSWERS)
def test_explain(path: str) -> None:
    answer = llama_plan().explain(path)
    assert answer.splitlines()[0] == path
    for words in LLAMA_ANSWERS[path]:
        assert words in answer


def test_explain_says_what_runs() -> None:
    answer = odd_plan().explain("h.0.attn.c_attn")
    for words in (
        "split_size 768 → 192",
        "config.sizes[1] 7 → 2, 2, 2, 1 by rank",
        "the gradient of input x[0].k is divided by 4",
        "its gradient is summed over ranks on shared rows",
        "view at forward:12:8>split_heads:3:20, time 2, where given no tensor, where its last dim",
        "is not 64: local sizes, gradients of its inputs summed, statistics summed over ranks (norm), output sliced",
        "bias dim 0: each of 4 ranks holds 3 of 12 × 64 | 3 of 12 × 64 | 3 of 12 × 64 = 576 of 2304",
    ):
        assert words in answer
    assert "mlp.fc" not in answer


def test_explain_one_parameter_of_several() -> None:
    answer = odd_plan().explain("h.0.attn.c_attn.bias")
    assert "bias dim 0" in answer and "weight dim 1" not in answer


@pytest.mark.parametrize("path", ["model.layer.3.mlp.up_prj", "layers.3.mlp.up_proj", "model.layers.3.mlp.up"])
def test_an_unknown_path_names_the_nearest(path: str) -> None:
    with pytest.raises(AutoplanError, match=r"nearest paths: model\.layers\.\*\.mlp\.up_proj"):
        explain(llama_plan(), path)


# ------------------------------------------------------------------------------------------------ diff


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_does_not_differ_from_itself(name: str) -> None:
    assert PLANS[name].diff(PLANS[name]) == ()


def test_each_field_is_noticed() -> None:
    """Change one field at a time: exactly the plans that are unequal have changes."""
    plan, other = llama_plan(), odd_plan()
    for name in ("model", "tp_size", "sequence_parallel", "source", "entries", "replicated", "layers", "legal_tp"):
        changed = replace(plan, **{name: getattr(other, name)})
        assert plan.diff(changed), name
    for name in ("findings", "proof", "runtime"):
        assert plan.diff(replace(plan, **{name: getattr(other, name)})), name
    assert plan.diff(replace(plan, entries=plan.entries[::-1]))  # order only


def test_changes_name_module_field_and_both_sides() -> None:
    plan = llama_plan()
    entries = list(plan.entries)
    entries[1] = replace(entries[1], style="replicate")
    (change,) = plan.diff(replace(plan, entries=tuple(entries)))
    assert (change.pattern, change.what) == ("model.layers.*.self_attn.q_proj", "style")
    assert (change.before, change.after) == ("colwise", "replicate")
    (gone,) = plan.diff(replace(plan, entries=plan.entries[1:]))
    assert (gone.pattern, gone.what, gone.before, gone.after) == (
        "model.embed_tokens",
        "entry",
        plan.entries[0],
        None,
    )


def test_diff_is_symmetric() -> None:
    there, back = llama_plan().diff(odd_plan()), odd_plan().diff(llama_plan())
    assert {(c.pattern, c.what, repr(c.before), repr(c.after)) for c in there} == {
        (c.pattern, c.what, repr(c.after), repr(c.before)) for c in back
    }


# ------------------------------------------------------------------------------------------------ reports


def test_report_leads_with_the_verdict_and_the_worst_gradient() -> None:
    report = Report(
        ok=False,
        findings=(Finding("gradient", "error", "model.norm.weight", "off by 0.3", "sum it over ranks"),),
        gradients={"lm_head.weight": 1e-12, "model.norm.weight": 0.3},
        forward=2e-15,
        tp_size=2,
        details={"checked": ("forward", "loss"), "not_checked": {"cache": "no cache"}, "seconds": 1.5},
    )
    lines = plain_text(report_view(report, "llama"), 100).splitlines()
    assert lines[0] == "llama · tp 2 · failed; 1 of 3 checks not run: cache"
    shown = "\n".join(lines)
    for words in (
        "off by 2.0e-15",
        "2 compared, largest error 3.0e-01 at model.norm.weight",
        "not checked",
        "cache: no cache",
        "error gradient · model.norm.weight",
        "→ sum it over ranks",
    ):
        assert words in shown
    assert plain_text(report_view(Report(ok=True, tp_size=4), "gpt2")).splitlines() == ["gpt2 · tp 4 · passed"]


def test_many_findings_of_one_check_are_folded() -> None:
    wrong = tuple(Finding("gradients", "error", f"h.{i}.w", f"off by {i}") for i in range(40))
    report = Report(ok=False, findings=(*wrong, Finding("loss", "error", "loss", "off by 1")), details={"model": "m"})
    shown = str(report)
    assert shown.splitlines()[0] == "m · tp 1 · failed"
    assert "off by 4" in shown and "off by 5" not in shown
    assert shown.count("and 35 more places: h.*.w") == 1
    assert "loss · loss" in shown
    assert len(report.to_dict()["findings"]) == 41


def test_a_report_as_json_has_no_nan() -> None:
    report = Report(ok=False, gradients={"w": float("nan")}, forward=float("inf"), details={"worst": (float("nan"), 1)})
    data = report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["gradients"] == {"w": None} and data["details"] == {"worst": [None, 1]}
