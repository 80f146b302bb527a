"""Small models, each right on ranks in the call that is planned and wrong without a word in another: what the path
guard must refuse. Each has one way of choosing between two pieces of code."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

__all__ = ["CASES", "Case", "X"]

X = torch.linspace(-1, 1, 2 * 6 * 16, dtype=torch.float64).view(2, 6, 16).sin()


def scaled(h: torch.Tensor) -> torch.Tensor:
    """Reads across what is split."""
    return h / (0.1 + h.pow(2).mean(-1, keepdim=True))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mode, self.before = "plain", 0

    def forward(self, x: torch.Tensor, **flags: Any) -> torch.Tensor:
        return x + self.down(self.inner(self.up(x).tanh(), **flags))

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return h


class Flag(Mlp):
    def forward(self, x: torch.Tensor, norm: bool = False) -> torch.Tensor:
        h = self.up(x).tanh()
        if norm:
            h = scaled(h)
        return x + self.down(h)


class Square(Mlp):
    """Both ways are known: the trial runs the one, and a rank goes the other where its part is not as wide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).tanh()
        if h.shape[0] == h.shape[-1]:
            h = h * 2
        return x + self.down(h)


class Shape(Mlp):
    """The shape of a part is held against numbers, and what follows is left for the next call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).tanh()
        self.before = 2 if h.shape == (3, 6, 32) else 0
        return x + self.down(h * (1 + self.before))


class Rounds(Mlp):
    """The first round is given an argument, which has no gradient; the second what the first computed."""

    def forward(self, x: torch.Tensor, rounds: int = 1) -> torch.Tensor:
        for _ in range(rounds):
            x = x + self.down(self.up(x).tanh())
        return x


ACTIVATIONS = {
    "tanh": torch.tanh,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "softmax": partial(torch.softmax, dim=-1),
}


class Dim(Mlp):
    def forward(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return x + self.down(self.up(x).softmax(dim))


class IndexedDim(Mlp):
    def forward(self, x: torch.Tensor, reverse: bool = False) -> torch.Tensor:
        return x + self.down(self.up(x).tanh().cumsum((1, -1)[reverse]))


class Function(Mlp):
    def forward(self, x: torch.Tensor, act: str = "tanh") -> torch.Tensor:
        return x + self.down(ACTIVATIONS[act](self.up(x)))


class Order(Mlp):
    def forward(self, x: torch.Tensor, p: int = 2) -> torch.Tensor:
        h = self.up(x)
        return x + self.down(h / (1 + torch.linalg.vector_norm(h, p, dim=-1, keepdim=True)))


class Groups(Mlp):
    def forward(self, x: torch.Tensor, groups: int = 4) -> torch.Tensor:
        return x + self.down(nn.functional.group_norm(self.up(x).mT, groups).mT)


class Width(Mlp):
    def forward(self, x: torch.Tensor, width: int = 32) -> torch.Tensor:
        h = nn.functional.linear(x, self.up.weight[:width], self.up.bias[:width]).tanh()
        return x + nn.functional.linear(h, self.down.weight[:, :width], self.down.bias)


class HeldDim(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.dim, self.act, self.setting = 1, nn.Tanh(), SimpleNamespace(norm=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.normalize(self.act(self.up(x)), dim=self.dim)
        return x + self.down(scaled(h) if self.setting.norm else h)


@torch.jit.script
def scripted(h: torch.Tensor, norm: bool) -> torch.Tensor:
    if norm:
        h = h / (0.1 + h.pow(2).mean(-1, keepdim=True))
    return h


class Scripted(Mlp):
    def inner(self, h: torch.Tensor, norm: bool = False) -> torch.Tensor:
        return scripted(h, norm)


class Clipped(torch.autograd.Function):
    """Only its backward asks for the flag."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, clip: bool) -> torch.Tensor:
        ctx.clip = clip
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return scaled(gradients[0]) if ctx.clip else gradients[0], None


class InBackward(Mlp):
    def inner(self, h: torch.Tensor, clip: bool = False) -> torch.Tensor:
        clipped: torch.Tensor = Clipped.apply(h, clip)  # type: ignore[no-untyped-call]
        return clipped


