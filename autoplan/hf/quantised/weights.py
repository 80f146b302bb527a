"""The quantised weights of a model and of its checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from autoplan.common.errors import SourceError
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.torch_internals import own_parameters
from autoplan.hf.own_sharding import from_config
from autoplan.hf.quantised.methods import method_of, quantization_config_of
from autoplan.hf.quantised.schemes import Group, Method, Plain, announced, named, packed_weight, plain_shape
from autoplan.hf.shrink import all_configs
from autoplan.values.quantised import PackedTensor, PackedWeight, Scheme

# The quantised weights of a plain model on meta: linear layers and stacks of experts, except those that a config or
# transformers itself leaves unquantised.

# Usual paths of a language model's blocks, for methods that quantise only blocks and do not say which.
_BLOCKS = ("model.language_model.layers", "model.layers", "model.decoder.layers", "transformer.h", "gpt_neox.layers",
           "language_model.model.layers", "language_model.layers", "backbone.layers", "layers", "h")  # fmt: skip
_PACKERS = (
    "bitsandbytes.", "gptqmodel.", "auto_gptq.", "awq.", "hqq.", "eetq.", "torchao.quantization", "torchao.dtypes",
)  # fmt: skip
_ADAPTER = re.compile(r"\.lora_|\.modules_to_save\.")  # adapters are plain
_EXPERTS = ("0.gate_proj", "0.up_proj", "0.down_proj", "0.w1", "0.w2", "0.w3")  # an expert's linears in checkpoints


def quantised_weights(config: PretrainedConfig | None, model: nn.Module) -> tuple[PackedWeight, ...]:
    """Return the quantised weights of a plain model built from `config`; empty without a `quantization_config`."""
    data = quantization_config_of(tuple(all_configs(config))) if config is not None else None
    if data is None or data.get("dequantize"):
        return ()
    method = method_of(data)
    weights = tuple(packed_weight(plain, scheme) for plain, scheme in _weights(model, method))
    if not weights:
        raise SourceError(
            f"quantization method {method.name!r} (from the config or weights=) applies to no weight of "
            f"{type(model).__name__}",
            hint="are its patterns for another model? Without the method it is planned unquantised",
        )
    return weights


def refuse_packed_by_others(model: nn.Module) -> None:
    """Raise for a model whose modules hold weights as a package packed them for its own kernels."""
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            packers = [holder for holder in (module, weight) if type(holder).__module__.startswith(_PACKERS)]
            if not packers:
                continue
            packer, package = packers[0], type(packers[0]).__module__.partition(".")[0]
            where = path if packer is module else f"{path}.{name}"
            raise SourceError(
                f"{where} is a {type(packer).__name__} of {package}, which packs its weight for its own kernel",
                hint="plan the plain model on meta (with its adapters), with the quantization_config in its config; "
                "autoplan.packed_model gives it packed tensors, and load_weights fills them from the checkpoint",
            )


def _weights(model: nn.Module, method: Method) -> Iterator[tuple[Plain, Scheme]]:
    """Yield plain weights and their schemes, in the order of the model."""
    # Modules of these names are not quantised.
    from transformers.quantizers.base import get_keys_to_not_convert

    patterns = [*method.skipped, *(_renamed(model, name) for name in method.skipped)]
    if method.default_skips:
        patterns += get_keys_to_not_convert(model)
    patterns += getattr(model, "_keep_in_fp32_modules", None) or []
    skipped = tuple(dict.fromkeys(pattern.removesuffix(".weight") for pattern in patterns if pattern))
    blocks = _blocks(model, method) if method.in_blocks else ()
    seen: set[int] = set()
    for path, module in model.named_modules():
        if _ADAPTER.search(path):
            continue
        for plain, parameter in _plain_weights(path, module):
            # A stack's experts are single linears in checkpoints, and configs name them so.
            names = (path, *(f"{path}.{expert}" for expert in _EXPERTS if plain.stacked))
            if id(parameter) in seen or any(named(pattern, name) for pattern in skipped for name in names):
                continue
            if blocks and not path.startswith(tuple(f"{block}." for block in blocks)):
                continue
            if method.only and not path.endswith(tuple(f".{suffix}" for suffix in method.only)):
                continue
            biased = own_parameters(module).get("bias") is not None
            if method.unbiased and (biased or any(size % method.unbiased for size in plain.shape)):
                continue
            group = _group_of(method, *names)
            scheme = None if group is None else group.of(plain.stacked)
            if scheme is not None:
                seen.add(id(parameter))
                yield plain, scheme


def _group_of(method: Method, *names: str) -> Group | None:
    """Return the first group that a module of one of these names is in."""
    fits = (g for g in method.groups if not g.names or any(named(p, name) for p in g.names for name in names))
    return next(fits, None)


def _plain_weights(path: str, module: nn.Module) -> Iterator[tuple[Plain, nn.Parameter]]:
    own = own_parameters(module)
    turned = type(module).__name__ == "Conv1D"
    if (turned or isinstance(module, nn.Linear)) and own.get("weight") is not None:
        yield Plain(f"{path}.weight", tuple(own["weight"].shape), transposed=turned), own["weight"]
    elif path.endswith("experts"):
        transposed, concatenated = is_transposed(module), bool(getattr(module, "is_concatenated", True))
        for name, parameter in own.items():
            if parameter is not None and parameter.dim() == 3:
                # A fused gate and up projection is two segments, which checkpoints hold apart.
                half = parameter.shape[2 if transposed else 1] // 2
                segments = (half, half) if name.endswith("gate_up_proj") and concatenated else ()
                yield Plain(f"{path}.{name}", tuple(parameter.shape), transposed, segments), parameter


def is_transposed(module: nn.Module) -> bool:
    """Return whether a stack of experts holds [in, out], by the shapes of both: input and output are equally wide."""
    both, down = own_parameters(module).get("gate_up_proj"), own_parameters(module).get("down_proj")
    if both is not None and down is not None and both.dim() == down.dim() == 3:
        return both.shape[1] == down.shape[2]
    return bool(getattr(module, "is_transposed", False))


def _renamed(model: Any, name: str) -> str:
    """Return the model's name for a name of the checkpoint. (Renamings are written for names of weights.)"""
    if name.startswith("re:") or from_config(type(model)) is None:
        return name
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    renamed = f"{name}."
    for rule in get_model_conversion_mapping(model):
        if isinstance(rule, WeightRenaming):
            renamed, _ = rule.rename_source_key(renamed)
    return renamed.removesuffix(".")


