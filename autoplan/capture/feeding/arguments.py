"""Read the arguments of a forward: its signature and annotations, and what arguments of such names usually are."""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autoplan.capture.feeding.names import passed_on, usual_names
from autoplan.capture.feeding.wants import Path, State, Want, is_nothing, is_number
from autoplan.common.code.code_place import nodes_of
from autoplan.common.conventions import conventions

_B, _L, _W, _S = "batch", "length", "width", "side"
_PLAIN = {int: 2, float: 1.0, bool: False, "int": 2, "float": 1.0, "bool": False}

IDS = Want("ids", (_B, _L))
SEQUENCE = Want("float", (_B, _L, _W))
FLAT = Want("float", (_B, _W))
PICTURE = Want("float", (_B, 3, _S, _S))
FILM = Want("float", (_B, 3, "frames", _S, _S))
NUMBERS = Want("unit", (_B,))
CLASSES = Want("ids", (_B,))
MASK = Want("bool", (_B, _L))
WAVE = Want("float", (_B, "samples"))
NONE = Want("none")

_SEVERAL = (2, 3, 1, 4)  # arguments that a `*rest` may stand for
_USUAL = (IDS, NUMBERS, CLASSES, SEQUENCE, FLAT, Want("float", (_B, _L)), PICTURE, MASK, NONE)


class Rest(inspect.Parameter):
    """The parameter `*rest` of a forward. Inputs hold its items under the name "*rest"."""

    @property
    def name(self) -> str:
        return f"*{super().name}"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """A forward's required and optional arguments. `open`: it takes any keyword. `losses`: arguments that make it
    compute a loss: targets, or a switch that is off."""

    model: nn.Module
    required: tuple[inspect.Parameter, ...]
    optional: tuple[inspect.Parameter, ...]
    signature: str
    open: bool = False
    losses: tuple[inspect.Parameter, ...] = ()

    @staticmethod
    def of(model: nn.Module, *, first: bool = False) -> Arguments:
        """Read them from a model's forward. `first`: the first argument counts as required even if it is optional."""
        try:
            signature = inspect.signature(model.forward, eval_str=True)
        except Exception:  # an annotation may name something undefined
            signature = inspect.signature(model.forward)
        named = [p for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        name = type(model).__name__
        stars = [Rest(p.name, p.kind) for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL]
        rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        taken = {p.name for p in named}
        more = {p.name: p for p in (*passed_on(model.forward, model), *keywords(model, rest))} if rest else {}
        named += [p for p in more.values() if p.name not in taken]
        required = [p for p in named or stars if p.default is p.empty or first and p is named[0]]
        optional = [p for p in (*named, *stars) if p not in required and (p in stars or is_nothing(p.default))]
        if not required and optional:
            required, optional = optional[:1], optional[1:]
        switches = [p for p in named if usual_names().loss_switches.search(p.name)]
        words = conventions().target_words
        losses = [p for p in optional if p in switches or any(word in p.name.lower() for word in words)]
        losses += [p for p in switches if p.default is False]
        text = f"{name}.forward{signature}"
        return Arguments(model, tuple(required), tuple(optional), text, rest is not None, tuple(losses))

    def start(self) -> State:
        """Return the first state: the likeliest value of each required argument."""
        return State(tuple((p.name, next(self.usual(p, p is self.required[0]))) for p in self.required))

    def usual(self, parameter: inspect.Parameter, first: bool = False) -> Iterator[Want]:
        """Yield what such an argument usually is, the likeliest first. Inputs of a graph have nodes, and no batch. A
        `*rest` is several equal arguments."""
        if isinstance(parameter, Rest):
            each = self.usual(field_of(None, parameter.name[1:]), first)
            yield from (_of_each(number, want) for want in each for number in _SEVERAL)
            return
        if not usual_names().has_edges(p.name for p in self.required):
            yield from usual(parameter, self.model, first)
            return
        if first:
            yield from (of_nodes(want) for want in first_layer_wants(self.model) if len(want.shape) == 2)
            yield Want("float", ("nodes", _W))
        yield from sorted(map(of_nodes, usual(parameter, self.model, first)), key=lambda want: want.kind == "positions")

    def left_out(self, state: State) -> list[tuple[Path, inspect.Parameter]]:
        """Return the optional arguments that a call does not have, and the keys of its dicts that need not be there."""
        optional: list[tuple[Path, inspect.Parameter]]
        optional = [((parameter.name,), parameter) for parameter in self.optional if not state.holds(parameter.name)]
        for name, want in state.wants:
            more = keywords(self.model, name) if want.kind == "dict" else ()
            optional += [((name, key.name), key) for key in more if key.name not in dict(want.items)]
        return optional

    def find(self, name: str) -> inspect.Parameter | None:
        return next((p for p in (*self.required, *self.optional) if p.name in (name, f"*{name}")), None)


def keywords(model: nn.Module, rest: str) -> list[inspect.Parameter]:
    """Return the keys that a forward reads from its `**rest`; `rest["x"]` is required unless it is tested for."""
    must: dict[str, bool] = {}
    for node in nodes_of(model.forward):
        match node:
            case ast.Subscript(value=ast.Name(id=found), slice=ast.Constant(value=str(key))):
                needed = True
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=found), attr=how), args=[ast.Constant(value=str(key)), *other]
            ):
                needed = how == "pop" and not other
            case ast.Compare(left=ast.Constant(value=str(key)), comparators=[ast.Name(id=found)]):
                needed = False
            case _:
                continue
        if found == rest and key.isidentifier():
            must[key] = must.get(key, True) and needed
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(name, kind, default=inspect.Parameter.empty if needed else None)
        for name, needed in must.items()
    ]


