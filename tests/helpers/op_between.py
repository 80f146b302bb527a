"""A call between linears: the module that the law test of ops shards.

Its first float tensor comes out of a linear along the dim under test; other tensors are buffers, parameters, or come
out of linears of their own. Each result goes, flattened, into a linear, and so does the first tensor itself: whatever
the op does, its features are worth cutting. The linears' inputs are chosen so that they give just the wanted numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["KINDS", "Between", "between"]

KINDS = ("buffer", "parameter", "linear")  # what the other tensors are
_EXTRA = 3  # input features beyond those needed for any numbers to come out
_WIDE = 16  # what follows the op's input is at least so wide, or it would not be worth cutting
_OUT = 4
_LONG = 128  # features along a dim, beyond which a linear that gives just the sample's numbers is not worth its size


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor in a sample's arguments: `kind` says which attribute of the module has it."""

    kind: str
    number: int = 0


class Between(nn.Module):
    """in -> linear -> the op along one dim -> a linear for each of its outputs, and one for what it was given."""

    def __init__(self, function: Callable[..., Any], arguments: Any, dim: int) -> None:
        super().__init__()
        self.function, self.arguments, self.dim = function, arguments, dim
        self.overwrites = False  # does the op write into what it is given, which others read?

    def forward(self, hidden: torch.Tensor, others: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x = self.first(hidden).movedim(-1, self.dim)
        given = x.clone() if self.overwrites else x
        args, kwargs = pytree.tree_map(lambda leaf: self._filled(leaf, given, others), self.arguments)
        beside = x if self.spread is None else x.unsqueeze(-1) * self.spread
        total = self.beside(beside.flatten())
        for number, output in enumerate(numbers_in(self.function(*args, **kwargs))):
            total = total + self.get_submodule(f"after_{number}")(output.flatten())
        return total

    def _filled(self, leaf: Any, x: torch.Tensor, others: tuple[torch.Tensor, ...]) -> Any:
        if not isinstance(leaf, _Slot):
            return leaf
        if leaf.kind == "main":
            return x
        if leaf.kind == "linear":
            made = self.get_submodule(f"linear_{leaf.number}")(others[leaf.number])
            return made.movedim(-1, getattr(self, f"dim_{leaf.number}"))
        return getattr(self, f"{leaf.kind}_{leaf.number}")


def numbers_in(result: Any) -> list[torch.Tensor]:
    """What came out, as float64 tensors: pairs of numbers for complex ones, zeros and ones for truth."""
    found = []
    for tensor in pytree.tree_leaves(result):
        if isinstance(tensor, torch.Tensor):
            tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
            found.append(tensor.to(torch.float64))
    return found


def between(
    function: Callable[..., Any], given: Any, main: torch.Tensor, dim: int, kind: str, seed: int
) -> tuple[Between, dict[str, Any]]:
    """The module of a sample, and the inputs with which its linears give the sample's numbers."""
    generator = torch.Generator().manual_seed(seed)
    leaves, spec = pytree.tree_flatten(given)
    module = Between(function, None, dim)
    others: list[torch.Tensor] = []
    for place, leaf in enumerate(leaves):
        if leaf is main:
            leaves[place] = _Slot("main")
        elif isinstance(leaf, torch.Tensor):
            leaves[place] = _held(module, leaf, kind, place, (main, dim), others, generator)
    module.arguments = pytree.tree_unflatten(leaves, spec)
    module.first, hidden = _giving(main, dim, generator)
    wide = -(-_WIDE // main.numel())
    spread = torch.rand(wide, generator=generator, dtype=torch.float64) + 0.5 if wide > 1 else None
    module.register_buffer("spread", spread)
    module.beside = _linear(main.numel() * wide, _OUT, generator)
    inputs = {"hidden": hidden, "others": tuple(others)}
    with torch.no_grad():
        given = main.clone()
        args, kwargs = pytree.tree_map(lambda leaf: module._filled(leaf, given, tuple(others)), module.arguments)
        outputs = numbers_in(function(*args, **kwargs))
        module.overwrites = given._version > 0
    if not outputs:
        raise ValueError("it gives no tensor")
    for number, output in enumerate(outputs):
        module.add_module(f"after_{number}", _linear(output.numel(), _OUT, generator))
    return module.eval(), inputs


def _held(
    module: Between,
    tensor: torch.Tensor,
    kind: str,
    place: int,
    main: tuple[torch.Tensor, int],
    others: Any,
    generator: Any,
) -> _Slot:
    """Another tensor of the sample: a buffer, a parameter, or made by a linear of its own."""
    if tensor.is_floating_point() and kind == "linear" and tensor.dim() and bool(torch.isfinite(tensor).all()):
        number = len(others)
        dim = _facing(tensor, *main)
        linear, hidden = _giving(tensor, dim, generator)
        module.add_module(f"linear_{number}", linear)
        setattr(module, f"dim_{number}", dim)
        others.append(hidden)
        return _Slot("linear", number)
    if tensor.is_floating_point() and kind == "parameter":
        module.register_parameter(f"parameter_{place}", nn.Parameter(tensor.clone()))
        return _Slot("parameter", place)
    module.register_buffer(f"buffer_{place}", tensor.clone())
    return _Slot("buffer", place)


def _facing(tensor: torch.Tensor, main: torch.Tensor, dim: int) -> int:
    """The dim that meets the one under test when both are aligned at the end, or at the start; else the last."""
    from_end = tensor.dim() - (main.dim() - dim)
    for place in (from_end, dim):
        if 0 <= place < tensor.dim() and tensor.shape[place] == main.shape[dim]:
            return place
    return tensor.dim() - 1


def _giving(tensor: torch.Tensor, dim: int, generator: torch.Generator) -> tuple[nn.Linear, torch.Tensor]:
    """A linear, and an input on which its features along `dim` are this tensor."""
    wanted = tensor.movedim(dim, -1).to(torch.float64)
    size = wanted.shape[-1]
    if size > _LONG or not bool(torch.isfinite(wanted).all()):  # any numbers
        linear = _linear(_EXTRA, size, generator)
        return linear, torch.randn(*wanted.shape[:-1], _EXTRA, generator=generator, dtype=torch.float64)
    linear = _linear(size + _EXTRA, size, generator)
    with torch.no_grad():
        return linear, (wanted - linear.bias) @ torch.linalg.pinv(linear.weight).mT


def _linear(width: int, out: int, generator: torch.Generator) -> nn.Linear:
    linear = nn.Linear(width, out, dtype=torch.float64)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(out, width, generator=generator, dtype=torch.float64) / max(width, 1) ** 0.5)
        linear.bias.copy_(torch.randn(out, generator=generator, dtype=torch.float64))
    return linear
