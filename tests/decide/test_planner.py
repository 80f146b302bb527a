"""The planner: entries, reasons, costs, what stays whole, names folded over blocks; and laws that hold for any model.

Traces come from small plain torch models, so the expected plans are known by thinking.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from small_models import Decoder, PackedDecoder, ids, with_adapters, with_experts
from torch import nn
from transformers import AutoConfig, LlamaConfig, Mamba2Config

import autoplan
from autoplan import planning
from autoplan.analyse.solve import Solution, solve
from autoplan.capture.recorder import record
from autoplan.common.options import Wish
from autoplan.common.patterns import matches
from autoplan.decide.plan.folding import Names
from autoplan.decide.plan.planner import make_plan
from autoplan.decide.rulebook.read import load_rules, parse_rule
from autoplan.hf.source import resolve
from autoplan.planning import draft_plan
from autoplan.values import Cost, Entry, Fold, Plan

RULES = {rule.id: rule for rule in load_rules()}


def solution(model: nn.Module, tp: int = 2) -> Solution:
    trace, _ = record(model, {"forward": ids()})
    return solve(trace, tp)


def planned(model: nn.Module, tp: int = 2, **options: object) -> Plan:
    return make_plan(solution(model, tp), model="small", **options)  # type: ignore[arg-type]


def entry(plan: Plan, pattern: str) -> Entry:
    return next(entry for entry in plan.entries if entry.pattern == pattern)


@cache
def decoder_plan() -> Plan:
    return planned(Decoder(head_norm=True))


# ---------------------------------------------------------------------------------------------- what entries say

DECODER = [
    # pattern, style, role, rule, units, segments
    ("table", "embedding_rowwise", "token embedding", "token-embedding", "96 rows", ("0:96!",)),
    ("layers.*.attention.q", "colwise", "query", "attention", "4 groups × 12", ("0:4!*12",)),
    ("layers.*.attention.k", "colwise", "key", "attention", "4 groups × 6", ("0:4!*6",)),
    ("layers.*.attention.v", "colwise", "value", "attention", "4 groups × 6", ("0:4!*6",)),
    ("layers.*.attention.o", "rowwise", "attention output", "attention", "4 groups × 12", ("1:4!*12", "whole")),
    ("layers.*.attention.norm", "replicated_with_grad_allreduce", "head norm", "head-norm", "", ("whole",)),
    ("layers.*.mlp.gate", "colwise", "gate", "gated-mlp", "56 features", ("0:56!", "0:56!")),
    ("layers.*.mlp.up", "colwise", "up", "gated-mlp", "56 features", ("0:56!", "0:56!")),
    ("layers.*.mlp.down", "rowwise", "down", "gated-mlp", "56 features", ("1:56!", "whole")),
    ("head", "colwise", "vocabulary head", "lm-head", "96 rows", ("0:96!",)),
]


@pytest.mark.parametrize("row", DECODER, ids=[row[0] for row in DECODER])
def test_a_decoder(row: tuple[str, str, str, str, str, tuple[str, ...]]) -> None:
    found = entry(decoder_plan(), row[0])
    assert (found.pattern, found.style, found.role, found.rule, found.units, found.segments) == row
    assert found.source == "inferred" and found.proof == "unproven"


def test_a_decoder_has_no_other_entries_and_no_warnings() -> None:
    assert {found.pattern for found in decoder_plan().entries} == {row[0] for row in DECODER}
    assert decoder_plan().findings == ()


def test_packed_weights_and_what_is_whole() -> None:
    plan = planned(PackedDecoder())
    packed = entry(plan, "block.attention.qkv")
    assert (packed.style, packed.rule, packed.segments[0]) == ("packed_colwise", "fused-qkv", "0:4!*10|4!*10|4!*10")
    both = entry(plan, "block.mlp.both")
    assert (both.style, both.rule, both.segments) == ("packed_colwise", "packed-gated-mlp", ("0:56!|56!",))
    places = next(item for item in plan.replicated if item.fqn == "places.weight")
    assert places.bytes == 16 * 40 * 4 and places.reason.startswith("lookup table: ")


def test_experts_as_separate_modules() -> None:
    rules = {found.pattern: (found.rule, found.style) for found in planned(with_experts()).entries}
    assert rules["layers.*.mlp.experts.*.gate"] == ("listed-experts", "colwise")
    assert rules["layers.*.mlp.experts.*.down"] == ("listed-experts", "rowwise")
    assert rules["layers.*.mlp.shared.up"] == ("shared-expert", "colwise")
    router = [item for item in planned(with_experts()).replicated if item.reason.startswith("router: ")]
    assert [item.fqn for item in router] == ["layers.*.mlp.router.weight"]


def test_adapters_follow_their_base_and_the_base_keeps_its_role() -> None:
    plan = planned(with_adapters())
    rules = {found.pattern: (found.rule, found.role, found.style) for found in plan.entries}
    assert rules["layers.*.attention.q.base"] == ("attention", "query", "colwise")
    assert rules["layers.*.attention.q.b"] == ("lora", "adapter B", "colwise")
    assert rules["layers.*.attention.o.a"] == ("lora", "adapter A", "rowwise")
    assert rules["layers.*.mlp.down.base"] == ("gated-mlp", "down", "rowwise")
    assert entry(plan, "layers.*.mlp.gate.base").reduces == (
        Cost("sum", "input-gradient", shared_with=("a", "up.base", "up.a")),
    )


def test_a_tied_weight_is_planned_where_it_is_looked_up_and_where_it_is_multiplied() -> None:
    plan = planned(Decoder(tied=True))
    assert (entry(plan, "table").style, entry(plan, "table").rule) == ("embedding_rowwise", "token-embedding")
    assert (entry(plan, "head").style, entry(plan, "head").rule) == ("colwise", "tied-head")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("layers.*.attention.q", "8 query heads in 4 groups; tp=2 gives each rank 4 query heads and 2 key/value heads"),
        ("layers.*.mlp.gate", "56 features; tp=2 gives each rank 28"),
        ("layers.*.attention.norm", "replicated, but each rank has a partial gradient: the gradients are summed"),
        ("table", "96 rows; tp=2 gives each rank 48"),
    ],
)
def test_reasons_have_numbers(pattern: str, says: str) -> None:
    assert entry(decoder_plan(), pattern).reason == says


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "units", "reason"),
    [
        (6, 3, 2, "6 heads × 16", "6 heads; tp=2 gives each rank 3"),  # one of two in each of three groups
        (
            6,
            3,
            3,
            "3 groups × 32",
            "6 query heads in 3 groups; tp=3 gives each rank 2 query heads and 1 key/value head",
        ),
    ],
)
def test_heads_are_counted_where_keys_are_replicated(
    heads: int, kv_heads: int, tp: int, units: str, reason: str
) -> None:
    config = LlamaConfig(
        hidden_size=16 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=2
    )
    query = entry(autoplan.plan(config, tp, prove="none"), "model.layers.*.self_attn.q_proj")
    assert query.units == units and query.reason.startswith(reason)


@pytest.mark.parametrize(
    ("pattern", "costs"),
    [
        ("layers.*.attention.q", ("sum of the input gradient (backward), shared with k, v",)),
        ("layers.*.attention.o", ("sum of the output (forward)",)),
        ("layers.*.attention.norm", ("sum of the gradient of weight (backward)",)),
        ("layers.*.mlp.up", ("sum of the input gradient (backward), shared with gate",)),
        ("layers.*.mlp.down", ("sum of the output (forward)",)),
        ("table", ("sum of the output (forward)",)),
        ("head", ("sum of the input gradient (backward)",)),
    ],
)
def test_costs_name_the_sums_and_who_shares_them(pattern: str, costs: tuple[str, ...]) -> None:
    assert tuple(map(str, entry(decoder_plan(), pattern).reduces)) == costs


def test_a_size_that_does_not_divide_stays_whole_with_the_reason() -> None:
    plan = planned(Decoder(inner=(55, 55)))
    assert not any(found.pattern.startswith("layers.*.mlp") for found in plan.entries)
    gate = next(item for item in plan.replicated if item.fqn == "layers.*.mlp.gate.weight")
    assert "55" in gate.reason and gate.bytes == 2 * 40 * 55 * 4


class OneHead(nn.Module):
    """Blocks whose reason to stay whole names the block."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(96, 40), nn.Linear(40, 96)
        self.attentions = nn.ModuleList(nn.MultiheadAttention(40, 1, batch_first=True) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        stream = self.table(ids)
        for attention in self.attentions:
            stream = stream + attention(stream, stream, stream, need_weights=False)[0]
        return self.head(stream)


def test_a_reason_that_differs_in_the_number_of_a_block_is_said_once() -> None:
    plan = planned(OneHead())
    weight = next(item for item in plan.replicated if item.fqn == "attentions.*.in_proj_weight")
    assert weight.reason.count("attentions.*") == weight.reason.count("attentions.") == 1, weight.reason
    notes = [found.message for found in plan.findings if found.check == "refused"]
    assert len(notes) == len(set(notes)) and not any("attentions.1" in note for note in notes), notes


# ----------------------------------------------------------------------------------------------------- the laws

MODELS = {
    "decoder": lambda: Decoder(head_norm=True),
    "tied": lambda: Decoder(tied=True),
    "packed": PackedDecoder,
    "experts": with_experts,
    "adapters": with_adapters,
}


@pytest.mark.parametrize("name", MODELS)
def test_nothing_vanishes(name: str) -> None:
    model = MODELS[name]()
    plan = planned(model)
    for parameter, tensor in model.named_parameters():
        owner, _, local = parameter.rpartition(".")
        planned_here = any(matches(e.pattern, owner) and local in e.parameters for e in plan.entries)
        whole = [item for item in plan.replicated if matches(item.fqn, parameter)]
        assert planned_here or whole, parameter
        assert len(whole) <= 1 and all(item.bytes >= tensor.numel() * 4 for item in whole), parameter


@pytest.mark.parametrize("name", MODELS)
def test_roles_never_decide_what_is_split(name: str) -> None:
    found = solution(MODELS[name]())
    with_rules, without = make_plan(found, model="m"), make_plan(found, model="m", rules=())

    def cuts(plan: Plan) -> set[tuple[str, str, tuple[str, ...]]]:
        return {(e.pattern, e.style, e.segments) for e in plan.entries}

    assert cuts(with_rules) == cuts(without)
    assert with_rules.runtime == without.runtime
    assert {e.rule for e in without.entries} == {"generic"}
    unnamed = [e for e in without.entries if e.style != "replicated_with_grad_allreduce"]
    assert all(e.reason.startswith("a verified split that no rule names") for e in unnamed)


def test_names_do_not_matter() -> None:
    model = Decoder(head_norm=True)
    trace, _ = record(model, {"forward": ids()})

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = model  # a misleading name on purpose

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.mlp(ids)

    plain, renamed = make_plan(solve(trace, 2), model="m"), planned(Renamed())
    assert [replace(e, pattern=f"mlp.{e.pattern}") for e in plain.entries] == list(renamed.entries)


def test_twice_the_layers_is_the_same_plan() -> None:
    short, long = planned(Decoder(inner=(56,) * 2)), planned(Decoder(inner=(56,) * 4))
    assert [replace(e, bytes=e.bytes * (2 if "*" in e.pattern else 1)) for e in short.entries] == list(long.entries)
    assert short.runtime == long.runtime
    for few, many in zip(short.replicated, long.replicated, strict=True):
        assert (few.fqn, few.reason) == (many.fqn, many.reason)
        assert many.bytes == few.bytes * (2 if "*" in few.fqn else 1)


def test_planning_twice_gives_the_same_plan() -> None:
    assert planned(Decoder()) == planned(Decoder())


# ------------------------------------------------------------------------------------------------- folded blocks


def folded(model: nn.Module, members: tuple[tuple[str, str], ...]) -> Solution:
    found = solution(model)
    return replace(found, trace=replace(found.trace, folds=(Fold("layers", members),)))


def test_blocks_that_were_not_traced_are_planned_like_the_one_that_stands_for_them() -> None:
    traced = make_plan(solution(Decoder(inner=(56,) * 6)), model="m")
    by_fold = make_plan(folded(Decoder(inner=(56,) * 2), (("2", "1"), ("3", "0"), ("4", "1"), ("5", "0"))), model="m")
    assert by_fold.entries == traced.entries
    assert by_fold.replicated == traced.replicated
    assert by_fold.runtime == traced.runtime


def test_blocks_of_two_kinds_get_patterns_that_tell_them_apart() -> None:
    plan = make_plan(folded(Decoder(inner=(56, 64)), (("2", "1"), ("3", "1"))), model="m")
    gates = {e.pattern: e.units for e in plan.entries if e.role == "gate"}
    assert gates.pop("layers.0.mlp.gate") == "56 features"
    assert set(gates.values()) == {"64 features"}
    for layer in "123":
        assert sum(matches(pattern, f"layers.{layer}.mlp.gate") for pattern in gates) == 1
    assert not any(matches(pattern, "layers.0.mlp.gate") for pattern in gates)


@pytest.mark.parametrize(
    ("kind", "wish"),
    [("gemma3_text", Wish(2, sequence_parallel=True)), ("qwen3_next", Wish(cp_size=2)), ("llama", Wish(2, cp_size=2))],
)
def test_along_the_sequence_folding_changes_nothing(kind: str, wish: Wish, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first block takes the stream in; all else that is done to blocks of a kind is the same."""
    source = resolve(AutoConfig.for_model(kind, num_hidden_layers=7))
    taken = draft_plan(source, wish)
    assert taken.trace.folds
    monkeypatch.setattr(planning, "same_in_like_blocks", lambda *_: False)
    whole = draft_plan(source, wish)
    one, other = (replace(p, entries=tuple(replace(e, axes=()) for e in p.entries)) for p in (taken.plan, whole.plan))
    assert (one.entries, one.runtime, one.communication) == (other.entries, other.runtime, other.communication)
    assert one.sequence_parallel and one.findings == other.findings


def test_what_runs_is_folded_without_loss() -> None:
    found = folded(Decoder(inner=(56, 64), head_norm=True), (("2", "1"), ("3", "0")))
    names = Names(found.trace)
    plan = make_plan(found, model="m")
    for kind, universe in (("parameters", names.parameters), ("instructions", names.modules)):
        wanted = {
            (name, replace(item, pattern=""))
            for item in getattr(found.runtime, kind)
            for name in names.expand(item.pattern)
        }
        meant = {
            (name, replace(item, pattern=""))
            for item in getattr(plan.runtime, kind)
            for name in universe
            if matches(item.pattern, name)
        }
        assert meant == wanted, kind


# ------------------------------------------------------------------------------------- when rules and facts differ


def test_a_rule_that_expects_another_style_is_a_finding_and_the_facts_win() -> None:
    text = RULES["gated-mlp"].text.replace('down = "rowwise"', 'down = "colwise"', 1)
    plan = planned(Decoder(), rules=[parse_rule(text, "gated-mlp")])
    assert entry(plan, "layers.*.mlp.down").style == "rowwise"
    assert [(f.check, f.level, f.where) for f in plan.findings] == [("rule-style", "warn", "layers.*.mlp.down")]
    assert "expects colwise, analysis derived rowwise" in plan.findings[0].message


def test_a_box_that_two_rules_claim_has_one_of_them_and_a_note() -> None:
    first = RULES["lm-head"]
    second = replace(first, id="another-head")
    plan = planned(Decoder(), rules=[first, second])
    assert (entry(plan, "head").rule, entry(plan, "head").style) == ("another-head", "colwise")
    assert [(f.check, f.level, f.where) for f in plan.findings] == [("rule-conflict", "note", "head")]


def test_sequence_parallel_takes_the_form_that_the_rule_gives() -> None:
    plan = planned(Decoder(), sequence_parallel=True)
    assert entry(plan, "layers.*.mlp.down").style == "rowwise_scatter"
    assert entry(plan, "layers.*.mlp.up").style == "colwise"
    assert plan.findings == ()


# -------------------------------------------------------------------------------------- real architectures as evidence

EVIDENCE = sorted({model for rule in RULES.values() for model in rule.seen_in})
QUICK = ("gpt2", "llama", "mamba2", "mixtral", "t5")


def cited(plan: Plan) -> set[str]:
    """Rules that an entry names, and those whose role stands before the reason why something is whole."""
    ids_ = {entry.rule for entry in plan.entries}
    for rule in RULES.values():
        roles = [f"{rule.role(name)}: " for name, _ in rule.yields]
        if any(item.reason.startswith(role) for item in plan.replicated for role in roles):
            ids_.add(rule.id)
    return ids_


def test_every_rule_names_an_architecture_that_shows_it_or_says_why_none_does() -> None:
    assert [rule.id for rule in RULES.values() if bool(rule.seen_in) == bool(rule.unseen)] == []


def test_a_rule_that_the_plan_of_a_model_does_not_use_is_noticed() -> None:
    """The evidence below can fail."""
    assert "mamba2" not in cited(decoder_plan()) and "gated-mlp" in cited(decoder_plan())


def plan_of_the_clone(model_type: str, ep_size: int) -> Plan:
    from autoplan.check.verify.clone import clone_of
    from autoplan.common.options import Wish
    from autoplan.planning import capture_source, solve_source

    clone = clone_of(resolve(model_type))
    source = resolve(clone.model, inputs=clone.feeds)
    return make_plan(solve_source(source, capture_source(source, clone.model), Wish(2, ep_size)), model=model_type)


@pytest.mark.parametrize(
    "model_type", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EVIDENCE]
)
def test_the_plans_of_the_models_a_rule_was_seen_in_cite_it(model_type: str) -> None:
    from autoplan.planning import capture_source

    source = resolve(model_type)
    plan = make_plan(solve(capture_source(source, source.module()).trace, 2), model=model_type)
    missing = {rule.id for rule in RULES.values() if model_type in rule.seen_in} - cited(plan)
    for ep_size in (1, 2) if missing else ():  # other calls, which are made for a clone; whole experts placed apart
        missing -= cited(plan_of_the_clone(model_type, ep_size))
    assert missing == set()
    assert [finding.message for finding in plan.findings if finding.check.startswith("rule-")] == []


@pytest.mark.parametrize(
    ("groups", "tp", "units"),
    [(1, 2, {"8 heads"}), (2, 2, {"2 groups"}), (2, 4, {"8 heads"}), (2, 8, {"16 features of each head"})],
)
def test_a_scan_is_counted_in_heads_or_groups_of_heads_as_it_is_sharded(groups: int, tp: int, units: set[str]) -> None:
    config = Mamba2Config(
        hidden_size=64, num_heads=8, head_dim=16, state_size=16, n_groups=groups, num_hidden_layers=2, vocab_size=128
    )
    plan = draft_plan(resolve(config), Wish(tp_size=tp)).plan
    mixers = [one for one in plan.entries if "mixer" in one.pattern and one.units]
    assert {one.counted or one.units for one in mixers} == units
    assert all(one.reason.startswith(units.copy().pop()) for one in mixers)


@pytest.mark.parametrize(("model_type", "counted"), [("olmo2", "8 heads"), ("mamba2", "2 groups")])
def test_a_norm_over_the_full_width_is_counted_in_the_units_of_its_axis(model_type: str, counted: str) -> None:
    norms = [one for one in plan_of_the_clone(model_type, 1).entries if one.rule == "full-width-norm"]
    assert norms and {one.counted for one in norms} == {counted}
