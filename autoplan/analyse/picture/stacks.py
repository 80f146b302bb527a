"""Find the repeated stacks of a model, and tell vision, audio and text stacks apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from autoplan.values.module_tree import Feed, Mask, ModuleTree

# Find the repeated stacks of a model from its structure alone: no tracing, no names.
#
# The problem: FSDP2 units, activation checkpointing and per-layer plans need the blocks of every stack: not the list
# that holds them, not experts, not norms or heads, whatever containers they are in. These properties identify blocks:
#
# - A *block* holds at least two matrices. It is *whole* if it holds modules that hold modules (attention and its
#   projections); otherwise (*bare*: an MLP, attention alone, convolution and norm) the widths must match from one
#   member to the next, or all members must be alike and write what something else reads (parallel mergers); and no
#   router next to the list may have one output per member: those are experts.
# - A *stage* is a member that is hardly more than a stack itself. Stages are opened, and so are lists in lists and
#   dictionaries of lists.
# - The outermost stack wins: whatever repeats inside a block is part of the block.
# - Blocks are the members of a container, or equal siblings held as attributes. Bare lists of one length next to each
#   other (attention here, feed-forward there) make one stack of units, taken alternately.
#
# Guesses beyond structure (a single block, siblings assumed to run in sequence) are recorded in the stack's notes.

OUTSIDE_BLOCKS = 0.1  # a stage holds at most this share of its bytes next to its blocks (down-sampling between stages)
ALONE = "a single block, treated as a stack of one layer"
SIBLINGS = "equal modules held as attributes, assumed to run in sequence"
PARTS = "no block class: the block's parts (attention, feed-forward) are the units"


@dataclass(frozen=True)
class Blocks:
    """A stack that was found: `holder` is the module (number) that holds the members, `blocks` each block once, in
    order. `listed` counts members with repetitions: a block listed twice is called twice."""

    name: str
    holder: int
    blocks: tuple[int, ...]
    listed: int
    whole: bool
    notes: tuple[str, ...] = ()


def find_blocks(tree: ModuleTree) -> tuple[Blocks, ...]:
    """Return all outermost stacks of the model, in order of definition, with no block in two of them."""
    taken: set[int] = set()
    stacks = []
    for stack in _Search(tree).below(0, outermost=True):
        if not taken.issuperset(stack.blocks):
            rest = tuple(block for block in stack.blocks if block not in taken)
            taken.update(rest)
            stacks.append(replace(stack, blocks=rest, notes=(*stack.notes, *_sharing(tree, rest))))
    return tuple(stacks)


class _Search:
    """One walk over a tree; the stacks found below a module are cached."""

    def __init__(self, tree: ModuleTree) -> None:
        self.tree = tree
        self.found: dict[tuple[int, bool], tuple[Blocks, ...]] = {}

    def below(self, number: int, outermost: bool) -> tuple[Blocks, ...]:
        """Return the stacks in a module; `outermost` unless the module may itself be a block."""
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

    # Members of containers

    def _in_container(self, number: int, outermost: bool) -> Blocks | None:
        members = self._members(number)
        opened = self._opened(tuple(dict.fromkeys(members)))
        blocks = [block for member in members for block in opened.get(member, (member,)) if self._is_block(block)]
        once = tuple(dict.fromkeys(blocks))
        whole = any(self._is_whole(block) for block in once)
        stack = Blocks(self.tree.nodes[number].name, number, once, len(blocks), whole)
        if not once or not self._is_stack(stack, outermost):
            return None
        alone = len(members) == 1 and len(blocks) == 1
        notes = ((ALONE,) if alone else ()) + ((PARTS,) if self._holds_parts(number, once) else ())
        return replace(stack, notes=notes)

    def _members(self, number: int, together: bool = False) -> list[int]:
        """Return the members of a container, with repetitions; containers in it are opened. Lists of different kinds
        next to each other are different stacks, unless they are `together` in a longer list."""
        children = [child for _, child in self.tree.nodes[number].children]
        inner = {child: self._members(child, True) for child in children if self.tree.nodes[child].container}
        if len(inner) > 1 and not together and not self._alike(list(inner.values())):
            return []
        return [member for child in children for member in inner.get(child, [child])]

    def _alike(self, groups: list[list[int]]) -> bool:
        """Return whether every group of blocks shares a class with another."""
        sets = [{self.tree.nodes[m].class_id for m in group if self.tree.children(m)} for group in groups]
        filled = [classes for classes in sets if classes]
        return all(classes & set().union(*(other for other in filled if other is not classes)) for classes in filled)

    def _holds_parts(self, number: int, blocks: tuple[int, ...]) -> bool:
        """Return whether the container holds lists like [attention, feed-forward]: parts of a block, and no block."""
        groups = [
            self._members(child, True) for child in self.tree.children(number) if self.tree.nodes[child].container
        ]
        parts = [[self.tree.nodes[m].class_id for m in group if m in blocks] for group in groups]
        return len(parts) > 1 and all(len(part) > 1 and len(set(part)) == len(part) for part in parts)

    def _opened(self, members: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
        """Return the blocks of each stage among the members; nothing if the members are blocks themselves."""
        stages: dict[int, tuple[int, ...]] = {}
        for member in members:
            inner = self.below(member, outermost=False) if self.tree.children(member) else ()
            if len(inner) == 1 and not self._routed(inner[0], member):
                stages[member] = inner[0].blocks
        total = sum(map(self.tree.bytes, stages))
        inside = sum(self.tree.bytes(block) for blocks in stages.values() for block in blocks)
        return stages if total - inside <= OUTSIDE_BLOCKS * total else {}

    # Tests for a block

    def _is_block(self, number: int) -> bool:
        matrices = len(self._matrices(number)) if self.tree.nodes[number].runs else 0
        return matrices > 1 or (matrices == 1 and bool(self.tree.children(number)))

    def _matrices(self, number: int) -> list[tuple[int, tuple[int, ...]]]:
        """Return the matrices in a module with the leaves that hold them; tables of ids multiply nothing."""
        nodes = self.tree.nodes
        leaves = (below for below in self.tree.subtree(number) if nodes[below].stem != "text")
        return [(leaf, p.shape) for leaf in leaves for p in nodes[leaf].parameters if len(p.shape) > 1]

    def _is_whole(self, number: int) -> bool:
        return self.tree.depth(number) > 1

    def _is_stack(self, stack: Blocks, outermost: bool) -> bool:
        classes = Counter(self.tree.nodes[block].class_id for block in stack.blocks)
        if len(stack.blocks) == 1:
            return stack.whole
        if not outermost and len(classes) > 1 and max(classes.values()) == 1:
            return False  # the different parts of one block, kept in a list
        scope = self.tree.parents.get(stack.holder, (stack.holder,))[0]
        joined = self._follow(stack.blocks) or self._side_by_side(stack)
        return stack.whole or (joined and not (len(classes) < 3 and self._routed(stack, scope)))

    def _follow(self, blocks: tuple[int, ...]) -> bool:
        """Return whether most blocks can read what the previous one writes, as far as widths are known."""
        widths = [self._widths(block) for block in blocks]
        pairs = list(zip(widths, widths[1:], strict=False))
        return 2 * sum(_fits(before, after) for before, after in pairs) >= len(pairs)

    def _side_by_side(self, stack: Blocks) -> bool:
        """Return whether the blocks are alike and write what something else in the model reads (no heads)."""
        widths = {self._widths(block) for block in stack.blocks}
        if len(widths) != 1 or len({self.tree.nodes[block].class_id for block in stack.blocks}) != 1:
            return False
        (_, written), inside = next(iter(widths)), set(self.tree.subtree(stack.holder))
        outside = (node for number, node in enumerate(self.tree.nodes) if number not in inside)
        return written is not None and any(node.reads == written for node in outside)

    def _widths(self, number: int) -> tuple[int | None, int | None]:
        leaves = [self.tree.nodes[leaf] for leaf, _ in self._matrices(number)]
        if not leaves:
            return None, None
        read, written = Counter(leaf.reads for leaf in leaves), Counter(leaf.writes for leaf in leaves)
        # Modules need not be defined in the order in which they run: widths that are read as often as written end as
        # they began
        return leaves[0].reads, leaves[0].reads if read == written else leaves[-1].writes

    def _routed(self, stack: Blocks, scope: int) -> bool:
        """Return whether a module in scope, next to the list, has one output per member: a router over experts."""
        count, listed = len(stack.blocks), set(self.tree.subtree(stack.holder))
        nodes = [self.tree.nodes[below] for below in self.tree.subtree(scope)[1:] if below not in listed]
        gates = [node for node in nodes if not node.children and node.stem is None]
        return any(len(p.shape) == 2 and count in p.shape for gate in gates for p in gate.parameters)

    # Blocks without a list

    def _siblings(self, number: int, children: list[int]) -> Iterable[Blocks]:
        """Yield stacks of equal blocks held as attributes of one module."""
        groups: dict[object, list[int]] = {}
        for child in children:
            node = self.tree.nodes[child]
            if not node.container and self._is_block(child):
                shapes = tuple(parameter.shape for parameter in self.tree.parameters(child))
                groups.setdefault((node.class_id, shapes), []).append(child)
        for group in groups.values():
            stack = Blocks(self.tree.nodes[number].name, number, tuple(group), len(group), self._is_whole(group[0]))
            share = sum(map(self.tree.bytes, group)) / max(1, self.tree.bytes(number))
            if len(group) > 1 and (share > 0.5 or stack.whole or len(group) > 2) and self._is_stack(stack, True):
                yield replace(stack, notes=(SIBLINGS,))

    def _interleave(self, number: int, by_child: dict[int, tuple[Blocks, ...]]) -> dict[int, tuple[Blocks, ...]]:
        """Join adjacent bare lists of one length and different classes: models without a block module."""
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
            f"no block class: {len(same)} parallel lists of {len(same[0].blocks)} modules each, taken "
            "alternately as units (the norms between them belong to no unit)"
        )
        joined = Blocks(f"{name}.{keys}" if name else keys, same[0].holder, units, len(units), False, (note,))
        rest = {child: tuple(stack for stack in stacks if stack not in same) for child, stacks in by_child.items()}
        return {**rest, same[0].holder: (joined,)}


def _fits(before: tuple[int | None, int | None], after: tuple[int | None, int | None]) -> bool:
    """Return whether widths are equal or several outputs are merged into one; parallel heads read one width."""
    written, read = before[1], after[0]
    if written is None or read is None or written == read:
        return True
    return before[0] != read and read % written == 0


def _sharing(tree: ModuleTree, blocks: tuple[int, ...]) -> tuple[str, ...]:
    """Return notes on modules that several blocks share: they are called often and must not be in two units."""
    holders: dict[int, set[int]] = {}
    for block in blocks:
        for below in tree.subtree(block)[1:]:
            holders.setdefault(below, set()).add(block)
    shared = [below for below, of in holders.items() if len(of) > 1 and tree.bytes(below)]
    inside = {below for outer in shared for below in tree.subtree(outer)[1:]}
    top = [below for below in shared if below not in inside]
    return tuple(f"{tree.nodes[below].name} is one module shared by {len(holders[below])} blocks" for below in top)


# Classify a stack of blocks: vision, audio, text decoder, text encoder, or something else. No names are read.
#
# The input of a stack decides. Going outwards from the stack, the first module that gives evidence counts: by the
# arguments of its forward, else by the layers next to the stack: a table of ids (text), a convolution over an image
# or a signal. Text stacks are decoders if only causal masks are built around them or an attention in them ran causal,
# if their blocks attend to another stack (more attentions per block than its blocks have), or if the model can
# generate text; else they are encoders.

Kind = Literal["decoder", "encoder", "vision", "audio", "other"]
UNKNOWN = "input modality unknown"
PROJECTIONS = 3  # query, key, value: fewer matrices are no attention


def kind_of(
    stack: Blocks, stacks: tuple[Blocks, ...], tree: ModuleTree, causal: frozenset[str] = frozenset()
) -> tuple[Kind, str]:
    """Return the kind, and what had to be guessed. `causal`: modules that ran a causal attention in the trace."""
    around = _around(stack, tree)
    feed = _feed(stack, stacks, tree)
    if feed == "text":
        inside = {name for below in tree.subtree(stack.blocks[0]) for name in tree.nodes[below].names}
        return ("decoder", "") if causal & inside else _text_kind(stack, stacks, tree)
    if feed is not None:
        return feed, ""
    rest = _left_over(around, tree)
    if rest is None or rest == "text":
        return "other", UNKNOWN
    return rest, f"assumed {rest}: the model's only input besides text"


def _text_kind(stack: Blocks, stacks: tuple[Blocks, ...], tree: ModuleTree) -> tuple[Kind, str]:
    masks = _masks(stack, tree)
    if len(masks) == 1:
        return ("decoder" if "causal" in masks else "encoder"), ""
    others = [other for other in stacks if other is not stack]
    causal = [other for other in others if _masks(other, tree) == {"causal"}]
    partners = [
        other for other in others if other not in causal and ("causal" in masks or _feed(other, stacks, tree) == "text")
    ]
    if any(_attends_to(stack, other, tree) for other in partners):
        return "decoder", ""
    if any(_attends_to(other, stack, tree) for other in partners):
        return "encoder", ""
    if not causal and any(tree.nodes[number].generates for number in _around(stack, tree)):
        return "decoder", "" if masks else "assumed decoder: the model outputs text"
    return "encoder", "" if masks else "assumed encoder: no evidence that it is causal"


def _around(stack: Blocks, tree: ModuleTree) -> list[int]:
    """Return the stack's holder and the modules around it, outwards."""
    path, current = [stack.holder], stack.holder
    while current in tree.parents and tree.parents[current][0] not in path:
        current = tree.parents[current][0]
        path.append(current)
    return path


