"""Fold the names of repeated blocks into patterns, and order the modules that one block of each kind runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, TypeVar

from autoplan.common.patterns import Universe, fold_counted, fold_names, grouped, is_under, matches, starred
from autoplan.values import (
    Boundary,
    CallRewrite,
    Finding,
    FlowPart,
    Fold,
    IntegerEdit,
    ParallelBlock,
    ParameterFact,
    Plan,
    Runtime,
    SequenceBoundary,
    Stack,
    Trace,
)

# Decisions on a representative are extended to every block that it stands for (`Trace.folds`), in few patterns.

Item = TypeVar("Item")


class Names:
    """The names of a model's modules and parameters, in all its blocks."""

    def __init__(self, trace: Trace) -> None:
        self.folds = tuple(_followers(fold) for fold in trace.folds)
        self.modules = Universe(self.expand_all(trace.module_classes))
        stored = (name for tensor in trace.tensors if tensor.kind in ("parameter", "buffer") for name in tensor.names)
        self.parameters = Universe(self.expand_all(stored))

    def expand(self, name: str) -> tuple[str, ...]:
        """Return the name itself, and its counterparts in every block that its block stands for."""
        names = [name]
        for prefix, followers in self.folds:
            for inside in [each for each in names if each.startswith(prefix)]:
                key, dot, rest = inside.removeprefix(prefix).partition(".")
                names += [f"{prefix}{member}{dot}{rest}" for member in followers.get(key, ())]
        return tuple(dict.fromkeys(names))

    def expand_all(self, names: Iterable[str]) -> list[str]:
        return [expanded for name in names for expanded in self.expand(name)]

    def fold(self, names: Sequence[str], *, parameters: bool = False) -> tuple[str, ...]:
        """Return patterns for these names (of representatives) and their counterparts, and for nothing else."""
        return tuple(pattern for pattern, _ in self.fold_counted(names, parameters=parameters))

    def fold_counted(self, names: Sequence[str], *, parameters: bool = False) -> tuple[tuple[str, int], ...]:
        """Return the patterns of `fold`, with the number of names each stands for."""
        expanded = sorted(self.expand_all(names), key=_natural)
        return fold_counted(expanded, self.parameters if parameters else self.modules)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that orders numbers by size: layer 2 before layer 10, expert_2 before expert_10."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+|\.)", name) if part)


def _followers(fold: Fold) -> tuple[str, dict[str, list[str]]]:
    """Return the prefix of a fold's blocks, and the blocks that each representative stands for."""
    followers = grouped((stands_in, member) for member, stands_in in fold.members)
    return (f"{fold.container}." if fold.container else ""), followers


def same_in_like_blocks(facts: Iterable[ParameterFact], runtime: Runtime, folds: Collection[Fold]) -> bool:
    """Return whether all that is done to a representative is also done to the traced block of its kind before it.

    This fails if nothing adds to a stream: each block's output is the next one's input, and splits by output and by
    input alternate. It also fails if the sum that a block of another kind needs for its input is placed on this block's
    output. Such a block cannot stand for others. That a stack's first block takes its stream in is not compared.
    """
    done: dict[str, list[Any]] = {}
    entries = {f"{fold.container}.0".lstrip(".") for fold in folds}
    for fact in facts:
        for name in fact.names:
            done.setdefault(name, []).append((fact.dim, fact.layout, fact.divide))
    for item in runtime.instructions:
        entry = item.pattern in entries and isinstance(item, SequenceBoundary) and item.stream_end == "input"
        if not entry and isinstance(item, (Boundary, ParallelBlock, CallRewrite, IntegerEdit)):
            done.setdefault(item.pattern, []).append(replace(item, pattern=""))  # the model's ends are in no block
    for fold in folds:
        for key, representative in fold.alike:
            mine, its = (_within(done, fold.container, block) for block in (key, representative))
            if mine != its:
                return False
    return True


def _within(done: dict[str, list[Any]], container: str, key: str) -> dict[str, list[Any]]:
    """Return what is done to one block, by the path inside it."""
    block = f"{container}.{key}" if container else key
    return {name[len(block) :]: work for name, work in done.items() if name == block or name.startswith(f"{block}.")}


def fold_runtime(runtime: Runtime, names: Names) -> Runtime:
    """Return the same actions, one per pattern."""
    return replace(
        runtime,
        parameters=_fold_items(runtime.parameters, names, parameters=True),
        instructions=_fold_items(runtime.instructions, names),
        random=_fold_plain(runtime.random, names),
        random_whole=_fold_plain(runtime.random_whole, names),
        constants=_fold_items(runtime.constants, names),
        idle=_fold_plain(runtime.idle, names),
    )


def _fold_plain(modules: tuple[str, ...], names: Names) -> tuple[str, ...]:
    return names.fold(modules) if modules else ()


def _fold_items(items: tuple[Any, ...], names: Names, *, parameters: bool = False) -> tuple[Any, ...]:
    """Merge items that differ only in their name into items for patterns; order of appearance stays."""
    groups: dict[str, tuple[Any, list[str]]] = {}
    for item in items:
        plain = replace(item, pattern="")
        groups.setdefault(repr(plain), (plain, []))[1].append(item.pattern)
    return tuple(
        replace(plain, pattern=pattern)
        for plain, patterns in groups.values()
        for pattern in names.fold(patterns, parameters=parameters)
    )


