"""Executors at the boundaries of modules: collectives, local experts, integer edits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autoplan.common.errors import PlanMismatchError
from autoplan.common.layout import Layout, chunk
from autoplan.common.nested import change_at, change_input
from autoplan.common.torch_internals import is_fake
from autoplan.execute.collectives import (
    RankGroup,
    copy_to_ranks,
    gather_over_ranks,
    scale_gradient,
    sum_over_ranks,
    take_rows,
)
from autoplan.execute.executors import Around, At, execute, executes
from autoplan.execute.hooks.sequence import zeros_of_a_shard
from autoplan.values import (
    AllGather,
    AllReduce,
    AllReduceGradient,
    IntegerEdit,
    JoinPartial,
    LocalExperts,
    MeanOverRanks,
    ParallelBlock,
    ReduceScatterSequence,
    ScaleGradient,
    WithholdPartial,
)

# Executors for tensors that enter or leave a module, except along the sequence.

Change = Callable[[torch.Tensor], torch.Tensor]


@executes(AllReduceGradient)
def _copy(planned: AllReduceGradient, at: At) -> Change:
    group = at.group
    return lambda x: copy_to_ranks(x, group)


@executes(AllReduce)
def _sum(planned: AllReduce, at: At) -> Change:
    group = at.group
    return lambda x: sum_over_ranks(x, group)


@executes(MeanOverRanks)
def _mean(planned: MeanOverRanks, at: At) -> Change:
    group = at.group
    return lambda x: sum_over_ranks(x, group) / group.size


@executes(ScaleGradient)
def _scale(planned: ScaleGradient, at: At) -> Change:
    size, dim = at.group.size, planned.dim
    if planned.layout is None or dim is None:
        return lambda x: scale_gradient(x, 1.0 / size)
    scale = [1.0 if carried else 1.0 / size for carried in Layout.parse(planned.layout).carried(size)]
    return lambda x: scale_gradient(x, scale, dim)


@executes(AllGather)
def _gather(planned: AllGather, at: At) -> Change:
    group = at.group
    rows = Layout.parse(planned.layout).rows_of_all(group.size)
    return lambda x: gather_over_ranks(x, group, planned.dim, rows)


@executes(WithholdPartial)
def _withhold(planned: WithholdPartial, at: At) -> Change:
    place = planned.pattern, planned.side, planned.path
    alone = execute(
        AllReduce(*place)
        if planned.dim is None or planned.sequence is None
        else ReduceScatterSequence(*place, planned.dim, planned.sequence),
        at,
    )
    zeros = zeros_of_a_shard(planned, at.running)
    return lambda x: at.running.branches.withhold(x, alone, zeros)


@executes(JoinPartial)
def _join(planned: JoinPartial, at: At) -> Change:
    return at.running.branches.join


@executes(ParallelBlock)
def _block(planned: ParallelBlock, at: At) -> Around:
    branches = at.running.branches
    return Around(begin=branches.enter, end=partial(branches.leave, at.name))


# At a module whose experts live on different ranks: run it on the work of this rank's experts only.
#
# Every rank has all tokens and the full routing. Before the module runs, what is routed to other ranks is removed: the
# module gets the pairs of a token and a local expert, each with one index, counted from the first local expert, and
# one weight. Its results are put back in the tokens' places; tokens without a local expert get zeros, and the
# all-reduce that follows (a hook of its own) completes the result.
#
# The number of pairs depends on the data, which compiled code does not allow, and tokens in more than one dim are not
# handled. There every pair stays: a foreign one goes to some local expert with the weight zero. Both give the same
# numbers, the second at the price of results that are discarded.

_ABSENT = object()  # of an attribute that a module lacks
_TOKENS_AND_CHOICES = 2  # dims of an index of experts per token


class ExpertsOfARank:
    """The entry and exit of one module with experts. Runs may nest or repeat (checkpointing), so the rows are a
    stack."""

    def __init__(self, site: LocalExperts, names: tuple[str, ...], group: RankGroup, where: str) -> None:
        self.site, self.names, self.where = site, names, where
        self.own = chunk(site.experts, group.size, group.rank)
        self.kept: list[tuple[torch.Tensor, int] | None] = []  # token rows of the pairs, and the number of tokens

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments for this rank's experts."""
        site = self.site
        if site.index is None or site.weights is None:
            self.kept.append(None)
            return change_input(args, kwargs, self.names, site.tokens, self._own_tokens, self.where)
        index, weights, tokens = (self._read(args, kwargs, p) for p in (site.index, site.weights, site.tokens))
        foreign = (index < self.own.start) | (index >= self.own.stop)
        index = (index - self.own.start).masked_fill(foreign, 0)
        weights = weights.masked_fill(foreign, 0)
        length_is_known = not (torch.compiler.is_compiling() or index.is_meta or not len(index))  # how many there are
        if length_is_known and index.dim() == tokens.dim() == _TOKENS_AND_CHOICES:
            rows, choices = _pairs(foreign, share=-(-self.site.experts // len(self.own)))
            self.kept.append((rows, len(tokens)))
            tokens, index, weights = tokens[rows], index[rows, choices, None], weights[rows, choices, None]
        else:
            self.kept.append(None)
        for path, value in ((site.index, index), (site.weights, weights), (site.tokens, tokens)):
            args, kwargs = self._write(args, kwargs, path, value)
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """Return the output with a row for every token again."""
        pairs = self.kept.pop()
        if pairs is None:
            return output
        rows, count = pairs

        def put(x: torch.Tensor) -> torch.Tensor:
            return x.new_zeros(count, *x.shape[1:]).index_add(0, rows, x)

        return change_at(output, self.site.output, put, self.where)

    def _own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of tokens that are sorted by expert."""
        by_expert = tokens.unflatten(0, (self.site.experts, -1))
        return take_rows(by_expert, 0, tuple(self.own)).flatten(0, 1)

    def _read(self, args: Any, kwargs: Any, path: tuple[Any, ...]) -> torch.Tensor:
        tensors: list[torch.Tensor] = []

        def read(x: torch.Tensor) -> torch.Tensor:
            tensors.append(x)
            return x

        change_input(args, kwargs, self.names, path, read, self.where)
        if not tensors:
            raise PlanMismatchError(
                f"{self.where} was called without {'.'.join(map(str, path))}, which routes tokens to experts",
                hint="this call takes a path that was not traced; plan again with inputs= that cover it",
            )
        return tensors[0]

    def _write(self, args: Any, kwargs: Any, path: tuple[Any, ...], value: torch.Tensor) -> tuple[Any, Any]:
        return change_input(args, kwargs, self.names, path, lambda _: value, self.where)


@executes(LocalExperts)
def _experts(planned: LocalExperts, at: At) -> Around:
    work = ExpertsOfARank(planned, at.names, at.group, at.name)
    return Around(work.enter, work.leave)


def _pairs(foreign: torch.Tensor, share: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the (token, choice) pairs of local experts; without any the first pair (its weight is zero), so that there
    are gradients. A dry run cannot count: there every rank's experts get an equal `share` of all pairs."""
    if is_fake(foreign):
        even = torch.zeros(-(-foreign.numel() // share), dtype=torch.long, device=foreign.device)
        return even, even
    rows, choices = (~foreign).nonzero(as_tuple=True)
    if len(rows):
        return rows, choices
    first = torch.zeros(1, dtype=torch.long, device=foreign.device)
    return first, first


# Integers are edited on the module itself, never on a config that others share.


@executes(IntegerEdit)
def _edit(edit: IntegerEdit, at: At) -> Callable[[], None]:
    """Set one integer and return a function that undoes it. A shared holder is copied for this module alone."""
    state, name, new = at.module.__dict__, edit.holder or edit.attribute, edit.on_rank(at.group.rank)
    before = state.get(name)
    own = state if not edit.holder else vars(before) if name in state else {}
    stored = own.get(edit.attribute, _ABSENT)
    value: Any = new
    if edit.index is None:
        fits = stored == edit.old
    elif fits := isinstance(stored, (list, tuple)) and stored[edit.index] in (edit.old, new):
        items = list(stored)
        items[edit.index] = new
        value = type(stored)(items)
    if not fits:
        reason = "no such attribute" if stored is _ABSENT else f"it is {stored!r}"
        raise PlanMismatchError(
            f"the plan changes {at.where}.{edit.name} from {edit.old} to {edit.new}, but {reason}",
            hint="the plan was made for another model, or the model is already sharded; plan this one again",
        )
    if edit.holder:
        state[name] = at.running.copy_holder(before, edit.attribute)
    (vars(state[name]) if edit.holder else state)[edit.attribute] = value
    return lambda: state.__setitem__(name, before)