def _feed(stack: Blocks, stacks: tuple[Blocks, ...], tree: ModuleTree) -> Feed | None:
    """Return the input modality that the nearest module gives evidence for. Tables are weak: positions use them too."""
    busy = {number for other in stacks for number in (*_around(other, tree), *other.blocks)}
    # If the first block begins with a convolution, it reads an image or a signal
    first = next(
        below for below in tree.subtree(stack.blocks[0]) if any(len(p.shape) > 1 for p in tree.nodes[below].parameters)
    )
    own = tree.nodes[first].stem
    looks_up = False
    for number in _around(stack, tree):
        inputs = tree.nodes[number].inputs
        if len(inputs) == 1 and not (looks_up and "other" in inputs):
            return next(iter(inputs))
        stems = _stems(number, busy, tree)
        if "text" in stems and "text" in inputs and own is None:
            return "text"
        convolutions = [stem for stem in stems if stem != "text"]
        if convolutions and not looks_up:
            return convolutions[0]
        looks_up = looks_up or "text" in stems
    return own or ("text" if looks_up else None)


def _stems(number: int, busy: set[int], tree: ModuleTree) -> list[Feed]:
    """Return the layers next to a module's stacks that could read the model's input, in order of definition."""
    stems: list[Feed] = []
    for child in tree.children(number):
        if child not in busy:
            stem = tree.nodes[child].stem
            stems += [stem] if stem else _stems(child, busy, tree)
    return stems


