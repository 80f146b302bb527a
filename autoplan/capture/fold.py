"""Copy a model so that the copy is cheap to run: without storage, and with few blocks of each repeated stack.

The problem: what a model does is learnt by running it, and 80 equal blocks tell nothing that two do not. The copy must
keep the names of the real parameters, must never touch the user's model (its tensors, hooks, config, attributes), and
must keep every *kind* of block: a stack may mix dense and expert blocks, sliding and full attention, Mamba and others.

Two blocks are of one kind when their signatures are equal: classes, parameters and buffers (names, shapes, dtypes), the
plain attributes of all submodules, and the values that per-layer lists of a configuration hold for them. Attributes
that only count (the block's index) do not matter. Of floating-point attributes only the sign matters: depth-dependent
rates and scales (`drop_path`, 1/sqrt(index)) change numbers, never what an axis is.
"""

from __future__ import annotations

import copy
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoplan.capture.copies import Rebinding, contents_of, copy_slots, prepare_forwarders
from autoplan.capture.forward_hooks import containers_in, hooks_of_forward, keep_hooks_of_forward
from autoplan.capture.outside import remember_original
from autoplan.common.conventions import conventions
from autoplan.common.errors import CaptureError
from autoplan.common.torch_internals import own_buffers, own_modules, own_parameters
from autoplan.values import Fold

Replace = Callable[[torch.Tensor, str], torch.Tensor]
# Two, since a block may follow one of its own kind. The last of a stack is kept as well, because what follows reads it;
# it stands for no other block.
KEPT_PER_KIND = 2
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Folded:
    """A copy of a model, and which of its blocks stand for which blocks that were left out."""

    module: nn.Module
    folds: tuple[Fold, ...]


@dataclass(frozen=True)
class _Choice:
    """The blocks that are kept of one container (positions in `keys`), and those that stand for the others."""

    name: str
    container: nn.Module
    keys: tuple[str, ...]
    kept: tuple[int, ...]
    members: tuple[tuple[str, str], ...]  # dropped key -> representative key
    alike: tuple[tuple[str, str], ...]  # kept key -> representative of its kind
    lists: tuple[tuple[Any, str], ...]  # (object, attribute) of the per-layer lists that distinguish its blocks


def fold(model: nn.Module, replace: Replace | None = None, *, fold: bool = True) -> Folded:
    """Copy `model` with `replace(tensor, name)` in place of each tensor; keep two blocks of each kind per stack.

    `replace` is called once per tensor (tied tensors stay tied) and defaults to empty tensors on the meta device.
    `fold=False` keeps all blocks, for models whose forward counts them.
    """
    choices = _choose(model) if fold else []
    left_out = {id(choice.container): choice for choice in choices}
    memo: dict[int, Any] = {}
    _plant_tensors(model, left_out, replace or _to_meta, memo)
    fill = prepare_forwarders(model, memo)
    folded_children: dict[int, dict[str, nn.Module]] = {id(choice.container): {} for choice in choices}
    for choice in choices:
        memo[id(own_modules(choice.container))] = folded_children[id(choice.container)]
    for choice in choices:
        blocks, copies = own_modules(choice.container), folded_children[id(choice.container)]
        for position in choice.kept:
            key = choice.keys[position]
            copies[key] = _deepcopy(blocks[key], memo, f"{choice.name}.{key}")
        for key, representative in choice.members:
            _stand_for(blocks[key], copies[representative], memo)
    module = _deepcopy(model, memo, "")
    fill()
    copy_slots(model, memo)
    rebinding = Rebinding(memo)
    keep_hooks_of_forward(model, rebinding)
    rebinding.everything()
    remember_original(module, model)
    _shorten(choices, memo)
    for choice in choices:
        if isinstance(choice.container, nn.ModuleList):
            _count_places(memo[id(choice.container)])
    for part in module.modules():
        for mark in conventions().hook_marks:
            part.__dict__.pop(mark, None)
    return Folded(module, tuple(Fold(choice.name, choice.members, choice.alike) for choice in choices))


