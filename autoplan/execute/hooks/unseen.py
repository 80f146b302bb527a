"""Refuse what the trace has not seen: unrecorded calls and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from autoplan.common.errors import PlanMismatchError
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
from autoplan.execute.collectives import (
    RankGroup,
    all_reduce,
    copy_to_ranks,
    gradient_is_summed,
    is_of_compiled_code,
    scale_gradient,
)
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