def usual(parameter: inspect.Parameter, model: nn.Module, first: bool = False) -> Iterator[Want]:
    """Yield what such an argument usually is, the likeliest first; `first`: the first layer counts before the name."""
    names = usual_names()
    yield from _plain(parameter, model)
    annotated = _record(parameter.annotation, model) or _annotated(parameter.annotation)
    if annotated is not None and is_number(annotated.value) and names.offsets.search(parameter.name):
        annotated = Want("value", value=0)
    if annotated is not None:
        if annotated.value is tuple and names.states.search(parameter.name):
            yield from (_of_each(len(annotated.items), state) for state in _recurrent(model))
        yield annotated
        if annotated.kind == "list" and PICTURE in names.usual(parameter.name)[:1]:  # each of its own size, unbatched
            picture = dataclasses.replace(PICTURE, shape=PICTURE.shape[1:])
            yield dataclasses.replace(annotated, items=tuple((place, picture) for place, _ in annotated.items))
        if is_number(annotated.value):
            yield from (Want("value", value=number) for number in (2, 1, 0) if number != annotated.value)
        return
    seen = set()
    if isinstance(parameter.default, tuple):
        yield from (_of_each(2, state) for state in _recurrent(model))
    if names.states.search(parameter.name):
        yield from _recurrent(model)
    named = names.usual(parameter.name)
    layers = tuple(first_layer_wants(model))
    seen_first = layers[:1] if not named or named[0] in (PICTURE, FILM, WAVE) else named[:1]
    for want in (*seen_first, *layers, *named, *_USUAL) if first else (*named, *_USUAL, *layers):
        if want not in seen:
            seen.add(want)
            yield want


def _without_none(annotation: Any) -> Any:
    """Return what an annotation says of an argument that is not None."""
    if typing.get_origin(annotation) not in (typing.Union, types.UnionType):
        return annotation
    others = [argument for argument in typing.get_args(annotation) if argument is not type(None)]
    return others[0] if len(others) == 1 else annotation


