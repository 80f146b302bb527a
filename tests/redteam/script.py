"""Run a case's calls on a model, sharded or not, and write down everything that can be compared."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import autoplan

from .case import Call, Case

__all__ = ["Drawn", "Step", "build", "observe", "script", "seed"]

_RATE = 0.01


@dataclass(frozen=True)
class Step:
    """One call and what follows it: "backward", "nothing", or two steps of "sgd"."""

    name: str
    call: Call
    then: str = "backward"
    must: bool = True  # else it is left out where the unsharded model does not run it


class Drawn(Exception):
    """A step draws random numbers, so that its values cannot be compared."""


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def build(case: Case, builder: Any = None) -> nn.Module:
    seed(0)
    model: nn.Module = (builder or case.build)()
    return model.to(case.dtype).eval()


def script(case: Case) -> list[Step]:
    """The calls of the case, then the first of them varied, as far as the unsharded model runs them."""
    steps = [Step(f"call {n}", one, "backward" if one.grad else "nothing") for n, one in enumerate(case.calls)]
    if not case.vary:
        return steps
    first = case.calls[0]
    more = [
        Step("again", first, must=False),
        Step("train", replace(first, train=True), must=False),
        Step("no grad", replace(first, grad=False), "nothing", must=False),
        Step("batch", _resized(first, _doubled), must=False),
        Step("shorter", _resized(first, _shortened), must=False),
        Step("sgd", replace(first, train=True), "sgd", must=False),
    ]
    probe = build(case)
    if case.prepare is not None:
        case.prepare(probe)
    for step in steps:
        _run(case, probe, step, {})
    return steps + [step for step in more if _runs(case, probe, step)]


def observe(case: Case, model: nn.Module, steps: list[Step]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each step and what it left: outputs, gradients, buffers, weights, plain values."""
    for number, step in enumerate(steps):
        seed(1000 + number)
        found: dict[str, Any] = {}
        _run(case, model, step, found)
        yield step.name, found


def _resized(call: Call, change: Any) -> Call:
    args, kwargs = tree_map(
        lambda value: change(value) if isinstance(value, torch.Tensor) else value, (call.args, dict(call.kwargs))
    )
    return replace(call, args=args, kwargs=kwargs)


def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor, tensor.flip(-1)]) if tensor.dim() else tensor


def _shortened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :-1] if tensor.dim() > 1 else tensor


def _runs(case: Case, probe: nn.Module, step: Step) -> bool:
    """Does the unsharded model run it, without drawing random numbers?"""
    seed(1000)
    before = torch.get_rng_state()
    try:
        _run(case, probe, step, {})
    except (RuntimeError, ValueError, IndexError, AssertionError, TypeError):  # what a wrong size raises in a model
        return False
    return torch.equal(before, torch.get_rng_state())


def _run(case: Case, model: nn.Module, step: Step, found: dict[str, Any]) -> None:
    model.train(step.call.train)
    if step.then == "sgd":
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_RATE)
        for turn in range(2):
            found[f"loss {turn}"] = _forward_backward(case, model, step.call, {})
            optimizer.step()
        found |= {f"weight {name}": tensor.detach() for name, tensor in autoplan.full_tensors(model).items()}
    else:
        _forward_backward(case, model, step.call, found)
    found |= {f"buffer {name}": _whole(tensor).clone() for name, tensor in model.named_buffers()}


def _forward_backward(case: Case, model: nn.Module, call: Call, found: dict[str, Any]) -> torch.Tensor | None:
    """Call the model, and where it is asked for a loss over all that comes out is taken backward."""
    model.zero_grad()
    leaves: list[torch.Tensor] = []

    def ready(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.clone()
        if value.is_floating_point():
            value = value.to(case.dtype)
            if call.grad and case.input_gradients:
                leaves.append(value.requires_grad_())
        return value

    args, kwargs = tree_map(ready, (call.args, dict(call.kwargs)))
    autocast = nullcontext() if call.autocast is None else torch.autocast("cpu", dtype=call.autocast)
    with torch.set_grad_enabled(call.grad), autocast:
        result = call.do(model, *args, **kwargs) if call.do else model(*args, **kwargs)
    outputs = {path: _whole(value) for path, value in _flat(result, "output", 0)}
    found |= {path: _copied(value) for path, value in outputs.items()}
    loss = _loss(outputs) if call.grad else None
    if loss is None:
        return None
    loss.backward()
    found |= {f"input gradient {n}": leaf.grad for n, leaf in enumerate(leaves) if leaf.grad is not None}
    gradients = autoplan.full_tensors(model, grads=True)
    found |= {f"gradient {name}": g.detach().clone() for name, g in gradients.items() if g is not None}
    return loss.detach()


def _loss(outputs: Mapping[str, Any]) -> torch.Tensor | None:
    total = None
    for number, value in enumerate(outputs.values()):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            part = torch.view_as_real(value) if value.is_complex() else value
            generator = torch.Generator().manual_seed(number)
            weights = torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.dtype)
            part = (part * weights).nan_to_num().sum().double()
            total = part if total is None else total + part
    return total


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _flat(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    """Every tensor and plain value in a nested result, with its path."""
    if depth > 8:
        return
    if value is None or isinstance(value, torch.Tensor | bool | int | float | str):
        yield path, value
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    elif isinstance(value, (list | tuple | Iterator)):
        value = dict(enumerate(value))
    elif not isinstance(value, Mapping):
        value = vars(value) if hasattr(value, "__dict__") else {}
    for name, part in value.items():
        yield from _flat(part, f"{path}.{name}", depth + 1)
