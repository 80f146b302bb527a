"""What a plan that somebody wrote asks of the analysis: dims that must stay whole, and products to gather at once.

Units, integers and sums always come from analysis; a written plan only chooses which weights are cut. So it reaches
the solver as this: everything that is not to be cut is refused from the start, with the reason that the plan gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoplan.analyse.infer import Axes
from autoplan.analyse.splits.packed import Packed
from autoplan.axes.terms import Term, find, leaves
from autoplan.common.patterns import is_under
from autoplan.values import Trace
from autoplan.values.reasons import Reason

__all__ = ["NO_DEMANDS", "Demands", "stay_whole"]


@dataclass(frozen=True)
class Demands:
    """`whole`: why no axis in a (parameter, dim) may be split. `gathered`: weights whose product is to be gathered.

    Of the other products analysis gathers what it likes, unless `only_those`. `packed`: quantised weights, whose blocks
    are not parted; `uneven`: where blocks do not divide, some ranks have one more.
    """

    whole: Mapping[tuple[str, int], Reason] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()
    only_those: bool = False
    packed: Packed = field(default_factory=dict)
    uneven: bool = False

    def with_whole(self, trace: Trace, tensors: Iterable[int], why: Reason) -> Demands:
        """These tensors stay whole too."""
        found = [trace.tensors[number] for number in tensors]
        more = {(name, dim): why for info in found for name in info.names[:1] for dim in range(len(info.shape))}
        return replace(self, whole={**more, **self.whole}, only_those=False)

    def and_also(self, other: Demands) -> Demands:
        """Both: what either keeps whole stays whole, for its own reason where it has one."""
        whole, packed = {**other.whole, **self.whole}, {**other.packed, **self.packed}
        uneven = self.uneven or other.uneven
        return replace(self, whole=whole, gathered=self.gathered | other.gathered, packed=packed, uneven=uneven)

    def refused(self, trace: Trace, axes: Axes) -> dict[Term, Reason]:
        """The axes that may not be split, as the solver wants them."""
        found: dict[Term, Reason] = {}
        for (name, dim), why in self.whole.items():
            if name in trace.by_name:
                for leaf in leaves(axes.of(trace.by_name[name])[dim]):
                    found.setdefault(find(leaf), why)
        return found

    def may_gather(self, names: tuple[str, ...]) -> bool:
        """May the product with the weight of these names be computed in parts and gathered?"""
        if not self.gathered.isdisjoint(names):
            return True
        return not self.only_those and not any(name in names for name, _ in self.whole)


def stay_whole(trace: Trace, patterns: tuple[str, ...], why: Reason) -> Demands:
    """Demands that keep every parameter under some modules whole."""
    names = [(n, t) for t in trace.tensors if t.kind == "parameter" for n in t.names]
    held = [(n, t) for n, t in names if any(is_under(pattern, n) for pattern in patterns)]
    return Demands({(n, dim): why for n, t in held for dim in range(len(t.shape))})


NO_DEMANDS = Demands()
