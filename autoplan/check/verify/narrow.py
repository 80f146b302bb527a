"""Which modules must stay whole for the rest of a plan to be right? Found by halves, each tried on ranks.

One wrong cut among sixteen takes about eight trials, two about twice as many; trying each module alone would never find
two. What is cut along one axis is one suspect. Cuts that are wrong only together are not told apart: one stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
