"""Record one run of a model: module visits, torch-function calls and aten ops, in one space of tensor ids.

Three levels are needed at once. Aten ops are exact enough to tell what each dimension is; torch-function calls are
where the module's own Python passes literals and where a rewrite can be attached at run time; module visits are where
hooks can sit. Tensors are distinguished by object identity (strong references are kept: Python reuses ids).

Works on real and on fake tensors. Gradients are enabled but no tensor requires them: views then keep their identity
from the aten level up to Python, and `torch.no_grad` blocks in the model remain visible.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoplan.capture.called import call, inside_a_function
from autoplan.capture.dry_run import own
from autoplan.capture.feeding.failure import INSTEAD_OF_TRACED, current_place
from autoplan.capture.known_values import Escapes, KnownValues, TracedInt, integer_attributes, trace_attributes
from autoplan.capture.outside import outsiders_of
from autoplan.common.code.code_place import call_name, code_place
from autoplan.common.code.ways import listener, tracing
from autoplan.common.errors import CaptureError, OutsideError
from autoplan.common.nested import flatten_tensors, own_argument, signature_names
from autoplan.common.torch_internals import DispatchMode, FakeTensor, is_wrapped, outside_of_modes, unwrapped
from autoplan.ops import call_record
from autoplan.ops.views import reshapes_in_place
from autoplan.patches.classes import code_lies_open
from autoplan.values import Call, Fold, ModuleVisit, Op, Ref, Symbolic, TensorInfo, Trace

_KEEP_VALUES_BELOW = 4097  # elements of integer constants worth keeping: index tables, not token ids


class Recording:
    """The growing record of one run."""

    def __init__(self, model: torch.nn.Module, *, keep_values: bool = False) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.attributes = {name: integer_attributes(module) for name, module in self.modules.items()}
        self.escapes = Escapes()
        self.ids: dict[int, int] = {}
        self.kept: list[torch.Tensor] = []
        self.kinds: list[str] = []
        self.asking: set[int] = set()  # inputs that require a gradient
        self.names: dict[int, list[str]] = {}
        self.ops: list[Op] = []
        self.calls: list[Call] = []
        self.visits: list[dict[str, Any]] = []
        self.frames: list[list[Any]] = [["", 0, 0, None]]  # module, visit, next position, index into visits
        self.visit_counts: Counter[str] = Counter()
        self.grad_enabled = True
        self.differentiating = False  # whether `torch.autograd.grad` runs, whose ops follow from those recorded before
        self.outsiders = outsiders_of(model)
        self.op_values: list[Any] | None = [] if keep_values else None
        self.first: dict[int, torch.Tensor] = {}  # first values of inputs and weights, which may be overwritten later
        state = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        for name, tensor in itertools.chain(*state):
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            self.names.setdefault(self.id_of(tensor, kind), []).append(name)

    def id_of(self, tensor: torch.Tensor, kind: str = "constant") -> int:
        tensor = unwrapped(tensor)
        index = self.ids.get(id(tensor))
        if index is None:
            if tensor.is_nested:
                raise CaptureError(
                    f"{self.frames[-1][0] or 'the model'} makes a nested tensor (torch.nested), whose "
                    "rows have different lengths: a trace has one size per dim",
                    hint="pass padded rows with a mask, or one packed row with its sequence starts",
                )
            index = self.ids[id(tensor)] = len(self.kept)
            self.kept.append(tensor)
            self.kinds.append(kind)
            if self.op_values is not None and kind != "activation":
                with outside_of_modes():
                    self.first[index] = tensor.detach().clone()
        return index

    def renew(self, tensor: torch.Tensor, before: torch.Tensor) -> None:
        """Give a tensor a new id after an op that reshaped it in place; `before` keeps the old id."""
        self.kept[self.ids.pop(id(tensor))] = before

    def encode(self, value: Any) -> Any:
        """Return a runtime value as plain data: Refs for tensors, Symbolic for traced ints, names for torch objects."""
        if isinstance(value, torch.Tensor):
            value = unwrapped(value)
            if id(value) not in self.ids or id(value) in self.outsiders.originals:
                self.outsiders.refuse(value, self.frames[-1][0])
            return Ref(self.id_of(value))
        if isinstance(value, TracedInt):
            return Symbolic(int(value), value.origin)
        if value is None or isinstance(value, (bool, int, float, str, complex)):
            return value
        if isinstance(value, (list, tuple)):
            return tuple(self.encode(item) for item in value)
        if isinstance(value, dict):
            return {key: self.encode(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self.encode(_bound(item)) for item in (value.start, value.stop, value.step)))
        if value is Ellipsis:
            return value
        return str(value).removeprefix("torch.")

    def trace(self, folds: tuple[Fold, ...], feeds: tuple[str, ...], real: bool) -> Trace:
        visits = tuple(
            ModuleVisit(v["module"], v["visit"], v["inputs"], v["outputs"], (v["first"], v["last"]), v["parent"])
            for v in self.visits
        )
        return Trace(
            tensors=tuple(self._tensor_info(i) for i in range(len(self.kept))),
            ops=tuple(self.ops),
            calls=tuple(self.calls),
            visits=visits,
            module_classes={name: type(module).__name__ for name, module in self.modules.items()},
            attributes={name: integers for name, integers in self.attributes.items() if integers},
            comparisons=tuple(self.escapes.comparisons),
            escapes=tuple(self.escapes.floats),
            folds=folds,
            feeds=feeds,
            real=real,
            asking=frozenset(self.asking),
        )

    def _tensor_info(self, index: int) -> TensorInfo:
        tensor, kind = self.kept[index], self.kinds[index]
        values = None
        wrapped = is_wrapped(tensor)  # lives only inside its transform
        if kind in ("constant", "activation") and not (tensor.is_floating_point() or tensor.is_complex() or wrapped):
            constant = getattr(tensor, "constant", None) if _is_fake(tensor) else tensor
            if constant is not None and constant.numel() < _KEEP_VALUES_BELOW and constant.device.type != "meta":
                with suppress(NotImplementedError):  # torch.load has moved its bytes elsewhere
                    values = tuple(int(item) for item in constant.reshape(-1).tolist())
        shape = tuple(int(n) for n in tensor.shape)
        names = tuple(self.names.get(index, ()))
        return TensorInfo(shape, str(tensor.dtype).removeprefix("torch."), kind, names, values)  # type: ignore[arg-type]


def _bound(item: Any) -> Any:
    """Return a slice bound; a one-element integer tensor becomes its number if that is known."""
    if isinstance(item, torch.Tensor) and item.numel() == 1 and not (_is_fake(item) or item.is_floating_point()):
        with outside_of_modes():
            return int(item)
    return item


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class _OpRecorder(DispatchMode):
    """Records every aten op. An operator that runs functions (`flex_attention`, `torch.cond`) is refused."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        r, kwargs = self.recording, kwargs or {}
        if func.namespace == "prim" or r.differentiating:  # "prim": queries of a fake tensor's device, no mathematics
            return func(*args, **kwargs)
        if func.namespace == "higher_order":
            place = current_place()
            raise CaptureError(
                f"the model cannot be recorded: it calls {func.name()}, which torch.compile must trace\n"
                f"  called at {place.where}: {place.text}",
                hint=INSTEAD_OF_TRACED,
            )
        encoded_args, encoded_kwargs = r.encode(tuple(args)), r.encode(kwargs)
        name, _, overload = str(func).removeprefix("aten.").rpartition(".")
        before = args[0].detach() if reshapes_in_place(name) else None  # recorded as the out-of-place op
        result = func(*args, **kwargs)
        if before is not None:
            r.renew(args[0], before)
            name = name.removesuffix("_")
        for _, tensor in flatten_tensors(result):
            r.id_of(tensor, "activation")
        outputs = r.encode(result if isinstance(result, (list, tuple)) else (result,))
        r.ops.append(Op(name, overload, encoded_args, encoded_kwargs, outputs, r.frames[-1][0]))
        if r.op_values is not None:
            r.op_values.append((func, _clone(result)))
        return result


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(_clone(item) for item in value) if isinstance(value, (list, tuple)) else value


