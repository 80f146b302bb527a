"""Name the blocks, roles and facts of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autoplan.analyse.picture.flow import Dim, Flow, Node, node_of
from autoplan.analyse.solve import Solution
from autoplan.common.layout import Layout
from autoplan.common.patterns import grouped
from autoplan.decide.match import Matching
from autoplan.decide.rulebook.read import Rule
from autoplan.values import ParameterFact

# Roles of parameters. One that is read in several places is named once per module that owns it: of a tied weight the
# lookup names the embedding's name, the product the head's.


@dataclass(frozen=True)
class Naming:
    """The role that a rule gives a parameter, the styles the rule allows, and sharded sizes of the match."""

    binding: str
    rule: Rule
    styles: tuple[str, ...]
    sizes: dict[str, int] = field(default_factory=dict, hash=False, compare=False)
    axis_unit: str = "unit"

    @property
    def role(self) -> str:
        return self.rule.role(self.binding)

    @property
    def unit(self) -> str:
        """The rule's, or where the rule has none, that of the axis."""
        return self.own_unit or self.axis_unit

    @property
    def own_unit(self) -> str:
        return self.rule.unit(self.binding)


@dataclass(frozen=True)
class Reading:
    """A box that reads a parameter, under the name by which its module owns the parameter."""

    name: str
    box: int
    node: Node


def readings(flow: Flow, facts: tuple[ParameterFact, ...]) -> dict[str, list[Reading]]:
    """Return the boxes that read each parameter, by its first name."""
    names = {name: fact.names for fact in facts for name in fact.names}
    by_parameter: dict[str, list[Reading]] = {}
    for box in flow:
        node = node_of(flow, box)
        for parameter in node.parameters:
            aliases = names.get(parameter, (parameter,))
            owners = {name.rpartition(".")[0]: name for name in reversed(aliases)}
            own = owners.get(node.module, aliases[0])  # the alias that the reading module owns; else the first
            by_parameter.setdefault(aliases[0], []).append(Reading(own, box, node))
    return by_parameter


def name_parameters(
    matching: Matching, read: dict[str, list[Reading]], flow: Flow, facts: tuple[ParameterFact, ...]
) -> dict[str, Naming]:
    """Return roles by the name under which a module owns a parameter. Of two claims by one rule the first counts."""
    by_box = grouped((reading.box, reading.name) for several in read.values() for reading in several)
    rows = {name: Layout.parse(fact.layout).size for fact in facts if fact.layout for name in fact.names}
    named: dict[str, Naming] = {}
    for match in matching.found:
        sizes = {
            f"{binding}.{field_name}": dim.size
            for binding, box in match.boxes
            for field_name, dim in node_of(flow, box).dims
            if dim.layout is not None
        }
        sizes |= {binding: rows[name] for binding, box in match.boxes for name in by_box.get(box, ()) if name in rows}
        allowed = dict(match.rule.yields)
        for binding, box in match.claims:
            for name in by_box.get(box, ()):
                named.setdefault(name, Naming(binding, match.rule, allowed[binding], sizes))
    return named


def with_units(named: dict[str, Naming], facts: tuple[ParameterFact, ...]) -> dict[str, Naming]:
    """Where a rule has no unit of its own, take it, and the sizes that it counts, from the rule of another
    parameter that is cut along the same axis."""
    cut = [(name, fact) for fact in facts if fact.axis is not None for name in fact.names if name in named]
    named_facts = [(fact, named[name]) for name, fact in reversed(cut) if named[name].own_unit]
    of_axis = {axis: naming for fact, naming in named_facts for axis in fact.axes}
    of_axis |= {fact.axis: naming for fact, naming in named_facts if fact.axis is not None}

    def told(naming: Naming, axis: int | None) -> Naming:
        like = of_axis.get(axis) if axis is not None else None
        if naming.own_unit or like is None:
            return naming
        return replace(naming, axis_unit=like.own_unit, sizes={**like.sizes, **naming.sizes})

    return {**named, **{name: told(named[name], fact.axis) for name, fact in cut}}


# The picture with facts: layouts and axis classes on the dims of boxes, and gathered outputs.


def with_facts(flow: Flow, solution: Solution) -> Flow:
    """Return a copy of the picture in which every dim has its layout and its axis classes."""
    layouts = {
        (name, fact.dim): fact.layout for fact in solution.parameters if fact.dim is not None for name in fact.names
    }
    classes: dict[tuple[str, int], set[str]] = {}
    for fact in solution.classes:
        for name, dim in fact.parameters:
            classes.setdefault((name, dim), set()).add(str(fact.id))
    gathered = gathered_parameters(solution)

    def know(dim: Dim) -> Dim:
        place = (dim.parameter, dim.dim if dim.dim is not None else -1)
        return replace(dim, layout=layouts.get(place), classes=frozenset(classes.get(place, ())))

    facts = flow.copy()
    for box in facts:
        node = node_of(flow, box)
        dims = tuple((field, know(dim)) for field, dim in node.dims)
        facts.nodes[box]["node"] = replace(node, dims=dims, gathered=not gathered.isdisjoint(node.parameters))
    return facts


def gathered_parameters(solution: Solution) -> frozenset[str]:
    """Return the weights whose product is gathered from all ranks."""
    axes, tensors = solution.axes, solution.trace.tensors
    calls = [call for call in solution.trace.calls if not axes.gathered.isdisjoint(range(*call.ops))]
    read = {axes.computed[t] for call in calls for t in call.reads if t in axes.computed}
    return frozenset(name for weight in read if len(axes.of(weight)) > 1 for name in tensors[weight].names)
