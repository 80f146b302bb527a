"""Sequences that a model has no positions for: a learned table is read past its end, which shapes alone do not show."""

from __future__ import annotations

from torch import nn

from autoplan.common.errors import AutoplanError
from autoplan.hf.inputs.make import core_of
from autoplan.hf.shrink import all_configs

_FIELDS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
_BEFORE_THE_FIRST = 2  # rows that some tables have for padding


def check_positions(name: str, module: nn.Module, length: int) -> None:
    """Raise where `length` tokens are more than the rows of a learned table of positions."""
    core = core_of(module)
    if core is None:
        return
    tables = {part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)}
    for config in all_configs(core.config):
        for field in _FIELDS:
            rows = getattr(config, field, None)
            if not isinstance(rows, int) or isinstance(rows, bool) or rows >= length:
                continue
            if rows != getattr(config, "vocab_size", None) and not tables.isdisjoint(
                range(rows, rows + _BEFORE_THE_FIRST + 1)
            ):
                raise AutoplanError(
                    f"{name} has a table of {rows:,} positions ({field}), and {length:,} tokens were asked for",
                    hint=f"ask for at most {rows:,} tokens (--sequence), or give a config with more positions",
                )
