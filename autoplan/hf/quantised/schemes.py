"""How a scheme stores one weight: `rules/quantised/<scheme>.toml`, with the numbers of a config put in.

rules/quantised/README.md says what a file holds. A dim like "in/{group}" becomes a `PackedDim`: its size, the dim of
the plain weight that it stands for, and how many elements of that make one of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autoplan.common.files.schemes import scheme_files
from autoplan.values.quantised import PackedDim, PackedTensor, PackedWeight, Scheme

__all__ = ["Plain", "announced", "is_for_linears", "packed_weight", "plain_shape", "scheme_of", "state_of",
           "stored_names"]  # fmt: skip

Values = Mapping[str, int | str | bool]
_DIM = re.compile(r"(whole )?(out\*in|out|in)(?:/(\d+)(?:\*(\d+))?)?")
_SIZES = {"uint8": 1, "int8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4,
          "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e8m0fnu": 1}  # fmt: skip


@dataclass(frozen=True)
class Plain:
    """A weight before it is packed. Stacks have their experts as dim 0; `segments` as in PackedWeight."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False  # what a product sums over comes before what it does not
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
    """The scheme of a method (in a form, if it has several), with the numbers of a config."""
    asked = method, form
    ids = [id for id, data in scheme_files().items() if (data["method"], data.get("form", "")) == asked]
    assert len(ids) == 1, f"rules/quantised: {len(ids)} documents for {method!r} in the form {form!r}"
    said = {key: value or "all" for key, value in values.items()}
    return Scheme(ids[0], str(scheme_files()[ids[0]]["title"]).format_map(said), tuple(sorted(values.items())))


def packed_weight(plain: Plain, scheme: Scheme) -> PackedWeight:
    """What a checkpoint holds in place of one weight."""
    values = dict(scheme.values)
    tensors = []
    for one in scheme_files()[scheme.id]["tensors"]:
        if "when" in one and not values.get(one["when"]):
            continue
        said = one.get("stacked", one["dims"]) if plain.stacked else one["dims"]
        dims = tuple(_dim(text, plain, values) for text in said)
        dims = (PackedDim(plain.shape[0], (0,)), *dims) if plain.stacked else dims
        dtype = str(one["dtype"]).format_map(values)
        size = prod(dim.size for dim in dims) * _SIZES[dtype]
        tensors.append(PackedTensor(_name(one["name"], plain), dtype, dims, size))
    return PackedWeight(plain.name, scheme, plain.shape, tuple(tensors), plain.rows, plain.contracted, plain.segments)


def announced(keys: Iterable[str], scheme: Scheme | None = None) -> Iterator[tuple[str, str, str]]:
    """(key, module, parameter) for each key that only packed weights have: those of a scheme, or of any."""
    files, known = scheme_files(), dict.fromkeys(keys)
    for data in [files[scheme.id]] if scheme is not None else list(files.values()):
        first = data["tensors"][0]["name"]
        pattern = _announcing(data)
        for key in known:
            match = pattern.fullmatch(key)
            if match is None:
                continue
            parameter = match.groupdict().get("weight") or "weight"
            if f"{match['owner']}.{first.format(weight=parameter)}" in known:
                yield key, match["owner"], parameter


def _announcing(data: Mapping[str, Any]) -> re.Pattern[str]:
    names = [one["name"] for one in data["tensors"] if one["name"] != "{weight}" and "when" not in one]
    own = re.escape(names[0]).replace(r"\{weight\}", r"(?P<weight>[A-Za-z]\w*?)")
    return re.compile(rf"(?P<owner>.+)\.{own}")


def is_for_linears(scheme: Scheme) -> bool:
    """Do the tools that write it know linear layers only, so that experts are stored one by one?"""
    return bool(scheme_files()[scheme.id].get("linears_only"))


def state_of(weight: PackedWeight) -> str | None:
    """The name, after that of the weight, of the tensor of bytes that says its shape; None where there is none."""
    said = scheme_files()[weight.scheme.id].get("state")
    return None if said is None else str(said).format_map(dict(weight.scheme.values))


def stored_names() -> tuple[tuple[str, str], ...]:
    """How stored tensors are called beside a parameter "weight", and after the name of a parameter of another name."""
    names = dict.fromkeys(one["name"] for data in scheme_files().values() for one in data["tensors"])
    kept = (name for name in names if name != "{weight}" and "." not in name)
    return tuple((_name(name, _BESIDE), _name(name, _AFTER)) for name in kept)


def plain_shape(
    name: str, scheme: Scheme, stacked: bool, shape: Callable[[str], tuple[int, ...]]
) -> tuple[tuple[int, ...], bool]:
    """The shape of the plain weight, by that of the first stored tensor; is what is contracted before the rest?"""
    data, values = scheme_files()[scheme.id], dict(scheme.values)
    first = data["tensors"][0]
    stored = shape(_name(first["name"], Plain(name, ())))
    lead, sizes = (stored[:1], stored[1:]) if stacked else ((), stored)
    found = {}
    for said, size in zip(first["dims"], sizes, strict=False):
        match = _DIM.fullmatch(str(said).format_map(values))
        if match is not None:
            found[match[2]] = size // int(match[4] or 1) * int(match[3] or 1)
    transposed = stacked and bool(data.get("transposed_stacks"))
    own = (found["in"], found["out"]) if transposed else (found["out"], found["in"])
    return (*lead, *own), transposed


def _name(said: str, plain: Plain) -> str:
    """After the name of the module."""
    parameter = plain.name.rpartition(".")[2]
    if "{weight}" in said:
        return said.format(weight=parameter)
    return said if parameter == "weight" else f"{parameter}_{said}"


def _dim(said: str | int, plain: Plain, values: Values) -> PackedDim:
    if isinstance(said, int):
        return PackedDim(said)
    if said == "segments":
        return PackedDim(max(1, len(plain.segments)))
    text = said.format_map(dict(values))
    match = _DIM.fullmatch(text)
    assert match is not None, f"rules/quantised: {text!r} is no dim"
    named = {"out": (plain.rows,), "in": (plain.contracted,), "out*in": (plain.rows, plain.contracted)}
    of = named[match[2]]
    size, factor, each = prod(plain.shape[dim] for dim in of), int(match[3] or 1), int(match[4] or 1)
    if factor == 0:  # one for all of them
        return PackedDim(1)
    segments = plain.segments if of == (plain.rows,) else ()
    blocks = sum(-(-part // factor) for part in segments or (size,))
    return PackedDim(blocks * each) if match[1] else PackedDim(blocks * each, of, factor, each)
