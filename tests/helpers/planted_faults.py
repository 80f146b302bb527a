"""Faults to plant: a check that finds nothing must be shown able to find.

Each fault is one way in which a tensor-parallel plan, or the code that applies it, can be wrong: a partner left whole,
a gradient nobody sums, heads paired with the wrong keys. It is planted into a right plan (or into the sharded model,
where the plan has no word for it) at the first place that offers itself, and verify must notice. Many of them leave
every forward result exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autoplan.check.verify.on_ranks import Sharding
from autoplan.common.layout import Layout
from autoplan.values import (
    INSTRUCTIONS,
    AllGatherPicked,
    AllReduce,
    AllReduceGradient,
    Boundary,
    CallRewrite,
    DrawOnShards,
    Instruction,
    IntegerEdit,
    LogitsOfPositions,
    MeanOverRanks,
    NoteShard,
    ParallelBlock,
    ParameterRule,
    Plan,
    RewriteCall,
    Runtime,
    SplitLogits,
    VocabularyTable,
)

Spoil = Callable[[Plan], Plan | None]
Applies = Callable[[Any, Plan], bool]


@dataclass(frozen=True)
class Fault:
    """`spoil` gives a wrong plan, or None where the plan has no place for this fault; `tamper` changes a sharded model.

    `checks` are those that should notice. `kind`: the class of instruction that it leaves out.
    """

    name: str
    about: str
    spoil: Spoil = lambda plan: plan
    tamper: Callable[[Any], bool] | None = None
    checks: tuple[str, ...] = ("parameters", "forward")
    kind: type[Instruction] | None = None


@dataclass(frozen=True)
class Planted:
    """A fault in place: the wrong plan, and how to shard with it."""

    fault: Fault
    plan: Plan
    sharding: Sharding


def plant(fault: Fault, plan: Plan, sharding_of: Callable[[Plan], Sharding]) -> Planted | None:
    """Plant a fault into a right plan; None when the plan has no place for it."""
    spoiled = fault.spoil(plan)
    if spoiled is None:
        return None
    right = sharding_of(spoiled)
    if fault.tamper is None:
        return Planted(fault, spoiled, right)
    return Planted(fault, spoiled, Sharding(partial(_tampered, shard=right.shard, fault=fault.name), right.gather))


def _tampered(model: Any, mesh: Any, *, shard: Callable[[Any, Any], Any], fault: str) -> Any:
    model = shard(model, mesh)
    tamper = next(known.tamper for known in FAULTS if known.name == fault)
    assert tamper is not None
    tamper(model)
    return model


# ------------------------------------------------------------------------------------------------ spoiling a plan


def first(kind: type[Any], change: Callable[[Any], Any], applies: Applies = lambda item, plan: True) -> Spoil:
    """Change (or, with None, drop) the first instruction (or parameter rule) of a kind to which the fault applies."""
    field = "parameters" if kind is ParameterRule else "instructions"

    def spoil(plan: Plan) -> Plan | None:
        items = list(getattr(plan.runtime, field))
        for position, item in enumerate(items):
            if isinstance(item, kind) and applies(item, plan):
                changed = change(item)
                items[position : position + 1] = [] if changed is None else [changed]
                return _with(plan, **{field: tuple(items)})
        return None

    return spoil


def _with(plan: Plan, **fields: Any) -> Plan:
    return replace(plan, runtime=replace(plan.runtime, **fields))


def _drop(_: Any) -> None:
    return None


def bare(call: CallRewrite) -> RewriteCall:
    """The same rewrite without what its kind does."""
    more = {"arguments": call.arguments, "copies": call.copies, "cuts": call.cuts, "sometimes": call.sometimes}
    return RewriteCall(call.pattern, call.site, **more)  # type: ignore[arg-type]


def without(one: Instruction) -> Instruction | None:
    """What is left of an instruction when it is left out: of a call that runs otherwise, its literals and copies."""
    return bare(one) if isinstance(one, CallRewrite) and not isinstance(one, RewriteCall) else None


def _rule(applies: Callable[[ParameterRule], bool], **change: Any) -> Spoil:
    return first(ParameterRule, lambda rule: replace(rule, **change), lambda rule, plan: applies(rule))


def _layout(matching: str, change: Callable[[str], str]) -> Spoil:
    """Another layout for the first weight whose layout looks like this; the vocabulary is left alone."""

    def applies(rule: ParameterRule, plan: Plan) -> bool:
        heads = tuple(f"{pattern}." for pattern in _ends(plan))
        return bool(rule.layout and re.fullmatch(matching, rule.layout)) and not rule.pattern.startswith(heads or "\0")

    return first(ParameterRule, lambda rule: replace(rule, layout=change(rule.layout)), applies)


def _interleaved(layout: str) -> str:
    """The same counts, one unit to each rank in turn: 8! becomes 4*2!."""
    return re.sub(r"^(\d+)!", lambda found: f"{int(found[1]) // 2}*2!", layout)


def _inside_heads(layout: str) -> str:
    heads, _, width = layout.partition("!*")
    return f"{heads}*{width}!"


def _contiguous(layout: str) -> str:
    return f"{Layout.parse(layout).size}!"


def _split_weight(rule: ParameterRule) -> bool:
    return rule.dim is not None and rule.pattern.endswith("weight") and rule.gradient == "local"


def _ends(plan: Plan) -> set[str]:
    """The vocabulary's table and head."""
    return {end.pattern for kind in (VocabularyTable, SplitLogits) for end in plan.runtime.of(kind)}


