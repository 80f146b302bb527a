"""Readers of quantised checkpoints, one for each method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autoplan.common.errors import SourceError
from autoplan.hf.quantised.schemes import Group, Method, scheme_of
from autoplan.values.quantised import Scheme

# compressed-tensors: groups of modules, each with its own format.

_PLAIN = ("naive-quantized", "int-quantized", "float-quantized")
_KNOWN = (*_PLAIN, "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
_LINEAR = "Linear"


def compressed_tensors(data: Mapping[str, Any]) -> Method:
    """Read a config of compressed-tensors. A checkpoint that is not compressed holds plain weights, and is refused."""
    if data.get("quantization_status", "compressed") != "compressed":
        text = f"compressed-tensors with quantization_status {data['quantization_status']!r} stores weights unquantised"
        raise SourceError(text, hint="compress the checkpoint, or delete its quantization_config")
    if (data.get("sparsity_config") or {}).get("format", "dense") not in ("dense", None):
        text = f"compressed-tensors in the sparse format {data['sparsity_config']['format']!r} is not supported"
        raise SourceError(text, hint="dense formats are")
    groups = []
    for entry in data["config_groups"].values():
        targets = tuple(str(target) for target in entry.get("targets") or (_LINEAR,))
        names = () if _LINEAR in targets else targets
        groups.append(Group(_compressed_scheme(entry, entry.get("format") or data.get("format")), names))
    ordered = sorted(groups, key=lambda group: not group.names)  # groups with names first: they are narrower
    return Method("compressed-tensors", tuple(ordered), tuple(map(str, data.get("ignore") or ())), default_skips=False)


def _compressed_scheme(said: Mapping[str, Any], given: str | None) -> Scheme:
    weights = said["weights"]
    bits, kind = int(weights["num_bits"]), str(weights.get("type", "int"))
    inputs = said.get("input_activations") or {}
    static = bool(inputs) and not inputs.get("dynamic")
    zero = not weights.get("symmetric", True)
    strategy = str(getattr(weights.get("strategy"), "value", weights.get("strategy")))
    format = given or ("pack-quantized" if bits == 4 and kind == "int" else "naive-quantized")
    if format not in _KNOWN:
        text = f"compressed-tensors in the format {format!r} is not supported"
        raise SourceError(text, hint=f"supported: {', '.join(_KNOWN)}")
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
    values: dict[str, Any] = {"scale": scale, "static": static, "zero_points": zero, "strategy": strategy}
    values["dtype"] = "float8_e4m3fn" if kind == "float" else "int8"
    if strategy == "tensor":
        return _of("one scale", **values)
    return _of("scales", rows=rows, columns=columns, **values)


def _of(form: str, **values: int | str | bool) -> Scheme:
    return scheme_of("compressed-tensors", form, **values)


def _blocks(strategy: str, weights: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns that share a scale; 0 = whole dim."""
    if strategy == "block":
        rows, columns = weights["block_structure"]
        return int(rows), int(columns)
    if strategy in ("group", "tensor_group"):
        return 1, int(weights["group_size"])
    if strategy in ("channel", "tensor"):
        return (1, 0) if strategy == "channel" else (0, 0)
    raise SourceError(f"compressed-tensors with the strategy {strategy!r} is not supported")


# torchao: the name of a configuration class with its fields, or one for each module.

_PER_MODULE = ("ModuleFqnToConfig", "FqnToConfig")


def torchao(data: Mapping[str, Any]) -> Method:
    """Read a config of torchao, a dict {"_type", "_data"} under "default"."""
    configuration = data["quant_type"]
    if isinstance(configuration, str):
        text = f"torchao's quantization type {configuration!r} is only a name, which newer versions do not read"
        raise SourceError(text, hint="save the checkpoint again with a configuration object")
    configuration = configuration.get("default", configuration)
    skipped = tuple(map(str, data.get("modules_to_not_convert") or ()))
    groups: list[Group] = []
    if configuration["_type"] in _PER_MODULE:
        table = next(iter(configuration["_data"].values()))
        for name, entry in table.items():
            if name != "_default" and entry is None:
                skipped += (name,)
            elif entry is not None:
                groups.append(Group(_torchao_scheme(entry), () if name == "_default" else (name,), experts=None))
        groups.sort(key=lambda group: not group.names)
    else:
        groups.append(Group(_torchao_scheme(configuration), experts=None))
    heads = not data.get("include_input_output_embeddings")
    return Method("torchao", tuple(groups), skipped, default_skips=heads)


