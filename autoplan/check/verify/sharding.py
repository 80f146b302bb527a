"""The way a plan shards, handed to the machinery that compares any sharding (`sharded.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from autoplan.check.verify.on_ranks import Sharding
from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.common.options import Checkpointing, Options, TensorParallel
from autoplan.common.patterns import best_match
from autoplan.execute.checkpointing.blocks import runs_of
from autoplan.execute.parallelize import shard_model
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.values import Plan, Stack


def mesh_of(plan: Plan) -> dict[str, int]:
    """The mesh to simulate for a plan."""
    split = {"ep" if plan.tp_size < plan.ep_size else "tp": max(plan.tp_size, plan.ep_size)}
    if plan.cp_size == 1:
        return split
    return {"cp": plan.cp_size, **(split if plan.ranks > plan.cp_size else {})}


def sharding_of(plan: Plan, *, gather_logits: bool = False, checkpointing: str = "", traffic: bool = True) -> Sharding:
    """The way a plan shards, for `check_sharding`. `traffic`: what each block moves is measured."""
    shard = partial(_apply, plan=plan, gather_logits=gather_logits, checkpointing=checkpointing)
    if checkpointing:
        return Sharding(shard, full_tensors, noted=partial(recomputed, stacks=plan.layers))
    shown = {fqn: None for stack in plan.layers for fqn in stack.fqns} if traffic and plan.communication else {}
    return Sharding(shard, full_tensors, tuple(shown), unread=partial(unread_parts, plan=plan))


def _apply(model: Any, mesh: Any, *, plan: Plan, gather_logits: bool, checkpointing: str) -> Any:
    mode = True if checkpointing == "block" else checkpointing or False
    options = Options(TensorParallel(gather_logits, sequence_padding="pad", path_guard="off"), Checkpointing(mode))
    return shard_model(model, mesh, plan, options)


# What exact numbers do not show of a run on ranks: were blocks checkpointed to any use, was every part read?
#
# Gradients are exact without checkpointing too. And a table whose second half no id looks up, or an expert that gets no
# token, gives the same however wrongly it is cut. What is read has a gradient, so a part is taken for unread where the
# unsharded model's gradient is zero all over.


def recomputed(model: Any, stacks: tuple[Stack, ...]) -> tuple[int, int]:
    """Blocks that hold a checkpoint, and how many of them ran again in a backward since.

    All blocks of `stacks` that are trained must hold one. Fewer may run again: nobody waits for the gradient of a block
    whose output is not used.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    runs = {id(modules[name]): (name, run) for name, run in runs_of(model).items()}
    listed = {id(modules[name]): name for stack in stacks for name in stack.fqns}
    blocks = [name for name in listed.values() if any(p.requires_grad for p in modules[name].parameters())]
    again = 0
    for name in blocks:
        inside = [runs[id(part)] for part in modules[name].modules() if id(part) in runs]
        if not inside:
            raise AutoplanError(
                f"{name} was not checkpointed", hint="autoplan.applied(model).notes says what was left out"
            )
        for part, run in inside:
            if run.again > run.kept:
                raise AutoplanError(f"{part} was called {run.kept} times, and ran again {run.again} times")
        again += any(run.again for _, run in inside)
    return len(blocks), again


def unread_parts(gradients: Iterable[Mapping[str, torch.Tensor]], *, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Weights that a plan splits, and the ranks whose part has no gradient in any of these runs."""
    unread: dict[str, set[int]] = {}
    for found in gradients:
        for name, gradient in found.items():
            rule = best_match(plan.runtime.parameters, name)
            if rule is None or rule.dim is None or rule.layout is None or gradient.numel() == 0:
                continue
            layout, zero = Layout.parse(rule.layout), set[int]()
            if layout.size == gradient.shape[rule.dim]:
                others = [dim for dim in range(gradient.dim()) if dim != rule.dim % gradient.dim()]
                read = (gradient != 0).sum(others) if others else gradient != 0
                rows = {rank: list(layout.rows(rank, plan.cut_over)) for rank in range(plan.cut_over)}
                zero = {rank for rank, held in rows.items() if held and not bool(read[held].any())}
            unread[name] = unread.get(name, zero) & zero
    return {name: tuple(sorted(ranks)) for name, ranks in unread.items() if ranks}


# Which modules must stay whole for the rest of a plan to be right? Found by halves, each tried on ranks.
#
# One wrong cut among sixteen takes about eight trials, two about twice as many; trying each module alone would never
# find two. What is cut along one axis is one suspect. Cuts that are wrong only together are not told apart: one stays
# whole.


Group = tuple[str, ...]


def cut_together(modules: Sequence[str], still_cut: Callable[[str], set[str]]) -> list[Group]:
    """Modules by what they share a cut with. `still_cut(module)`: what is still cut when that one stays whole."""
    groups: list[Group] = []
    for module in modules:
        if not any(module in group for group in groups):
            rest = still_cut(module)
            groups.append(tuple(other for other in modules if other not in rest))
    return groups


def wrong_cuts(groups: Sequence[Group], is_wrong: Callable[[Group], bool], trials: int) -> Group:
    """The modules to keep whole. `is_wrong(cut)`: is the plan wrong that cuts these and no others?

    All of them together are known to be wrong. Out of trials, whatever is not cleared stays whole.
    """
    return tuple(dict.fromkeys(name for group in _Search(is_wrong, trials).among(groups) for name in group))


class _Search:
    def __init__(self, is_wrong: Callable[[Group], bool], trials: int) -> None:
        self._is_wrong, self._left = is_wrong, trials

    def among(self, suspects: Sequence[Group]) -> Sequence[Group]:
        """Which of these, that are wrong together, are to blame?"""
        if len(suspects) < 2 or self._left < 2:
            return suspects
        halves = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        self._left -= 2
        wrong = [half for half in halves if self._is_wrong(tuple(name for group in half for name in group))]
        if not wrong:  # each half alone is right
            return halves[1]
        return [group for half in wrong for group in self.among(half)]
