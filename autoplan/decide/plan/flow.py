"""The order in which a model runs its modules, one block of each kind: what a page draws from top to bottom.

A trace says which weight was read when. Blocks that run the same modules in the same order are one kind; a block that
was not traced is of the kind of the one that stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_

from autoplan.common.patterns import fold_names, matches
from autoplan.decide.plan.folding import Names, starred
from autoplan.values import FlowPart, Stack, Trace, refs

_FEW = 4  # so many alike are written one by one: the parts of a block that its author numbered
Part = tuple[str, list[str]]  # a block ("" for none), and the modules that ran in it


def flow_of(trace: Trace, layers: Sequence[Stack], names: Names) -> tuple[FlowPart, ...]:
    """Parts in the order of their first module."""
    blocks = {block: stack.name for stack in layers for block in stack.fqns}
    kinds: dict[tuple[str, tuple[str, ...]], FlowPart] = {}
    feeds = _with_parameters(trace)
    for place, (block, modules) in enumerate(_parts(feeds, blocks)):
        steps, number = _folded([module.removeprefix(f"{block}.") if block else module for module in modules])
        of = dict(zip(modules, number, strict=True))
        reads = [
            tuple(sorted({of.get(fed, -1) for module in modules if of[module] == n for fed in feeds[module]} - {n}))
            for n in range(len(steps))
        ]
        part = FlowPart(block, 1, steps, tuple(reads))
        if not block:
            kinds[f"\0{place}", steps] = part
            continue
        many = sum(name in blocks for name in names.expand(block))
        known = kinds.get((blocks[block], steps))
        kinds[blocks[block], steps] = replace(known or part, blocks=many + (known.blocks if known else 0))
    return tuple(kinds.values())


def _with_parameters(trace: Trace) -> dict[str, frozenset[str]]:
    """The modules that own parameters, in the order in which those are first read: which others feed them directly.

    A module need not run for that: the code of another may read its weight. A tied weight is that of the module which
    runs, if it is one of its owners. What is computed of weights alone feeds nobody until it meets a value.
    """
    owners = {
        number: [name.rpartition(".")[0] for name in tensor.names]
        for number, tensor in enumerate(trace.tensors)
        if tensor.kind == "parameter" and tensor.names
    }
    numbers: dict[str, int] = {}  # of modules; sets of them are the bits of an integer, since there may be thousands
    weights: dict[int, int] = {}  # tensor -> whose weights it is made of, and of nothing else
    made: dict[int, int] = {}  # tensor -> the last modules on its ways
    feeds: dict[int, int] = {}
    behind: dict[int, int] = {}
    for op in trace.ops:
        read = set(refs((op.args, op.kwargs)))
        own = 0
        for ref in read & owners.keys():
            module = op.module if op.module in owners[ref] else owners[ref][0]
            own |= 1 << numbers.setdefault(module, len(numbers))
        own = reduce(or_, (weights[ref] for ref in read & weights.keys()), own)
        if own and read <= owners.keys() | weights.keys():
            weights |= dict.fromkeys(refs(op.outputs), own)
            continue
        fed = _last(reduce(or_, (made.get(ref, 0) for ref in read), 0), behind)
        for number in _bits(own):
            if number not in behind:
                feeds[number] = fed
                behind[number] = reduce(or_, (behind[one] for one in _bits(fed)), fed)
        given = _last(fed | own, behind)
        made |= dict.fromkeys(refs(op.outputs), given)
    modules = list(numbers)
    return {name: frozenset(modules[one] for one in _bits(feeds.get(n, 0))) for name, n in numbers.items()}


def _last(modules: int, behind: dict[int, int]) -> int:
    """Without those that feed another of them."""
    return modules & ~reduce(or_, (behind[one] for one in _bits(modules)), 0) if modules & (modules - 1) else modules


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _parts(modules: Iterable[str], blocks: dict[str, str]) -> Iterable[Part]:
    """Runs of modules in one block, or in none."""
    found: dict[str, list[str]] = {}
    outside = 0
    last = None
    for module in modules:
        block = _block_of(module, blocks)
        outside += block == "" and last != ""
        found.setdefault(block or f"\0{outside}", []).append(module)
        last = block
    return [("" if block.startswith("\0") else block, members) for block, members in found.items()]


def _block_of(module: str, blocks: dict[str, str]) -> str:
    """The innermost block that holds the module, or is it."""
    while module and module not in blocks:
        module = module.rpartition(".")[0]
    return module


def _folded(steps: list[str]) -> tuple[tuple[str, ...], list[int]]:
    """Many alike (experts) as one, where the first of them runs; and for each step which of these it is."""
    groups: dict[str, list[str]] = {}
    for step in steps:
        groups.setdefault(starred(step), []).append(step)
    many = {step: members for members in groups.values() if len(members) > _FEW for step in members}
    folded = {step: fold_names(many[step], steps) if step in many else (step,) for step in steps}
    found = tuple(dict.fromkeys(pattern for step in steps for pattern in folded[step]))
    of = [next(pattern for pattern in folded[step] if matches(pattern, step)) for step in steps]
    return found, list(map(found.index, of))
