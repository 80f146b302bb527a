"""Formats of quantised weights, and double quantisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from autoplan.common.errors import AutoplanError
from autoplan.common.files.rule_files import scheme_files
from autoplan.values.quantised import PackedWeight, Scheme

# bitsandbytes' double quantisation: the absmax of each block is a code. A packed model holds absmax as float32, since a
# block of them (16384 weights) would rarely lie on one rank.

_STATE = ".quant_state."
_ENDS = (_STATE, ".absmax")


@dataclass(frozen=True)
class QuantisedTwice:
    """The quantisation of a weight's absmax values, and the stored state of the weight."""

    largest: torch.Tensor
    values: torch.Tensor
    state: torch.Tensor
    offset: float
    block: int

    def numbers(self, codes: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the numbers of the codes at these places."""
        return self.values.float()[codes.int()] * self._scales(places) + self.offset

    def codes(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the codes of all numbers: the nearest ones, or a neighbour where rounding went astray."""
        places, rising = torch.arange(len(numbers)), self.values.float().argsort()
        sought = (numbers - self.offset) / self._scales(places)
        near = torch.searchsorted(self.values.float()[rising], sought.nan_to_num())
        tried = torch.stack([rising[(near + step).clamp(0, len(rising) - 1)] for step in (-1, 0, 1)])
        right = torch.stack([self.numbers(codes, places) == numbers for codes in tried])
        if not right.any(0).all():
            raise AutoplanError(
                "the block maxima changed since they were loaded, and have no codes",
                hint="save the weights unquantised: load the folder with dequantise=True",
            )
        return tried.gather(0, right.int().argmax(0, keepdim=True))[0].to(torch.uint8)

    def _scales(self, places: torch.Tensor) -> torch.Tensor:
        return self.largest.float()[places // self.block]


def stored_twice(entries: Mapping[str, Any], quantisations: Mapping[str, QuantisedTwice]) -> dict[str, Any]:
    """Return tensors of a checkpoint, with doubly quantised weights as bitsandbytes writes them."""
    stored: dict[str, Any] = {}
    for entry, value in entries.items():
        weight, end = next(((entry[: entry.index(end)], end) for end in _ENDS if end in entry), (entry, ""))
        twice = quantisations.get(weight)
        if twice is None or not end:
            stored[entry] = value
        elif end == _STATE:
            stored[entry] = twice.state
        else:
            stored |= {entry: twice.codes(value), f"{weight}.nested_absmax": twice.largest}
            stored[f"{weight}.nested_quant_map"] = twice.values
    return stored


# One function per storage format: (packed weight, stored tensors by name, shape of the plain shard) -> that shard.
# Every number depends on its own block only, which is why shards are exact.

Parts = Mapping[str, torch.Tensor]
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each of eight outputs in an integer


def dequantise(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the plain shard of `shape` that is stored as `parts` (by `weight`'s names)."""
    decode = decoder_of(weight.scheme)
    if decode is None:
        what = f"dequantising {weight.scheme.title} is not supported yet"
        raise AutoplanError(f"{weight.name}: {what}", hint="load it as stored")
    own = {tensor.name: parts[tensor.name] for tensor in weight.tensors}
    if weight.rows < weight.contracted:
        return decode(weight, own, shape)
    turned = (*shape[:-2], shape[-1], shape[-2])  # the decoders take outputs before inputs
    return decode(_turned(weight), own, turned).transpose(-1, -2)


def decoder_of(scheme: Scheme) -> Callable[[PackedWeight, Parts, tuple[int, ...]], torch.Tensor] | None:
    """Return the decoder named by `dequantise` in the scheme's document, if any. A plan may name a scheme without a
    document."""
    return _DEQUANTISED.get(scheme_files().get(scheme.id, {}).get("dequantise", ""))


@lru_cache(maxsize=4096)
def _turned(weight: PackedWeight) -> PackedWeight:
    """Return the weight with its rows before its contracted dim."""
    places = {weight.rows: weight.contracted, weight.contracted: weight.rows}
    tensors = tuple(
        replace(tensor, dims=tuple(replace(d, of=tuple(places.get(dim, dim) for dim in d.of)) for d in tensor.dims))
        for tensor in weight.tensors
    )
    *lead, first, last = weight.shape
    shape, rows = (*lead, last, first), weight.contracted
    return replace(weight, shape=shape, tensors=tensors, rows=rows, contracted=weight.rows)


def _spread(scales: torch.Tensor, shape: tuple[int, ...], blocks: Mapping[int, int], parts: int = 1) -> torch.Tensor:
    """Repeat scales over their blocks, one per element; size 1 broadcasts. `parts`: number of matrices in a stack's
    rows."""
    for dim, block in blocks.items():
        if scales.shape[dim] > 1 and block > 1:
            scales = scales.repeat_interleave(block, dim)
        if scales.shape[dim] > 1:
            scales = _trimmed(scales, dim, shape[dim], parts if dim == len(shape) - 2 else 1)
    return scales


def _trimmed(numbers: torch.Tensor, dim: int, size: int, parts: int) -> torch.Tensor:
    """Remove the padding of the last block of each part."""
    dim %= numbers.dim()
    return numbers.unflatten(dim, (parts, -1)).narrow(dim + 1, 0, size // parts).flatten(dim, dim + 1)


def _parts(weight: PackedWeight) -> int:
    return max(1, len(weight.segments))


def _blocks(weight: PackedWeight, name: str) -> dict[int, int]:
    """Return how many elements share one of a stored tensor, by dim of the plain weight."""
    tensor = next(tensor for tensor in weight.tensors if tensor.name == name)
    return {dim.of[0]: dim.factor for dim in tensor.dims if len(dim.of) == 1}


def _named(weight: PackedWeight, ending: str) -> str:
    return next(tensor.name for tensor in weight.tensors if tensor.name.endswith(ending))


def _rows(weight: PackedWeight, name: str, stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Repeat a value per segment of a stack's rows to one per row."""
    dims = next(tensor.dims for tensor in weight.tensors if tensor.name == name)
    if len(shape) < 3 or len(dims) < 2 or dims[1].of or dims[1].size != _parts(weight):
        return stored
    return stored.repeat_interleave(shape[1] // dims[1].size, 1)


def _scales(weight: PackedWeight, parts: Parts, ending: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return scales as float32, one per element. Bytes are exponents of two."""
    name = _named(weight, ending)
    stored = parts[name]
    numbers = (stored.float() - 127.0).exp2() if stored.dtype == torch.uint8 else stored.float()
    broad = _broad(_rows(weight, name, numbers, shape), shape)
    return _spread(broad, shape, _blocks(weight, name), _parts(weight))


def _broad(numbers: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return numbers with as many dims as the weight, by trailing dims of size 1, so that they broadcast."""
    if len(shape) == 2 and numbers.numel() == 1:
        return numbers.reshape(1, 1)
    return numbers.reshape(*numbers.shape, *[1] * (len(shape) - numbers.dim()))


def _bits(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Unpack unsigned integers of `bits` bits from 32-bit ones, lowest bits first, along a dim."""
    dim %= packed.dim()
    moved = packed.movedim(dim, -1).contiguous()
    if 32 % bits == 0:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        numbers = (moved.unsqueeze(-1) >> shifts) & (2**bits - 1)
    else:  # three bits: 32 numbers in three integers, some across two of them
        words = moved.unflatten(-1, (-1, bits)).long() & 0xFFFFFFFF
        wide = torch.cat([words, torch.zeros_like(words[..., :1])], -1)
        first = torch.arange(32) * bits
        low = wide[..., first // 32] >> (first % 32)
        high = wide[..., first // 32 + 1] << (32 - first % 32)
        numbers = (low | high) & (2**bits - 1)
    return numbers.flatten(-2).int().movedim(-1, dim)


def _pairs(packed: torch.Tensor) -> torch.Tensor:
    """Unpack the two halves of each byte, the lower one first, along the last dim."""
    bytes_ = packed.view(torch.uint8)
    return torch.stack([bytes_ & 15, bytes_ >> 4], -1).flatten(-2)


def _float4(packed: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_FLOAT4)[_pairs(packed).int()]


def _plain_numbers(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode float8 or int8, times a scale, minus a zero point if there is one."""
    numbers = parts[weight.tensors[0].name].float()
    ending = next(end for end in ("_scale_inv", "_scale") for t in weight.tensors if t.name.endswith(end))
    zeros = [tensor.name for tensor in weight.tensors if tensor.name.endswith("_zero_point")]
    if zeros:
        zero = _broad(_rows(weight, zeros[0], parts[zeros[0]].float(), shape), shape)
        numbers = numbers - _spread(zero, shape, _blocks(weight, zeros[0]), _parts(weight))
    return numbers * _scales(weight, parts, ending, shape)


def _mxfp4(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode blocks of 16 bytes along the inputs."""
    numbers = _float4(parts[_named(weight, "_blocks")])  # [experts, outputs, blocks, 32]
    exponents = parts[_named(weight, "_scales")].int() - 127
    return torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2)


def _nvfp4(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    name = f"{weight.parameter}_global_scale"
    global_scale = _broad(_rows(weight, name, parts[name].float(), shape), shape)
    return _float4(parts[weight.tensors[0].name]) * (_scales(weight, parts, "_scale", shape) / global_scale)


def _awq(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    bits = weight.scheme.value("bits")
    order = torch.tensor(_AWQ_ORDER)
    numbers, zeros = (
        _bits(parts[_named(weight, name)], bits, -1).unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
        for name in ("qweight", "qzeros")
    )
    scales = parts[_named(weight, "scales")]
    inputs = numbers.shape[-2]
    group = weight.scheme.value("group") or inputs
    zeros, scales = (x.repeat_interleave(group, -2).narrow(-2, 0, inputs) for x in (zeros, scales))
    return ((numbers - zeros) * scales).transpose(-1, -2)


def _gptq(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode by `g_idx`, the group of each input; where groups are in order, a shard holds those of its inputs."""
    value = weight.scheme.value
    numbers = _bits(parts[_named(weight, "qweight")], value("bits"), -2)
    zeros = _bits(parts[_named(weight, "qzeros")], value("bits"), -1)[..., : numbers.shape[-1]]
    zeros = (zeros + 1) & (2 ** value("bits") - 1) if value("one_more") else zeros
    scales = parts[_named(weight, "scales")]
    groups = parts[_named(weight, "g_idx")].long()
    if weight.contracted in _blocks(weight, _named(weight, "scales")):  # in order: those of these inputs
        groups = torch.unique(groups, return_inverse=True)[1]
    if groups.dim() == 1:
        return (scales[groups] * (numbers - zeros[groups])).transpose(-1, -2)
    groups = _rows(weight, _named(weight, "g_idx"), groups, shape).transpose(-1, -2)  # for a stack, one per element
    return (scales.gather(1, groups) * (numbers - zeros.gather(1, groups))).transpose(-1, -2)


def _packed_integers(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode compressed-tensors: unsigned with an offset, packed along the inputs; zero points along the outputs."""
    bits = weight.scheme.value("bits")
    half = 2 ** (bits - 1)
    numbers = _bits(parts[_named(weight, "_packed")], bits, -1).narrow(-1, 0, shape[-1]) - half
    scales = parts[_named(weight, "_scale")]
    zeros = [parts[t.name] for t in weight.tensors if t.name.endswith("_zero_point")]
    zero = _trimmed(_bits(zeros[0], bits, -2), -2, shape[-2], _parts(weight)) - half if zeros else None
    places = [_rows(weight, t.name, parts[t.name].long(), shape) for t in weight.tensors if t.name.endswith("_g_idx")]
    columns = weight.scheme.value("columns") or shape[-1]

    def spread(x: torch.Tensor) -> torch.Tensor:
        if not places:
            return _spread(x, shape, {len(shape) - 1: columns})
        return x.index_select(-1, places[0]) if x.dim() == 2 else x.gather(-1, places[0])

    shifted = numbers if zero is None else numbers - spread(zero)
    return shifted.to(scales.dtype) * spread(scales)


def _bnb_4bit(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode the higher half of a byte first; the absmax of each block is stored separately."""
    parameter = weight.tensors[0].name
    stored = parts[parameter].reshape(-1).view(torch.uint8)
    numbers = torch.stack([stored >> 4, stored & 15], -1).reshape(-1)
    values = parts[f"{parameter}.quant_map"].float()[numbers.int()]
    largest = parts[f"{parameter}.absmax"].float().repeat_interleave(weight.scheme.value("block"))
    return (values * largest[: len(values)]).reshape(shape)


def _torchao_int4(weight: PackedWeight, parts: Parts, shape: tuple[int, ...]) -> torch.Tensor:
    """Decode signed halves, lower first; scales and zero points by group and output, the latter added."""
    numbers = ((_pairs(parts[_named(weight, "_qdata")]).int() ^ 8) - 8).float()
    scales, zeros = (
        _spread(parts[_named(weight, name)].float().transpose(-1, -2), shape, {1: weight.scheme.value("group")})
        for name in ("_scale", "_zero_point")
    )
    return numbers * scales + zeros


_DEQUANTISED: dict[str, Callable[[PackedWeight, Parts, tuple[int, ...]], torch.Tensor]] = {
    "scaled numbers": _plain_numbers,
    "pairs of float4": lambda weight, parts, shape: (
        _float4(parts[weight.tensors[0].name]) * _scales(weight, parts, weight.tensors[1].name, shape)
    ),
    "blocks of float4": _mxfp4,
    "pairs of float4, scaled twice": _nvfp4,
    "integers packed along the outputs": _awq,
    "integers packed along the inputs, by g_idx": _gptq,
    "integers packed along the inputs": _packed_integers,
    "codes in blocks": _bnb_4bit,
    "integers by their largest": lambda weight, parts, shape: (
        parts[weight.tensors[0].name].float() * parts[_named(weight, "SCB")].float().unsqueeze(-1) * (1 / 127)
    ),
    "pairs of integers": _torchao_int4,
}
