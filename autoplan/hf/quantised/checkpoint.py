"""What the files of a quantised checkpoint hold: which tensors are one weight, by the config that lies beside them.

The config says how modules are stored, the files say which tensors there are. Where the two contradict each other
nothing is guessed: tensors that nobody announced, announced ones that are absent, and other shapes are an error each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from autoplan.common.errors import SourceError
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.hf.quantised.groups import Method, named
from autoplan.hf.quantised.methods import method_of
from autoplan.hf.quantised.schemes import Plain, announced, packed_weight, plain_shape
from autoplan.values.quantised import PackedTensor, PackedWeight, Scheme

__all__ = ["stored_aliases", "stored_weights"]

Shape = Callable[[str], tuple[int, ...]]
_EXPERT = re.compile(r"\.experts\.\d+\.")
_METHODS_WITH_ALIASES = ("fp8", "mxfp8")  # in DeepSeek-V4's own files and in Mistral's
_ALIASES = {"scale": "weight_scale_inv", "qscale_weight": "weight_scale_inv", "qscale_act": "activation_scale"}
_OF_THE_CACHE = ("q_scale", "k_scale", "v_scale", "prob_scale")
_OPTIONAL = ("activation_scale", "input_scale", "input_global_scale", "weight_shape", "g_idx")


def stored_weights(
    folder: Path, keys: tuple[str, ...], shape: Shape, read: Callable[[str], Any]
) -> tuple[PackedWeight, ...]:
    """The packed weights of a folder, by the names that plain ones would have in it."""
    data = _quantization_config(folder)
    if data is None:
        odd = next((key for key, _, _ in announced(keys)), None)
        if odd is not None:
            raise SourceError(
                f"{folder} holds quantised weights ({odd}), but its config.json has no quantization_config",
                hint="fetch the config.json that belongs to these files",
            )
        return ()
    method = method_of(data)
    found = tuple(_weights(folder, method, keys, shape, read))
    if not found:
        raise SourceError(
            f"the config.json in {folder} says quantization method {method.name!r}, but its files hold none of its "
            "tensors",
            hint="fetch the files that belong to this config.json, or delete its quantization_config",
        )
    return found


def stored_aliases(folder: Path, keys: tuple[str, ...]) -> dict[str, str]:
    """Stored tensors that files call otherwise than their scheme does, each with the name that it has there.

    "" for what is no part of a weight: scales of the cache, how a kernel of bitsandbytes orders rows.
    """
    if not (folder / "config.json").is_file():
        return {}
    data = _quantization_config(folder)
    if data is None:
        return {}
    known, found = set(keys), dict[str, str]()
    aliases = _ALIASES if data.get("quant_method") in _METHODS_WITH_ALIASES else {}
    for key in keys:
        owner, _, name = key.rpartition(".")
        if name in aliases and f"{owner}.weight" in known and f"{owner}.{aliases[name]}" not in known:
            found[key] = f"{owner}.{aliases[name]}"
        elif name in _OF_THE_CACHE or (name == "weight_format" and f"{owner}.SCB" in known):
            found[key] = ""
    return found


def _quantization_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.json"
    if not path.is_file():
        raise SourceError(
            f"{folder} has no config.json, which says how its weights are quantised", hint="copy it there"
        )
    config = read_plain(path, NotPlain(error=SourceError, hint="fetch it again"), notation="json")
    if not isinstance(config, dict):
        raise SourceError(f"{path} holds a {type(config).__name__}, no settings by name", hint="fetch it again")
    parts = (config, *(value for value in config.values() if isinstance(value, dict)))
    found = next((part["quantization_config"] for part in parts if part.get("quantization_config")), None)
    if found is not None and not isinstance(found, dict):
        raise SourceError(f"{path}: quantization_config is {found!r}, no settings by name", hint="fetch it again")
    return found


def _weights(
    folder: Path, method: Method, keys: tuple[str, ...], shape: Shape, read: Callable[[str], Any]
) -> Iterator[PackedWeight]:
    known = set(keys)
    schemes = dict.fromkeys(
        scheme for group in method.groups for scheme in (group.of(False), group.of(True)) if scheme is not None
    )
    for scheme in schemes:
        for key, owner, parameter in announced(keys, scheme):
            stacked = parameter != "weight"
            if _scheme(method, owner, stacked) == scheme:
                plain = _plain(f"{owner}.{parameter}", scheme, stacked, known, shape, read)
                yield _checked(folder, packed_weight(plain, scheme), key, known, shape)


def _scheme(method: Method, owner: str, stacked: bool) -> Scheme | None:
    """Experts that are stored one by one have the scheme of stacks, if these have one."""
    for group in method.groups:
        if not group.names or any(named(pattern, owner) for pattern in group.names):
            expert = not stacked and _EXPERT.search(owner) is not None
            return (group.of(True) or group.of(False)) if expert else group.of(stacked)
    return None


def _plain(
    name: str, scheme: Scheme, stacked: bool, known: set[str], shape: Shape, read: Callable[[str], Any]
) -> Plain:
    state = next((key for key in known if key.startswith(f"{name}.quant_state.")), None)
    if state is not None:
        said = json.loads(bytes(read(state).tolist()).decode("utf-8"))
        return Plain(name, tuple(said["shape"]))
    if packed_weight(Plain(name, (1, 1)), scheme).is_flat:
        raise SourceError(
            f"{name} is stored as {scheme.title}, row after row; {name}.quant_state…, which says its shape, is absent",
            hint="complete the download, or save the checkpoint again with its package",
        )
    sizes, transposed = plain_shape(name, scheme, stacked, lambda own: shape(f"{name.rpartition('.')[0]}.{own}"))
    return Plain(name, sizes, transposed)


def _checked(folder: Path, weight: PackedWeight, key: str, known: set[str], shape: Shape) -> PackedWeight:
    """The weight with those of its tensors that are there; all but a few must be, with the shapes they should have."""
    kept: list[PackedTensor] = []
    for tensor in weight.tensors:
        own = f"{weight.owner}.{tensor.name}"
        if own not in known:
            if tensor.name.endswith(_OPTIONAL):
                continue
            raise SourceError(
                f"{folder}: {key} belongs to a weight stored as {weight.scheme.title}, but {own} is absent",
                hint="complete the download, or fetch the config.json that belongs to these files",
            )
        found = shape(own)
        if found != tensor.shape and not (prod(found) == prod(tensor.shape) == 1):
            raise SourceError(
                f"{folder}: {own} has the shape {list(found)}, where {list(tensor.shape)} belongs to a weight of "
                f"{list(weight.shape)} stored as {weight.scheme.title}",
                hint="does the config.json belong to these files?",
            )
        kept.append(tensor)
    return replace(weight, tensors=tuple(kept))