class _CallRecorder(TorchFunctionMode):
    """Records outermost torch-function calls, and turns sizes into traced integers."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        r, kwargs, name = self.recording, kwargs or {}, call_name(func)
        if name in ("attr:shape", "size", "numel"):
            return self._traced_size(name, func, args, kwargs)
        if torch.is_grad_enabled() or not inside_a_function():  # inside, gradients are off whatever is outside
            r.grad_enabled = torch.is_grad_enabled()
        first, place = len(r.ops), code_place()
        encoded = None if name.startswith("attr:") else (r.encode(tuple(args)), r.encode(kwargs))
        result = self._gradients(args, kwargs) if func is torch.autograd.grad else func(*args, **kwargs)
        if not call_record(name).assigns and next(flatten_tensors(result), None) is None:
            return result
        for _, tensor in flatten_tensors(result):
            r.id_of(tensor, "activation" if len(r.ops) > first else "constant")
        frame = r.frames[-1]
        encoded_args, encoded_kwargs = encoded or (r.encode(tuple(args)), r.encode(kwargs))
        r.calls.append(
            Call(name, frame[0], frame[1], frame[2], encoded_args, encoded_kwargs, r.encode(result),
                 (first, len(r.ops)), r.grad_enabled, place)
        )  # fmt: skip
        frame[2] += 1
        return result

    def _gradients(self, args: Any, kwargs: Any) -> Any:
        """Run `torch.autograd.grad`, and record each gradient as a new tensor like the value that it belongs to. Its
        own ops need no plan: they follow from those of the forward, and sums over ranks can be differentiated twice."""
        r, values = self.recording, [t for _, t in flatten_tensors(args[1] if len(args) > 1 else kwargs["inputs"])]
        if any(is_wrapped(value) for value in values):  # inside of a transform
            return torch.autograd.grad(*args, **kwargs)
        r.differentiating = True
        try:
            result = torch.autograd.grad(*args, **kwargs)
            for value, gradient in zip(values, result, strict=True):
                if gradient is not None and id(unwrapped(gradient)) not in r.ids:
                    like, gradient_ref = r.encode(value), Ref(r.id_of(gradient, "activation"))
                    r.asking.add(like.id)
                    r.ops.append(Op("empty_like", "", (like,), {}, (gradient_ref,), r.frames[-1][0]))
                    if r.op_values is not None:
                        r.op_values.append((torch.ops.aten.empty_like.default, (_clone(gradient),)))
        finally:
            r.differentiating = False
        return result

    def _traced_size(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        r, result = self.recording, func(*args, **kwargs)
        if not isinstance(args[0], torch.Tensor):
            return result
        tensor = r.id_of(args[0])
        if isinstance(result, torch.Size):
            return torch.Size([TracedInt(n, ("size", tensor, d), r.escapes) for d, n in enumerate(result)])
        if name == "numel":
            return TracedInt(result, ("numel", tensor), r.escapes)
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        return TracedInt(result, ("size", tensor, int(dim) % args[0].dim()), r.escapes)


class _VisitRecorder:
    """Hooks on every module that record when it runs and on which tensors."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.handles: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self.recording.modules.items():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks; its ops count as its caller's
                continue
            names = signature_names(module)
            self.handles.append(module.register_forward_pre_hook(self._enter(name, names), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._leave(), with_kwargs=True, always_call=True))

    def __exit__(self, *exception: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, name: str, names: tuple[str, ...]) -> Any:
        r = self.recording

        def enter(module: Any, args: Any, kwargs: Any) -> None:
            r.visit_counts[name] += 1
            bound = dict(zip(names, args, strict=False)) | {("args", i): a for i, a in enumerate(args[len(names) :])}
            inputs = tuple((path, r.id_of(t)) for path, t in flatten_tensors(bound | kwargs))
            parent = r.frames[-1][3]
            r.frames.append([name, r.visit_counts[name], 0, len(r.visits)])
            r.visits.append(
                {"module": name, "visit": r.visit_counts[name], "inputs": inputs, "outputs": (),
                 "first": len(r.calls), "last": len(r.calls), "parent": parent}
            )  # fmt: skip
            r.escapes.module = name

        return enter

    def _leave(self) -> Any:
        r = self.recording

        def leave(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            _, _, _, index = r.frames.pop()
            r.visits[index]["last"] = len(r.calls)
            r.visits[index]["outputs"] = tuple((path, r.id_of(t)) for path, t in flatten_tensors(output))
            r.escapes.module = r.frames[-1][0]

        return leave


def record(
    model: torch.nn.Module,
    feeds: dict[str, dict[str, Any]],
    *,
    fake_mode: Any = None,
    folds: tuple[Fold, ...] = (),
    keep_values: bool = False,
) -> tuple[Trace, Recording]:
    """Call the model (or the submodule that a feed names) on each feed and return what happened.

    The model is a throw-away copy: its stored integers are replaced. With `fake_mode` (plain, or one of known values),
    parameters must be fake already and inputs are converted. The recording keeps the tensors themselves, for replaying.
    """
    recording, ways = Recording(model, keep_values=keep_values), listener()
    if ways is not None:
        ways.forget()  # what an earlier, failed attempt recorded
        ways.know(model)
    trace_attributes(recording.modules, recording.escapes)
    for feed, kwargs in feeds.items():
        asking = {path for path, tensor in flatten_tensors(kwargs) if tensor.requires_grad}
        if fake_mode is not None:
            admit = fake_mode.admit if isinstance(fake_mode, KnownValues) else partial(_faked, fake_mode)
            kwargs = admit(dict(kwargs))
        else:
            kwargs = own(dict(kwargs))
        for path, tensor in flatten_tensors(kwargs):
            number = recording.id_of(tensor, "input")
            recording.names.setdefault(number, []).append(".".join(["<input>", feed, *map(str, path)]))
            recording.asking |= {number} if path in asking else set()
        recording.grad_enabled = True
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(code_lies_open(model))
            if fake_mode is not None:
                stack.enter_context(fake_mode)
            stack.enter_context(_VisitRecorder(recording))
            stack.enter_context(_OpRecorder(recording))
            stack.enter_context(_CallRecorder(recording))
            stack.enter_context(tracing(ways))
            try:
                call(model, kwargs)
            except (CaptureError, OutsideError):
                raise
            except Exception as error:  # someone else's forward may raise anything
                raise _cannot_run(error, recording, feed) from error
    real = fake_mode is None
    return recording.trace(folds, tuple(feeds), real), recording


def _faked(mode: Any, value: Any) -> Any:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else own_argument(value, partial(_faked, mode))


def _cannot_run(error: Exception, recording: Recording, feed: str) -> CaptureError:
    """Return an error that says which op failed, in which module."""
    visit = recording.visits[-1] if recording.visits else {"module": ""}
    running = next((f for f in reversed(recording.frames) if f[0]), None)
    where = running[0] if running else visit["module"]
    kind = type(recording.modules[where]).__name__ if where in recording.modules else "?"
    last = recording.calls[-1].name if recording.calls else "nothing"
    reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else ""
    return CaptureError(
        f"the model's forward cannot run on feed {feed!r}: {type(error).__name__}: {reason} "
        f"(in module {where or 'the model itself'!r} of class {kind}, "
        f"after the torch call {last!r})",
        hint="pass example inputs with inputs={'name': tensor, …} as the model's forward takes them",
    )
