"""The part of a whole plan that a pipeline stage needs.

The problem: a pipeline gives each rank some blocks of a model, and the table or the head to the ends only. Such a piece
cannot be planned by itself: nobody knows what goes into its middle. The whole model can, once, anywhere (on meta), and
each stage takes what speaks of modules that it has. It must be a piece of that model: every parameter it holds is known
to the plan, under the same name. What is left is then as good as the whole was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from torch import nn

from autoplan.common.errors import PlanMismatchError
from autoplan.common.patterns import matches, nearest
from autoplan.execute.fits import model_hash
from autoplan.values import Plan, Stack
from autoplan.values.steering import digest

__all__ = ["part_for"]

_SHOWN = 3
Item = TypeVar("Item")


def part_for(plan: Plan, model: nn.Module) -> Plan:
    """What of `plan` speaks of `model`, which is a piece of the model that it was made for."""
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    packed = tuple(weight for weight in plan.packed if _means(weight.owner, modules))
    _refuse_strangers(plan, model, tensors)
    runtime, known = plan.runtime, [*tensors, *buffers, *(weight.name for weight in packed)]
    parameters = tuple(rule for rule in runtime.parameters if _means(rule.pattern, known))
    instructions = tuple(one for one in runtime.instructions if _means(one.pattern, modules))
    if parameters == runtime.parameters and instructions == runtime.instructions:
        return plan
    if plan.sequence_parallel:
        raise PlanMismatchError(
            f"the plan for {plan.model} cuts the stream along the sequence, and its ends are not in this stage",
            hint="plan the whole model with sequence_parallel=False: stages hand on whole sequences",
        )
    kept = replace(
        plan,
        entries=tuple(e for e in plan.entries if _means(e.pattern, [*modules, *tensors])),
        replicated=tuple(whole for whole in plan.replicated if _means(whole.fqn, tensors)),
        layers=tuple(stack for one in plan.layers if (stack := _blocks_in(one, modules)).fqns),
        runtime=replace(
            runtime,
            parameters=parameters,
            instructions=instructions,
            random=_present(runtime.random, modules),
            random_whole=_present(runtime.random_whole, modules),
            constants=tuple(one for one in runtime.constants if _means(one.pattern, modules)),
            idle=_present(runtime.idle, modules),
            outputs=(),  # a stage returns something else
            shapes=(),
            unsummed=(),  # what it is given comes from another stage, behind the sums of its first block
        ),
        obstacles=tuple(one for one in plan.obstacles if _means(one.pattern, modules)),
        packed=packed,
        paths=(),  # a stage is entered and left elsewhere
    )
    sizes = tuple(one for one in plan.made_for.sizes if _means(one.pattern, [*tensors, *buffers]))
    made_for = replace(plan.made_for, sizes=sizes)
    kept = replace(kept, made_for=made_for)
    if plan.made_for.content and digest(plan) == plan.made_for.content:  # else it was edited, and stays suspect
        kept = replace(kept, made_for=replace(made_for, content=digest(kept), model=model_hash(model)))
    return kept


def _refuse_strangers(plan: Plan, model: nn.Module, tensors: list[str]) -> None:
    """Raise where the model holds a parameter that the plan never heard of."""
    known = [*(rule.pattern for rule in plan.runtime.parameters), *(whole.fqn for whole in plan.replicated)]
    known += [f"{weight.owner}.{tensor.name}" for weight in plan.packed for tensor in weight.tensors]
    strange = [name for name in tensors if not any(matches(pattern, name) for pattern in known)]
    if not strange:
        return
    close = nearest(strange[0], known)
    more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
    raise PlanMismatchError(
        f"{type(model).__name__} holds {strange[0]}{more}, which the plan for {plan.model} does not know",
        hint="a stage keeps the names of the whole model (blocks by their numbers in it)"
        + (f"; nearest: {', '.join(close[:_SHOWN])}" if close else ""),
    )


def _means(pattern: str, names: Iterable[str]) -> bool:
    return any(matches(pattern, name) for name in names)


def _present(patterns: tuple[str, ...], modules: list[str]) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if _means(pattern, modules))


def _blocks_in(stack: Stack, modules: list[str]) -> Stack:
    return replace(stack, fqns=tuple(name for name in stack.fqns if name in modules))
