"""What a config of compressed-tensors says: groups of modules, each with a format of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.common.errors import SourceError
from autoplan.hf.quantised.groups import Group, Method
from autoplan.hf.quantised.schemes import scheme_of
from autoplan.values.quantised import Scheme

__all__ = ["compressed_tensors"]

_PLAIN = ("naive-quantized", "int-quantized", "float-quantized")
_KNOWN = (*_PLAIN, "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_LINEAR = "Linear"


def compressed_tensors(data: Mapping[str, Any]) -> Method:
    """A checkpoint that is not compressed holds plain weights: it is no quantised one to load, and is refused."""
    if data.get("quantization_status", "compressed") != "compressed":
        raise SourceError(
            f"compressed-tensors with quantization_status {data['quantization_status']!r} holds weights as they are",
            hint="compress the checkpoint, or delete its quantization_config",
        )
    if (data.get("sparsity_config") or {}).get("format", "dense") not in ("dense", None):
        raise SourceError(
            f"compressed-tensors in the sparse format {data['sparsity_config']['format']!r} is not described",
            hint="dense ones are",
        )
    groups = []
    for said in data["config_groups"].values():
        targets = tuple(str(target) for target in said.get("targets") or (_LINEAR,))
        names = () if _LINEAR in targets else targets
        groups.append(Group(_scheme(said, said.get("format") or data.get("format")), names))
    ordered = sorted(groups, key=lambda group: not group.names)  # those with names first, they are narrower
    return Method("compressed-tensors", tuple(ordered), tuple(map(str, data.get("ignore") or ())), default_skips=False)


def _scheme(said: Mapping[str, Any], given: str | None) -> Scheme:
    weights = said["weights"]
    bits, kind = int(weights["num_bits"]), str(weights.get("type", "int"))
    inputs = said.get("input_activations") or {}
    static = bool(inputs) and not inputs.get("dynamic")
    zero = not weights.get("symmetric", True)
    strategy = str(getattr(weights.get("strategy"), "value", weights.get("strategy")))
    format = given or ("pack-quantized" if bits == 4 and kind == "int" else "naive-quantized")
    if format not in _KNOWN:
        raise SourceError(
            f"compressed-tensors in the format {format!r} is not described", hint=f"described are {', '.join(_KNOWN)}"
        )
    if format == "nvfp4-pack-quantized":
        return _of(format, activations=bool(inputs))
    if format == "mxfp4-pack-quantized":
        return _of(format)
    rows, columns = _blocks(strategy, weights)
    scale = str(weights.get("scale_dtype") or "bfloat16").removeprefix("torch.")
    if format == "pack-quantized":
        ordered = bool(weights.get("actorder")) and str(weights.get("actorder")) != "static" and columns > 0
        form = "groups in order of activation" if ordered else "groups in order"
        return _of(form, bits=bits, pack=32 // bits, columns=columns, zero_points=zero, scale=scale)
    dtype = "float8_e4m3fn" if kind == "float" else "int8"
    values: dict[str, Any] = {
        "dtype": dtype,
        "scale": scale,
        "static": static,
        "zero_points": zero,
        "strategy": strategy,
    }
    if strategy == "tensor":
        return _of("one scale", **values)
    return _of("scales", rows=rows, columns=columns, **values)


def _of(form: str, **values: int | str | bool) -> Scheme:
    return scheme_of("compressed-tensors", form, **values)


def _blocks(strategy: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    """How many rows and columns share a scale; 0: all of them."""
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return int(rows), int(columns)
    if strategy in ("group", "tensor_group"):
        return 1, int(weights["group_size"])
    if strategy in ("channel", "tensor"):
        return (1, 0) if strategy == "channel" else (0, 0)
    raise SourceError(f"compressed-tensors with the strategy {strategy!r} is not described")