def _left_over(around: list[int], tree: ModuleTree) -> Feed | None:
    """Return the one non-text input of the nearest module that takes two: a stack that reads no text must read it."""
    for number in around:
        inputs = tree.nodes[number].inputs
        if len(inputs) == 2 and "text" in inputs:
            return next(iter(inputs - {"text"}))
    return None


def _masks(stack: Blocks, tree: ModuleTree) -> frozenset[Mask]:
    """Return the masks built in the blocks, else by the nearest module around that builds any."""
    inside = frozenset(mask for below in tree.subtree(stack.blocks[0]) for mask in tree.nodes[below].masks)
    around = (tree.nodes[number].masks for number in _around(stack, tree))
    return inside or next((masks for masks in around if masks), frozenset())


def _attends_to(stack: Blocks, other: Blocks, tree: ModuleTree) -> bool:
    """Return whether the blocks have one attention more than those of the other stack, which they could attend to."""
    mine, theirs = stack.blocks[0], other.blocks[0]
    if tree.nodes[mine].class_id == tree.nodes[theirs].class_id:
        return len(tree.parameters(mine)) > len(tree.parameters(theirs))
    attentions, others = _attentions(stack, tree), _attentions(other, tree)
    if attentions.keys() & others.keys():
        return attentions.total() > others.total()
    return max(attentions.values(), default=0) > 1 and others.total() == 1


def _attentions(stack: Blocks, tree: ModuleTree) -> Counter[int]:
    """Return how many modules of a block could be attentions, by class, at most over all blocks."""
    most: Counter[int] = Counter()
    for block in stack.blocks:
        counter: Counter[int] = Counter()
        for below in tree.subtree(block)[1:]:
            leaves = [child for child in tree.children(below) if not tree.children(child)]
            matrices = sum(len(p.shape) > 1 for child in leaves for p in tree.nodes[child].parameters)
            counter[tree.nodes[below].class_id] += matrices >= PROJECTIONS
        most |= counter
    return most