def _record(annotation: Any, model: nn.Module) -> Want | None:
    """Return an instance of an annotated class with its required fields: a dataclass, a named tuple, a typed dict; or
    a dict with all members of an Enum as keys."""
    annotation = _without_none(annotation)
    keys = typing.get_args(annotation)[:1] if typing.get_origin(annotation) in (dict, Mapping) else ()
    if keys and isinstance(keys[0], enum.EnumType):
        plain = not issubclass(keys[0], int | str)  # members that are numbers or strings are keys as they are
        members: list[Any] = list(keys[0])
        held = {f"{keys[0].__name__}.{member.name}" if plain else member: member.name for member in members}
        items = of_items("dict", {name: field_of(None, name) for name in held.values()}, model).items
        return Want("dict", value=keys[0] if plain else None, items=tuple(zip(held, dict(items).values(), strict=True)))
    if not isinstance(annotation, type):
        return None
    cls: Any = annotation
    if dataclasses.is_dataclass(annotation):
        wanted = [item for item in dataclasses.fields(annotation) if item.init and item.default is dataclasses.MISSING]
        fields = [item.name for item in wanted if item.default_factory is dataclasses.MISSING]
        return of_items("record", {name: field_of(annotation, name) for name in fields}, model, annotation)
    if typing.is_typeddict(annotation):
        fields = [name for name in cls.__annotations__ if name in cls.__required_keys__]
        return of_items("dict", {name: field_of(annotation, name) for name in fields}, model)
    if issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
        fields = cls._fields[: len(cls._fields) - len(cls.__new__.__defaults__ or ())]
        items = of_items("record", {name: field_of(annotation, name) for name in fields}, model).items
        return Want("list", value=annotation, items=tuple(enumerate(want for _, want in items)))
    return None


def _plain(parameter: inspect.Parameter, model: nn.Module) -> Iterator[Want]:
    """Yield plain values for an argument that is annotated with them or as a function, or compared with strings."""
    annotation = _without_none(parameter.annotation)
    if typing.get_origin(annotation) is typing.Literal or isinstance(annotation, enum.EnumType):
        values = annotation if isinstance(annotation, enum.EnumType) else typing.get_args(annotation)
        yield from (Want("value", value=value) for value in values)
        return
    yield from (Want("value", value=value) for value in _compared_strings(type(model).forward).get(parameter.name, ()))
    if typing.get_origin(annotation) is Callable or annotation in (Callable, typing.Callable):
        yield Want("value", value=torch.relu)


@functools.lru_cache(maxsize=64)
def _compared_strings(function: Any) -> dict[str, list[str]]:
    """Return the strings with which a function compares each name."""
    strings: dict[str, list[str]] = {}
    for node in nodes_of(function):
        match node:
            case ast.Compare(left=ast.Name(id=name), ops=[ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn()]):
                within: list[ast.AST] = list(node.comparators)
            case ast.Match(subject=ast.Name(id=name)):
                within = [case.pattern for case in node.cases]
            case _:
                continue
        constants = (n.value for part in within for n in ast.walk(part) if isinstance(n, ast.Constant))
        strings.setdefault(name, []).extend(value for value in constants if isinstance(value, str))
    return strings


def of_items(kind: Any, held: Mapping[str, inspect.Parameter], model: nn.Module, cls: Any = None) -> Want:
    """Return a dict or a record with the usual value of each item; if there are edges, there are nodes."""
    items = {
        name: next(usual(parameter, model, number == 0 and kind == "record"))
        for number, (name, parameter) in enumerate(held.items())
    }
    if usual_names().has_edges(items):
        items = {name: of_nodes(want) for name, want in items.items()}
    return Want(kind, value=cls, items=tuple(items.items()))


def field_of(cls: Any, name: str) -> inspect.Parameter:
    """Return a dataclass field as an argument; of another record, an argument of that name."""
    try:
        hints = typing.get_type_hints(cls) if cls is not None else {}
    except (NameError, TypeError, AttributeError, SyntaxError):  # an annotation may name something undefined
        hints = {}
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hints.get(name, inspect.Parameter.empty))


def _recurrent(model: nn.Module) -> Iterator[Want]:
    """Yield the initial states that recurrent layers take."""
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            for batch in (_B, _L) if layer.batch_first else (_L, _B):
                yield Want("float", (layer.num_layers * (1 + layer.bidirectional), batch, layer.weight_hh_l0.shape[1]))
        elif isinstance(layer, nn.RNNCellBase):
            state = Want("float", (_B, layer.weight_hh.shape[1]))
            yield from (_of_each(2, state), state) if isinstance(layer, nn.LSTMCell) else (state,)


