"""What blocks move between ranks compared with the least they need, as rows of a table and as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autoplan.values import Traffic

TRAFFIC_COLUMNS = ("block", "forward", "backward", "least forward", "least backward", "moved/least")


def traffic_row(one: Traffic) -> tuple[str, ...]:
    """A block: how many collectives of which kind, and their bytes for each token."""
    ratio = "" if one.ratio is None else f"{one.ratio:.2f}"
    least = [
        f"{size} B in {number}" if number else "nothing" for number, size in (one.least_forward, one.least_backward)
    ]
    return one.block, _moved(one.forward), _moved(one.backward), *least, ratio


def traffic_lines(traffic: Iterable[Traffic]) -> list[str]:
    """The same as text, a line for each block."""
    found = []
    for one in traffic:
        block, forward, backward, least_forward, least_backward, ratio = traffic_row(one)
        once = f"; {one.once} B of whole parameters' gradients once a step" if one.once else ""
        found.append(
            f"{block}: forward {forward} (least {least_forward}), backward {backward} (least {least_backward})"
            f"{f', {ratio} of the least' if ratio else ''}{once}"
        )
    return found


def _moved(kinds: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{number} {kind} {size} B" for kind, (number, size) in kinds.items()) or "nothing"
