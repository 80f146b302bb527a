"""One call that the path guard traces (guard.py): where it strays from what the plan knows, and what leaves it."""

from __future__ import annotations

import dis
import operator
import random
import sys
from collections.abc import Callable
from functools import partial
from math import prod
from types import FrameType
from typing import Any
from weakref import WeakMethod

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.code.code_place import call_name, outer_stores
from autoplan.common.code.forms import form_of, form_of_given, without_length
from autoplan.common.code.ways import ENTRY, Follower, Key, Tracer, is_module_call, key_in, source_line
from autoplan.common.nested import changed_inside, flatten_tensors
from autoplan.common.torch_internals import DisableTorchFunction
from autoplan.execute.data_parallel.mesh_dims import ALIASES
from autoplan.execute.guard.marks import GRADIENT, PART, Marks, Shape, fits, keeping_code, loads_of
from autoplan.execute.guard.situations import reads_outside
from autoplan.execute.parameters.held import memory_of
from autoplan.ops.elementwise import literals_say

# Sizes of a rank's parts, as the model's code reads them while a guard looks on.
#
# A plan may know both ways of `if h.shape[0] == h.shape[-1]`, and a rank takes the wrong one: its part is narrower than
# the value. So a size that is read of a part knows that of the whole value too, as far as it can be told (from weights
# through linear layers and what keeps shapes), and a comparison which that would answer otherwise is noted. Where the
# other side may be a count that sharding has set (`h.shape[-1] == self.heads * self.width`), ranks compare their own.

Pair = tuple[float, float]
Differs = Callable[[], Callable[[Pair, Pair], None] | None]  # a weak reference: models and caches keep sizes
WholeShapes = Callable[[torch.Tensor], Shape | None]  # None: cannot be told

_KEEP_SHAPES = {"clone", "contiguous", "detach", "double", "dropout", "float", "half", "log_softmax", "softmax"}
_KEEP_SHAPES |= {"layer_norm", "rms_norm", "to", "type_as"}


