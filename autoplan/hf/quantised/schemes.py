"""Quantisation schemes: blocks, groups and how tensors are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Literal

from autoplan.common.files.rule_files import scheme_files
from autoplan.values.quantised import PackedDim, PackedTensor, PackedWeight, Scheme

# Assign schemes to modules: patterns of names and of classes, as configs give them.

_SAME: Literal["same"] = "same"


@dataclass(frozen=True)
class Group:
    """A scheme of a method. `experts`: that of stacks of experts; None: none. `names`: patterns; none: every linear."""

    scheme: Scheme | None
    names: tuple[str, ...] = ()
    experts: Scheme | Literal["same"] | None = _SAME

    def of(self, stacked: bool) -> Scheme | None:
        """Return the scheme of a matrix, or of a stack of matrices."""
        return self.experts if stacked and self.experts != _SAME else self.scheme


@dataclass(frozen=True)
class Method:
    """The content of a config. A module's group is the first one whose names fit it, unless it is skipped.

    `default_skips`: leave unquantised what the library does by default (the output head). `in_blocks`: quantise only
    inside repeated blocks, of those that `within` names, if it names any; `only`: only modules of these names in a
    block. `unbiased`: only linear layers without bias, both sizes of which are multiples of this.
    """

    name: str
    groups: tuple[Group, ...]
    skipped: tuple[str, ...] = ()
    default_skips: bool = True
    in_blocks: bool = False
    within: tuple[str, ...] = ()
    only: tuple[str, ...] = field(default=())
    unbiased: int = 0


def named(pattern: str, name: str) -> bool:
    """Return whether a pattern of a config ("re:…", else a name, a dotted part of it, or an expression for its
    beginning) matches `name`.

    >>> named("visual", "model.visual.blocks.0.attn"), named("re:.*mlp.gate$", "layers.0.mlp.gate_proj")
    (True, False)
    >>> named("model.layers.1", "model.layers.11.mlp"), named("lm_head", "lm_head")
    (False, True)
    """
    if pattern.startswith("re:"):
        return _compiled(pattern[3:]).match(name) is not None
    if f".{pattern}." in f".{name}.":
        return True
    if re.escape(pattern).replace(r"\.", ".") == pattern.replace(r"\.", "."):  # a plain name, no expression
        return False
    return _compiled(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))").match(name) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


# Describe how a scheme stores one weight: `rules/quantised/<scheme>.toml` (see the README there) with the numbers of a
# config.

Values = Mapping[str, int | str | bool]
_DIM = re.compile(r"(whole )?(out\*in|out|in)(?:/(\d+)(?:\*(\d+))?)?")
_SIZES = {"uint8": 1, "int8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
          "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1}  # fmt: skip


@dataclass(frozen=True)
class Plain:
    """A weight before it is packed. Stacks have their experts as dim 0; `segments` as in PackedWeight."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False  # the contracted dim comes before the output dim
    segments: tuple[int, ...] = ()

    @property
    def stacked(self) -> bool:
        return len(self.shape) == 3

    @property
    def rows(self) -> int:
        return len(self.shape) - (1 if self.transposed else 2)

    @property
    def contracted(self) -> int:
        return len(self.shape) - 2 if self.transposed else len(self.shape) - 1


_BESIDE, _AFTER = Plain("weight", ()), Plain("", ())


def scheme_of(method: str, form: str = "", **values: int | str | bool) -> Scheme:
    """Return the scheme of a method (in a form, if it has several), with the numbers of a config."""
    method_and_form = method, form
    ids = [id for id, data in scheme_files().items() if (data["method"], data.get("form", "")) == method_and_form]
    assert len(ids) == 1, f"rules/quantised: {len(ids)} documents for {method!r} in the form {form!r}"
    texts = {key: value or "all" for key, value in values.items()}
    return Scheme(ids[0], str(scheme_files()[ids[0]]["title"]).format_map(texts), tuple(sorted(values.items())))


