"""DeepSpeed's plans, and the wrappers that other libraries put around a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from autoplan.common.files.decode import misshapen
from autoplan.common.patterns import fold_names
from autoplan.decide.written_plans.choices import ChosenCut, WrittenPlanError
from autoplan.values.module_tree import NamedModules

# DeepSpeed's `tensor_parallel.partition_config`. Expressions match from the start of a parameter's name, the first spec
# that matches counts, and a `shape` says that the cut dim is packed:
#
#     {"layer_specs": [{"patterns": [".*\.qkv_proj\.weight$"], "partition_type": "column", "shape": [3, -1]}]}

# Attributes that AutoTP divides, by name, on every module above a layer that it shards (release 0.19).
COUNTS = (
    *("n_heads", "inner_dim", "num_heads", "num_kv", "num_attention_heads", "num_attn_heads", "all_head_size"),
    *("embed_dim", "hidden_size", "num_key_value_heads", "num_kv_heads", "kv_n_heads", "d_model"),
    *("num_attention_heads_per_partition", "num_multi_query_groups_per_partition", "hidden_size_per_partition"),
)
_CONFIG = {"lm_head_patterns": [str], "layer_specs": [{"patterns": [str], "partition_type": str}]}
_SHAPE = {**_CONFIG, "partition_config": _CONFIG, "tensor_parallel": {**_CONFIG, "partition_config": _CONFIG}}
_STYLES = {"column": "colwise", "row": "rowwise", "skip": "replicate"}
_MORE = {
    ("column", "gather_output"): "colwise_gather_output",
    ("skip", "grad_allreduce"): "replicated_with_grad_allreduce",
}


def is_deepspeed(data: Any) -> bool:
    """Return whether this is a DeepSpeed config, or its part about tensor parallelism."""
    return specs_of(data) is not None


def specs_of(data: Any) -> list[Any] | None:
    """Return the specs of a config; None if it is none."""
    for key in ("tensor_parallel", "partition_config"):
        if isinstance(data, Mapping) and key in data:
            data = data[key]
    specs = data.get("layer_specs") if isinstance(data, Mapping) else None
    return specs if isinstance(specs, list) else None


def spec_for(data: Any, parameter: str) -> Mapping[str, Any] | None:
    """Return the spec that decides about a parameter."""
    matching = (
        s for s in specs_of(data) or [] if any(_matches(e, parameter, "a pattern") for e in s.get("patterns", ()))
    )
    return next(matching, None)


def heads_of(data: Any) -> tuple[str, ...]:
    """Return the names of vocabulary heads for DeepSpeed: last parts of module names, unless the config says others."""
    for key in ("tensor_parallel", "partition_config"):
        data = data[key] if isinstance(data, Mapping) and key in data else data
    return tuple(data.get("lm_head_patterns", ("lm_head", "embed_out")))


def kind_of(spec: Mapping[str, Any]) -> str:
    """Return column, row or skip; a spec without a type is a column."""
    return str(spec.get("partition_type", "column")).lower()


def read_deepspeed(data: Any, name: str, parameters: Iterable[str], tolerant: bool = False) -> tuple[ChosenCut, ...]:
    """Return the choices of a partition config, on the parameters of one model. The first spec that matches counts.
    `tolerant`: a spec that matches nothing is a choice for its first expression."""
    if problem := misshapen(data, _SHAPE):
        raise WrittenPlanError(f"{name}: {problem}", hint="see DeepSpeed's partition_config")
    names = list(parameters)
    taken: set[str] = set()
    choices = []
    for index, spec in enumerate(specs_of(data) or []):
        where = f"{name}: layer_specs[{index}]"
        style = _style_of(spec, where)
        matched = [p for p in names if p not in taken and any(_matches(e, p, where) for e in spec.get("patterns", ()))]
        if not matched and tolerant and spec.get("patterns"):
            choices.append(ChosenCut(str(spec["patterns"][0]), style, where, kind_of(spec)))
        elif not matched:
            raise WrittenPlanError(
                f"{where}: {spec.get('patterns')} match no parameter that is not yet matched",
                hint="DeepSpeed matches from the start of a name (begin with '.*'); names look like "
                f"{', '.join(fold_names(names)[:3])}",
            )
        taken.update(matched)
        choices += [ChosenCut(pattern, style, where, kind_of(spec)) for pattern in fold_names(matched, names)]
    return tuple(choices)


def _style_of(spec: Any, where: str) -> str:
    kind = kind_of(spec) if isinstance(spec, Mapping) else None
    if kind not in _STYLES:
        raise WrittenPlanError(f"{where}: partition_type is {kind!r}", hint=f"DeepSpeed knows {', '.join(_STYLES)}")
    more = next((style for (of, option), style in _MORE.items() if of == kind and spec.get(option)), None)
    style = more or _STYLES[kind]
    return f"packed_{style}" if spec.get("shape") and more is None and kind != "skip" else style


# A repeat inside a repeat, or many repeats in a row, can take exponential time.
_REPEAT = r"(?:[*+]|\{\d*,\d*\})"
_NESTED = re.compile(rf"\([^()]*{_REPEAT}[^()]*\)+{_REPEAT}")
_MOST_REPEATS = 6


@cache
def _refuse_slow(expression: Any, where: str) -> None:
    """Raise on an expression that could take forever on a name."""
    if not isinstance(expression, str):
        raise WrittenPlanError(f"{where}: {expression!r} is not a regular expression", hint="write the pattern as text")
    bare = re.sub(r"\\.|\[(?:\\.|[^\]])*\]", "x", expression)
    if len(expression) > 500 or _NESTED.search(bare) or len(re.findall(_REPEAT, bare)) > _MOST_REPEATS:
        raise WrittenPlanError(
            f"{where}: {expression[:80]!r} may take too long: it is too long, or repeats within or after repeats",
            hint=f"use at most {_MOST_REPEATS} repeats, none inside another",
        )


def _matches(expression: str, parameter: str, where: str) -> bool:
    _refuse_slow(expression, where)
    try:
        return re.match(expression, parameter) is not None
    except re.error as error:
        problem = f"{where}: {expression!r} is not a regular expression: {error}"
        raise WrittenPlanError(problem, hint="fix the pattern") from error


# Wrappers (PEFT, `torch.compile`, FSDP, checkpointing) hold the model as the one child that has (nearly) all
# parameters, under one of these names; plans for the model inside have keys relative to it.

_INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_model", "module", "model")
_LIBRARIES = ("peft.", "torch.", "accelerate.", "deepspeed.")


def unwrapped(model: NamedModules) -> tuple[str, NamedModules]:
    """Return the innermost model and its path inside the wrappers ("" if there are none)."""
    path: list[str] = []
    while True:
        inner = _inner(model)
        if inner is None:
            return ".".join(path), model
        path.append(inner)
        model = dict(model.named_children())[inner]


def _inner(model: NamedModules) -> str | None:
    if not type(model).__module__.startswith(_LIBRARIES):
        return None
    children = dict(model.named_children())
    return next((name for name in _INNER if name in children), None)


def ancestors_of(cls: type) -> tuple[tuple[str, str], ...]:
    """Return (module, qualname) of a class and of its ancestors, nearest first."""
    return tuple((base.__module__, base.__qualname__) for base in cls.__mro__ if base.__module__ != "builtins")
