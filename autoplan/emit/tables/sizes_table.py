"""Which tp to take: for each legal size, the weights of a rank, how much of them is whole, and what a block sends."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoplan.values import Plan

__all__ = ["rank_weights", "shown_sizes", "sizes_view"]

_MOST = 12  # sizes that are shown


def rank_weights(plan: Plan, tp: int) -> tuple[int, int]:
    """Bytes of weights on a rank at another legal size, and how many of them are whole."""
    whole = sum(one.bytes for one in plan.replicated)
    return whole + sum(-(-entry.bytes // tp) for entry in plan.entries), whole


def shown_sizes(plan: Plan) -> tuple[int, ...]:
    """Powers of two among the legal sizes, and the plan's own."""
    return tuple(tp for tp in plan.legal_tp if tp & (tp - 1) == 0 or tp == plan.tp_size)[:_MOST]


def sizes_view(plan: Plan) -> RenderableType | None:
    """A line for each legal size; None where nothing is split."""
    if not plan.entries or len(plan.legal_tp) < 2:
        return None
    table = Table("tp", "weights of a rank", "of them whole", "messages of a block", box=None, pad_edge=False)
    sums = [sum(n for n, _ in (*one.forward.values(), *one.backward.values())) for one in plan.communication]
    sent = str(max(sums)) if sums else "-"
    shown = shown_sizes(plan)
    for tp in shown:
        size, whole = rank_weights(plan, tp)
        mark = " (this plan)" if tp == plan.tp_size else ""
        share = f"{_gib(whole)}, {whole / max(size, 1):.0%}"
        table.add_row(f"{tp}{mark}", _gib(size), share, "0" if tp == 1 else sent)
    others = [str(tp) for tp in plan.legal_tp if tp not in shown]
    more = [Text(f"legal too: {', '.join(others)}")] if others else []
    return Group(Text("Sizes of tp that divide everything", style="bold"), table, *more)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