class PartSize(int):
    """A size of a part. `whole`: of the value; None: unknown. `differs` hears of comparisons that `whole` would answer
    otherwise: what was compared here, and what it is of the whole value. `counted`: plain numbers may be counts that
    sharding has set, so that nothing is known of what is computed with them."""

    whole: int | None
    differs: Differs
    counted: bool

    @classmethod
    def of(cls, size: int, whole: int | None, differs: Differs, counted: bool) -> PartSize:
        part = cls(size)
        part.whole, part.differs, part.counted = whole, differs, counted
        return part

    def _answer(self, ask: Callable[[Any, Any], bool], other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        here = int(self), int(other) if isinstance(other, PartSize) else other
        whole, facing = self.whole, other.whole if isinstance(other, PartSize) else other
        answer = ask(*here)
        if whole is not None and facing is not None and ask(whole, facing) != answer:
            differs = self.differs()
            if differs is not None:
                differs(here, (whole, facing))
        return answer

    def __reduce__(self) -> Any:  # copies and pickles are plain ints
        return int, (int(self),)


def _computed(name: str, plain: Callable[[Any, Any], Any]) -> None:
    def operate(self: PartSize, other: Any) -> Any:
        result = plain(self, other)
        if type(result) is not int:
            return result
        both = self.whole, other.whole if isinstance(other, PartSize) else None if self.counted else other
        return PartSize.of(result, None if None in both else plain(*both), self.differs, self.counted)

    setattr(PartSize, name, operate)


def _compared(ask: Callable[[Any, Any], bool]) -> None:
    setattr(PartSize, f"__{ask.__name__}__", lambda self, other: self._answer(ask, other))


for _ask in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    _compared(_ask)
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _dunder in (f"__{_name}__", f"__r{_name}__"):
        _computed(_dunder, getattr(int, _dunder))


def whole_shape(function: Any, args: Any, kwargs: Any, result: Any, shapes: WholeShapes) -> Shape | None:
    """The shape that the result would have, computed from whole values; None where that cannot be told."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    whole = [shapes(tensor) for tensor in tensors]
    if not isinstance(result, torch.Tensor) or not tensors or None in whole:
        return None
    sizes = [shape for shape in whole if shape is not None]
    name = call_name(function)
    if name == "linear":
        joined = (*sizes[0][:-1], sizes[1][0])
    elif kwargs.get("keepdim") and len(sizes) == 1 and result.dim() == len(sizes[0]):  # a mean of features
        joined = tuple(1 if size == 1 else all_of for size, all_of in zip(result.shape, sizes[0], strict=True))
    elif name in _KEEP_SHAPES or literals_say(name) == "elementwise" or (literals_say(name) == "nothing"):
        try:
            joined = tuple(torch.broadcast_shapes(*sizes))
        except RuntimeError:  # a rank's own number of rows meets the whole one
            return None
    else:
        return None
    return joined if fits(result, joined) else None


def plain_sizes(value: Any) -> Any:
    """Return a model's output with plain ints in place of such sizes, which its caller may compare with anything."""
    if isinstance(value, PartSize | torch.Size):
        return torch.Size(map(int, value)) if isinstance(value, torch.Size) else int(value)
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    same = all(isinstance(item, torch.Tensor) or plain_sizes(item) is item for item in items)
    return value if same else changed_inside(value, plain_sizes)


# The tracer.

_VALUES_READ = frozenset(
    {  # they return values to Python, or sizes that depend on values
        *("__array__", "__bool__", "__complex__", "__contains__", "__dlpack__", "__float__", "__format__", "__index__"),
        *("__int__", "__repr__", "allclose", "equal", "is_nonzero", "item", "numpy", "tolist"),
        *("_unique2", "argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"),
    }
)
# What does not reach a parameter, of which a forward has a view; and what to do instead.
_LOST = {
    torch.Tensor.data.__set__: ("sets .data of", "change it in place, under torch.no_grad(): weight.copy_(x)"),
    torch.Tensor.grad.__get__: ("reads .grad of", "read it outside of the forward"),
    torch.Tensor.register_hook: ("sets a hook on", "set it outside of the forward, once the model is sharded"),
}
_COUNTS = ("nelement", "numel")
_SIZES = frozenset({"__get__", "size", *_COUNTS})
HOOKS = (
    "hook a module that returns full values, detach the hook's arguments, or replicate the module: overrides={name: "
    "'replicate'}"
)
ONE_PART, PARTS_OF_GRADIENT = "a rank's shard of a value", "a value with a partial gradient"


class _Every(set[str]):
    """A set that contains all ways."""

    def __contains__(self, way: object) -> bool:
        return True


_EVERY = _Every()


def _by_mask(index: Any) -> bool:
    """Return whether an index contains a mask, so that the size depends on values."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _is_sharded_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter in FSDP2's shards: while its module runs, another object stands for it."""
    names = tensor.device_mesh.mesh_dim_names or () if isinstance(tensor, DTensor) else ()
    return any(name in names for name in ALIASES["dp_shard"])


def _host_state() -> tuple[Any, bytes]:
    numbers: Any = numpy.random.get_state()
    return random.getstate(), numbers[1].tobytes()


class Watch(Tracer):
    """The tracer of one call."""

    def __init__(self, guard: Any) -> None:  # a PathGuard, whose file imports this one
        super().__init__()
        self.guard, self.marks = guard, Marks()
        self.know(guard.model)
        self.counts: dict[int, set[str]] = {}
        modules = dict(guard.model.named_modules()) if guard.edited else {}  # modules may have been removed
        for name, attribute in guard.edited:
            self.counts.setdefault(id(modules.get(name)), set()).add(attribute)
        self.strays: dict[str, None] = {}
        self.sizes: dict[str, None] = {}
        self.lengths: set[int] = set()  # that `len` of a part has answered
        self.exits: dict[str, str] = {}  # sentences, with hints
        self.escaping: dict[int, tuple[torch.Tensor, str]] = {}  # partial gradients that a hook got, with words
        self.reads_values = False
        self.before = _host_state()

    def host_draws(self) -> bool:
        """Return whether Python's or numpy's random numbers, on which code may branch, were drawn."""
        return self.before != _host_state()

    def on_enter(self, follower: Follower, frame: FrameType) -> None:
        facts, names = follower.facts, frame.f_code.co_varnames
        owner = frame.f_locals.get(names[0]) if frame.f_code.co_argcount else None
        situations = self.guard.situations
        situations.note_code(owner, frame, facts.stores)
        self.guard.kept.note_code(frame)
        self.reads_values |= reads_outside(frame)
        if isinstance(owner, nn.Module):
            follower.touched = not self.counts.get(id(owner), set()).isdisjoint(frame.f_code.co_names)
        ways = self.guard.ways.get(self._key(follower))
        if ways is None and facts.code in self.guard.listeners.codes:
            follower.known = _EVERY
            self._hook(frame)
        elif not (self.guard.compares and self.guard.kernels.isdisjoint({*facts.code.co_names, facts.code.co_name})):
            follower.known = _EVERY
        elif ways is None:
            follower.known = set()
            self._stray(follower, None)
            count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            if self.marks.kind_in([frame.f_locals.get(name) for name in names[:count]]) == PART:  # it may keep it
                self._touch(follower)
        else:
            follower.known = ways
            situations.open_ways |= not ways.issuperset(f"{at}{side}" for at in facts.asking for side in "+-")

    def _key(self, follower: Follower) -> Key:
        return key_in(self.guard.ways, follower.facts.place, follower.facts.hash, follower.owner)

    def on_function(self, follower: Follower, arguments: tuple[Any, ...]) -> None:
        if any(_is_sharded_data(tensor) for _, tensor in flatten_tensors(arguments)):
            text = f"{source_line(follower.facts.code, None)} is given parameters that FSDP2 has not gathered"
            self.exits[text] = "give it the modules alone, or leave dp_shard out of the mesh"
        forms = self.guard.forms.get(self._key(follower), {}).get(ENTRY)
        form = form_of_given(arguments)
        if forms is not None and not forms.has(form, self.guard.edited_names) and self.marks.any_in(arguments):
            self.strays[f"{source_line(follower.facts.code, None)} [{form}]"] = None

    def on_way(self, follower: Follower, way: str) -> None:
        if ">" in way:
            self._stray(follower, None)
        else:
            self._stray(follower, int(way.rstrip("+-")))

    def _hook(self, frame: FrameType) -> None:
        """Check the arguments of a foreign hook that begins."""
        code, loads = frame.f_code, loads_of(frame.f_code)
        module = frame.f_back.f_locals.get("self") if frame.f_back is not None else None
        name = self.guard.name_of(module) if isinstance(module, nn.Module) else ""
        words = f"a hook on {name or 'the model'} ({source_line(code, None)}) receives"
        for argument in loads:
            value = frame.f_locals.get(argument)
            kind = self.marks.kind_in(value)
            if kind == PART:
                self.exits[f"{words} {ONE_PART}"] = HOOKS
            elif kind == GRADIENT:
                text = f"{words} {PARTS_OF_GRADIENT}"
                self.escaping.update(
                    (id(tensor), (tensor, text)) for _, tensor in flatten_tensors(value) if self.marks.any_in(tensor)
                )

    def on_return(self, follower: Follower, frame: FrameType, value: Any) -> None:
        if self.escaping and follower.facts.code in self.guard.listeners.codes:
            if sum(loads_of(frame.f_code).values()) == 1:  # it may just return its argument
                for _, tensor in flatten_tensors(value):
                    self.escaping.pop(id(tensor), None)
            self.exits.update((text, HOOKS) for _, text in self.escaping.values())
            self.escaping.clear()
        if follower.strays and self.marks.any_in(value):
            self._touch(follower)
        for name in outer_stores(frame.f_code):
            made_here = any(name in running.frame.f_code.co_cellvars for running in self.frames.values())
            if not made_here and self.marks.any_in(frame.f_locals.get(name)):
                self.exits[f"{source_line(frame.f_code, None)}: stores {ONE_PART} in {name!r}, a variable outside"] = (
                    "return it from forward: the model's outputs are full on every rank"
                )

    def on_module_call(self, frame: FrameType) -> Any:
        arguments = frame.f_locals.get("args"), frame.f_locals.get("kwargs")
        if self.marks.any_in(arguments):
            self._touch_above(frame.f_back)
            module, planned = frame.f_locals["self"], self.guard.planned
            name = self.guard.name_of(module) if module not in planned else ""  # unless the forward made the module
            added = name and planned.isdisjoint(module.modules())  # else a wrapper
            if added and self.marks.kind_in(arguments) == PART:
                text = f"{name} ({type(module).__name__}) was added after the model was sharded, and receives"
                self.exits[f"{text} {ONE_PART}"] = "add it before sharding, and plan again"
        if not self.guard.compares or id(frame.f_locals.get("self")) not in self.guard.listeners.backward:
            return None
        frame.f_trace_lines = frame.f_trace_opcodes = False
        return partial(self._backward_hook, frame.f_locals["self"])

    def _backward_hook(self, module: nn.Module, frame: FrameType, event: str, value: Any) -> Any:
        """Check a module with foreign backward hooks when it returns: torch's wrapper has removed the marks."""
        if event == "return":
            places = {memory_of(tensor) for tensor in list(self.marks.tensors)}
            arguments = frame.f_locals.get("args"), frame.f_locals.get("kwargs")
            if any(x.requires_grad and memory_of(x) in places for _, x in flatten_tensors((arguments, value))):
                name = self.guard.name_of(module) or "the model"
                self.exits[f"a backward hook on {name} receives partial gradients"] = HOOKS
        return partial(self._backward_hook, module)

    def _stray(self, follower: Follower, offset: int | None) -> None:
        text = source_line(follower.facts.code, offset)
        if text not in follower.strays:
            follower.strays.append(text)
        if follower.touched:  # it reads a count that is local to the rank
            self._touch(follower)

    def _touch(self, follower: Follower) -> None:
        """Record what a function strayed into, since it handles a marked value."""
        self.strays.update(dict.fromkeys(follower.strays))

    def _touch_above(self, frame: FrameType | None) -> None:
        """Record this for all functions that run in the module whose code this is."""
        while frame is not None and not is_module_call(frame.f_code):
            follower = self.frames.get(id(frame))
            if follower is not None:
                self._touch(follower)
            frame = frame.f_back

    def on_torch(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        name = getattr(function, "__name__", "")
        self.reads_values |= name in _VALUES_READ or (function is torch.Tensor.__getitem__ and _by_mask(args[1]))
        with DisableTorchFunction():
            lost = _LOST.get(function)
            if lost and args[0] in self.marks.weights and (caller := self.caller(sys._getframe(2))):
                line = source_line(caller.facts.code, caller.frame.f_lasti)
                self.exits[f"{line}: {lost[0]} a weight in a forward, which has only a view of it"] = lost[1]
            kind = self.marks.kind_in((args, kwargs))
            if not kind:
                return result
            if kind == PART and name in _SIZES:
                result = self._sizes(name, args, result)
            elif name == "__len__":
                self.lengths.add(result)
            whole = whole_shape(function, args, kwargs, result, self.marks.shape_of) if kind == PART else None
            self.marks.add(result, kind, whole)
            if name == "register_hook" and len(args) > 1 and (code := keeping_code(args[1])) is not None:
                self.exits[f"{source_line(code, None)}: a hook stores a gradient, {ONE_PART}"] = HOOKS
            asks = kind == PART or any(tensor.requires_grad for _, tensor in flatten_tensors(result))
            if self.escaping and not asks:  # a hook that computes without a gradient is right
                for _, tensor in flatten_tensors((args, kwargs)):
                    self.escaping.pop(id(tensor), None)
        if kind == PART and (result is None or next(flatten_tensors(result), None) is not None):
            self._compare(function, args, kwargs, sys._getframe(2))
        if asks:
            self._touch_above(sys._getframe(2))
        return result

    def _sizes(self, name: str, args: Any, result: Any) -> Any:
        """Sizes of a part that the model's own code reads know those of the whole value."""
        sizes = isinstance(result, int | torch.Size) and not isinstance(result, bool)
        if not sizes or self.caller(sys._getframe(3)) is None:
            return result
        whole = self.marks.shape_of(args[0])
        part_of = partial(PartSize.of, differs=WeakMethod(self._differs), counted=bool(self.guard.edited))
        if isinstance(result, torch.Size):
            return torch.Size(map(part_of, result, whole or (None,) * len(result)))
        if name in _COUNTS:
            return part_of(result, None if whole is None else prod(whole))
        if len(args) < 2 or not isinstance(args[1], int):
            return result
        return part_of(result, None if whole is None else whole[args[1]])

    def _differs(self, here: Pair, whole: Pair) -> None:
        """A comparison that sizes of the whole value would answer otherwise."""
        frame = sys._getframe(3)
        follower = self.frames.get(id(frame)) if self.guard.running is self else None
        if follower is None or dis.opname[frame.f_code.co_code[frame.f_lasti]] != "COMPARE_OP":
            return
        if here[0] != here[1] or not self.guard.edited:  # else it is held against a rank's own count
            compared = f"compares {here[0]} with {here[1]}; for the full value, {whole[0]} with {whole[1]}"
            self.sizes[f"{source_line(frame.f_code, frame.f_lasti)} ({compared})"] = None

    def _is_length(self, caller: Follower, args: Any) -> bool:
        """Return whether a number that equals a tensor's leading size may be `len` of it, not a number of the caller's:
        the leading dim is whole, or the code asked for that length."""
        size, whole = args[0].shape[0], self.marks.shape_of(args[0])
        return (whole is not None and whole[0] == size) or size in self.lengths or "int" in caller.facts.code.co_names

    def on_planned(self, function: Any, args: Any, kwargs: Any) -> None:
        if self.marks.kind_in((args, kwargs)) == PART:
            self._compare(function, args, kwargs, sys._getframe(2))

    def _compare(self, function: Any, args: Any, kwargs: Any, frame: FrameType) -> None:
        """Record a call of this function with these literals that the plan does not know at its place. Calls with
        replicated values need no check, nor do their gradients, which ranks sum."""
        caller = self.caller(frame) if self.guard.has_forms and self.guard.compares else None
        if caller is None or caller.known is _EVERY:
            return
        form, place = form_of(literals_say, function, args, kwargs), caller.facts.call_at(caller.frame.f_lasti)
        form = without_length(form, partial(self._is_length, caller, args))
        forms = self.guard.forms.get(self._key(caller), {}).get(place)
        if form and (forms is None or not forms.has(form, self.guard.edited_names)):
            text = f"{source_line(caller.facts.code, place)} [{form}]"
            self.strays[text] = None
