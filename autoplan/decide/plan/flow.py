"""The order in which a model runs its modules, one block of each kind: what a page draws from top to bottom.

A trace says which weight was read when. Blocks that run the same modules in the same order are one kind; a block that
was not traced is of the kind of the one that stands for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoplan.common.patterns import fold_names
from autoplan.decide.plan.folding import Names, starred
from autoplan.values import FlowPart, Stack, Trace, refs

__all__ = ["flow_of"]

_FEW = 4  # so many alike are written one by one: the parts of a block that its author numbered
Part = tuple[str, list[str]]  # a block ("" for none), and the modules that ran in it


def flow_of(trace: Trace, layers: Sequence[Stack], names: Names) -> tuple[FlowPart, ...]:
    """Parts in the order of their first module."""
    blocks = {block: stack.name for stack in layers for block in stack.fqns}
    kinds: dict[tuple[str, tuple[str, ...]], FlowPart] = {}
    for place, (block, modules) in enumerate(_parts(_with_parameters(trace), blocks)):
        steps = _folded([module.removeprefix(f"{block}.") if block else module for module in modules])
        if not block:
            kinds[f"\0{place}", steps] = FlowPart("", 1, steps)
            continue
        many = sum(name in blocks for name in names.expand(block))
        known = kinds.get((blocks[block], steps), FlowPart(block, 0, steps))
        kinds[blocks[block], steps] = FlowPart(known.block, known.blocks + many, steps)
    return tuple(kinds.values())


def _with_parameters(trace: Trace) -> Iterable[str]:
    """The modules that own parameters, each once, in the order in which those are first read.

    A module need not run for that: the code of another may read its weight. A tied weight is that of the module which
    runs, if it is one of its owners.
    """
    owners = {
        number: [name.rpartition(".")[0] for name in tensor.names]
        for number, tensor in enumerate(trace.tensors)
        if tensor.kind == "parameter" and tensor.names
    }
    read = ((op.module, owners[ref]) for op in trace.ops for ref in refs((op.args, op.kwargs)) if ref in owners)
    return dict.fromkeys(module if module in own else own[0] for module, own in read)


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


def _folded(steps: list[str]) -> tuple[str, ...]:
    """Many alike (experts) as one, where the first of them runs."""
    groups: dict[str, list[str]] = {}
    for step in steps:
        groups.setdefault(starred(step), []).append(step)
    many = {step: members for members in groups.values() if len(members) > _FEW for step in members}
    found = (fold_names(many[step], steps) if step in many else (step,) for step in steps)
    return tuple(dict.fromkeys(pattern for patterns in found for pattern in patterns))
