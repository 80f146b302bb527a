"""Find the repeated stacks of a model from its structure alone: no tracing, no names.

The problem: FSDP2 units, activation checkpointing and per-layer plans need the blocks of every stack: not the list that
holds them, not experts, not norms or heads, whatever containers they lie in. What tells a block from the rest:

- A *block* holds at least two matrices. It is *whole* if it holds modules that hold modules (attention and its
  projections); otherwise (*bare*: an MLP, attention alone, convolution and norm) the widths must follow on from one
  member to the next, and no router beside the list may have one output per member: those are experts.
- A *stage* is a member most of which is a stack itself (what lies beside that stack weighs less than one of its
  blocks). Stages are opened, and so are lists in lists and dictionaries of lists.
- The outermost stack wins: whatever repeats inside a block is part of the block.
- Blocks are the members of a container, or equal siblings held as attributes. Bare lists of one length beside each
  other (attention here, feed-forward there) make one stack of units, taken alternately.

What structure cannot say (one block alone, siblings assumed to run in sequence) is said in the stack's note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from autoplan.analyse.module_tree import ModuleTree

__all__ = ["Blocks", "find_blocks"]


@dataclass(frozen=True)
class Blocks:
    """A stack as found: `holder` is the module (number) that holds the members, `blocks` each block once, in order.

    `listed` counts members with repetitions: a block listed twice is called twice.
    """

    name: str
    holder: int
    blocks: tuple[int, ...]
    listed: int
    whole: bool
    notes: tuple[str, ...] = ()


def find_blocks(tree: ModuleTree) -> tuple[Blocks, ...]:
    """All outermost stacks of the model, in order of definition, no block in two of them."""
    taken: set[int] = set()
    stacks = []
    for stack in _Search(tree).below(0, outermost=True):
        if not taken.issuperset(stack.blocks):
            rest = tuple(block for block in stack.blocks if block not in taken)
            taken.update(rest)
            stacks.append(replace(stack, blocks=rest, notes=(*stack.notes, *_sharing(tree, rest))))
    return tuple(stacks)


class _Search:
    """One walk over a tree; what was found below a module is kept."""

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.found: dict[tuple[int, bool], tuple[Blocks, ...]] = {}

    def below(self, number: int, outermost: bool) -> tuple[Blocks, ...]:
        """The stacks in a module; `outermost` unless the module may itself be a block."""
        key = (number, outermost)
        if key not in self.found:
            self.found[key] = ()  # a module that holds itself ends here
            self.found[key] = self._search(number, outermost)
        return self.found[key]

    def _search(self, number: int, outermost: bool) -> tuple[Blocks, ...]:
        tree = self.tree
        if tree.nodes[number].container:
            stack = self._in_container(number, outermost)
            if stack is not None:
                return (stack,)
        children = tree.children(number)
        by_child = {child: self.below(child, outermost) for child in children}
        if outermost and not tree.nodes[number].container:
            by_child = self._interleave(number, by_child)
            siblings = self._siblings(number, [child for child in children if not by_child[child]])
            return (*(stack for stacks in by_child.values() for stack in stacks), *siblings)
        return tuple(stack for stacks in by_child.values() for stack in stacks)

    # ------------------------------------------------------------------------------------------ members of containers

    def _in_container(self, number: int, outermost: bool) -> Blocks | None:
        members = self._members(number)
        blocks: list[int] = []
        for member in members:
            blocks.extend(self._opened(member) or ((member,) if self._is_block(member) else ()))
        once = tuple(dict.fromkeys(blocks))
        whole = any(self._is_whole(block) for block in once)
        stack = Blocks(self.tree.nodes[number].name, number, once, len(blocks), whole)
        if not once or not self._is_stack(stack, outermost):
            return None
        alone = len(members) == 1 and len(blocks) == 1
        return replace(stack, notes=("a single block: taken for a stack of one layer",)) if alone else stack

    def _members(self, number: int) -> list[int]:
        """What a container holds, with repetitions, containers in it opened where they hold the same kind of block."""
        children = [child for _, child in self.tree.nodes[number].children]
        inner = {child: self._members(child) for child in children if self.tree.nodes[child].container}
        if len(inner) > 1 and not self._alike(list(inner.values())):
            return []
        return [member for child in children for member in inner.get(child, [child])]

    def _alike(self, groups: list[list[int]]) -> bool:
        """Whether groups of blocks share a class; stacks of different kinds in one dictionary stay apart."""
        sets = [{self.tree.nodes[m].class_id for m in group if self.tree.children(m)} for group in groups]
        filled = [classes for classes in sets if classes]
        return all(classes & set().union(*(other for other in filled if other is not classes)) for classes in filled)

    def _opened(self, member: int) -> tuple[int, ...]:
        """The blocks in a stage; nothing if the member is a block."""
        if not self.tree.children(member):
            return ()
        inner = self.below(member, outermost=False)
        if len(inner) != 1:
            return ()
        blocks = inner[0].blocks
        largest = max(map(self.tree.bytes, blocks))
        beside = self.tree.bytes(member) - sum(map(self.tree.bytes, blocks))
        return blocks if largest >= beside else ()

    # ------------------------------------------------------------------------------------------------ what is a block

    def _is_block(self, number: int) -> bool:
        matrices = sum(len(parameter.shape) > 1 for parameter in self.tree.parameters(number))
        return matrices > 1 or (matrices == 1 and bool(self.tree.children(number)))

    def _is_whole(self, number: int) -> bool:
        return self.tree.depth(number) > 1

    def _is_stack(self, stack: Blocks, outermost: bool) -> bool:
        classes = Counter(self.tree.nodes[block].class_id for block in stack.blocks)
        if len(stack.blocks) == 1:
            return stack.whole
        if not outermost and len(classes) > 1 and max(classes.values()) == 1:
            return False  # the different parts of one block, kept in a list
        return stack.whole or (self._follows(stack.blocks) and not self._routed(stack))

    def _follows(self, blocks: tuple[int, ...]) -> bool:
        """Whether each block can read what the one before it writes, as far as widths are known."""
        widths = [self._widths(block) for block in blocks]
        pairs = zip(widths, widths[1:], strict=False)
        return all(None in (before[1], after[0]) or before[1] == after[0] for before, after in pairs)

    def _widths(self, number: int) -> tuple[int | None, int | None]:
        nodes = [self.tree.nodes[below] for below in self.tree.subtree(number)]
        known = [node for node in nodes if any(len(parameter.shape) > 1 for parameter in node.parameters)]
        return (known[0].reads, known[-1].writes) if known else (None, None)

    def _routed(self, stack: Blocks) -> bool:
        """Whether something beside the list has one output per member: a router, and the members are experts."""
        count = len(stack.blocks)
        for parent in self.tree.parents.get(stack.holder, ()):
            beside = [parent, *(child for child in self.tree.children(parent) if not self.tree.children(child))]
            shapes = [p.shape for node in beside for p in self.tree.nodes[node].parameters if len(p.shape) > 1]
            if count > 2 and any(count in shape for shape in shapes):
                return True
        return False

    # -------------------------------------------------------------------------------------------- blocks without a list

    def _siblings(self, number: int, children: list[int]) -> Iterable[Blocks]:
        """Equal blocks held as attributes of one module."""
        groups: dict[object, list[int]] = {}
        for child in children:
            node = self.tree.nodes[child]
            if not node.container and self._is_block(child):
                shapes = tuple(parameter.shape for parameter in self.tree.parameters(child))
                groups.setdefault((node.class_id, shapes), []).append(child)
        for group in groups.values():
            stack = Blocks(self.tree.nodes[number].name, number, tuple(group), len(group), self._is_whole(group[0]))
            if len(group) > (1 if stack.whole else 2) and self._is_stack(stack, outermost=True):
                note = "equal modules held as attributes: taken to run one after the other"
                yield replace(stack, notes=(note,))

    def _interleave(self, number: int, by_child: dict[int, tuple[Blocks, ...]]) -> dict[int, tuple[Blocks, ...]]:
        """Join bare lists of one length and different classes beside each other: models without a block module."""
        bare = [
            stacks[0] for child, stacks in by_child.items()
            if len(stacks) == 1 and stacks[0].holder == child and not stacks[0].whole
        ]  # fmt: skip
        same = [stack for stack in bare if len(stack.blocks) == len(bare[0].blocks)]
        classes = {self.tree.nodes[stack.blocks[0]].class_id for stack in same}
        if len(same) < 2 or len(classes) < len(same):
            return by_child
        units = tuple(block for together in zip(*(stack.blocks for stack in same), strict=True) for block in together)
        name = self.tree.nodes[number].name
        keys = "+".join(self.tree.nodes[stack.holder].name.rpartition(".")[2] for stack in same)
        note = (
            f"no block module: {len(same)} parallel lists of {len(same[0].blocks)} modules each, taken alternately "
            "as units (norms between them belong to none)"
        )
        joined = Blocks(f"{name}.{keys}" if name else keys, same[0].holder, units, len(units), False, (note,))
        rest = {child: tuple(stack for stack in stacks if stack not in same) for child, stacks in by_child.items()}
        return {**rest, same[0].holder: (joined,)}


def _sharing(tree: ModuleTree, blocks: tuple[int, ...]) -> tuple[str, ...]:
    """What several blocks have in common: such modules are called often and must not be in two units."""
    holders: dict[int, set[int]] = {}
    for block in blocks:
        for below in tree.subtree(block)[1:]:
            holders.setdefault(below, set()).add(block)
    shared = [below for below, of in holders.items() if len(of) > 1 and tree.bytes(below)]
    inside = {below for outer in shared for below in tree.subtree(outer)[1:]}
    top = [below for below in shared if below not in inside]
    return tuple(f"{tree.nodes[below].name} is one module in {len(holders[below])} blocks" for below in top)
