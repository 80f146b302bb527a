"""Refuse what the trace has not seen: unrecorded calls and outputs."""

from __future__ import annotations

import dis
import linecache
import os
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.nested import (
    Path,
    change_if_tensor,
    change_input,
    change_output,
    changed_inside,
    flatten_tensors,
    signature_names,
)
from autoplan.common.patterns import is_under, matches
from autoplan.execute import collectives
from autoplan.execute.collectives import (
    RankGroup,
    all_reduce,
    copy_to_ranks,
    gradient_is_summed,
    is_of_compiled_code,
    scale_gradient,
)
from autoplan.execute.parameters.held import record_of
from autoplan.values import AllReduceGradient, Constant, OutputShape, Runtime

# What no recorded call did, where a call does it and hooks can tell. (A file of its own: of none of this a plan says
# what is to be done.)
#
# Modules that never ran: they are whole, and so are the gradients that they give. But what they read may be a value
# whose gradient is summed over ranks, since every reader that was seen gives a part of it. There a whole gradient
# would count once for each rank: it is given in equal parts.
#
# Constants that are none: a stream may be zeros until a branch fills it. What reads it then gives each rank's part of a
# gradient, of which no instruction knows. It is summed, or the call is refused.


def watch_unrecorded(modules: dict[str, nn.Module], seen: Runtime, group: RankGroup) -> Iterator[RemovableHandle]:
    """Have idle modules give their part of such gradients, and ranks sum those of what was constant, from now on."""
    if group.size == 1:
        return
    given_on = any(instruction.side == "output" for instruction in seen.of(AllReduceGradient))
    for name, module in modules.items():
        if any(is_under(pattern, name) for pattern in seen.idle):
            watch = partial(_give_parts, _Idle(name, group.size, given_on))
            yield module.register_forward_pre_hook(watch, with_kwargs=True)
        for constant in seen.constants:
            if matches(constant.pattern, name):
                yield _watch(module, name, constant, group)


class _Idle(NamedTuple):
    """An idle module. `given_on`: do others return values whose gradient is summed?"""

    name: str
    ranks: int
    given_on: bool


