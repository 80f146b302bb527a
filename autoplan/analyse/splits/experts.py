"""Expert parallelism: treat modules that hold a stack of experts as one op, and keep experts unsplit where asked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from autoplan.analyse.infer import Axes, infer_axes
from autoplan.analyse.solve import Solution, solve
from autoplan.analyse.splits.integer_edits import attributes_of
from autoplan.analyse.splits.literal_sizes import sizes_given
from autoplan.analyse.splits.packed import NO_DEMANDS, Demands
from autoplan.axes.terms import factors, find, leaves
from autoplan.common.patterns import grouped
from autoplan.ops import call_record
from autoplan.ops.attention import BOX
from autoplan.ops.records.record import REMOVED
from autoplan.values import Call, IntegerEdit, LocalExperts, ModuleVisit, Op, Ref, Trace
from autoplan.values.reasons import ExpertsDoNotDivide, ExpertsWhole, OnlyExperts, Reason

# Experts distributed over ranks instead of sharded: modules that hold a stack of experts are treated as one op.
#
# Under expert parallelism a rank holds some of the experts entirely. What happens inside the module then depends on the
# values of integers (which token goes to which expert), which no dimension of any tensor shows. But it need not be
# followed: the result for one token and one expert depends on no other, so from outside the module is a sum over its
# experts. Such a module is boxed here: it becomes one op between its inputs and its output, which has the experts' axis
# as the first dim of its weights. The rest of the analysis sees a contraction over that axis and treats it as any
# other.
#
# Two forms are recognised by structure: several weights of three dims or more with one leading size, and either
#
#     routed   tokens, integers (the chosen experts) and weights of their shape; the output has the tokens' shape
#     sorted   the tokens of every expert one after the other: the experts are the major factor of the first dim
#
# A box replaces the recorded ops and calls without moving any other: their indices stay the same.

_STACKED = 3  # dims of a weight that holds one matrix for each expert
_INTEGERS = ("int64", "int32", "int16", "uint8")


@dataclass(frozen=True)
class ExpertStack:
    """A module that holds experts: the tensors of its weights, and the work at its boundaries."""

    stack: tuple[int, ...]
    site: LocalExperts

    @property
    def module(self) -> str:
        return self.site.pattern

    @property
    def experts(self) -> int:
        return self.site.experts


# Recognising experts


def find_experts(trace: Trace, axes: Axes) -> tuple[ExpertStack, ...]:
    """Return every module of the trace whose experts can be distributed over ranks."""
    visits = grouped((visit.module, visit) for visit in trace.visits)
    expert_stacks = []
    for module, runs in visits.items():
        stack = _stack_of(module, trace)
        forms = {_form(visit, stack, trace, axes) for visit in runs} if stack else set()
        if len(forms) == 1 and None not in forms and _self_contained(module, stack, runs, trace):
            form = next(form for form in forms if form is not None)
            expert_stacks.append(ExpertStack(stack, replace(form, pattern=module)))
    return tuple(expert_stacks)


def _stack_of(module: str, trace: Trace) -> tuple[int, ...]:
    """Return the module's own parameters with one slice for each expert; empty if there is no such leading dim."""
    own = {
        number: info.shape
        for number, info in enumerate(trace.tensors)
        if info.kind == "parameter" and any(name.rpartition(".")[0] == module for name in info.names)
    }
    counts = {shape[0] for shape in own.values() if len(shape) >= _STACKED}
    stacked = [number for number, shape in own.items() if len(shape) >= 2]
    if len(counts) != 1 or sum(len(own[number]) >= _STACKED for number in stacked) < 2:
        return ()
    (count,) = counts
    return tuple(stacked) if count > 1 and all(own[number][0] == count for number in stacked) else ()


