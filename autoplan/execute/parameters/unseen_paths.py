"""Reads of a sharded parameter on paths that the plan has not seen."""

from __future__ import annotations

import dis
import linecache
import os
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.execute import collectives
from autoplan.execute.parameters.held import record_of

# Functions of functions around a sharded model (`torch.func.grad`, `vmap`, forward derivatives, export): one error.
#
# They need of every step rules of their own, and a communication between ranks has none. Without this check each says
# so in other words, from the middle of the model.


def refuse_transforms(module: nn.Module) -> None:
    """Raise where a module whose parameters lie on ranks runs inside of such a function."""
    if torch.compiler.is_dynamo_compiling() or (torch.compiler.is_compiling() and not torch.compiler.is_exporting()):
        return  # compilers use such functions for their own ends; torch 2.11's says that it exports
    if torch._C._functorch.peek_interpreter_stack() is not None:
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
