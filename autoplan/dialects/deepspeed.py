"""DeepSpeed's `tensor_parallel.partition_config`: regular expressions on parameter names, and how to cut what matches.

    {"layer_specs": [{"patterns": [".*\\.qkv_proj\\.weight$"], "partition_type": "column", "shape": [3, -1]}]}

A `shape` says that the cut dim is packed. The expressions are resolved on the model's own names, so that one that
matches nothing is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from autoplan.decide.choices import Choice, ChoiceError
from autoplan.patterns import fold_names

__all__ = ["is_deepspeed", "read_deepspeed"]

_STYLES = {"column": "colwise", "row": "rowwise", "skip": "replicate"}


def is_deepspeed(data: Any) -> bool:
    """Is this a DeepSpeed config, or the part of one that is about tensor parallelism?"""
    return _specs(data) is not None


def _specs(data: Any) -> list[Any] | None:
    for key in ("tensor_parallel", "partition_config"):
        if isinstance(data, Mapping) and key in data:
            data = data[key]
    found = data.get("layer_specs") if isinstance(data, Mapping) else None
    return found if isinstance(found, list) else None


def read_deepspeed(data: Any, name: str, parameters: Iterable[str]) -> tuple[Choice, ...]:
    """The choices of a partition config, on the parameters of one model. The first spec that matches counts."""
    known = list(parameters)
    taken: set[str] = set()
    choices = []
    for index, spec in enumerate(_specs(data) or []):
        where = f"{name}: layer_specs[{index}]"
        style = _style_of(spec, where)
        matched = [p for p in known if p not in taken and any(_matches(e, p, where) for e in spec.get("patterns", ()))]
        if not matched:
            raise ChoiceError(
                f"{where}: {spec.get('patterns')} match no parameter of the model that is still free",
                hint=f"parameters look like {', '.join(fold_names(known)[:3])}",
            )
        taken.update(matched)
        written = str(spec.get("partition_type"))
        choices += [Choice(pattern, style, where, written) for pattern in fold_names(matched, known)]
    return tuple(choices)


def _style_of(spec: Any, where: str) -> str:
    kind = spec.get("partition_type") if isinstance(spec, Mapping) else None
    if kind not in _STYLES:
        raise ChoiceError(f"{where}: partition_type is {kind!r}", hint=f"DeepSpeed knows {', '.join(_STYLES)}")
    style = _STYLES[kind]
    return f"packed_{style}" if spec.get("shape") and style != "replicate" else style


def _matches(expression: str, parameter: str, where: str) -> bool:
    try:
        return re.search(expression, parameter) is not None
    except re.error as error:
        problem = f"{where}: {expression!r} is no regular expression: {error}"
        raise ChoiceError(problem, hint="mend the pattern") from error