def _form(visit: ModuleVisit, stack: tuple[int, ...], trace: Trace, axes: Axes) -> LocalExperts | None:
    """Return the paths of tokens, indices and weights in one run of the module."""
    shapes = {tensor: trace.tensors[tensor].shape for _, tensor in (*visit.inputs, *visit.outputs)}
    if len(visit.outputs) != 1:
        return None
    (result, output), count = visit.outputs[0], trace.tensors[stack[0]].shape[0]
    out = shapes[output]
    floats = [(path, t) for path, t in visit.inputs if trace.tensors[t].differentiable]
    integers = [(path, t) for path, t in visit.inputs if trace.tensors[t].dtype in _INTEGERS]
    if len(floats) + len(integers) != len(visit.inputs):
        return None
    if len(floats) == 2 and len(integers) == 1:
        index, chosen = integers[0]
        tokens = [(p, t) for p, t in floats if shapes[t] == out and shapes[t][:-1] == shapes[chosen][:-1]]
        weights = [(p, t) for p, t in floats if shapes[t] == shapes[chosen] and (p, t) not in tokens[:1]]
        return LocalExperts("", count, tokens[0][0], index, weights[0][0], result) if tokens and weights else None
    if len(floats) == 1 and not integers and shapes[floats[0][1]] == out and len(out) > 1:
        experts = find(axes.of(stack[0])[0])
        major = [factors(axes.of(t)[0])[:1] for t in (floats[0][1], output)]
        sorted_by_expert = all(len(parts) == 1 and find(parts[0]) is experts for parts in major)
        return LocalExperts("", count, floats[0][0], output=result) if sorted_by_expert else None
    return None


def _self_contained(module: str, stack: tuple[int, ...], runs: list[ModuleVisit], trace: Trace) -> bool:
    """Return whether the weights are read only inside the module, and nothing inside draws random numbers."""
    spans = [_ops_of(visit, trace) for visit in runs]
    if any(span is None for span in spans):
        return False
    inside = {number for span in spans if span is not None for number in range(*span)}
    readers = (number for number, op in enumerate(trace.ops) if not set(stack).isdisjoint(op.reads))
    calls = (trace.calls[number] for visit in runs for number in range(*visit.calls))
    return all(number in inside for number in readers) and not any(call_record(call.name).random for call in calls)


def _ops_of(visit: ModuleVisit, trace: Trace) -> tuple[int, int] | None:
    calls = [trace.calls[number] for number in range(*visit.calls)]
    return (calls[0].ops[0], calls[-1].ops[1]) if calls and calls[0].ops[0] < calls[-1].ops[1] else None


# The box


def boxed(trace: Trace, stacks: Iterable[ExpertStack]) -> Trace:
    """Return the trace with one op and one call for every run of these modules."""
    ops, calls, visits = list(trace.ops), list(trace.calls), list(trace.visits)
    by_module = {stack.module: stack for stack in stacks}
    for number, visit in enumerate(trace.visits):
        if visit.module in by_module:
            _put_in_box(by_module[visit.module], visit, trace, ops, calls)
        elif any(trace.visits[above].module in by_module for above in _above(number, trace)):
            visits[number] = replace(visit, inputs=(), outputs=())
    comparisons = tuple(item for item in trace.comparisons if item[0] not in by_module)
    return replace(trace, ops=tuple(ops), calls=tuple(calls), visits=tuple(visits), comparisons=comparisons)


def _above(visit: int, trace: Trace) -> Iterator[int]:
    parent = trace.visits[visit].parent
    while parent is not None:
        yield parent
        parent = trace.visits[parent].parent


def _put_in_box(stack: ExpertStack, visit: ModuleVisit, trace: Trace, ops: list[Op], calls: list[Call]) -> None:
    """Put one op where the output was made and one call in place of the module's last; blank out the others."""
    span = _ops_of(visit, trace)
    assert span is not None
    output = Ref(visit.outputs[0][1])
    inputs: dict[Any, Ref] = {path: Ref(tensor) for path, tensor in visit.inputs}
    read = dict.fromkeys(t for number in range(*span) for t in trace.ops[number].reads)
    others = tuple(Ref(t) for t in read if t not in stack.stack and trace.tensors[t].kind in ("parameter", "buffer"))
    routing = tuple(inputs[path] for path in (stack.site.index, stack.site.weights) if path is not None)
    args = (tuple(Ref(t) for t in stack.stack), inputs[stack.site.tokens], routing, others)
    producer = max(number for number in range(*span) if output.id in trace.ops[number].results)
    for number in range(*span):
        ops[number] = replace(ops[number], name=REMOVED, args=(), kwargs={}, outputs=())
    ops[producer] = Op(BOX, "", args, {}, (output,), stack.module)
    first, last = visit.calls
    for number in range(first, last):
        calls[number] = replace(calls[number], name=REMOVED, args=(), kwargs={}, outputs=(), ops=(span[1], span[1]))
    calls[last - 1] = Call(BOX, stack.module, visit.visit, 0, args, {}, output, span)