def _inner(boundary: Boundary, plan: Plan) -> bool:
    """Is it away from the model's entry and exit?"""
    return boundary.pattern not in _ends(plan)


def _last_split_rule_dropped(plan: Plan) -> Plan | None:
    """The partner that is left whole."""
    heads = {f"{pattern}.weight" for pattern in _ends(plan)}
    split = [rule for rule in plan.runtime.parameters if _split_weight(rule) and rule.pattern not in heads]
    if not split:
        return None
    return _with(plan, parameters=tuple(rule for rule in plan.runtime.parameters if rule is not split[-1]))


def _two_rules_swapped(plan: Plan) -> Plan | None:
    """Column where row belongs, and the other way round."""
    rules = {
        rule.dim: rule
        for rule in reversed(plan.runtime.parameters)
        if _split_weight(rule) and "|" not in (rule.layout or "")
    }
    if not {0, 1} <= set(rules):
        return None
    changed = {id(rules[dim]): replace(rules[dim], dim=1 - dim) for dim in (0, 1)}
    return _with(plan, parameters=tuple(changed.get(id(rule), rule) for rule in plan.runtime.parameters))


def _copied_twice(plan: Plan) -> Plan | None:
    copied = next((one for one in plan.runtime.of(AllReduceGradient) if one.side == "output"), None)
    return None if copied is None else _with(plan, instructions=(*plan.runtime.instructions, replace(copied)))


def _nothing_random(plan: Plan) -> Plan | None:
    runtime: Runtime = plan.runtime
    return _with(plan, random=(), random_whole=(), draws=False) if any(runtime.random_whole) else None


# ------------------------------------------------------------------------------------------------ tampering afterwards


def _untie(model: Any) -> bool:
    """Give the second name of a tied parameter a parameter of its own."""
    from torch import nn

    seen: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in seen:
            owner, _, leaf = name.rpartition(".")
            own = nn.Parameter(parameter.detach().clone())
            own.__dict__.update(parameter.__dict__)
            model.get_submodule(owner)._parameters[leaf] = own
            return True
        seen[id(parameter)] = name
    return False


def _drift(model: Any) -> bool:
    """One rank's copy of a replicated parameter is a little different."""
    import torch
    import torch.distributed as dist

    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if local.shape == parameter.shape and dist.get_rank() == dist.get_world_size() - 1:
            with torch.no_grad():
                local.detach().mul_(1.01)
            return True
    return False


