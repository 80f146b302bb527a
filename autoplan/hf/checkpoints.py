"""Read and write the names of checkpoints as transformers does."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import CheckpointNames, CheckpointWriter, Join, conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import grouped
from autoplan.common.torch_internals import own_parameters
from autoplan.hf.own_sharding import from_config
from autoplan.hf.quantised.schemes import Plain, packed_weight, scheme_files, state_of, stored_names
from autoplan.hf.quantised.weights import is_transposed
from autoplan.values.quantised import PackedTensor, PackedWeight

# Make a model's tensors from a checkpoint's by transformers' own rules, which rename, merge and split them.

_MOVING = frozenset(("Chunk", "Concatenate", "Conv3dToLinear", "ErnieFuseAndSplitTextVisionExperts", "Interleave",
                     "LinearToConv3d", "MergeModulelist", "PermuteForRope", "Split", "SplitModulelist",
                     "Transpose"))  # fmt: skip
_STACK = re.compile(r"[a-z_]+?_proj(?=_|$)")


@dataclass
class _Converted:
    """One conversion of transformers."""

    converter: Any
    first: str  # the target after which transformers names the conversion
    keys: list[str] = field(default_factory=list)
    _entries: list[tuple[str, str, str]] = field(default_factory=list)
    _shape: tuple[int, ...] = ()  # of the first entry

    @property
    def moves(self) -> bool:
        return all(type(operation).__name__ in _MOVING for operation in self.converter.operations)

    def targets(self) -> list[str]:
        patterns = self.converter.target_patterns
        return [self.first.replace(patterns[0], pattern) for pattern in patterns]

    def add(self, name: str, key: str, pattern: str, shape: tuple[int, ...]) -> None:
        self._entries.append((name, key, pattern))
        self._shape = self._shape or shape
        self.keys.append(key)

    def make(self, model: Any, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self.converter)
        for name, key, pattern in self._entries:
            converter.add_tensor(name, key, pattern, partial(read, key))
        try:
            converter.operations = [self._settled(operation, model) for operation in converter.operations]
            results = converter.convert(self.first, model=model, config=conventions().config_of(model))
        except (RuntimeError, ValueError, LookupError, AttributeError) as error:
            raise AutoplanError(
                f"transformers' conversion of {len(self.keys)} checkpoint tensors ({self.keys[0]}, …) "
                f"to {self.first} failed: {error}",
                hint="is the checkpoint complete, and is transformers as new as the checkpoint?",
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}

    def _settled(self, operation: Any, model: Any) -> Any:
        """Return an operation that does for shards what it would do for the full tensor, whose shape it may look at."""
        from transformers.core_model_loading import Chunk

        if not getattr(operation, "check_dims", False):
            return operation
        if self._shape == tuple(model.get_parameter(self.first).shape):
            return Chunk(dim=0)  # into one chunk
        operation.check_dims = False
        return operation


def checkpoint_names(model: nn.Module) -> CheckpointNames:
    """Return the names of any model; one that is not transformers' own is stored under its own names."""
    rename, converters, turned = _rules(model)
    return CheckpointNames(
        prefix=getattr(model, "base_model_prefix", None) or "model",
        rename=rename,
        conversion=lambda pattern, first: _Converted(converters[pattern], first),
        join=lambda pattern: _join(converters[pattern], turned=pattern in turned),
        may_lack=tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ()),
        may_exceed=tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )


