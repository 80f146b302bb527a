"""How the stacks that `autoplan.layers` finds are held against a model and its config.

- *coverage*: of the parameters under repeated siblings (two or more of one class in one parent, with matrices in
  modules of their own; lists that are called experts and tables of ids left out), the share that lies in found blocks;
- *counts*: each number of layers in the configs (num_hidden_layers, encoder_layers, depths, ...) that the model's
  structure depends on is the number of blocks in a stack, or in those below one part of the model together. It is said
  where the config counts otherwise: calls of blocks that run again, or blocks of stages that are units as a whole
  (much lies next to their blocks). Models without a block module have units instead, which no config counts;
- *blind*: the same is found when every module, key, class and parameter has a meaningless name, and in a copy of the
  model's source in which all classes and attributes are renamed.

Unlike what is measured, the measure reads names: of experts, and of settings.
"""

from __future__ import annotations

import copy
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import transformers
from renamer import renamed_copy
from torch import nn

from autoplan.common.errors import AutoplanError
from autoplan.hf.shrink import all_configs
from autoplan.hf.source import Source, resolve
from autoplan.hf.stacks import layers, module_tree, stacks_of
from autoplan.values import Stack
from autoplan.values.module_tree import ModuleNode, ModuleTree

__all__ = ["LEAST", "Found", "examined"]

LEAST = 0.95  # of the parameters under repeated siblings, in blocks
COUNT = re.compile(
    r"^(num|n)_(hidden_|encoder_|decoder_)?layers?(_per_stack)?$|(^|_)(encoder|decoder)_layers$|^depths?$"
)


@dataclass
class Found:
    """One architecture. `problem`: why it could not be built. `counts`: what the config says and no stack has;
    `otherwise`: what it counts otherwise. `unrenamed`: why no renamed copy of its source could be built."""

    name: str
    stacks: tuple[Stack, ...] = ()
    coverage: float = math.nan
    outside: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    otherwise: dict[str, int] = field(default_factory=dict)
    blind: str = ""
    unrenamed: str = ""
    problem: str = ""

    @property
    def fine(self) -> bool:
        return not self.problem and self.coverage >= LEAST and not self.counts and not self.blind


def examined(model_type: str, class_name: str, renamed: bool = False) -> Found:
    name = f"{model_type} ({class_name})"
    try:
        source = resolve(f"{model_type}:{class_name}")
        model = _built(source)
    except (AutoplanError, ImportError) as error:
        return Found(name, problem=str(error).splitlines()[0])
    stacks = layers(model)
    coverage, outside = covered(model, stacks)
    counts, otherwise = odd_counts(source, model, stacks)
    blind, unrenamed = difference(stacks, unnamed(module_tree(model))), ""
    if renamed and not blind:
        blind, unrenamed = of_renamed(source, stacks)
    return Found(name, stacks, coverage, outside, counts, otherwise, blind, unrenamed)


def _built(source: Source) -> nn.Module:
    """At full size; tiny where the default config does not build."""
    try:
        return source.module()
    except AutoplanError:
        return source.tiny()


# ------------------------------------------------------------------------------------------------ coverage


def covered(model: nn.Module, stacks: tuple[Stack, ...]) -> tuple[float, dict[str, int]]:
    """The share of the parameters under repeated siblings that blocks hold; what lies outside, largest first."""
    blocks = {fqn for stack in stacks for fqn in stack.fqns}
    held = {id(p) for fqn in blocks for p in model.get_submodule(fqn).parameters()}
    total: dict[int, int] = {}
    outside: Counter[str] = Counter()
    for where, module in _repeated(model, "", blocks):
        tables = {id(p) for below in module.modules() if isinstance(below, nn.Embedding) for p in below.parameters()}
        for parameter in module.parameters():
            if id(parameter) not in {*total, *tables}:
                total[id(parameter)] = parameter.numel()
                outside[where] += 0 if id(parameter) in held else parameter.numel()
    inside = sum(count for key, count in total.items() if key in held)
    return (inside / sum(total.values()) if total else 1.0), {k: n for k, n in outside.most_common(3) if n}