def _give_parts(idle: _Idle, module: nn.Module, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    if torch.compiler.is_compiling():
        raise _compiled(idle)

    def part(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return changed_inside(value, part)
        if idle.given_on and is_of_compiled_code(value):
            raise _compiled(idle)
        return scale_gradient(value, 1.0 / idle.ranks) if gradient_is_summed(value) else value

    with torch._C.DisableTorchFunction():
        return tuple(map(part, args)), {name: part(value) for name, value in kwargs.items()}


def _compiled(idle: _Idle) -> PlanMismatchError:
    return PlanMismatchError(
        f"{idle.name} runs, which no recorded call did, and in compiled code it is unknown whether ranks sum its "
        "gradients",
        hint=f"plan with inputs= that reach {idle.name}, or run this call without torch.compile",
    )


def _watch(module: nn.Module, name: str, constant: Constant, group: RankGroup) -> RemovableHandle:
    side, path, names = constant.side, constant.path, signature_names(module)

    def change(x: torch.Tensor) -> torch.Tensor:
        if constant.sums or not (x.requires_grad and torch.is_grad_enabled()):
            return copy_to_ranks(x, group)
        place = "".join(f"[{step!r}]" for step in path)
        raise PlanMismatchError(
            f"what {name} {'takes' if side == 'input' else 'returns'}{' at ' * bool(place)}{place} has a gradient, of "
            "which each rank makes a part: it was a constant in every recorded call",
            hint="plan with inputs= in which it is not (several calls: inputs={'usual': {…}, 'other': {…}})",
        )

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:  # where kernels take masks of their own, these stay
        with torch._C.DisableTorchFunction():
            return change_input(args, kwargs, names, path, change, name, at=change_if_tensor)

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return change_if_tensor(output, path, change, name)

    if side == "output":
        return module.register_forward_hook(after)
    return module.register_forward_pre_hook(before, with_kwargs=True)


# Outputs as they leave the model: those that the plan's trace never saw are whole on every rank, or refused.
#
# A caller can ask a model for more than it returned when it was planned (attention weights, hidden states), or for
# something else in its place (embeddings instead of logits). Most of what comes then is the same on every rank. Some
# is not: attention weights of a rank's own heads, hidden states of its part of the sequence. Nothing in a tensor
# tells, so the ranks compare what they hold, once for each output. What was seen is told by its features: what
# weights decide is as long as it was recorded.
#
# Where readers of such an output each give a part of its gradient, which is summed further up, its caller gives one
# too.

_TOLERANCE = 1e-2  # of the largest value: ranks may round apart, parts of different heads differ altogether
_OF_LAYERS = 3  # so deep in tuples lie caches: keys of a layer


class UnseenOutputs:
    """`seen` are the paths of outputs that the plan knows, `shapes` how long those are of which weights decide,
    `names` what forward takes: caches come out and go in."""

    def __init__(
        self, seen: Iterable[Path], shapes: Iterable[OutputShape], names: Iterable[str], group: RankGroup
    ) -> None:
        self.seen, self.shapes = frozenset(seen), {shape.path: shape for shape in shapes}
        self.by_name = any(path and isinstance(path[0], str) for path in self.seen)
        self.names, self.group = frozenset((name,) for name in names), group
        self.whole: set[tuple[Any, ...]] = set()  # what was compared already
        self.partial = False  # may a gradient be a part of a sum although nothing sums it? Then none is given

    def check(self, output: Any) -> Any:
        """Raise for an output of which each rank has another value. Compiled code is not interrupted for it."""
        if not self.seen or torch.compiler.is_compiling():
            return output
        alike = isinstance(output, dict) == self.by_name
        for path, tensor in list(flatten_tensors(output)):
            if path[:1] in self.names or (not alike and len(path) >= _OF_LAYERS):
                continue
            strange = self._strange(path, tensor) if alike and path in self.seen else ()
            if strange is None or isinstance(tensor, DTensor) and not strange or tensor.dim() == 0:
                continue
            if self.partial and tensor.requires_grad:
                name = ".".join(map(str, path))
                raise PlanMismatchError(
                    f"output {name!r}, which was not returned when the plan was made, carries a gradient, of which "
                    "each rank may make a part",
                    hint="plan with inputs= in which the model returns it, or call it under torch.no_grad()",
                )
            compared = (alike, path, strange)
            if compared not in self.whole:
                if isinstance(tensor, DTensor) or not self._agrees(tensor.detach()):
                    raise _refusal(path, tensor, strange)
                self.whole.add(compared)
            if gradient_is_summed(tensor):
                part = partial(scale_gradient, vector=1.0 / self.group.size)
                output = change_output(output, path, part, "the model")
        return output

    def _strange(self, path: Path, tensor: torch.Tensor) -> tuple[tuple[int, int, int], ...] | None:
        """Features of what was seen that are not as many as they were: (dim, now, then). None: as it was seen."""
        shape = self.shapes.get(path)
        if shape is None or tensor.dim() != shape.dims:
            return None
        found = [(dim, tensor.shape[dim], size) for dim, size in shape.features]
        return tuple((dim, now, size) for dim, now, size in found if now != size) or None

    def _agrees(self, mine: torch.Tensor) -> bool:
        """All ranks come to the same answer: they would wait for each other for ever otherwise."""
        size = torch.tensor([float(mine.numel()), -float(mine.numel())], device=mine.device)
        largest, smallest = all_reduce(size, self.group, "max").tolist()
        if largest != -smallest:
            return False
        values = mine.double() if mine.dtype != torch.bool else mine.to(torch.float64)
        mean = all_reduce(values, self.group) / self.group.size
        finite = torch.isfinite(mean)
        apart = torch.where(finite, (values - mean).abs(), 0.0).max() if mine.numel() else values.new_zeros(())
        bound = torch.where(finite, mean.abs(), 0.0).max() if mine.numel() else apart
        worst = all_reduce(torch.stack([apart, bound]), self.group, "max").tolist()
        return bool(worst[0] <= _TOLERANCE * worst[1])


def _refusal(path: Path, tensor: torch.Tensor, strange: tuple[tuple[int, int, int], ...]) -> PlanMismatchError:
    name = ".".join(map(str, path)) or "output"
    for dim, now, size in strange:
        return PlanMismatchError(
            f"the sharded model returns {name!r} of shape {list(tensor.shape)}: its dim {dim} has {now} features, and "
            f"had {size} when it was planned",
            hint="where this call takes another path, plan with inputs= that show it; else the plan does not "
            "fit this model: make it again, and try it with autoplan.verify(model, plan)",
        )
    return PlanMismatchError(
        f"output {name!r} of shape {list(tensor.shape)} is not the same on all ranks: each has a part of it, and the "
        "plan knows nothing of it, since the model did not return it when it was planned",
        hint="plan with inputs= in which the arguments that ask for it are those of this call, or do without",
    )


# Reads of a sharded parameter on paths that the plan has not seen.

# Functions of functions around a sharded model (`torch.func.grad`, `vmap`, forward derivatives, export): one error.
#
# They need of every step rules of their own, and a communication between ranks has none. Without this check each says
# so in other words, from the middle of the model.


def refuse_transforms(module: nn.Module) -> None:
    """Raise where a module whose parameters lie on ranks runs inside of such a function."""
    if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and not torch.compiler.is_exporting()):
        return  # compilers use such functions for their own ends; torch 2.11's says that it exports
    if torch._C._are_functorch_transforms_active():
        how, instead = "a transform of torch.func (grad, vjp, jvp, vmap)", "torch.autograd.grad, with create_graph"
    elif forward_ad._current_level >= 0:
        how, instead = "a forward derivative", "torch.autograd.grad"
    elif torch.compiler.is_exporting():
        how, instead = "torch.export", "torch.compile; or export the model that is not sharded"
    else:
        return
    raise AutoplanError(
        f"{type(module).__name__} lies on ranks, and is called inside of {how}, which cannot see what ranks send each "
        "other",
        hint=f"what works: {instead}",
    )


# A path that no plan was made for, reached while the model runs on shards, is named: the module, the call, what to do.
#
# Code may do something else at another size or with other arguments than in the calls that were recorded. What it does
# there with a rank's shards often ends in an error of shapes, raised by torch in the middle of the model. The traceback
# tells whose code made the call; nothing is noted while models run.

Line: TypeAlias = tuple[FrameType, int]
SHAPE_ERRORS = (RuntimeError, IndexError, ValueError, AssertionError)
_PLAIN = frozenset(SHAPE_ERRORS)  # what torch and Python raise; subclasses are about other things (memory, networks)
_SHAPES_BY_NAME = "einops"  # a library that raises errors of its own for shapes
_TORCH = os.path.dirname(torch.__file__) + os.sep
_DISTRIBUTED = os.path.dirname(dist.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_COLLECTIVES = os.path.abspath(collectives.__file__)
_CALLS = nn.modules.module.__file__  # where a module calls its forward
_RAISE = dis.opmap["RAISE_VARARGS"]
_HINT = (
    "if the unsharded model runs on this call, it takes a path here that the plan was not made for: plan again and "
    "show it this call beside the usual one, inputs={'usual': {argument: value}, 'other': {argument: value}}"
)


def unseen_path(model: nn.Module, error: BaseException) -> AutoplanError | None:
    """What to raise in place of an error of shapes that was raised below `model`; None: it is about something else."""
    steps = list(_steps(error.__traceback__))
    # Did a collective of ours fail inside torch?
    files = [step.tb_frame.f_code.co_filename for step in steps]
    inside = files[len(files) - files[::-1].index(_COLLECTIVES) :] if _COLLECTIVES in files else []
    if bool(inside) and all(file.startswith(_TORCH) for file in inside):
        return AutoplanError(
            f"ranks could not communicate inside of {type(model).__name__}: {str(error).strip()}",
            hint="another rank stopped or ran something else; look for its error first. "
            "init_process_group(timeout=...) says how long ranks wait for each other",
        )
    if not steps or not _is_of_shapes(error, steps[-1]):
        return None
    running = [one for step in steps if isinstance(one := step.tb_frame.f_locals.get("self"), nn.Module)]
    if running and running[-1]._parameters and record_of(running[-1]) is None:
        said = f"{type(running[-1]).__name__} was not there when the model was sharded: {str(error).strip()}"
        return PlanMismatchError(said, hint="put it in before autoplan.parallelize, and plan again")
    own = [at for at, step in enumerate(steps) if _runs_on_shards(step)]
    if not own or any(step.tb_frame.f_code.co_filename.startswith(_DISTRIBUTED) for step in steps[own[-1] :]):
        return None
    above = list(_callers(sys._getframe(1)))
    within = [(step.tb_frame, step.tb_lineno) for step in steps[own[-1] :]]
    before = [*reversed(above), *((step.tb_frame, step.tb_lineno) for step in steps[: own[-1]])]
    place = _innermost(within)
    if place is None and _has_right_dtype(steps[own[-1]].tb_frame):  # raised by a layer of torch's: whoever calls it
        place = _innermost(before)
    if place is None:  # it was given what it cannot take, on shards or not
        return None
    module = steps[own[-1]].tb_frame.f_locals["self"]
    outer = (frame.f_locals.get("self") for frame, _ in reversed(above))
    root = next((one for one in outer if isinstance(one, nn.Module) and module in one.modules()), model)
    name = next((name for name, part in root.named_modules() if part is module), "")
    said = (str(error).strip() or "no message").splitlines()[0]
    return PlanMismatchError(
        f"{name or 'the model'} ({type(module).__name__}) cannot make this call on a rank's shards: "
        f"{_place(place)}: {type(error).__name__}: {said}",
        hint=_HINT,
    )


def _steps(trace: TracebackType | None) -> list[TracebackType]:
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    return steps


def _is_of_shapes(error: BaseException, last: TracebackType) -> bool:
    """Did a call fail, or did the model's own code refuse something in words of its own?"""
    if type(error).__module__.partition(".")[0] == _SHAPES_BY_NAME:
        return True
    code = last.tb_frame.f_code
    refused = code.co_code[last.tb_lasti] == _RAISE and not code.co_filename.startswith(_TORCH)
    return type(error) in _PLAIN and not refused


def _runs_on_shards(step: TracebackType) -> bool:
    """Is it code of a module whose parameters, or those of modules inside it, are split?"""
    frame = step.tb_frame
    module = frame.f_locals.get("self")
    if not isinstance(module, nn.Module) or frame.f_code.co_filename.startswith((_OURS, _CALLS)):
        return False
    records = (record_of(part) for part in module.modules())
    return any(
        parameter.dim is not None
        for record in records
        if record is not None
        for parameter in record.parameters.values()
    )


def _has_right_dtype(frame: FrameType) -> bool:
    """Is a layer given tensors that are of its weights' dtype, or a table numbers? Then it is sizes that do not fit."""
    layer = frame.f_locals["self"]
    given = [value.dtype for value in frame.f_locals.values() if isinstance(value, torch.Tensor)]
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return not any(dtype.is_floating_point for dtype in given)
    own = {parameter.dtype for parameter in layer._parameters.values() if parameter is not None}
    return own.issuperset(given)


def _callers(frame: FrameType | None) -> Iterator[Line]:
    """Whoever called, the nearest first."""
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _innermost(lines: list[Line]) -> Line | None:
    """The last that is neither torch's nor ours: the model's own code, or a function that it calls."""
    theirs = [line for line in lines if not line[0].f_code.co_filename.startswith((_OURS, _TORCH))]
    return theirs[-1] if theirs else None


def _place(line: Line) -> str:
    """The file and line, and the line itself."""
    code, number = line[0].f_code, line[1]
    text = linecache.getline(code.co_filename, number).strip()
    return f"{os.path.basename(code.co_filename)}:{number} in {code.co_name}" + (f", {text}" if text else "")