# Sizes at which no block is split: the plan is valid, but every rank holds and computes nearly the entire model.

BLOCKS = "blocks"  # its name in findings


def whole_blocks(plan: Plan) -> tuple[Finding, ...]:
    """Return a warning if something is split, but nothing in a repeated block."""
    blocks = [block for stack in plan.layers for block in stack.fqns]
    if plan.ranks == 1 or not blocks or not plan.entries:
        return ()
    if any(_inside(entry.pattern, block) for entry in plan.entries for block in blocks):
        return ()
    split = ", ".join(entry.pattern for entry in plan.entries[:3])
    legal = ", ".join(map(str, plan.legal_tp))
    hint = f"valid sizes: {legal}" if plan.legal_tp else "choose another size"
    text = f"no block is sharded at tp={plan.ranks}, only {split}: every rank computes all {len(blocks)} blocks"
    return (Finding(BLOCKS, "warn", "", text, hint),)


def _inside(pattern: str, block: str) -> bool:
    """Return whether a pattern of a module matches one in this block, or the block itself."""
    depth = block.count(".") + 1
    return is_under(block, pattern) or matches(".".join(pattern.split(".")[:depth]), block)


_FEW = 4  # up to this many alike are listed one by one: numbered parts of a block
Part = tuple[str, list[str]]  # (a block, "" for none; the modules that ran in it)


def flow_of(trace: Trace, layers: Sequence[Stack], names: Names) -> tuple[FlowPart, ...]:
    """Return the parts in the order of their first module."""
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
        earlier = kinds.get((blocks[block], steps))
        kinds[blocks[block], steps] = replace(earlier or part, blocks=many + (earlier.blocks if earlier else 0))
    return tuple(kinds.values())


def _with_parameters(trace: Trace) -> dict[str, frozenset[str]]:
    """Return the modules that own parameters, in the order in which those are first read, with their direct feeders.

    A module need not run for that: the code of another may read its weight. A tied weight counts for the module that
    runs, if that is one of its owners. Values computed from weights alone feed nothing until they meet data.
    """
    owners = {
        number: [name.rpartition(".")[0] for name in tensor.names]
        for number, tensor in enumerate(trace.tensors)
        if tensor.kind == "parameter" and tensor.names
    }
    numbers: dict[str, int] = {}  # of modules; a set of them is an integer's bits, since there may be thousands
    weights: dict[int, int] = {}  # tensor computed from weights alone -> their owners
    makers: dict[int, int] = {}  # tensor -> the last modules on the paths to it
    feeds: dict[int, int] = {}
    behind: dict[int, int] = {}
    for op in trace.ops:
        read = set(op.reads)
        own = 0
        for ref in read & owners.keys():
            module = op.module if op.module in owners[ref] else owners[ref][0]
            own |= 1 << numbers.setdefault(module, len(numbers))
        own = reduce(or_, (weights[ref] for ref in read & weights.keys()), own)
        if own and read <= owners.keys() | weights.keys():
            weights |= dict.fromkeys(op.results, own)
            continue
        fed = _last(reduce(or_, (makers.get(ref, 0) for ref in read), 0), behind)
        for number in _bits(own):
            if number not in behind:
                feeds[number] = fed
                behind[number] = reduce(or_, (behind[bit] for bit in _bits(fed)), fed)
        last_modules = _last(fed | own, behind)
        makers |= dict.fromkeys(op.results, last_modules)
    modules = list(numbers)
    return {name: frozenset(modules[bit] for bit in _bits(feeds.get(n, 0))) for name, n in numbers.items()}


def _last(modules: int, behind: dict[int, int]) -> int:
    """Return the modules without those that feed another of them."""
    return modules & ~reduce(or_, (behind[bit] for bit in _bits(modules)), 0) if modules & (modules - 1) else modules


def _bits(number: int) -> Iterator[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest


def _parts(modules: Iterable[str], blocks: dict[str, str]) -> Iterable[Part]:
    """Return runs of modules in one block, or in none."""
    kinds: dict[str, list[str]] = {}
    outside = 0
    last = None
    for module in modules:
        block = module  # the innermost block that holds the module, or is it
        while block and block not in blocks:
            block = block.rpartition(".")[0]
        outside += block == "" and last != ""
        kinds.setdefault(block or f"\0{outside}", []).append(module)
        last = block
    return [("" if block.startswith("\0") else block, members) for block, members in kinds.items()]


def _folded(steps: list[str]) -> tuple[tuple[str, ...], list[int]]:
    """Merge many alike steps (experts) into one, where the first of them runs; return each step's pattern index."""
    groups = grouped((starred(step), step) for step in steps)
    many = {step: members for members in groups.values() if len(members) > _FEW for step in members}
    folded = {step: fold_names(many[step], steps) if step in many else (step,) for step in steps}
    patterns = tuple(dict.fromkeys(pattern for step in steps for pattern in folded[step]))
    of = [next(pattern for pattern in folded[step] if matches(pattern, step)) for step in steps]
    return patterns, list(map(patterns.index, of))
