"""Which tp to take: for each planned size, the weights of a rank, what is replicated, what is sent, and memory."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoplan.emit.tables.estimate_table import memory_bar
from autoplan.values import Plan
from autoplan.values.estimate import Estimate

_MOST = 12  # sizes that are shown


def rank_weights(plan: Plan) -> tuple[int, int]:
    """Bytes of weights on a rank, and how many of them are replicated."""
    whole = sum(one.bytes for one in plan.replicated)
    return whole + sum(-(-entry.bytes // plan.ranks) for entry in plan.entries), whole


def messages_of_a_block(plan: Plan) -> str:
    """Of the kind of block that sends the most."""
    sums = [sum(n for n, _ in (*one.forward.values(), *one.backward.values())) for one in plan.communication]
    return str(max(sums)) if sums else "0" if plan.ranks == 1 else "-"


def shown_sizes(plan: Plan) -> tuple[int, ...]:
    """Powers of two among the legal sizes, and the plan's own."""
    return tuple(tp for tp in plan.legal_tp if tp & (tp - 1) == 0 or tp == plan.tp_size)[:_MOST]


def sizes_view(
    plan: Plan,
    plans: Mapping[int, Plan] | None = None,
    estimates: Mapping[int, Estimate] | None = None,
    memory: int = 0,
    why: str = "",
) -> RenderableType | None:
    """A line for each size in `plans`; None where nothing is split. `estimates`: a training step at some of them,
    against the `memory` of a device; `why` there is none."""
    known = estimates or {}
    bar = memory_bar(known[plan.tp_size], memory) if plan.tp_size in known else None
    said = [Text(f"a training step was not estimated{': ' if not known else ' '}{why}")] if why else []
    if not plan.entries or len(plan.legal_tp) < 2:
        return Group(bar) if bar is not None else None
    heads = ("tp", "weights of a rank", "replicated", "messages of a block")
    table = Table(*heads, *(("of a step", "memory of a step") if known else ()), box=None, pad_edge=False)
    for tp, made in sorted({**(plans or {}), plan.tp_size: plan}.items()):
        size, whole = rank_weights(made)
        mark = " (this plan)" if tp == plan.tp_size else ""
        share = f"{_gib(whole)}, {whole / max(size, 1):.0%}"
        step = _step(known.get(tp), memory) if known else ()
        table.add_row(f"{tp}{mark}", _gib(size), share, messages_of_a_block(made), *step)
    head = Text(f"Valid tp sizes: {', '.join(map(str, plan.legal_tp))}", style="bold")
    return Group(*([bar, Text("")] if bar is not None else []), head, table, *said)


def _step(found: Estimate | None, memory: int) -> tuple[str, str]:
    """Number and bytes of a step's messages, and its peak."""
    if found is None:
        return "", ""
    number, size = sum(one.number for one in found.messages), sum(one.bytes for one in found.messages)
    fits = "" if not memory or found.peak <= memory else ", does not fit"
    return f"{number}, {_gib(size)}" if number else "0", f"{_gib(found.peak)}{fits}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
