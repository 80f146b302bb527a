"""A size at which no block splits: the plan is legal, and every rank holds and computes nearly the whole model."""

from __future__ import annotations

from autoplan.common.patterns import is_under, matches
from autoplan.values import Finding, Plan

__all__ = ["BLOCKS", "whole_blocks"]

BLOCKS = "blocks"  # what findings call it


def whole_blocks(plan: Plan) -> tuple[Finding, ...]:
    """A warning if something is split, and nothing of it lies in a repeated block."""
    blocks = [block for stack in plan.layers for block in stack.fqns]
    if plan.ranks == 1 or not blocks or not plan.entries:
        return ()
    if any(_inside(entry.pattern, block) for entry in plan.entries for block in blocks):
        return ()
    split = ", ".join(entry.pattern for entry in plan.entries[:3])
    legal = ", ".join(map(str, plan.legal_tp))
    hint = f"sizes that divide every axis: {legal}" if plan.legal_tp else "choose another size"
    text = f"no block is split at tp={plan.ranks}, only {split}: every rank computes all {len(blocks)} blocks"
    return (Finding(BLOCKS, "warn", "", text, hint),)


def _inside(pattern: str, block: str) -> bool:
    """Does a pattern of a module mean one in this block, or the block itself?"""
    depth = block.count(".") + 1
    return is_under(block, pattern) or matches(".".join(pattern.split(".")[:depth]), block)