def packed_weight(plain: Plain, scheme: Scheme) -> PackedWeight:
    """Return the tensors that a checkpoint holds in place of one weight."""
    values = dict(scheme.values)
    tensors = []
    for tensor in scheme_files()[scheme.id]["tensors"]:
        if "when" in tensor and not values.get(tensor["when"]):
            continue
        texts = tensor.get("stacked", tensor["dims"]) if plain.stacked else tensor["dims"]
        dims = tuple(_dim(text, plain, values) for text in texts)
        dims = (PackedDim(plain.shape[0], (0,)), *dims) if plain.stacked else dims
        dtype = str(tensor["dtype"]).format_map(values)
        size = prod(dim.size for dim in dims) * _SIZES[dtype]
        tensors.append(PackedTensor(_name(tensor["name"], plain), dtype, dims, size))
    return PackedWeight(plain.name, scheme, plain.shape, tuple(tensors), plain.rows, plain.contracted, plain.segments)


def announced(keys: Iterable[str], scheme: Scheme | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield (key, module, parameter) for each key that only packed weights have: those of a scheme, or of any."""
    files, present = scheme_files(), dict.fromkeys(keys)
    for data in [files[scheme.id]] if scheme is not None else list(files.values()):
        first = data["tensors"][0]["name"]
        names = [tensor["name"] for tensor in data["tensors"] if tensor["name"] != "{weight}" and "when" not in tensor]
        own = re.escape(names[0]).replace(r"\{weight\}", r"(?P<weight>[A-Za-z]\w*?)")
        pattern = re.compile(rf"(?P<owner>.+)\.{own}")
        for key in present:
            match = pattern.fullmatch(key)
            if match is None:
                continue
            parameter = match.groupdict().get("weight") or "weight"
            if f"{match['owner']}.{first.format(weight=parameter)}" in present:
                yield key, match["owner"], parameter


def state_of(weight: PackedWeight) -> str | None:
    """Return the name, after that of the weight, of the tensor of bytes with its shape; None if there is none."""
    text = scheme_files()[weight.scheme.id].get("state")
    return None if text is None else str(text).format_map(dict(weight.scheme.values))


def stored_names() -> tuple[tuple[str, str], ...]:
    """Return suffixes of stored tensors: for a parameter named "weight", and after any other parameter's name."""
    names = dict.fromkeys(tensor["name"] for data in scheme_files().values() for tensor in data["tensors"])
    suffixes = (name for name in names if name != "{weight}" and "." not in name)
    return tuple((_name(name, _BESIDE), _name(name, _AFTER)) for name in suffixes)


def plain_shape(
    name: str, scheme: Scheme, stacked: bool, shape: Callable[[str], tuple[int, ...]]
) -> tuple[tuple[int, ...], bool]:
    """Return a plain weight's shape, from that of the first stored tensor, and whether it is [in, out]."""
    data, values = scheme_files()[scheme.id], dict(scheme.values)
    first = data["tensors"][0]
    stored = shape(_name(first["name"], Plain(name, ())))
    lead, sizes = (stored[:1], stored[1:]) if stacked else ((), stored)
    dims = {}
    for text, size in zip(first["dims"], sizes, strict=False):
        match = _DIM.fullmatch(str(text).format_map(values))
        if match is not None:
            dims[match[2]] = size // int(match[4] or 1) * int(match[3] or 1)
    transposed = stacked and bool(data.get("transposed_stacks"))
    own = (dims["in"], dims["out"]) if transposed else (dims["out"], dims["in"])
    return (*lead, *own), transposed


def _name(said: str, plain: Plain) -> str:
    """Return a stored tensor's name, after that of the module."""
    parameter = plain.name.rpartition(".")[2]
    if "{weight}" in said:
        return said.format(weight=parameter)
    return said if parameter == "weight" else f"{parameter}_{said}"


def _dim(said: str | int, plain: Plain, values: Values) -> PackedDim:
    if isinstance(said, int) or said == "segments":
        return PackedDim(said if isinstance(said, int) else max(1, len(plain.segments)))
    text = said.format_map(dict(values))
    match = _DIM.fullmatch(text)
    assert match is not None, f"rules/quantised: {text!r} is no dim"
    named = {"out": (plain.rows,), "in": (plain.contracted,), "out*in": (plain.rows, plain.contracted)}
    of = named[match[2]]
    size, factor, each = prod(plain.shape[dim] for dim in of), int(match[3] or 1), int(match[4] or 1)
    if factor == 0:  # one scale for all
        return PackedDim(1)
    segments = plain.segments if of == (plain.rows,) else ()
    blocks = sum(-(-part // factor) for part in segments or (size,))
    return PackedDim(blocks * each) if match[1] else PackedDim(blocks * each, of, factor, each)
