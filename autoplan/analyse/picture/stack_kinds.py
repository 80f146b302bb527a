"""Say what a stack of blocks is: vision, audio, text decoder, text encoder, or something else. No names are read.

What feeds a stack decides. Going outwards from the stack, the first module that tells is believed: by the arguments of
its forward, else by what stands next to the stack: a table of ids (text), a convolution over an image or a signal.
Text stacks decode when only causal masks are built around them or an attention in them was seen to run causal, when
their blocks attend to another stack (more attentions per block than its blocks have), or when the model can write text;
else they encode.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from autoplan.analyse.picture.blocks import Blocks
from autoplan.values.module_tree import Feed, Mask, ModuleTree

__all__ = ["Kind", "kind_of"]

Kind = Literal["decoder", "encoder", "vision", "audio", "other"]
UNKNOWN = "input modality unknown"
PROJECTIONS = 3  # query, key, value: fewer matrices are no attention


def kind_of(
    stack: Blocks, stacks: tuple[Blocks, ...], tree: ModuleTree, causal: frozenset[str] = frozenset()
) -> tuple[Kind, str]:
    """The kind, and what had to be guessed. `causal`: modules that called a causal attention when the model ran."""
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
    return rest, f"taken for {rest}: the model's only input besides text"


def _text_kind(stack: Blocks, stacks: tuple[Blocks, ...], tree: ModuleTree) -> tuple[Kind, str]:
    masks = _masks(stack, tree)
    if len(masks) == 1:
        return ("decoder" if "causal" in masks else "encoder"), ""
    others = [other for other in stacks if other is not stack]
    causal = [other for other in others if _masks(other, tree) == {"causal"}]
    partners = [
        other for other in others if other not in causal and ("causal" in masks or _reads_text(other, stacks, tree))
    ]
    if any(_attends_to(stack, other, tree) for other in partners):
        return "decoder", ""
    if any(_attends_to(other, stack, tree) for other in partners):
        return "encoder", ""
    if not causal and any(tree.nodes[number].generates for number in _around(stack, tree)):
        return "decoder", "" if masks else "taken for a decoder: the model writes text"
    return "encoder", "" if masks else "taken for an encoder: nothing says that it is causal"


def _reads_text(stack: Blocks, stacks: tuple[Blocks, ...], tree: ModuleTree) -> bool:
    return _feed(stack, stacks, tree) == "text"


def _around(stack: Blocks, tree: ModuleTree) -> list[int]:
    """The stack's holder and the modules around it, outwards."""
    path, current = [stack.holder], stack.holder
    while current in tree.parents and tree.parents[current][0] not in path:
        current = tree.parents[current][0]
        path.append(current)
    return path


def _feed(stack: Blocks, stacks: tuple[Blocks, ...], tree: ModuleTree) -> Feed | None:
    """What the nearest telling module says. Tables of ids are weaker than the rest: positions are looked up too."""
    busy = {number for other in stacks for number in (*_around(other, tree), *other.blocks)}
    own = _own_stem(stack, tree)
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
    """What stands in a module next to its stacks and could read the model's input, in order of definition."""
    found: list[Feed] = []
    for child in tree.children(number):
        if child not in busy:
            stem = tree.nodes[child].stem
            found += [stem] if stem else _stems(child, busy, tree)
    return found


def _own_stem(stack: Blocks, tree: ModuleTree) -> Feed | None:
    """The convolution with which the first block begins, if it does: it reads an image or a signal."""
    first = next(
        below for below in tree.subtree(stack.blocks[0]) if any(len(p.shape) > 1 for p in tree.nodes[below].parameters)
    )
    return tree.nodes[first].stem


def _left_over(around: list[int], tree: ModuleTree) -> Feed | None:
    """The one input besides text of the nearest module that takes several: what is not text must be fed by it."""
    for number in around:
        inputs = tree.nodes[number].inputs
        if len(inputs) == 2 and "text" in inputs:
            return next(iter(inputs - {"text"}))
    return None


def _masks(stack: Blocks, tree: ModuleTree) -> frozenset[Mask]:
    """The masks built in the blocks, else by the nearest module around that builds any."""
    inside = frozenset(mask for below in tree.subtree(stack.blocks[0]) for mask in tree.nodes[below].masks)
    around = (tree.nodes[number].masks for number in _around(stack, tree))
    return inside or next((masks for masks in around if masks), frozenset())


def _attends_to(stack: Blocks, other: Blocks, tree: ModuleTree) -> bool:
    """Whether the blocks hold one attention more than those of the other stack, which they could attend to."""
    mine, theirs = stack.blocks[0], other.blocks[0]
    if tree.nodes[mine].class_id == tree.nodes[theirs].class_id:
        return len(tree.parameters(mine)) > len(tree.parameters(theirs))
    attentions, known = _attentions(stack, tree), _attentions(other, tree)
    if attentions.keys() & known.keys():
        return attentions.total() > known.total()
    return max(attentions.values(), default=0) > 1 and known.total() == 1


def _attentions(stack: Blocks, tree: ModuleTree) -> Counter[int]:
    """How many modules that could be attentions a block holds, by class, at most over all blocks."""
    most: Counter[int] = Counter()
    for block in stack.blocks:
        found: Counter[int] = Counter()
        for below in tree.subtree(block)[1:]:
            leaves = [child for child in tree.children(below) if not tree.children(child)]
            matrices = sum(len(p.shape) > 1 for child in leaves for p in tree.nodes[child].parameters)
            found[tree.nodes[below].class_id] += matrices >= PROJECTIONS
        most |= found
    return most