def _repeated(module: nn.Module, name: str, blocks: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Every module outside blocks, and every block, that has a sibling of its class."""
    children = {f"{name}.{key}".strip("."): child for key, child in module.named_children()}
    classes = Counter(type(child) for child in children.values())
    for fqn, child in children.items():
        if "expert" in fqn:
            continue
        container = isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if classes[type(child)] > 1 and not container and _has_matrices(child):
            yield f"{name} of {type(child).__name__}", child
        if fqn not in blocks:
            yield from _repeated(child, fqn, blocks)


def _has_matrices(module: nn.Module) -> bool:
    return any(True for _ in module.children()) and sum(p.dim() > 1 for p in module.parameters()) > 1


# ------------------------------------------------------------------------------------------------ counts


def odd_counts(source: Source, model: nn.Module, stacks: tuple[Stack, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Numbers of layers in the configs that no stack has; and those that count otherwise."""
    lengths = {len(stack.fqns) for stack in stacks}
    lengths |= {len({f for s in stacks for f in s.fqns if f.startswith(part)}) for part in _parts(stacks)}
    odd: dict[str, int] = {}
    otherwise: dict[str, int] = {}
    if any("no block class" in stack.note for stack in stacks):
        return odd, otherwise
    for place, config in enumerate(all_configs(model.config)):
        for key, numbers in _said(config).items():
            if sum(numbers) not in lengths and _matters(source, model, place, key):
                found = otherwise if _counted_otherwise(numbers, lengths) else odd
                found[f"{type(config).__name__}.{key}"] = sum(numbers)
    return odd, otherwise


def _said(config: transformers.PretrainedConfig) -> dict[str, Sequence[int]]:
    """Every number of layers that a config gives, sub-configs aside, by stage where it says so."""
    found = {}
    for key in filter(COUNT.search, {*config.to_dict(), "num_hidden_layers"}):
        value = getattr(config, key, None)
        if isinstance(value, int | list | tuple) and not isinstance(value, bool):
            found[key] = value if isinstance(value, list | tuple) else [value]
    return {key: numbers for key, numbers in found.items() if sum(numbers)}


def _counted_otherwise(numbers: Sequence[int], lengths: set[int]) -> bool:
    """Calls: a multiple of a stack's blocks. Stages: each is one unit, or as many as its blocks."""
    if len(numbers) == 1:
        return any(numbers[0] % length == 0 for length in lengths - {0})
    units = {0}
    for number in numbers:
        units = {before + count for before in units for count in (1, number)}
    return bool(units & lengths)


def _matters(source: Source, model: nn.Module, place: int, key: str) -> bool:
    """Has the model other modules when the number in its config is another?"""
    config = copy.deepcopy(model.config)
    one = all_configs(config)[place]
    value = getattr(one, key)
    try:
        setattr(one, key, [*value[:-1], value[-1] - 1] if isinstance(value, list | tuple) else value - 1)
        other = replace(source, config=config).module()
    except (AutoplanError, AttributeError):
        return True  # it cannot be built: the number was in use
    return sum(1 for _ in other.modules()) != sum(1 for _ in model.modules())


def _parts(stacks: tuple[Stack, ...]) -> set[str]:
    """Every prefix of a block's name."""
    names = [stack.fqns[0].split(".") for stack in stacks]
    return {".".join([*name[:length], ""]) if length else "" for name in names for length in range(len(name))}


# ------------------------------------------------------------------------------------------------ without names


def unnamed(tree: ModuleTree) -> ModuleTree:
    """The same tree with numbers for names."""
    return ModuleTree(tuple(_unnamed(node, number) for number, node in enumerate(tree.nodes)))


def _unnamed(node: ModuleNode, number: int) -> ModuleNode:
    return replace(
        node,
        names=(f"m{number}",),
        class_name="",
        children=tuple((f"k{place}", child) for place, (_, child) in enumerate(node.children)),
        parameters=tuple(replace(p, name=f"p{place}") for place, p in enumerate(node.parameters)),
    )


def difference(stacks: tuple[Stack, ...], tree: ModuleTree | tuple[Stack, ...]) -> str:
    """What is found elsewhere, if it differs in kinds or lengths."""
    others = stacks_of(tree) if isinstance(tree, ModuleTree) else tree
    mine, theirs = ([(s.kind, len(s.fqns)) for s in found] for found in (stacks, others))
    return "" if mine == theirs else f"without names: {theirs}, with: {mine}"


def of_renamed(source: Source, stacks: tuple[Stack, ...]) -> tuple[str, str]:
    """What differs in a renamed copy of the source; and why there is none: the renamer is no compiler."""
    assert source.model_class is not None and source.config is not None
    try:
        module, names = renamed_copy(source.model_class.__module__)
        model = _built(replace(source, model_class=getattr(module, names[source.model_class.__name__])))
    except Exception as error:
        return "", f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
    return difference(stacks, layers(model)), ""
