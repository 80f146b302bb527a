"""At a module whose experts live on different ranks: hand it the work of this rank's experts, and nothing else.

Every rank sees all tokens and the whole routing. Before the module runs, what is routed to experts of other ranks is
taken out: the module is given the pairs of a token and one of its experts that are this rank's, each with one index,
counted from the first expert here, and one weight. What comes out is put back where the tokens were; tokens that chose
no expert of this rank get zeros, and the sum over ranks that follows (a hook of its own) makes the result whole.

The number of pairs is a number in the data, which compiled code cannot have, and tokens in more than one dim are not
told apart. There every pair stays: a foreign one goes to some expert of this rank with the weight zero. Both give the
same numbers, the second at the price of computing what is thrown away.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from autoplan.common.errors import PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.common.nested import change_input, change_output
from autoplan.execute.collectives import RankGroup, take_rows
from autoplan.execute.executors import Around, At, executes
from autoplan.values import LocalExperts

__all__ = ["ExpertsOfARank"]

_TOKENS_AND_CHOICES = 2  # dims of an index that says, for each token, which experts it goes to


class ExpertsOfARank:
    """One module's entry and exit. Runs may nest or repeat (activation checkpointing), so what is kept is a stack."""

    def __init__(self, site: LocalExperts, names: tuple[str, ...], group: RankGroup, where: str) -> None:
        self.site, self.names, self.where = site, names, where
        self.own = chunk(site.experts, group.size, group.rank)
        self.kept: list[tuple[torch.Tensor, int] | None] = []  # rows that were handed on, and of how many

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments for this rank's experts."""
        site = self.site
        if site.index is None or site.weights is None:
            self.kept.append(None)
            return change_input(args, kwargs, self.names, site.tokens, self._own_tokens, self.where)
        index, weights, tokens = (self._read(args, kwargs, p) for p in (site.index, site.weights, site.tokens))
        foreign = (index < self.own.start) | (index >= self.own.stop)
        index = (index - self.own.start).masked_fill(foreign, 0)
        weights = weights.masked_fill(foreign, 0)
        if index.dim() == tokens.dim() == _TOKENS_AND_CHOICES and _counts_are_known(index):
            rows, choices = _pairs(foreign, share=-(-self.site.experts // len(self.own)))
            self.kept.append((rows, len(tokens)))
            tokens, index, weights = tokens[rows], index[rows, choices, None], weights[rows, choices, None]
        else:
            self.kept.append(None)
        for path, value in ((site.index, index), (site.weights, weights), (site.tokens, tokens)):
            args, kwargs = self._write(args, kwargs, path, value)
        return args, kwargs

    def leave(self, output: Any) -> Any:
        """The output with a row for every token again."""
        kept = self.kept.pop()
        if kept is None:
            return output
        rows, count = kept
        return change_output(output, self.site.output, lambda x: _put_back(x, rows, count), self.where)

    def _own_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of tokens that lie expert by expert, those of this rank's experts."""
        by_expert = tokens.unflatten(0, (self.site.experts, -1))
        return take_rows(by_expert, 0, tuple(self.own)).flatten(0, 1)

    def _read(self, args: Any, kwargs: Any, path: tuple[Any, ...]) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def read(x: torch.Tensor) -> torch.Tensor:
            found.append(x)
            return x

        change_input(args, kwargs, self.names, path, read, self.where)
        if not found:
            raise PlanMismatchError(
                f"{self.where} was called without {'.'.join(map(str, path))}, which says what goes to which expert",
                hint="the model ran in a way the plan's trace never saw; plan again with inputs= that show it",
            )
        return found[0]

    def _write(self, args: Any, kwargs: Any, path: tuple[Any, ...], value: torch.Tensor) -> tuple[Any, Any]:
        return change_input(args, kwargs, self.names, path, lambda _: value, self.where)


@executes(LocalExperts)
def _experts(planned: LocalExperts, at: At) -> Around:
    work = ExpertsOfARank(planned, at.names, at.group, at.name)
    return Around(work.enter, work.leave)


def _counts_are_known(index: torch.Tensor) -> bool:
    return not (torch.compiler.is_compiling() or index.is_meta or not len(index))


def _pairs(foreign: torch.Tensor, share: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs (token, choice) that stay. Where none does, the first (its weight is zero), so gradients exist.

    A dry run has no numbers to count: there every rank's experts get an equal `share` of all pairs.
    """
    if is_fake(foreign):
        even = torch.zeros(-(-foreign.numel() // share), dtype=torch.long, device=foreign.device)
        return even, even
    rows, choices = (~foreign).nonzero(as_tuple=True)
    if len(rows):
        return rows, choices
    first = torch.zeros(1, dtype=torch.long, device=foreign.device)
    return first, first


def _put_back(x: torch.Tensor, rows: torch.Tensor, count: int) -> torch.Tensor:
    return x.new_zeros(count, *x.shape[1:]).index_add(0, rows, x)