def _to_meta(tensor: torch.Tensor, name: str) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


# Choice of the blocks that are left out


def _choose(model: nn.Module) -> list[_Choice]:
    """Return a choice for each outermost container in which some block is repeated."""
    configs = _Configs(containers_in(model))
    choices: list[_Choice] = []
    seen: set[int] = set()

    def visit(module: nn.Module, name: str, above: tuple[nn.Module, ...]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if isinstance(module, CONTAINERS):
            choice = _choose_in(module, name, above, configs)
            if choice is not None and choice.members:
                choices.append(choice)
                return
        for key, child in own_modules(module).items():
            if child is not None:
                visit(child, f"{name}.{key}" if name else key, (*above, module))

    visit(model, "", ())
    return choices


def _choose_in(container: nn.Module, name: str, above: tuple[nn.Module, ...], configs: _Configs) -> _Choice | None:
    blocks = {key: block for key, block in own_modules(container).items() if block is not None}
    alone = len({id(block) for block in blocks.values()}) == len(blocks)
    if len(blocks) <= KEPT_PER_KIND or not alone or not all(map(_is_block, blocks.values())):
        return None
    keys = tuple(blocks)
    configs.near.clear()
    kinds = _signatures(list(blocks.values()), above, configs)
    lists = tuple((thing, attribute) for thing, attribute, _ in configs.lists(len(blocks)))
    indices = _kept(kinds)
    stands_for = {kinds[position]: keys[position] for position in indices if position != len(keys) - 1}
    dropped = (position for position in range(len(keys)) if position not in indices)
    members = tuple((keys[position], stands_for[kinds[position]]) for position in dropped)
    standing = sorted({keys.index(representative) for _, representative in members})
    alike = tuple((keys[p], keys[q]) for q in standing for p in indices if p < q and kinds[p] == kinds[q])
    return _Choice(name, container, keys, indices, members, alike, lists)


def _is_block(module: nn.Module) -> bool:
    """Return whether a module holds modules that hold modules (block, attention, projection), or norms beside matrices.

    Experts, heads and projections do not; they are selected by index or used all at once, and all stay.
    """
    children = [child for child in own_modules(module).values() if child is not None]
    if isinstance(module, CONTAINERS) or not children:
        return False
    if any(own_modules(child) for child in children):
        return True
    ranks = {max((p.dim() for p in own_parameters(child).values() if p is not None), default=0) for child in children}
    return 1 in ranks and max(ranks) > 1


def _kept(kinds: list[Hashable]) -> tuple[int, ...]:
    """Return the positions of the first blocks of each kind and of the last block, with as many others as are needed so
    that a block's index and its place among the kept ones never mean different kinds.

    Models index per-layer lists by either (`enumerate`, or the index that a block stores); see `_shorten`.
    """
    count: Counter[Hashable] = Counter()
    chosen = []
    for position, kind in enumerate(kinds):
        count[kind] += 1
        if count[kind] <= KEPT_PER_KIND or position == len(kinds) - 1:
            chosen.append(position)
    while any(place in chosen and kinds[place] != kinds[chosen[place]] for place in range(len(chosen))):
        hole = next(position for position in range(len(kinds)) if position not in chosen)
        chosen = sorted((*chosen, hole))
    return tuple(chosen)


# Kinds of blocks


class _Configs:
    """Objects besides the blocks (configurations, modules above): their plain content, and per-layer lists in them."""

    def __init__(self, shared: frozenset[int] = frozenset()) -> None:
        self.shared = shared  # containers that hooks may write into
        self.numbers: dict[Hashable, int] = {}  # content -> number: equal content is compared by number
        self.known: dict[int, tuple[Any, int]] = {}  # id(object) -> the object, kept alive, and its number
        self.near: dict[int, Any] = {}  # the objects that the stack at hand can read

    def number(self, thing: Any) -> int:
        if id(thing) not in self.known:
            content = tuple((name, _plain(value)) for name, value in vars(thing).items())
            self.known[id(thing)] = thing, self.numbers.setdefault((type(thing), content), len(self.numbers))
        self.near[id(thing)] = thing
        return self.known[id(thing)][1]

    def lists(self, length: int) -> Iterator[tuple[Any, str, Any]]:
        """Yield (object, attribute, list) for each list nearby with one value per block, not all of them equal."""
        for thing in self.near.values():
            for name, value in vars(thing).items():
                if not isinstance(value, list | tuple) or len(value) != length:
                    continue
                has_blocks = any(isinstance(item, nn.Module | torch.Tensor) for item in value)  # the blocks themselves
                if not has_blocks and len(set(map(_text, value))) > 1:
                    yield thing, name, value


def kinds_of(modules: list[nn.Module]) -> list[Hashable]:
    """Return a signature of each module, taken by itself: modules of one kind differ in numbers only."""
    return _signatures(modules, (), _Configs())


def _signatures(blocks: list[nn.Module], above: tuple[nn.Module, ...], configs: _Configs) -> list[Hashable]:
    for module in above:
        configs.near[id(module)] = module
        for value in module.__dict__.values():
            if _is_config(value):
                configs.number(value)
    described = [_describe(block, configs) for block in blocks]
    counters = _counters([integers for _, integers in described])
    per_layer = [values for _, _, values in configs.lists(len(blocks))]
    kinds: list[Hashable] = []
    for position, (content, integers) in enumerate(described):
        rest = tuple(item for item in integers.items() if item[0] not in counters)
        kinds.append((content, rest, tuple(_text(values[position]) for values in per_layer)))
    return kinds


def _describe(block: nn.Module, configs: _Configs) -> tuple[Hashable, dict[Hashable, int]]:
    """Return a block's content without its integers, and its integers by (submodule, attribute)."""
    content: list[Hashable] = []
    integers: dict[Hashable, int] = {}
    for name, module in block.named_modules():
        content.append((name, type(module)))
        for tensors in (own_parameters(module), own_buffers(module)):
            content.extend((key, t.shape, t.dtype) for key, t in tensors.items() if t is not None)
        for kind, _, hook in hooks_of_forward(module, configs.shared):
            content.append((name, kind, getattr(hook, "__code__", type(hook)), tuple(map(_plain, contents_of(hook)))))
        for key, value in module.__dict__.items():
            if key in _BASE_STATE:
                continue
            if type(value) is int:
                integers[name, key] = value
            elif _is_config(value):
                content.append((key, configs.number(value)))
            else:
                content.append((key, _plain(value)))
    return tuple(content), integers


def _counters(integers: list[dict[Hashable, int]]) -> set[Hashable]:
    """Return the attributes that rise by one from block to block: they count, and say nothing about the kind."""
    names = set(integers[0]).union(*integers[1:])

    def counts(name: Hashable) -> bool:
        offsets = {values[name] - position for position, values in enumerate(integers) if name in values}
        return len(offsets) == 1 and sum(name in values for values in integers) > 1

    return set(filter(counts, names))


def _plain(value: Any) -> Hashable:
    """Return what may distinguish blocks in an attribute's value; None if nothing does (tensors, objects)."""
    if isinstance(value, float):
        return ("float", (value > 0) - (value < 0))
    if value is None or isinstance(value, int | str | torch.dtype | types.FunctionType | type):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return None


def _text(value: Any) -> str:
    """Return a per-layer value as text: it may be a number, a name, a dict or a small object."""
    return repr(sorted(vars(value).items(), key=lambda item: item[0])) if hasattr(value, "__dict__") else repr(value)


def _is_config(value: Any) -> bool:
    kinds = (nn.Module, torch.Tensor, type, types.ModuleType, types.FunctionType, types.MethodType)
    return hasattr(value, "__dict__") and not isinstance(value, kinds)


# The copy

_HOOKS = frozenset(key for key in nn.Module().__dict__ if "hooks" in key)
_BASE_STATE = frozenset(nn.Module().__dict__)


def _plant_tensors(model: nn.Module, left_out: dict[int, _Choice], replace: Replace, memo: dict[int, Any]) -> None:
    """Put into the memo, before deepcopy starts, a replacement of each tensor and empty dicts for hooks."""

    def plant(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                memo[id(value)] = replace(value, name)
        elif isinstance(value, dict):
            for key, item in value.items():
                plant(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                plant(item, f"{name}.{index}")

    seen: set[int] = set()

    def visit(module: nn.Module, prefix: str) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        dot = f"{prefix}." if prefix else ""
        plant(own_parameters(module), prefix)
        plant(own_buffers(module), prefix)
        for key, value in module.__dict__.items():
            if key in _HOOKS and isinstance(value, dict):
                memo[id(value)] = OrderedDict()
            elif key not in _BASE_STATE:
                plant(value, dot + key)
        choice = left_out.get(id(module))
        dropped = {key for key, _ in choice.members} if choice else set()
        for key, child in own_modules(module).items():
            if child is not None and key not in dropped:
                visit(child, dot + key)

    visit(model, "")


def _stand_for(block: Any, copied: Any, memo: dict[int, Any]) -> None:
    """Map the block and its submodules to its representative's for whatever else holds them (a list, a function)."""
    memo[id(block)] = copied
    parts = dict(copied.named_modules())
    for name, module in block.named_modules():
        if (part := parts.get(name)) is not None:
            memo.setdefault(id(module), part)
            for tensors, others in (
                (own_parameters(module), own_parameters(part)),
                (own_buffers(module), own_buffers(part)),
            ):
                for key, tensor in tensors.items():
                    if tensor is not None and others.get(key) is not None:
                        memo.setdefault(id(tensor), others[key])


def _shorten(choices: list[_Choice], memo: dict[int, Any]) -> None:
    """Edit the copy's per-layer lists so that a kept block's place among the kept ones gives that block's value."""
    edits: dict[tuple[int, str], tuple[Any, list[Any]]] = {}
    for choice in choices:
        for thing, name in choice.lists:
            values = vars(thing)[name]
            edited = list(values)
            for place, position in enumerate(choice.kept):
                edited[place] = values[position]
            if edits.setdefault((id(thing), name), (thing, edited))[1] != edited:
                raise CaptureError(
                    f"two stacks of {len(choice.keys)} blocks read one per-layer list ({name!r}) differently",
                    hint="capture the model with all its blocks (fold=False)",
                )
    for (_, name), (thing, edited) in edits.items():
        if id(thing) in memo:
            vars(memo[id(thing)])[name] = type(vars(thing)[name])(edited)


def _count_places(blocks: nn.ModuleList) -> None:
    """Make integers index the kept blocks by place: of blocks 0, 1 and 31, `blocks[2]` and `blocks[-1]` are 31."""
    keys = tuple(own_modules(blocks))
    vars(blocks)["_get_abs_string_index"] = lambda index: keys[index]


def _deepcopy(module: nn.Module, memo: dict[int, Any], name: str) -> nn.Module:
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:  # someone's __deepcopy__ may raise anything
        where, culprit = _not_copyable(module, dict(memo), name)
        raise CaptureError(
            f"a copy of the model is needed to run it safely, but {where} cannot be copied: {culprit or error}",
            hint="remove that attribute before planning, or give it a __deepcopy__ method",
        ) from error


def _not_copyable(root: nn.Module, memo: dict[int, Any], prefix: str) -> tuple[str, str]:
    """Find the attribute whose copy fails by copying them one by one."""
    for name, module in root.named_modules():
        path = ".".join(part for part in (prefix, name) if part)
        for key, value in module.__dict__.items():
            if key in _BASE_STATE:
                continue
            try:
                copy.deepcopy(value, memo)
            except Exception as error:
                return f"attribute {f'{path}.{key}' if path else key!r}", f"{type(error).__name__}: {error}"
    return f"module {prefix or type(root).__name__!r}", ""
