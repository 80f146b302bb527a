"""Models whose weights stay packed: each module's class gets a subclass with a weight property that dequantises.

Packed tensors are frozen parameters under their names in checkpoints: sharded, loaded and saved like any others.
Gradients pass to the input and to adapters. No GPU kernel is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from math import lcm, prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.conventions import conventions
from autoplan.common.errors import PlanMismatchError, SourceError
from autoplan.common.options import check_argument
from autoplan.common.patterns import matches
from autoplan.common.torch_internals import DisableTorchFunction, function_mode_is_active, own_parameters
from autoplan.execute.parameters.held import plain_name, record_of
from autoplan.execute.parameters.local_views import stored_tensor
from autoplan.execute.quantised.formats import QuantisedTwice, decoder_of, dequantise
from autoplan.execute.weights.files import CheckpointFiles
from autoplan.patches.classes import give_class, subclass_of
from autoplan.values import Plan
from autoplan.values.quantised import PackedTensor, PackedWeight

_STORED = "_autoplan_stored"
_BESIDE = "_autoplan_beside"
_PLAIN = "_autoplan_plain"  # stacks dequantised in the running call


def packed_model(model: nn.Module, plan: Plan) -> nn.Module:
    """Replace weights of the plain `model` by the packed tensors of `plan`, on meta; `load_weights` fills them."""
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    check_argument("plan", plan, Plan, "pass a plan that autoplan.plan made for a quantised model")
    if not plan.packed:
        raise PlanMismatchError("the plan has no quantised weights", hint="plan a config with quantization_config")
    unknown = next((weight for weight in plan.packed if decoder_of(weight.scheme) is None), None)
    if unknown is not None:
        raise PlanMismatchError(
            f"{unknown.name} is stored as {unknown.scheme.title}, which needs its own package for computing",
            hint="build the model with that package, or fill a plain one with load_weights(…, dequantise=True)",
        )
    chosen: dict[nn.Module, list[PackedWeight]] = {}
    for path, module in model.named_modules():
        for name, parameter in own_parameters(module).items():
            own = f"{path}.{name}" if path else name
            weight = next((weight for weight in plan.packed if matches(weight.name, own)), None)
            if weight is None or parameter is None:
                continue
            if tuple(parameter.shape) != weight.shape:
                shapes = f"has shape {list(parameter.shape)}, but the plan has {list(weight.shape)}"
                raise PlanMismatchError(f"{path}.{name} {shapes}")
            chosen.setdefault(module, []).append(weight)
    for module, weights in chosen.items():  # nothing was changed before
        stored: dict[str, tuple[PackedWeight, torch.dtype]] = {}
        for weight in weights:
            old = own_parameters(module).pop(weight.parameter)
            assert old is not None
            stored[weight.parameter] = (weight, old.dtype)
            for tensor in weight.tensors:
                empty = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
                own_parameters(module)[tensor.attribute] = nn.Parameter(empty, requires_grad=False)
        module.__dict__[_STORED] = stored
        kind: type = type(module)
        give_class(module, _stored_class(kind, tuple(stored), any(len(weight.shape) == 3 for weight in weights)))
    return model


def is_packed(module: nn.Module) -> bool:
    """Return whether a module itself holds packed tensors."""
    return _STORED in module.__dict__


def stored_tensors(model: nn.Module) -> dict[str, tuple[PackedWeight, PackedTensor]]:
    """Return the packed tensors of a model by full name, each with its weight."""
    tensors: dict[str, tuple[PackedWeight, PackedTensor]] = {}
    for path, module in model.named_modules():
        for weight, _ in module.__dict__.get(_STORED, {}).values():
            tensors |= {plain_name(f"{path}.{tensor.attribute}"): (weight, tensor) for tensor in weight.tensors}
    return tensors


def keep_beside(model: nn.Module, headers: Mapping[str, str], twice: Mapping[str, QuantisedTwice]) -> None:
    """Keep what the files of a packed model held besides tensors: readers of a saved checkpoint need it again."""
    if stored_tensors(model):
        model.__dict__[_BESIDE] = dict(headers), dict(twice)


def kept_beside(model: nn.Module) -> tuple[dict[str, str], dict[str, QuantisedTwice]]:
    """Return the headers of those files, and the weights that they stored quantised twice."""
    return model.__dict__.get(_BESIDE, ({}, {}))


def compute_in(module: nn.Module, dtype: torch.dtype) -> None:
    """Dequantise a packed module to this dtype from now on: its inputs are cast to it."""
    stored = module.__dict__[_STORED]
    module.__dict__[_STORED] = {name: (weight, dtype) for name, (weight, _) in stored.items()}


@cache
def _stored_class(cls: type, names: tuple[str, ...], stacks: bool) -> Any:
    own: dict[str, Any] = {name: property(_reader(name)) for name in names}
    call: Any = cls.__call__

    def keeping_plain(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = module.__dict__.get(_PLAIN)
        module.__dict__[_PLAIN] = {}
        try:
            return call(module, *args, **kwargs)
        finally:
            module.__dict__[_PLAIN] = outer

    if stacks:  # a stack, which a forward reads once per expert, is dequantised once per call
        own["__call__"] = keeping_plain
    return subclass_of(cls, own)


def _reader(name: str) -> Any:
    def plain(module: nn.Module) -> torch.Tensor:
        weight, dtype = module.__dict__[_STORED][name]
        parts = {tensor.name: stored_tensor(module, tensor.attribute) for tensor in weight.tensors}
        # The shape of the plain shard follows from the first local tensor.
        first = parts[weight.tensors[0].name]
        shape = list(weight.shape)
        tensor: PackedTensor = weight.tensors[0]
        if weight.is_flat and weight.dim is not None:
            numbers = first.numel() * tensor.dims[0].factor // tensor.dims[0].each
            shape[weight.dim] = numbers // (weight.elements // weight.shape[weight.dim])
        for place, dim in enumerate(tensor.dims):
            if len(dim.of) == 1:
                shape[dim.of[0]] = first.shape[place] * dim.factor // dim.each
        return dequantise(weight, parts, tuple(shape)).to(dtype)

    def read(module: nn.Module) -> torch.Tensor:
        parameter = own_parameters(module).get(name)
        if isinstance(parameter, DTensor) and (parameter.device_mesh.ndim > 1 or record_of(module) is None):
            return parameter  # FSDP2 reads its sharded parameter between uses, even while the forward runs
        cache = module.__dict__.get(_PLAIN)
        if cache is not None and name in cache:
            return cache[name]
        if function_mode_is_active():
            with DisableTorchFunction():  # a scoped function mode must not count these calls
                plain_weight = plain(module)
        else:
            plain_weight = plain(module)
        if cache is not None:
            cache[name] = plain_weight
        return plain_weight

    return read


# Read a folder of a quantised checkpoint as if its weights were plain, dequantising only the requested blocks.


_AT_ONCE = 2**24  # elements dequantised at once of a flat matrix
_NESTED = ".nested_absmax"  # of absmax values that are quantised in blocks themselves


class _Files(CheckpointFiles):
    """A folder whose stored tensors have the names of their schemes, and whose absmax values are dequantised."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.call(conventions().stored_aliases(self.folder, super().keys))
        keys = set(super().keys)
        self._nested = {f"{key.removesuffix(_NESTED)}.absmax" for key in keys if key.endswith(_NESTED)} & keys

    def dtype(self, key: str) -> torch.dtype:
        return torch.float32 if key in self._nested else super().dtype(key)

    def read(self, key: str, rows: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        rows_read = super().read(key, rows)
        if key not in self._nested:
            return rows_read
        places = torch.tensor(list((rows or {}).get(0, range(len(rows_read)))), dtype=torch.long)
        return self._twice(key.removesuffix(".absmax")).numbers(rows_read, places)

    def _twice(self, weight: str) -> QuantisedTwice:
        keys, read = super().keys, super().read
        state = next((key for key in keys if key.startswith(f"{weight}.quant_state.")), None)
        if state is None:
            raise SourceError(
                f"{self.folder}: {weight}.absmax is quantised, but {weight}.quant_state… with its offset is missing",
                hint="complete the download, or save the checkpoint again with its package",
            )
        largest, values, record = read(f"{weight}{_NESTED}"), read(f"{weight}.nested_quant_map"), read(state)
        quantisation = json.loads(bytes(record.tolist()).decode("utf-8"))
        offset, block = float(quantisation["nested_offset"]), int(quantisation.get("nested_blocksize", 256))
        return QuantisedTwice(largest, values, record, offset, block)

    def says_nothing(self, key: str) -> bool:
        """Return whether a bias can be ignored: GPTQ's tools wrote zeros for layers without a bias."""
        owner, _, name = key.rpartition(".")
        return name == "bias" and f"{owner}.qweight" in super().keys and not super().read(key).any()


class StoredFiles(_Files):
    """The tensors of a folder as a packed model holds them: parameter names have no dots."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._states = tuple(key for key in super().keys if key.partition(".quant_state.")[1])
        names = {key for state in self._states for key in [state.partition(".quant_state.")[0]]}
        self._hidden = {*self._states, *(f"{name}{end}" for name in names for end in (_NESTED, ".nested_quant_map"))}
        self._dotted = {f"{name}_{end}": f"{name}.{end}" for name in names for end in ("absmax", "quant_map")}

    def quantised_twice(self) -> dict[str, QuantisedTwice]:
        """Return, by weight, what turns the absmax values of its blocks into codes again."""
        return {weight: self._twice(weight) for key in sorted(self._nested) for weight in [key.removesuffix(".absmax")]}

    @property
    def keys(self) -> tuple[str, ...]:
        plain = {dotted: name for name, dotted in self._dotted.items()}
        return tuple(plain.get(key, key) for key in super().keys if key not in self._hidden)

    def shape(self, key: str) -> tuple[int, ...]:
        return super().shape(self._dotted.get(key, key))

    def dtype(self, key: str) -> torch.dtype:
        return super().dtype(self._dotted.get(key, key))

    def read(self, key: str, rows: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        return super().read(self._dotted.get(key, key), rows)


class DequantisedFiles(_Files):
    """The tensors of a folder, with packed weights under the names and shapes of plain ones."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        shape, read = super().shape, super().read
        stored = conventions().stored_weights(self.folder, super().keys, shape, read)
        self.packed = {weight.name: weight for weight in stored}
        self._parts = {f"{w.owner}.{tensor.name}" for w in stored for tensor in w.tensors}
        # An 8-bit float without its scale is no number.
        plain = ((key, super(DequantisedFiles, self).dtype(key)) for key in self.keys if key not in self.packed)
        odd = next(((key, dtype) for key, dtype in plain if dtype.is_floating_point and dtype.itemsize == 1), None)
        if odd is not None:
            raise SourceError(
                f"{self.folder}: {odd[0]} holds {str(odd[1]).removeprefix('torch.')}, but the scales that the "
                "config announces are missing",
                hint="complete the download, or fetch the config.json that belongs to these files",
            )

    @property
    def keys(self) -> tuple[str, ...]:
        def owners(key: str) -> set[str]:
            """Return the weights that a key may be other data of ("….weight.quant_state")."""
            return {key.rpartition(".")[0], key.partition(".quant_state.")[0]}

        others = (key for key in super().keys if key not in self._parts and self.packed.keys().isdisjoint(owners(key)))
        return (*others, *self.packed)

    def shape(self, key: str) -> tuple[int, ...]:
        return self.packed[key].shape if key in self.packed else super().shape(key)

    def dtype(self, key: str) -> torch.dtype:
        return torch.float32 if key in self.packed else super().dtype(key)

    def read(self, key: str, rows: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        if key not in self.packed:
            return super().read(key, rows)
        weight = self.packed[key]
        wanted = {dim: tuple(own) for dim, own in (rows or {}).items()}
        if weight.is_flat:
            # A few rows at a time, of which only the requested columns are kept.
            outputs, inputs = weight.shape
            own = wanted.get(0, tuple(range(outputs)))
            columns = torch.tensor(wanted[1]) if 1 in wanted else None
            step = max(1, _AT_ONCE // inputs)
            pieces = []
            for start in range(0, len(own), step):
                some = own[start : start + step]
                piece = self._flat_rows(weight, min(some), max(some) + 1)[[row - min(some) for row in some]]
                pieces.append(piece if columns is None else piece.index_select(1, columns))
            return torch.cat(pieces)
        covers: dict[int, tuple[int, ...]] = {}  # all rows of the blocks that contain these rows, in order of first use
        for dim, own in wanted.items():
            factors = (number.factor for tensor in weight.tensors for number in tensor.dims if number.of == (dim,))
            block, size = lcm(*factors), weight.shape[dim]
            touched = dict.fromkeys(row // block for row in own)
            covers[dim] = tuple(n for at in touched for n in range(at * block, min((at + 1) * block, size)))
        parts: dict[str, torch.Tensor] = {}
        for tensor in weight.tensors:
            own_rows: dict[int, Sequence[int]] = {}  # of the stored tensor: the blocks of these rows
            for place, stored in enumerate(tensor.dims):
                if stored.of and stored.of[0] in covers:
                    blocks_here = dict.fromkeys(row // stored.factor for row in covers[stored.of[0]])
                    own_rows[place] = [at * stored.each + offset for at in blocks_here for offset in range(stored.each)]
            parts[tensor.name] = super().read(f"{weight.owner}.{tensor.name}", own_rows)
        shape = tuple(len(covers[dim]) if dim in covers else size for dim, size in enumerate(weight.shape))
        blocks = dequantise(weight, parts, shape)
        for dim, own in wanted.items():
            if covers[dim] != own:
                places = {row: place for place, row in enumerate(covers[dim])}
                blocks = blocks.index_select(dim, torch.tensor([places[row] for row in own], dtype=torch.long))
        return blocks

    def _flat_rows(self, weight: PackedWeight, start: int, stop: int) -> torch.Tensor:
        """Return consecutive rows of a matrix that is stored flat. Blocks may begin in one row and end in the next."""
        inputs = weight.shape[1]
        block = lcm(*(dim.factor for tensor in weight.tensors for dim in tensor.dims))
        first = start * inputs // block * block
        last = min(-(-stop * inputs // block) * block, prod(weight.shape))
        parts = {}
        for tensor in weight.tensors:
            flat = next((place for place, dim in enumerate(tensor.dims) if dim.of), None)
            factor = tensor.dims[flat].factor if flat is not None else 1
            wanted = {} if flat is None else {flat: range(first // factor, -(-last // factor))}
            parts[tensor.name] = super().read(f"{weight.owner}.{tensor.name}", wanted)
        numbers = dequantise(weight, parts, (last - first,))
        return numbers[start * inputs - first : stop * inputs - first].reshape(stop - start, inputs)