def _blocks(model: nn.Module, method: Method) -> tuple[str, ...]:
    lists = {path for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    wanted = method.within or tuple(path for path in _BLOCKS if path in lists)[:1]
    blocks = tuple(path for path in lists if f".{path}".endswith(tuple(f".{suffix}" for suffix in wanted)))
    return blocks or tuple(sorted(lists))


# The files of a quantised checkpoint. A contradiction between config and files is an error.

Shape = Callable[[str], tuple[int, ...]]
_EXPERT = re.compile(r"\.experts\.\d+\.")
_METHODS_WITH_ALIASES = ("fp8", "mxfp8")  # in DeepSeek-V4's own files and in Mistral's
_ALIASES = {"scale": "weight_scale_inv", "qscale_weight": "weight_scale_inv", "qscale_act": "activation_scale"}
_OF_THE_CACHE = ("q_scale", "k_scale", "v_scale", "prob_scale")
_OPTIONAL = ("activation_scale", "input_scale", "input_global_scale", "weight_shape", "g_idx")


def stored_weights(
    folder: Path, keys: tuple[str, ...], shape: Shape, read: Callable[[str], Any]
) -> tuple[PackedWeight, ...]:
    """Return the packed weights of a folder, by the names that plain ones would have in it."""
    data = _quantization_config(folder)
    if data is None:
        odd = next((key for key, _, _ in announced(keys)), None)
        if odd is not None:
            text = f"{folder} holds quantised weights ({odd}), but its config.json has no quantization_config"
            raise SourceError(text, hint="fetch the config.json that belongs to these files")
        return ()
    method = method_of(data)
    weights = tuple(_checkpoint_weights(folder, method, keys, shape, read))
    if not weights:
        raise SourceError(
            f"the config.json in {folder} says quantization method {method.name!r}, but its files contain none "
            "of its tensors",
            hint="fetch the files that belong to this config.json, or delete its quantization_config",
        )
    return weights


def stored_aliases(folder: Path, keys: tuple[str, ...]) -> dict[str, str]:
    """Map stored tensors to their scheme's names where these differ; "" for tensors that belong to no weight."""
    if not (folder / "config.json").is_file():
        return {}
    data = _quantization_config(folder)
    if data is None:
        return {}
    present, names = set(keys), dict[str, str]()
    aliases = _ALIASES if data.get("quant_method") in _METHODS_WITH_ALIASES else {}
    for key in keys:
        owner, _, name = key.rpartition(".")
        if name in aliases and f"{owner}.weight" in present and f"{owner}.{aliases[name]}" not in present:
            names[key] = f"{owner}.{aliases[name]}"
        elif name in _OF_THE_CACHE or (name == "weight_format" and f"{owner}.SCB" in present):
            names[key] = ""
    return names


def _quantization_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        hint = "copy it there"
        raise SourceError(f"{folder} has no config.json, which describes how its weights are quantised", hint=hint)
    config = read_plain(path, NotPlain(error=SourceError, hint="fetch it again"), notation="json")
    if not isinstance(config, dict):
        raise SourceError(f"{path} holds a {type(config).__name__}, not a mapping", hint="fetch it again")
    parts = (config, *(value for value in config.values() if isinstance(value, dict)))
    quantisation = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if quantisation is not None and not isinstance(quantisation, dict):
        raise SourceError(f"{path}: quantization_config is {quantisation!r}, not a mapping", hint="fetch it again")
    return quantisation


def _checkpoint_weights(
    folder: Path, method: Method, keys: tuple[str, ...], shape: Shape, read: Callable[[str], Any]
) -> Iterator[PackedWeight]:
    present = set(keys)
    schemes = dict.fromkeys(
        scheme for group in method.groups for scheme in (group.of(False), group.of(True)) if scheme is not None
    )
    for scheme in schemes:
        for key, owner, parameter in announced(keys, scheme):
            stacked = parameter != "weight"
            # Experts stored one by one have the scheme of stacks, if there is one.
            group, expert = _group_of(method, owner), not stacked and _EXPERT.search(owner) is not None
            own = None if group is None else (group.of(True) or group.of(False)) if expert else group.of(stacked)
            if own == scheme:
                plain = _plain(f"{owner}.{parameter}", scheme, stacked, present, shape, read)
                yield _checked(folder, packed_weight(plain, scheme), key, present, shape)


def _plain(
    name: str, scheme: Scheme, stacked: bool, known: set[str], shape: Shape, read: Callable[[str], Any]
) -> Plain:
    state = next((key for key in known if key.startswith(f"{name}.quant_state.")), None)
    if state is not None:
        state_data = json.loads(bytes(read(state).tolist()).decode("utf-8"))
        return Plain(name, tuple(state_data["shape"]))
    if packed_weight(Plain(name, (1, 1)), scheme).is_flat:
        text = f"{name} is stored as {scheme.title} in one dimension, but {name}.quant_state… with its shape is missing"
        raise SourceError(text, hint="complete the download, or save the checkpoint again with its package")
    sizes, transposed = plain_shape(name, scheme, stacked, lambda own: shape(f"{name.rpartition('.')[0]}.{own}"))
    return Plain(name, sizes, transposed)


def _checked(folder: Path, weight: PackedWeight, key: str, known: set[str], shape: Shape) -> PackedWeight:
    """Return the weight with the tensors that are present. All but optional ones must be, with the right shapes."""
    tensors: list[PackedTensor] = []
    for tensor in weight.tensors:
        own = f"{weight.owner}.{tensor.name}"
        if own not in known:
            if tensor.name.endswith(_OPTIONAL):
                continue
            text = f"{folder}: {key} belongs to a weight stored as {weight.scheme.title}, but {own} is missing"
            raise SourceError(text, hint="complete the download, or fetch the config.json that belongs to these files")
        actual = shape(own)
        if actual != tensor.shape and not (prod(actual) == prod(tensor.shape) == 1):
            raise SourceError(
                f"{folder}: {own} has shape {list(actual)}, but a weight of {list(weight.shape)} stored as "
                f"{weight.scheme.title} needs {list(tensor.shape)}",
                hint="does the config.json belong to these files?",
            )
        tensors.append(tensor)
    return replace(weight, tensors=tuple(tensors))