# The work of a rank


def expert_edits(trace: Trace, axes: Axes, stacks: Iterable[ExpertStack], tp: int) -> tuple[IntegerEdit, ...]:
    """Return the edits of attributes in which a module stores how many experts it has.

    The trace shows one implementation of its forward, and another may read an attribute that this one does not. So the
    attribute is one that has this value in every module of the class, and that gives no other dim its size.
    """
    stacks = tuple(stacks)
    counting = {stack.module: _counting(trace, axes, stack) for stack in stacks}
    alike: dict[str, set[str]] = {}
    for stack in stacks:
        alike.setdefault(trace.module_classes[stack.module], set(counting[stack.module])).intersection_update(
            counting[stack.module]
        )
    return tuple(
        IntegerEdit(stack.module, name, None, stack.experts, stack.experts // tp)
        for stack in stacks
        for name in sorted(alike[trace.module_classes[stack.module]])
    )


def _counting(trace: Trace, axes: Axes, stack: ExpertStack) -> set[str]:
    """Return the module's attributes that equal the number of its experts and are not known to mean something else."""
    stored = trace.attributes.get(stack.module, {})
    equal = {name for name, value in stored.items() if value == stack.experts and "." not in name}
    experts = find(axes.of(stack.stack[0])[0])
    for visit in trace.visits:
        for call in trace.calls[slice(*visit.calls)] if visit.module == stack.module else ():
            for dim, literal in sizes_given(call, trace):
                if experts not in leaves(axes.of(call.results[0])[dim]):
                    equal -= {attribute[2] for attribute in attributes_of(literal)}
    return equal


# The solution where experts are distributed over ranks, rather than each of them sharded.
#
# Modules that hold stacks of experts are boxed and everything is solved as usual. One whose experts cannot be
# distributed after all is opened again, so that each is sharded, and the solution says why.

Experts = Literal["inside", "apart", "alone"]


def solve_experts(
    trace: Trace, tp: int, *, experts: Experts = "inside", demands: Demands = NO_DEMANDS, **how: Any
) -> Solution:
    """Solve with experts sharded ("inside"), distributed over ranks ("apart"), or only that ("alone")."""
    if experts == "inside":
        return solve(trace, tp, demands=demands, **how)
    axes = infer_axes(trace)
    stacks = find_experts(trace, axes)
    if experts == "alone":
        demands = demands.with_whole(trace, _others(trace, stacks), OnlyExperts())
    inside: dict[str, Reason] = {s.module: ExpertsDoNotDivide(s.experts, tp) for s in stacks if s.experts % tp}
    while True:
        used = tuple(stack for stack in stacks if stack.module not in inside)
        solution = solve(boxed(trace, used), tp, demands=demands, **how)
        assert solution.shards is not None
        apart = tuple(stack for stack in used if all(map(solution.shards.is_split, stack.stack)))
        if len(apart) == len(used):
            break
        inside |= {stack.module: _why_not(stack, trace, solution) for stack in used if stack not in apart}
    existing = {(edit.pattern, edit.name, edit.index) for edit in solution.runtime.of(IntegerEdit)}
    edits = [e for e in expert_edits(trace, axes, used, tp) if (e.pattern, e.name, e.index) not in existing]
    sites = [stack.site for stack in used]
    others = [instruction for instruction in solution.runtime.instructions if not isinstance(instruction, IntegerEdit)]
    runtime = replace(solution.runtime, instructions=(*sites, *solution.runtime.of(IntegerEdit), *edits, *others))
    return replace(solution, trace=trace, runtime=runtime, experts_inside=tuple(inside.items()))


def _why_not(stack: ExpertStack, trace: Trace, solution: Solution) -> Reason:
    """Return why the axis of a module's experts is not split in a solution."""
    weight = trace.tensors[stack.stack[0]].names[0]
    places = (fact for fact in solution.classes if (weight, 0) in fact.parameters)
    reasons = [fact.reason for fact in places if fact.reason is not None]
    return ExpertsWhole(reasons[0] if reasons else None)


def _others(trace: Trace, stacks: tuple[ExpertStack, ...]) -> set[int]:
    """Return all parameters but the experts'."""
    of_experts = {number for stack in stacks for number in stack.stack}
    return {number for number, info in enumerate(trace.tensors) if info.kind == "parameter"} - of_experts
