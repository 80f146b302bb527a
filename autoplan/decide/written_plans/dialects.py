"""Plans as torch, transformers and DeepSpeed write them, the dotted patterns that they use, and the wrappers that other
libraries put around a model.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from autoplan.common.conventions import conventions
from autoplan.common.files.decode import misshapen
from autoplan.common.files.rule_files import importable_here
from autoplan.common.patterns import fold_names, matches
from autoplan.decide.written_plans.choices import ChosenCut, ChosenCuts, WrittenPlanError, check_key, check_style
from autoplan.values import Plan
from autoplan.values.module_tree import NamedModules

# Dotted paths: `pkg.module.NAME`, `pkg.module.Class.attribute`, `pkg.module:function`. The value is a plan, or a
# function that returns one, of no argument, of the model, or of the model and `sequence_parallel`.


def looks_dotted(text: str) -> bool:
    """Return whether this could be a dotted path. (Whether it leads anywhere is another question.)"""
    parts = text.replace(":", ".").split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def plan_at(path: str, model: Any, sequence_parallel: bool = False) -> Mapping[str, Any] | Plan:
    """Return the dict or Plan that a dotted path leads to."""
    with importable_here():
        value = _value_at(path)
    called = ""
    if callable(value) and not isinstance(value, Mapping):
        try:
            value, called = _called(value, path, model, sequence_parallel), "() returned"
        except WrittenPlanError:
            raise
        except (Exception, SystemExit) as error:
            raise WrittenPlanError(f"{path} raises when it is called: {_said(error)}", hint="fix it first") from error
    if isinstance(value, (Mapping, Plan)):
        return value
    kind = type(value)
    of = f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
    raise WrittenPlanError(
        f"{path}{called or ' is'} {of}, which is not a plan",
        hint="it must be a dict of pattern: style, an autoplan Plan, or a function that returns one",
    )


def _value_at(path: str) -> Any:
    parts = path.replace(":", ".").split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        if not _exists(name):
            continue
        try:
            value = import_module(name)
        except ImportError as error:
            raise WrittenPlanError(f"{path}: importing {name} failed: {error}", hint="install what it needs") from error
        except (Exception, SystemExit) as error:
            raise WrittenPlanError(f"{path} raises on import: {_said(error)}", hint=f"fix {name} first") from error
        for part in parts[length:]:
            if not hasattr(value, part):
                public = [attribute for attribute in dir(value) if not attribute.startswith("_")]
                raise WrittenPlanError(f"{path}: {name} has no {part!r}", hint=f"it has {', '.join(public[:12])}")
            value, name = getattr(value, part), f"{name}.{part}"
        return value
    if parts[-1] in ("json", "yaml", "yml"):
        raise WrittenPlanError(f"there is no file {path}", hint="`autoplan plan MODEL --tp N -o FILE` writes one")
    raise WrittenPlanError(
        f"{path}: no module named {parts[0]!r}", hint="check the spelling, and that its folder is on PYTHONPATH"
    )


def _exists(module: str) -> bool:
    if module in sys.modules:  # `__main__` is there but has no spec
        return True
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or is no package
        return False


def _called(function: Callable[..., Any], path: str, model: Any, sequence_parallel: bool) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise WrittenPlanError(f"{path} cannot be called: {error}", hint="pass a plain function") from error
    offered = {"model": model, "sequence_parallel": sequence_parallel}
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.name in offered for p in places):
        arguments = {p.name: offered[p.name] for p in places if p.name in offered}
        unfilled = [p for p in places if p.name not in offered and p.default is p.empty]
        if not unfilled:
            return function(**arguments)
    required = [p for p in places if p.default is p.empty]
    if len(required) > 2:
        names = ", ".join(p.name for p in required)
        raise WrittenPlanError(f"{path} requires ({names})", hint="allowed: (), (model) or (model, sequence_parallel)")
    return function(*list(offered.values())[: len(required)])


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# Dicts of `ParallelStyle` objects. Only the side of the weight to shard is a choice; layouts follow from it.
# Frameworks subclass torch's styles, so a class is recognised by its ancestors.

_LAYOUT_ONLY = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")


def read_style(pattern: str, style: Any, name: str, *, by_position: bool) -> tuple[ChosenCut, ...]:
    """Return the choices of one line of a dict: a style's name, as transformers writes it, or a style object, of which
    ours may cover several parameters of their module."""
    if isinstance(style, str):
        return (ChosenCut(pattern, check_style(style, pattern, name, ALIASES), name, style, by_position),)
    classes = [cls.__name__ for cls in type(style).__mro__]
    if classes[0] == "PlannedModel":
        return ()
    choices = style.choices if "PlannedModule" in classes else [(pattern, _style_of(style, pattern, name))]
    layouts = [
        f"{side}={(layout[0] if isinstance(layout, tuple) and layout else layout)!r}"
        for side in ("input_layouts", "output_layouts")
        if (layout := getattr(style, side, None)) is not None
    ]
    written = f"{classes[0]}({', '.join(layouts)})"
    return tuple(ChosenCut(planned, chosen, name, written) for planned, chosen in choices)


def _style_of(style: Any, pattern: str, name: str) -> str:
    ancestors = [cls.__name__ for cls in type(style).__mro__]
    if "ColwiseParallel" in ancestors:
        return "colwise_gather_output" if _is_whole(getattr(style, "output_layouts", None)) else "colwise"
    if "RowwiseParallel" in ancestors:
        return "rowwise_split_input" if _is_whole(getattr(style, "input_layouts", None)) else "rowwise"
    if "SequenceParallel" in ancestors:
        return "sequence_parallel"
    if "ReplicatedWithGradAllReduce" in ancestors:
        return "replicated_with_grad_allreduce"
    if any(layout in ancestors for layout in _LAYOUT_ONLY):
        return "local_params"
    cls = type(style)
    raise WrittenPlanError(
        f"{name}: {pattern!r} has a {cls.__module__}.{cls.__qualname__}, which is not a style that autoplan knows",
        hint="use ColwiseParallel, RowwiseParallel or SequenceParallel, a subclass of them, or a style's name "
        "such as 'packed_colwise'",
    )


def _is_whole(layouts: Any) -> bool:
    """Return whether the (first) layout is Replicate()."""
    first = layouts[0] if isinstance(layouts, (list, tuple)) and layouts else layouts
    return type(first).__name__ == "Replicate"


# transformers' plans: strings by module or parameter. A model's plan is assembled from parts (hf/own_sharding.py);
# the place of a key decides its meaning, so each choice records that.

# Older and alternative names in transformers; ours are its newest.
ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "local_packed_colwise": "packed_colwise",
    "local_packed_rowwise": "packed_rowwise",
    "local": "local_params",
    "gather": "all_reduce",
    "replicated": "replicate",
    "ep_router": "replicate",
}


def hf_plan(model: object, name: str) -> ChosenCuts:
    """Return the plan that transformers itself would apply to a model, every key with its origin."""
    parts, parts_notes = conventions().shipped_parts(model)
    styles: dict[str, tuple[str, str]] = {}
    for part in parts:
        for key, style in part.styles.items():
            check_key(key, part.origin)
            styles[f"{part.prefix}.{key}" if part.prefix else key] = (style, part.origin)
    if not styles:
        raise WrittenPlanError(
            f"{name} has no transformers plan: {conventions().no_plan_because()}",
            hint="use source='inferred' (analysis), source='auto', or write one: source={pattern: style}",
        )
    choices = tuple(
        ChosenCut(key, check_style(style, key, origin, ALIASES), origin, style, by_position=True)
        for key, (style, origin) in styles.items()
    )
    notes = tuple(f"{c.pattern}: {c.written} comes from {c.origin}" for c in choices)
    return ChosenCuts(f"transformers' plan of {name}", "hf", choices, notes=(*notes, *parts_notes))


def with_prefix(choices: ChosenCuts, modules: Iterable[str], parameters: Iterable[str]) -> ChosenCuts:
    """Make keys relative to an inner model (as configs write them) absolute, if one prefix fits all dead keys."""
    modules = list(modules)
    names = [*modules, *parameters]
    dead = [c for c in choices.choices if not any(matches(c.pattern, name) for name in names)]
    if not dead:
        return choices
    for prefix in sorted((m for m in modules if m), key=lambda name: (name.count("."), name)):
        if all(any(matches(f"{prefix}.{c.pattern}", name) for name in names) for c in dead):
            moved = tuple(replace(c, pattern=f"{prefix}.{c.pattern}") if c in dead else c for c in choices.choices)
            note = f"{len(dead)} keys are relative to {prefix!r}"
            return replace(choices, choices=moved, notes=(*choices.notes, note))
    return choices


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
        style = _deepspeed_style(spec, where)
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


def _deepspeed_style(spec: Any, where: str) -> str:
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
    while type(model).__module__.startswith(_LIBRARIES):
        children = dict(model.named_children())
        inner = next((name for name in _INNER if name in children), None)
        if inner is None:
            break
        path.append(inner)
        model = children[inner]
    return ".".join(path), model


def ancestors_of(cls: type) -> tuple[tuple[str, str], ...]:
    """Return (module, qualname) of a class and of its ancestors, nearest first."""
    return tuple((base.__module__, base.__qualname__) for base in cls.__mro__ if base.__module__ != "builtins")