# Classes that can be left out of a plan without making any number wrong in these runs, and why.
UNSEEN: dict[type[Instruction], str] = {
    AllGatherPicked: "no call of these checks is told which positions to go on with",
    DrawOnShards: "ranks then draw the same numbers for their own features: less random, and nowhere wrong",
    NoteShard: "nothing is done to the value; it tells those who collect it, and no check here collects",
    ParallelBlock: "each branch is then summed by itself, which is right and moves more",
}

FAULTS = (
    Fault("column for row", "two weights are cut along the other dim", _two_rules_swapped),
    Fault("wrong rows", "a weight's rows go to ranks one by one, in turn", _layout(r"\d*[02468]!", _interleaved)),
    Fault("wrong head pairing", "a weight's heads are sharded otherwise", _layout(r"\d*[02468]!\*\d+", _interleaved)),
    Fault("cut inside heads", "each rank gets a part of every head", _layout(r"\d+!\*\d*[02468]", _inside_heads)),
    Fault("packed cut contiguously", "a packed weight is cut as if it were one", _layout(r".*!.*\|.*", _contiguous)),
    Fault("unsplit partner", "one weight of a group stays whole", _last_split_rule_dropped),
    Fault("no forward sum", "partial sums go on as if they were sums", first(AllReduce, _drop, _inner)),
    Fault(
        "mean for sum",
        "partial sums are averaged",
        first(AllReduce, lambda sum_: MeanOverRanks(sum_.pattern, sum_.side, sum_.path), _inner),
    ),
    Fault("no gradient sum", "nobody sums the gradient at a region's entry", first(AllReduceGradient, _drop, _inner)),
    Fault("double gradient sum", "the gradient at a region's entry is summed twice", _copied_twice),
    Fault(
        "no gradient sum of a parameter",
        "a whole parameter in a split region keeps its own gradient",
        _rule(lambda rule: rule.gradient == "sum", gradient="local"),
    ),
    Fault(
        "no gradient sum of shared rows",
        "rows that several ranks hold keep their own gradients",
        _rule(lambda rule: rule.gradient == "shared", gradient="local"),
    ),
    Fault(
        "double gradient sum of a parameter",
        "a gradient that is whole already is summed",
        _rule(lambda rule: rule.divide, gradient="sum"),
    ),
    Fault("bias of every rank", "each rank adds the whole bias", _rule(lambda rule: rule.divide, divide=False)),
    Fault("unedited integer", "a module keeps its number of heads", first(IntegerEdit, _drop)),
    Fault(
        "wrong integer",
        "a module is given half of what it should",
        first(IntegerEdit, lambda edit: replace(edit, new=edit.new // 2), lambda edit, plan: edit.new > 1),
    ),
    Fault(
        "table without mask",
        "each rank looks every token up in its own rows",
        first(VocabularyTable, _drop),
    ),
    Fault(
        "logits taken for whole",
        "a rank's logits leave the model as if they were all",
        first(SplitLogits, _drop),
    ),
    Fault(
        "no exchange in a norm",
        "a norm over all heads averages those of one rank",
        first(CallRewrite, bare, lambda call, plan: call.reduces),
    ),
    Fault(
        "no gradient sum in a scoped call",
        "a statistic's gradient stays partial",
        first(CallRewrite, lambda call: replace(call, copies=()), lambda call, plan: bool(call.copies)),
    ),
    Fault(
        "constant not cut",
        "a constant made in forward stays whole",
        first(CallRewrite, lambda call: replace(call, cuts=()), lambda call, plan: bool(call.cuts)),
    ),
    Fault("unseeded dropout", "each rank drops what it likes of whole values", _nothing_random, checks=("dropout",)),
    Fault("untied head", "a tied weight becomes two", tamper=_untie),
    Fault("drifting replica", "one rank's copy of a whole parameter differs", tamper=_drift),
)


LEFT_OUT = tuple(
    Fault(
        f"no {kind.__name__}",
        f"{kind.__name__} is left out",
        first(kind, without),
        checks=("loss",) if kind is LogitsOfPositions else ("parameters", "forward"),
        kind=kind,
    )
    for kind in INSTRUCTIONS.values()
    if kind not in UNSEEN
)
