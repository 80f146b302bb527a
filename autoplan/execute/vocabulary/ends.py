"""The two ends of a language model on a rank: the table that takes token ids in, the head that gives logits out."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as calls

from autoplan.common.layout import chunk
from autoplan.common.nested import change_input
from autoplan.execute.collectives import gather_pieces, sum_over_ranks
from autoplan.execute.executors import Around, At, executes
from autoplan.execute.vocabulary.leaving import LeavingLogits
from autoplan.execute.vocabulary.split_logits import can_stay_split, dressed, moved, split_class
from autoplan.patches.compiled_loss import left_untraced
from autoplan.patches.patched import Kept
from autoplan.values import SplitLogits, VocabularyTable

__all__: list[str] = []


@executes(VocabularyTable)
def _table(planned: VocabularyTable, at: At) -> Around:
    """Token ids as rows of our piece; foreign ones look up row 0 and are zeroed afterwards."""
    group, names, where = at.group, at.names, at.where
    own = chunk(planned.rows, group.size, group.rank)
    masks: list[torch.Tensor] = []  # runs may nest

    def mask(ids: torch.Tensor) -> torch.Tensor:
        foreign = (ids < own.start) | (ids >= own.stop)
        masks.append(foreign)
        return (ids - own.start).masked_fill(foreign, 0)

    def leave(output: torch.Tensor) -> torch.Tensor:
        return sum_over_ranks(output.masked_fill(masks.pop().unsqueeze(-1), 0), group)

    return Around(lambda args, kwargs: change_input(args, kwargs, names, planned.path, mask, where), leave)


@executes(SplitLogits)
def _head(planned: SplitLogits, at: At) -> Around:
    """Whole, or split and knowing it, or (when nothing but the model's exit will read them) plain columns.

    Whole before a loss, too, if someone listens to the head's backward: torch then passes its output on by a function
    of autograd, which takes columns for what they show.

    Compiled code that is given such logits from outside, where a graph was broken between head and loss, leaves them as
    they are. (Inside of a graph they are traced: it begins before them.)
    """
    running, group, module = at.running, at.group, at.module
    columns = split_class(group, planned.columns, planned.dim)
    kept = Kept(left_untraced((LeavingLogits, *moved(columns))))
    stays = can_stay_split(planned.columns, group)

    def leave(output: torch.Tensor) -> torch.Tensor:
        if running.whole_logits or (running.loss and (not stays or _is_watched(module))):
            return gather_pieces(output, group, planned.dim, planned.columns)
        return dressed(output, columns) if running.loss else output

    return Around(leave=leave, kept=kept)


def _is_watched(module: nn.Module) -> bool:
    """Do hooks wait for its backward?"""
    if torch.compiler.is_compiling():
        return False
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or calls._global_backward_hooks or calls._global_backward_pre_hooks)