def _torchao_scheme(said: Mapping[str, Any]) -> Scheme:
    kind, fields = str(said["_type"]), said.get("_data") or {}
    if kind == "Int4WeightOnlyConfig":
        packing = fields.get("int4_packing_format") or "plain"
        packing = str(packing["_data"] if isinstance(packing, Mapping) else packing).lower().rpartition(".")[2]
        if packing != "plain":
            hint = "a packing for one device's kernel cannot be sharded; save the checkpoint in the plain packing"
            raise SourceError(f"torchao's int4 in the packing {packing!r} is not supported", hint=hint)
        return scheme_of("torchao", "int4", group=int(fields.get("group_size", 128)), scale="bfloat16")
    if kind in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        rows, columns = _scaled(fields.get("granularity"), int(fields.get("group_size") or 0))
        return _integers(rows, columns, "float32")
    if kind in ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"):
        packing = str(fields.get("intx_packing_format") or "unpacked_to_int8").lower()
        if "unpacked_to_int8" not in packing:
            hint = "a packing for one device's kernel cannot be sharded; save the checkpoint unpacked to int8"
            raise SourceError(f"torchao's {kind} in the packing {packing!r} is not supported", hint=hint)
        said_of = fields.get("weight_granularity") or fields.get("granularity")
        rows, columns = _scaled(said_of, 0 if kind == "IntxWeightOnlyConfig" else 32)
        return _integers(rows, columns, "bfloat16")
    if kind in ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig"):
        per_tensor = "PerTensor" in str(fields.get("granularity"))
        rows = 0 if per_tensor and kind.startswith("Float8Dynamic") else 1
        return scheme_of("torchao", "plain", dtype="float8_e4m3fn", scale="float32", rows=rows, columns=0)
    hint = "supported: Int4WeightOnlyConfig, and weights of int8, fewer bits in int8, or float8"
    raise SourceError(f"torchao's {kind} is not supported", hint=hint)


def _integers(rows: int, columns: int, scale: str) -> Scheme:
    return scheme_of("torchao", "plain", dtype="int8", scale=scale, rows=rows, columns=columns, zero_points=True)


def _scaled(said: Any, group: int) -> tuple[int, int]:
    """Return the rows and columns per scale; 0 = whole dim. `group`: the default group size."""
    kind = str(said.get("_type", "")) if isinstance(said, Mapping) else ""
    if kind == "PerGroup":
        group = int((said.get("_data") or {}).get("group_size") or group)
    return (0, 0) if kind == "PerTensor" else (1, 0 if kind in ("PerRow", "PerAxis") else group)


# One function for each method, by transformers' name for it. Methods whose packed tensors rules/quantised does not
# describe are refused by name, never read as unquantised.

