"""Say what a stack of blocks is: vision, audio, text decoder, text encoder, or something else. No names are read.

What feeds a stack decides. Going outwards from the stack, the first module that tells is believed: by the arguments of
its forward, else by what stands beside the stack: a table of ids (text), a convolution over an image or a signal.
Text stacks decode when only causal masks are built around them, when their blocks attend to another stack (more
attentions per block than its blocks have), or when the model can write text; else they encode.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from autoplan.analyse.blocks import Blocks
from autoplan.analyse.module_tree import Feed, Mask, ModuleTree

__all__ = ["Kind", "kind_of"]

Kind = Literal["decoder", "encoder", "vision", "audio", "other"]
PROJECTIONS = 3  # query, key, value: fewer matrices are no attention


def kind_of(stack: Blocks, stacks: tuple[Blocks, ...], tree: ModuleTree) -> tuple[Kind, str]:
    """The kind, and what had to be guessed."""
    around = _around(stack, tree)
    feed = _feed(around, stacks, tree)
    if feed is None:
        return "other", "what feeds it cannot be told from structure"
    if feed in ("vision", "audio", "other"):
        return feed, ""
    if _attends_elsewhere(stack, stacks, tree):
        return "decoder", ""
    if any(_attends_elsewhere(other, (stack,), tree) for other in stacks):
        return "encoder", ""
    masks = _masks(stack, around, tree)
    if masks == {"causal"}:
        return "decoder", ""
    if masks == {"bidirectional"}:
        return "encoder", ""
    if any(tree.nodes[number].generates for number in around):
        return "decoder", ""
    if masks:
        return "encoder", "its masks may be causal or not: taken for an encoder, as the model does not write text"
    return "encoder", "decoder or encoder cannot be told from structure: taken for an encoder"


def _around(stack: Blocks, tree: ModuleTree) -> list[int]:
    """The stack's holder and the modules around it, outwards."""
    path, current = [stack.holder], stack.holder
    while current in tree.parents and tree.parents[current][0] not in path:
        current = tree.parents[current][0]
        path.append(current)
    return path


def _feed(around: list[int], stacks: tuple[Blocks, ...], tree: ModuleTree) -> Feed | None:
    busy = {number for stack in stacks for number in _around(stack, tree)} | {b for s in stacks for b in s.blocks}
    for number in around:
        node = tree.nodes[number]
        if len(node.inputs) == 1:
            return next(iter(node.inputs))
        level = [child for child in tree.children(number) if child not in busy]
        while level:  # the nearest layer of modules that holds a stem
            stems = {tree.nodes[child].stem for child in level}
            for feed in ("vision", "audio", "text"):
                if feed in stems:
                    return feed
            level = [below for child in level for below in tree.children(child)]
    return None


def _masks(stack: Blocks, around: list[int], tree: ModuleTree) -> frozenset[Mask]:
    inside = frozenset(mask for below in tree.subtree(stack.blocks[0]) for mask in tree.nodes[below].masks)
    return inside or next((tree.nodes[number].masks for number in around if tree.nodes[number].masks), frozenset())


def _attends_elsewhere(stack: Blocks, others: tuple[Blocks, ...], tree: ModuleTree) -> bool:
    """Whether the blocks hold more attentions of one class than the blocks of another stack hold of the same class."""
    mine = _attentions(stack, tree)
    for other in others:
        theirs = _attentions(other, tree) if other is not stack else {}
        if any(mine[kind] > theirs[kind] for kind in mine if kind in theirs):
            return True
    return False


def _attentions(stack: Blocks, tree: ModuleTree) -> Counter[int]:
    """How many modules that could be attentions one block holds, by class, at most over all blocks."""
    found: Counter[int] = Counter()
    for block in stack.blocks:
        here: Counter[int] = Counter()
        for below in tree.subtree(block)[1:]:
            leaves = [child for child in tree.children(below) if not tree.children(child)]
            matrices = sum(len(p.shape) > 1 for child in leaves for p in tree.nodes[child].parameters)
            here[tree.nodes[below].class_id] += matrices >= PROJECTIONS
        found |= here
    return found
