"""What a config of torchao says: a configuration class by name with its fields, or one for each module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.common.errors import SourceError
from autoplan.hf.quantised.groups import Group, Method
from autoplan.hf.quantised.schemes import scheme_of
from autoplan.values.quantised import Scheme

__all__ = ["torchao"]

_PER_MODULE = ("ModuleFqnToConfig", "FqnToConfig")


def torchao(data: Mapping[str, Any]) -> Method:
    """The configuration is a dict {"_type", "_data"} under "default"."""
    said = data["quant_type"]
    if isinstance(said, str):
        raise SourceError(
            f"torchao's quantization type {said!r} is only a name, which newer versions do not read",
            hint="save the checkpoint again with a configuration object",
        )
    said = said.get("default", said)
    skipped = tuple(map(str, data.get("modules_to_not_convert") or ()))
    groups: list[Group] = []
    if said["_type"] in _PER_MODULE:
        table = next(iter(said["_data"].values()))
        for name, one in table.items():
            if name != "_default" and one is None:
                skipped += (name,)
            elif one is not None:
                groups.append(Group(_scheme(one), () if name == "_default" else (name,), experts=None))
        groups.sort(key=lambda group: not group.names)
    else:
        groups.append(Group(_scheme(said), experts=None))
    heads = not data.get("include_input_output_embeddings")
    return Method("torchao", tuple(groups), skipped, default_skips=heads)


def _scheme(said: Mapping[str, Any]) -> Scheme:
    kind, fields = str(said["_type"]), said.get("_data") or {}
    if kind == "Int4WeightOnlyConfig":
        packing = fields.get("int4_packing_format") or "plain"
        packing = str(packing["_data"] if isinstance(packing, Mapping) else packing).lower().rpartition(".")[2]
        if packing != "plain":
            raise SourceError(
                f"torchao's int4 in the packing {packing!r} is not described",
                hint="that of one device's kernel is cut nowhere; save the checkpoint in the plain packing",
            )
        return scheme_of("torchao", "int4", group=int(fields.get("group_size", 128)), scale="bfloat16")
    if kind in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        rows, columns = _scaled(fields.get("granularity"), int(fields.get("group_size") or 0))
        return _integers(rows, columns, "float32")
    if kind in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"):
        packing = str(fields.get("intx_packing_format") or "unpacked_to_int8").lower()
        if "unpacked_to_int8" not in packing:
            raise SourceError(
                f"torchao's {kind} in the packing {packing!r} is not described",
                hint="that of one device's kernel is cut nowhere; save the checkpoint unpacked to int8",
            )
        said_of = fields.get("weight_granularity") or fields.get("granularity")
        rows, columns = _scaled(said_of, 0 if kind == "IntxWeightOnlyConfig" else 32)
        return _integers(rows, columns, "bfloat16")
    if kind in ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"):
        per_tensor = "PerTensor" in str(fields.get("granularity"))
        rows = 0 if per_tensor and kind.startswith("Float8Dynamic") else 1
        return scheme_of("torchao", "plain", dtype="float8_e4m3fn", scale="float32", rows=rows, columns=0)
    raise SourceError(
        f"torchao's {kind} is not described",
        hint="described are Int4WeightOnlyConfig, and weights of int8, fewer bits in int8, or float8",
    )


def _integers(rows: int, columns: int, scale: str) -> Scheme:
    return scheme_of("torchao", "plain", dtype="int8", scale=scale, rows=rows, columns=columns, zero_points=True)


def _scaled(said: Any, group: int) -> tuple[int, int]:
    """Of how many rows and columns one scale is; 0: of all. `group`: where nothing is said."""
    kind = str(said.get("_type", "")) if isinstance(said, Mapping) else ""
    if kind == "PerGroup":
        group = int((said.get("_data") or {}).get("group_size") or group)
    return (0, 0) if kind == "PerTensor" else (1, 0 if kind in ("PerRow", "PerAxis") else group)