# The usual config of a checkpoint of each method.
USUAL_CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "mxfp8": {"quant_method": "mxfp8"},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"],
              "config_groups": {"linear": {"targets": ["Linear"], "weights": {
                  "num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}}}},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}  # fmt: skip

_STORED = {"uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
_BNB_BLOCK = 64


def quantization_config_of(configs: tuple[Any, ...]) -> dict[str, Any] | None:
    """Return, as plain data, the first `quantization_config` of a config or of those inside it."""
    settings = (getattr(config, "quantization_config", None) for config in configs)
    first: Any = next((setting for setting in settings if setting is not None), {})
    return (dict(first) if isinstance(first, Mapping) else first.to_dict()) or None


def method_of(data: Mapping[str, Any]) -> Method:
    """Return the method of a `quantization_config`. Raise SourceError, by name, for one that is not described."""
    # Older bitsandbytes configs do not say their method
    usual = "bitsandbytes" if data.get("load_in_4bit") or data.get("load_in_8bit") else ""
    name = str(getattr(data.get("quant_method"), "value", data.get("quant_method")) or usual)
    if name not in _METHODS:
        hint = f"supported: {', '.join(_METHODS)}; without `quantization_config` the model is planned dequantised"
        raise SourceError(f"quantization method {name!r} is not supported", hint=hint)
    try:
        return _METHODS[name](data)
    except SourceError:
        raise
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        text = f"the quantization_config of method {name!r} cannot be read: {type(error).__name__}: {error}"
        raise SourceError(text, hint="compare it with that of a checkpoint of the same method") from error


# float8


def _fp8(data: Mapping[str, Any]) -> Method:
    skipped = data.get("modules_to_not_convert", data.get("ignored_layers"))
    static = data.get("activation_scheme", "dynamic") == "static"
    scale = "float8_e8m0fnu" if data.get("scale_fmt") == "ue8m0" else "float32"
    blocks = data.get("weight_block_size", (128, 128))
    if blocks is None:
        scheme = scheme_of("fp8", "tensor", static=static)
    else:
        rows, columns = (int(size) for size in blocks)
        if rows < 1 or columns < 1:
            raise SourceError(f"weight_block_size is {list(blocks)}", hint="sizes must be at least 1")
        scheme = scheme_of("fp8", "blocks", rows=rows, columns=columns, scale=scale, static=static)
    experts = scheme_of("fp8", "fp4", scale=scale) if data.get("expert_dtype") == "fp4" else scheme
    return Method("fp8", (Group(scheme, experts=experts),), _names(skipped), default_skips=skipped is None)


# Four bits


def _mxfp4(data: Mapping[str, Any]) -> Method:
    group = Group(None, experts=scheme_of("mxfp4"))
    return Method("mxfp4", (group,), _names(data.get("modules_to_not_convert")), default_skips=False)


def _nvfp4(data: Mapping[str, Any]) -> Method:
    """Read a config of NVFP4: a plain checkpoint is quantised while loading, where its kernel can run."""
    return replace(_everywhere("nvfp4", scheme_of("nvfp4"), data, stacks=False), unbiased=16)


def _awq(data: Mapping[str, Any]) -> Method:
    bits, group = _bits(data, (4,)), _group(data)
    layout = str(data.get("version") or data.get("format") or "gemm").lower()
    if layout != "gemm":
        raise SourceError(f"AWQ checkpoints of version {layout!r} are not supported", hint="version 'gemm' is")
    scheme = scheme_of("awq", bits=bits, group=group, pack=32 // bits)
    return Method("awq", (Group(scheme),), _names(data.get("modules_to_not_convert")), default_skips=True)


def _gptq(data: Mapping[str, Any]) -> Method:
    def scheme(said: Mapping[str, Any]) -> Scheme:
        bits, group = _bits(said, (2, 3, 4, 8)), _group(said)
        pack, words = (32, 3) if bits == 3 else (32 // bits, 1)
        ordered = bool(said.get("desc_act")) and group > 0
        form = "groups in order of activation" if ordered else "groups in order"
        one_more = str(said.get("checkpoint_format", "gptq")).lower() != "gptq_v2"
        return scheme_of("gptq", form, bits=bits, group=group, pack=pack, words=words, one_more=one_more)

    dynamic = data.get("dynamic") or {}
    overrides = {f"re:{key.removeprefix('+:')}": said for key, said in dynamic.items() if not key.startswith("-:")}
    own = tuple(Group(scheme({**data, **said}), names=(pattern,)) for pattern, said in overrides.items())
    skipped = tuple(f"re:{key[2:]}" for key in dynamic if key.startswith("-:"))
    inside = data.get("modules_in_block_to_quantize")
    only = tuple(name for names in inside for name in ([names] if isinstance(names, str) else names)) if inside else ()
    blocks = data.get("block_name_to_quantize")
    skipped += _names(data.get("modules_to_not_convert"))
    return Method(
        "gptq", (*own, Group(scheme(data))), skipped, default_skips=not data.get("lm_head"),
        within=(str(blocks),) if blocks else (), in_blocks=True, only=only,
    )  # fmt: skip


def _auto_round(data: Mapping[str, Any]) -> Method:
    packing = str(data.get("packing_format", ""))
    if "awq" in packing:
        return _awq({**data, "version": "gemm"})
    if "gptq" in packing or packing in ("auto_round", "auto_round:gptqmodel"):
        return _gptq(data)
    text = f"auto-round checkpoints packed as {packing!r} are not supported"
    raise SourceError(text, hint="the layouts of GPTQ and AWQ are")


def _bitsandbytes(data: Mapping[str, Any]) -> Method:
    skipped = data.get("llm_int8_skip_modules")
    if data.get("load_in_8bit") or data.get("_load_in_8bit"):
        scheme = scheme_of("bitsandbytes", "8 bits")
    else:
        storage = str(data.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        kind = str(data.get("bnb_4bit_quant_type", "fp4"))
        nested = bool(data.get("bnb_4bit_use_double_quant"))
        values: dict[str, Any] = {"kind": kind, "storage": storage, "numbers": 2 * _STORED[storage], "nested": nested}
        scheme = scheme_of("bitsandbytes", "4 bits", block=_BNB_BLOCK, **values)
    return Method("bitsandbytes", (Group(scheme, experts=None),), _names(skipped), default_skips=skipped is None)


# Shared by several methods


def _everywhere(name: str, scheme: Scheme, data: Mapping[str, Any], stacks: bool = True) -> Method:
    skipped = data.get("modules_to_not_convert")
    group = Group(scheme) if stacks else Group(scheme, experts=None)
    return Method(name, (group,), _names(skipped), default_skips=skipped is None)


def _names(said: Any) -> tuple[str, ...]:
    return tuple(str(name) for name in said or ())


def _bits(data: Mapping[str, Any], known: tuple[int, ...]) -> int:
    bits = int(data["w_bit"] if "w_bit" in data else data["bits"])
    if bits not in known:
        raise SourceError(f"weights of {bits} bits are not supported", hint=f"supported: {known} bits")
    return bits


def _group(data: Mapping[str, Any]) -> int:
    """Return the number of inputs that share a scale; 0 = all of them."""
    group = int(data["q_group_size"] if "q_group_size" in data else data["group_size"])
    if group < 1 and group != -1:
        raise SourceError(f"group_size is {group}", hint="a group has at least one input; -1: all inputs")
    return max(group, 0)


_METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda data: _everywhere("fbgemm_fp8", scheme_of("fbgemm_fp8"), data),
    "mxfp8": lambda data: _everywhere("mxfp8", scheme_of("mxfp8"), data),
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "bitsandbytes": _bitsandbytes,
    "bitsandbytes_4bit": _bitsandbytes,
    "bitsandbytes_8bit": lambda data: _bitsandbytes({**data, "load_in_8bit": True}),
    "compressed-tensors": compressed_tensors,
    "compressed_tensors": compressed_tensors,
    "torchao": torchao,
}