class Large(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return x + self.down(scaled(h) if x.abs().max() > 40 else h)


class Odd(Mlp):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return scaled(h) if h.shape[1] % 2 else h


class Ticks:
    count = 0

    def __next__(self) -> int:
        self.count += 1
        return self.count


class Schedule(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.ticks = Ticks()

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return scaled(h) if next(self.ticks) > 9 else h


def _after_many(change: Callable[[Any], object]) -> Callable[[Any], None]:
    """A change after calls that were all alike."""

    def prepare(model: Any) -> None:
        for _ in range(5):
            model(X)
        change(model)

    return prepare


def _many_lengths(model: Any) -> None:
    for length in range(2, 40, 2):
        model(_long(length))


class LeftOut(Mlp):
    """The other way leaves something out, and runs no line that is new."""

    def forward(self, x: torch.Tensor, norm: bool = True) -> torch.Tensor:
        h = self.up(x).tanh()
        if norm:
            return x + self.down(h.sin())
        h = h.softmax(-1) if not norm and h.dim() else h
        return x + self.down(h)


class Stats(Mlp):
    def forward(self, x: torch.Tensor, stats: bool = False) -> Any:
        h = self.up(x).tanh()
        out = x + self.down(h)
        return (out * h.mean(), out) if stats else out


class Long(Mlp):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return scaled(h) if h.shape[1] > 8 else h


class OneToken(Mlp):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        if h.shape[1] == 1:
            h = scaled(h)
        return h


class Dtype(Mlp):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return scaled(h) if h.dtype == torch.float32 else h


class Helper(Mlp):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return trained(h, self.training)


def trained(h: torch.Tensor, training: bool) -> torch.Tensor:
    return scaled(h) if training else h


class Lambda(Mlp):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        choose = lambda y: scaled(y) if self.training else y  # noqa: E731
        return choose(h)


class GradMode(Mlp):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return h if torch.is_grad_enabled() else scaled(h)


class Drawn(Mlp):
    """Planned and called first with a number above a half."""

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        return scaled(h) if self.training and random.random() < 0.02 else h


class Before(Mlp):
    def inner(self, h: torch.Tensor) -> torch.Tensor:
        self.before += 1
        return scaled(h) if self.before > 6 else h


class Attribute(Mlp):
    """A tensor that the call before has left."""

    last: torch.Tensor | None = None

    def inner(self, h: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            h = scaled(h) + self.last
        self.last = h.detach().mean(-1, keepdim=True) if self.mode == "keep" else None
        return h


class Heads(nn.Module):
    """With one head on a rank the branch goes the other way, with no other argument."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (m(x).view(b, s, -1, 4).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = (q @ k.transpose(-1, -2)).softmax(-1) if q.shape[1] > 1 else (q @ k.transpose(-1, -2)).sigmoid()
        return x + self.o((scores @ v).transpose(1, 2).reshape(b, s, -1))


class ShortCircuit(Mlp):
    def forward(self, x: torch.Tensor, a: bool = False, b: bool = False) -> torch.Tensor:
        h = self.up(x).tanh()
        h = (a and scaled(h)) if a else h
        h = h if not (b and x.dim() == 3) else scaled(h)
        return x + self.down(h)


class Comprehension(Mlp):
    def forward(self, x: torch.Tensor, more: tuple[int, ...] = ()) -> torch.Tensor:
        h = self.up(x).tanh()
        h = h + sum([scaled(h) * one for one in more]) if more else h
        return x + self.down(h)


class Tried(Mlp):
    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        h = self.up(x).tanh()
        try:
            h = h * float(scale)
        except TypeError:
            h = scaled(h)
        return x + self.down(h)


class EarlyReturn(Mlp):
    def inner(self, h: torch.Tensor, early: bool = False) -> torch.Tensor:
        if not early:
            return h
        return scaled(h)


class Loop(Mlp):
    def inner(self, h: torch.Tensor, rounds: int = 0) -> torch.Tensor:
        for _ in range(rounds):
            h = scaled(h)
        return h


class Match(Mlp):
    def inner(self, h: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        match kind:
            case "plain":
                return h
            case "norm":
                return scaled(h)
        return h


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"plain": torch.sin, "norm": scaled}


class Dispatch(Mlp):
    def inner(self, h: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        return FUNCTIONS[kind](h)


class Getattr(Mlp):
    def inner(self, h: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        return getattr(self, f"do_{kind}")(h)

    def do_plain(self, h: torch.Tensor) -> torch.Tensor:
        return h.sin()

    def do_norm(self, h: torch.Tensor) -> torch.Tensor:
        return scaled(h)


class SeenElsewhere(Mlp):
    """The helper ran, but on values that are whole."""

    def forward(self, x: torch.Tensor, kind: str = "plain") -> torch.Tensor:
        choices = {"plain": Mlp.inner, "norm": lambda _, h: scaled(h)} if kind == "lambda" else WAYS
        return scaled(x) + self.down(choices[kind](self.up(x).tanh()))


def plain(h: torch.Tensor) -> torch.Tensor:
    return h


WAYS = {"plain": plain, "norm": scaled}


def perhaps(h: torch.Tensor, norm: bool) -> torch.Tensor:
    return scaled(h) if norm else h.tanh()


class OtherPlace(Mlp):
    """A function goes both of its ways in each call, but each in a place of its own."""

    def forward(self, x: torch.Tensor, hidden: bool = False) -> torch.Tensor:
        return perhaps(x, not hidden) + self.down(perhaps(self.up(x), hidden))


class Children(Mlp):
    """The flag of a child is read by its parent alone, in a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.children_of_its = nn.ModuleList([Mlp()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).tanh()
        return x + self.down(scaled(h) if any(child.mode == "norm" for child in self.children_of_its) else h)


class OutsideGradient(Mlp):
    """Forward all is right: the gradient of a value that each rank holds a part of is counted twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, side: bool = False) -> Any:
        n = self.norm(x)
        out = x + self.down(self.up(n).tanh())
        if side:
            out = out + n.pow(2).mean()
        return out


@dataclass(frozen=True)
class Case:
    """A model, the call that it is planned with, and the one that goes another way: what is passed, and how it is run
    (`before` each: a function of the model)."""

    model: type[nn.Module]
    other: dict[str, Any]
    tp: int = 2
    prepare: Callable[[nn.Module], Any] | None = None
    grad: bool = True
    times: int = 1
    seed: int | None = None


def _long(length: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * length * 16, dtype=torch.float64).view(2, length, 16).sin()


def _keep(model: nn.Module) -> None:
    model.mode = "keep"  # type: ignore[assignment]


CASES: dict[str, Case] = {
    "a flag": Case(Flag, {"norm": True}),
    "something left out": Case(LeftOut, {"norm": False}),
    "statistics": Case(Stats, {"stats": True}),
    "a length": Case(Long, {"x": _long(20)}),
    "a batch as large as a width": Case(Square, {"x": X[:1].expand(32, 6, 16)}),
    "a shape of a part": Case(Shape, {"x": X[:1].expand(3, 6, 16)}),
    "one token": Case(OneToken, {"x": _long(1)}),
    "a dtype": Case(Dtype, {"x": X.float()}, prepare=lambda model: model.float()),
    "training in a helper": Case(Helper, {}, prepare=lambda model: model.train()),
    "training in a lambda": Case(Lambda, {}, prepare=lambda model: model.train()),
    "the grad mode": Case(GradMode, {}, grad=False),
    "Python's random": Case(Drawn, {}, prepare=lambda model: model.train(), times=14, seed=1),
    "a counter": Case(Before, {}, times=8),
    "what a call left": Case(Attribute, {}, prepare=_keep, times=3),
    "one head on a rank": Case(Heads, {}, tp=4),
    "and, or": Case(ShortCircuit, {"b": True}),
    "a comprehension": Case(Comprehension, {"more": (1, 2)}),
    "an exception": Case(Tried, {"scale": None}),
    "an early return": Case(EarlyReturn, {"early": True}),
    "a loop": Case(Loop, {"rounds": 1}),
    "a second round": Case(Rounds, {"rounds": 2}),
    "TorchScript": Case(Scripted, {"norm": True}),
    "a flag of a backward": Case(InBackward, {"clip": True}),
    "a dim": Case(Dim, {"dim": -1}),
    "a dim that is looked up": Case(IndexedDim, {"reverse": True}),
    "a function that is looked up": Case(Function, {"act": "softmax"}),
    "an order": Case(Order, {"p": 1}),
    "a rank's number of groups": Case(Groups, {"groups": 2}),
    "a width": Case(Width, {"width": 24}),
    "a dim of a module": Case(HeldDim, {}, prepare=_after_many(lambda model: setattr(model, "dim", -1))),
    "a module": Case(HeldDim, {}, prepare=_after_many(lambda model: setattr(model, "act", nn.Softmax(-1)))),
    "a setting": Case(HeldDim, {}, prepare=_after_many(lambda model: setattr(model.setting, "norm", True))),
    "what a whole value holds": Case(Large, {"x": X * 100}, prepare=_after_many(lambda model: None)),
    "a schedule": Case(Schedule, {}, times=9),
    "an odd length": Case(Odd, {"x": _long(21)}, prepare=_many_lengths),
    "match": Case(Match, {"kind": "norm"}),
    "a dict of functions": Case(Dispatch, {"kind": "norm"}),
    "getattr": Case(Getattr, {"kind": "norm"}),
    "a function seen elsewhere": Case(SeenElsewhere, {"kind": "norm"}),
    "a function's other place": Case(OtherPlace, {"hidden": True}),
    "a flag of a child": Case(
        Children, {}, prepare=_after_many(lambda model: setattr(model.children_of_its[0], "mode", "norm"))
    ),
    "a gradient": Case(OutsideGradient, {"side": True}),
}
