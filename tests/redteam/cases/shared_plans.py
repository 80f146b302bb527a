"""A plan of one variant, given to another that differs in a value that is no size."""

from __future__ import annotations

import enum
import functools

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)


class Kind(enum.Enum):
    PLAIN = "plain"
    NORMED = "normed"


class Variant(Mlp):
    """Each value but the one that is tested stays as it is."""

    def __init__(self, normed=False, kind="relu", power=0.0, shape=torch.relu, options=None, mode=Kind.PLAIN):
        super().__init__()
        self.normed, self.kind, self.power, self.shape = normed, kind, power, shape
        self.options, self.mode = options or {"centre": False}, mode

    def forward(self, x):
        h = self.shape(self.up(x))
        if self.normed or self.mode is Kind.NORMED:
            h = F.normalize(h, dim=-1)
        if self.kind == "softmax":
            h = h.softmax(-1)
        if self.power > 0:
            h = h / (1 + h.pow(2).sum(-1, keepdim=True) ** self.power)
        if self.options["centre"]:
            h = h - h.mean(-1, keepdim=True)
        return x + self.down(h)


def softly(h):
    return h.softmax(-1)


@case(call(X), plan_for=Variant, allowed=HOSTILE)
class OtherBool(Variant):
    """A subclass of its own differs by class too; the functions below build the same class."""

    def __init__(self):
        super().__init__(normed=True)


@case(call(X), plan_for=Variant, allowed=HOSTILE)
def SameClassOtherBool():
    return Variant(normed=True)


@case(call(X), plan_for=Variant, allowed=HOSTILE)
def SameClassOtherString():
    return Variant(kind="softmax")


@case(call(X), plan_for=Variant, allowed=HOSTILE)
def SameClassOtherFloat():
    return Variant(power=0.5)


@case(call(X), plan_for=Variant, allowed=HOSTILE)
def SameClassOtherFunction():
    return Variant(shape=softly)


@case(call(X), plan_for=Variant, allowed=HOSTILE)
def SameClassOtherPartial():
    return Variant(shape=functools.partial(F.softmax, dim=-1))


@case(call(X), plan_for=Variant, allowed=HOSTILE)
def SameClassOtherDict():
    return Variant(options={"centre": True})


@case(call(X), plan_for=Variant, allowed=HOSTILE)
def SameClassOtherEnum():
    return Variant(mode=Kind.NORMED)


@case(call(X), plan_for=Variant, through="cache", allowed=HOSTILE)
def CacheOtherBool():
    return Variant(normed=True)


@case(call(X), plan_for=Variant, through="cache", allowed=HOSTILE)
def CacheOtherString():
    return Variant(kind="softmax")


@case(call(X), plan_for=Variant, through="cache", allowed=HOSTILE)
def CacheOtherFloat():
    return Variant(power=0.5)


@case(call(X), plan_for=Variant, through="cache", allowed=HOSTILE)
def CacheOtherFunction():
    return Variant(shape=softly)


@case(call(X), plan_for=Variant, through="cache", allowed=HOSTILE)
def CacheOtherDict():
    return Variant(options={"centre": True})


@case(call(X), plan_for=Variant, through="cache", allowed=HOSTILE)
def CacheOtherEnum():
    return Variant(mode=Kind.NORMED)


@case(call(X), plan_for=Variant)
def SameVariant():
    """The same values: the plan fits."""
    return Variant()


@case(call(X), plan_for=Variant, through="cache")
def CacheSameVariant():
    return Variant()


def _patched(self, x):
    h = self.up(x).relu()
    return x + self.down(h / (1 + h.norm(dim=-1, keepdim=True)))


@case(call(X), plan_for=Variant, allowed=HOSTILE)
def ForwardReplaced():
    """An instance whose forward was replaced."""
    model = Variant()
    model.forward = functools.partial(_patched, model)
    return model


class Tuple(Attention):
    """Which norm is applied is said by a tuple of strings."""

    def __init__(self, steps=("scale",)):
        super().__init__()
        self.steps = steps

    def mixed(self, x):
        s = self.scores(x)
        for step in self.steps:
            s = s - s.mean(1, keepdim=True) if step == "centre" else s * 1.5
        return joined(torch.softmax(s, -1) @ parted(self.v(x), self.heads))


@case(call(X), plan_for=Tuple, allowed=HOSTILE)
def SameClassOtherTuple():
    return Tuple(("scale", "centre"))


class Switches:
    centre = False


class Nested(Mlp):
    """A config object holds the switch."""

    def __init__(self, centre=False):
        super().__init__()
        self.config = Switches()
        self.config.centre = centre

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h - h.mean(-1, keepdim=True) if self.config.centre else h)


@case(call(X), plan_for=Nested, allowed=HOSTILE)
def SameClassOtherConfig():
    return Nested(True)


@case(call(X), plan_for=Nested, through="cache", allowed=HOSTILE)
def CacheOtherConfig():
    return Nested(True)


class Swapped(nn.Module):
    """A child of another class, without parameters."""

    def __init__(self, act=None):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), act or nn.ReLU(), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


@case(call(X), plan_for=Swapped, allowed=HOSTILE)
def OtherActivationModule():
    return Swapped(nn.Softmax(-1))


@case(call(X), plan_for=Swapped, through="cache", allowed=HOSTILE)
def CacheOtherActivationModule():
    return Swapped(nn.Softmax(-1))