def _of_each(number: int, want: Want) -> Want:
    """Return a tuple of `number` equal items."""
    return Want("list", value=tuple, items=tuple((place, want) for place in range(number)))


def of_nodes(want: Want) -> Want:
    if want.shape[:1] != (_B,) or len(want.shape) > 3:
        return want
    return dataclasses.replace(want, shape=("nodes", *want.shape[1:][-1:]) if want.kind != "ids" else ("nodes",))


def _annotated(annotation: Any) -> Want | None:
    """Return what an annotation says beyond "a tensor"."""
    if annotation in _PLAIN:
        return Want("value", value=_PLAIN[annotation])
    within = typing.get_origin(annotation)
    if within in (typing.Union, types.UnionType):
        inside = [_annotated(argument) for argument in typing.get_args(annotation) if argument is not type(None)]
        return inside[0] if inside and all(want is not None for want in inside) else None
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if within in (list, tuple) and typing.get_args(annotation)[:1] == (int,):
        return Want("list", items=((0, Want("size", value=_L)),))
    if within is tuple and len(parts := typing.get_args(annotation)) > 1 and set(parts) == {torch.Tensor}:
        return _of_each(len(parts), FLAT)
    if within in (list, tuple) or re.match(r"(typing\.)?(list|tuple|sequence)\b", text, re.IGNORECASE):
        return Want("list", items=((0, FLAT), (1, FLAT)))  # with one item, a loop never goes on
    if within is dict or re.match(r"(typing\.)?(dict|mapping)\b", text, re.IGNORECASE):
        return Want("dict")
    return None


def first_layer_wants(model: nn.Module) -> Iterator[Want]:
    """Yield the inputs of the first layer of each kind with weights, in the order in which they were made; without any
    (scripted code, plain parameters), what a matrix may take."""
    seen = set()
    for module in model.modules():
        kind = type(module)
        if isinstance(module, nn.Module) and kind not in seen:
            wants = _of_layer(module)
            if wants is not None:
                seen.add(kind)
                yield from wants
    matrices = (parameter for parameter in model.parameters() if parameter.dim() == 2)
    for width in dict.fromkeys(size for matrix in matrices for size in (matrix.shape[1], matrix.shape[0])):
        yield from () if seen else (Want("float", (_B, _L, width)), Want("float", (_B, width)))


def lengths_of(model: nn.Module) -> Iterator[int]:
    """Yield sizes that may be lengths of sequences: of masks and other buffers, then of tables that are no layer's."""
    tables = [buffer for buffer in model.buffers() if buffer.dim() > 1]
    for module in model.modules():
        if isinstance(module, nn.Embedding) or not type(module).__module__.startswith("torch."):
            tables += (parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1)
    yield from dict.fromkeys(size for table in tables for size in table.shape)


def _of_layer(module: nn.Module) -> tuple[Want, ...] | None:
    if isinstance(module, nn.Embedding):
        return (Want("ids", (_B, _L), module.num_embeddings),)
    if isinstance(module, nn.Conv3d):
        return (
            Want("float", (_B, module.in_channels, "frames", _S, _S)),
            Want("float", (_B, module.in_channels, _S, _S, _S)),
        )
    if isinstance(module, nn.Conv2d):
        return (Want("float", (_B, module.in_channels, _S, _S)),)
    if isinstance(module, nn.Conv1d):
        long = (Want("float", (_B, module.in_channels, "samples")),) if module.in_channels < 3 else ()
        return (*long, Want("float", (_B, module.in_channels, _L)), Want("float", (_B, _L, module.in_channels)))
    if isinstance(module, nn.Linear):
        return (Want("float", (_B, _L, module.in_features)), Want("float", (_B, module.in_features)))
    if isinstance(module, nn.RNNBase):
        return (Want("float", (_B, _L, module.input_size)),)
    return None