def _join(rule: Any, turned: bool = False) -> Join | None:
    """Return what a converter joins, if it does nothing else."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    kinds = [type(operation) for operation in rule.operations]
    plain = all(not getattr(operation, "num_shards_attribute", None) for operation in rule.operations)
    stacked = kinds[:1] == [MergeModulelist] and rule.operations[0].dim == 0
    if len(rule.target_patterns) != 1 or not plain or kinds[int(stacked) :] not in ([], [Concatenate]) or not kinds:
        return None
    return Join(tuple(rule.source_patterns), stacked, turned)


def _for_stored(rule: Any, names: frozenset[str]) -> Iterator[Any]:
    """Yield a converter for each further tensor of packed weights: it is joined as the weight is."""
    targets = rule._original_target_patterns
    sources = rule._original_source_patterns
    if len(targets) != 1 or not all(source.endswith(".weight") for source in sources) or _join(rule) is None:
        return
    parameter = targets[0].rpartition(".")[2]
    for own, further in stored_names():
        stored = own if parameter == "weight" else f"{parameter}{further}"
        if stored in names:
            apart = [source.removesuffix("weight") + own for source in sources]
            target = targets[0].removesuffix(parameter) + stored
            further_rule = type(rule)(apart, [target], operations=list(rule.operations))
            further_rule.scope_prefix, further_rule.base_model_prefix = rule.scope_prefix, rule.base_model_prefix
            yield further_rule


def _for_lists(model: nn.Module, converters: Sequence[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield converters for expert stacks that tools write one by one, and whether an entry's rows become columns."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    covered = {target for rule in converters for target in rule.target_patterns}
    owners: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if path.endswith("experts") and getattr(module, "is_concatenated", True):
            stacks = (_STACK.match(name) for name in own_parameters(module))
            owners |= {match[0]: module for match in stacks if match is not None}
    for stack, owner in owners.items():
        if not any(target.endswith(f"experts.{stack}") for target in covered):
            sources = [f".experts.*.{part}.weight" for part in listed(stack)]
            joined = [MergeModulelist(dim=0), *([Concatenate(dim=1)] if len(sources) > 1 else [])]
            yield WeightConverter(sources, f".experts.{stack}", operations=joined), is_transposed(owner)


def listed(stack: str) -> tuple[str, ...]:
    """Return the names of one expert's linear layers that form a stack.

    >>> listed("gate_up_proj"), listed("down_proj")
    (('gate_proj', 'up_proj'), ('down_proj',))
    """
    return tuple(f"{part}_proj" for part in stack.removesuffix("_proj").split("_"))


def _rules(model: nn.Module) -> tuple[Callable[[str], tuple[str, str | None]], dict[str, Any], frozenset[str]]:
    """Return transformers' renaming of keys, its converters by source pattern, and the patterns that transpose."""
    if from_config(type(model)) is None:
        return lambda key: (key, None), {}, frozenset()
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    lists = list(_for_lists(model, converters))
    converters += [rule for rule, _ in lists]
    stored = frozenset(name.rpartition(".")[2] for name, _ in model.named_parameters())
    converters += [copied for rule in converters for copied in _for_stored(rule, stored)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    turned = frozenset(pattern for rule, turns in lists if turns for pattern in rule.source_patterns)
    return lambda key: rename_source_key(key, renamings, converters), by_pattern, turned


# Write a checkpoint. transformers reverses its conversions on a full state dict; here it is called on one group of
# tensors at a time, those that one conversion needs.

Stored = Mapping[str, tuple[PackedWeight, PackedTensor]]


def checkpoint_writer(
    model: nn.Module, original: bool = True, stored: Stored = MappingProxyType({})
) -> CheckpointWriter:
    """Return a writer for any model; only transformers' own have settings. `stored`: packed tensors to be written."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return CheckpointWriter(lambda names: [(name,) for name in names], lambda tensors: tensors)
    group_of = _group_names(model) if original else lambda name: name

    def groups(names: Iterable[str]) -> list[tuple[str, ...]]:
        members = grouped((group_of(name), name) for name in names)
        return [tuple(group) for group in members.values()]

    return CheckpointWriter(
        groups=groups,
        convert=(lambda tensors: _as_checkpoints(model, tensors, stored)) if original else lambda tensors: tensors,
        settings=lambda folder, cls: _write_settings(model, folder, cls),
        copies=frozenset(getattr(model, "all_tied_weights_keys", None) or ()),
        left_out=frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ()),
    )


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def _as_checkpoints(model: Any, tensors: dict[str, torch.Tensor], stored: Stored) -> dict[str, torch.Tensor]:
    checkpoints = _reverted(model, {name: tensor for name, tensor in tensors.items() if name not in stored})
    for name, whole in tensors.items():
        if name not in stored:
            continue
        weight, tensor = stored[name]
        if len(weight.shape) == 3:
            checkpoints |= _apart(model, name, whole, weight, tensor)
            continue
        ((entry, value),) = _reverted(model, {name: whole}).items()
        entry = entry.removesuffix(tensor.attribute) + tensor.name
        checkpoints[entry] = value
        state = state_of(weight)
        if state is not None and tensor is weight.tensors[0]:  # its method records the matrix in a tensor of bytes
            kind, block = weight.scheme.value("kind"), weight.scheme.value("block")
            dtype = str(model.dtype).removeprefix("torch.")
            text = json.dumps({"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": list(weight.shape)})
            checkpoints[f"{entry}.{state}"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return checkpoints


def _apart(
    model: Any, name: str, whole: torch.Tensor, weight: PackedWeight, tensor: PackedTensor
) -> dict[str, torch.Tensor]:
    """Return a packed stack as checkpoints hold it, with an entry for each expert and quantised matrix. The names come
    from running the conversion on index numbers in place of the plain stack."""
    experts, segments = weight.shape[0], max(1, len(weight.segments))
    plain = name.removesuffix(tensor.attribute) + weight.parameter
    numbers_of = _reverted(model, {plain: torch.arange(experts * segments).reshape(experts, segments, 1)})
    if any(numbers.numel() != 1 for numbers in numbers_of.values()):
        (entry,) = numbers_of
        owner = entry.removesuffix(weight.parameter)
        # of tools that know linear layers only, experts are stored one by one
        if not scheme_files()[weight.scheme.id].get("linears_only") or not weight.parameter.endswith("_proj"):
            return {owner + tensor.name: whole}  # written as a stack
        each = product(range(experts), enumerate(listed(weight.parameter)))
        numbers_of = {f"{owner}{n}.{part}.weight": torch.tensor(n * segments + at) for n, (at, part) in each}
    rows = weight.shape[weight.rows] // segments
    expert_weight = packed_weight(Plain("weight", (rows, weight.shape[weight.contracted])), weight.scheme)
    mine = expert_weight.tensors[weight.tensors.index(tensor)]
    place = next((place for place, dim in enumerate(tensor.dims) if weight.rows in dim.of), 1)
    parts = whole.chunk(segments, place) if whole.dim() > 1 else (whole,) * segments
    entries = {}
    for entry, number in numbers_of.items():
        expert, segment = divmod(int(number), segments)
        entries[entry.removesuffix("weight") + mine.name] = parts[segment][expert].reshape(mine.shape)
    return entries


def _group_names(model: Any) -> Callable[[str], str]:
    """Return a function that maps tensor names to a key; names with the same key are converted back together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    loaded = getattr(model, "_weight_conversions", None)
    rules = get_model_conversion_mapping(model, add_legacy=False) if loaded is None else loaded
    reverse = [rule.reverse_transform() for rule in rules[::-1]]
    converters = [rule for rule in reverse if isinstance(rule, WeightConverter)]

    def group(name: str) -> str:
        tried = (converter.rename_source_key(name) for converter in converters)
        return next((f"converted to {renamed}" for renamed, pattern in tried if pattern is not None), name)

    return group


def _write_settings(model: Any, folder: str | os.PathLike[str], cls: type) -> None:
    """Write what `save_pretrained` writes besides weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [cls.__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
