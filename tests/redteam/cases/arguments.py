"""Arguments of every kind that say what happens: enums, tuples, nested dicts, numbers, slices, tensors, lists."""

from __future__ import annotations

import enum
import types
from collections import namedtuple
from dataclasses import dataclass, field

import numpy
import torch

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)


class Way(enum.Enum):
    PLAIN = 0
    NORMED = 1


class Bits(enum.Flag):
    A = enum.auto()
    B = enum.auto()


Pair = namedtuple("Pair", "x normed")


@dataclass
class Options:
    way: str = "plain"
    more: dict = field(default_factory=dict)


class Given(Mlp):
    """The argument says whether a softmax is taken over the hidden units."""

    def says(self, how):
        raise NotImplementedError

    def forward(self, x, how=None):
        h = self.inner(x)
        return x + self.down(h.softmax(-1) if self.says(how) else h)


def asked(plain, other, **options):
    return case(
        call(X, plain), call(X, other), call(X, plain), inputs={"x": X, "how": plain}, allowed=HOSTILE, **options
    )


@asked(Way.PLAIN, Way.NORMED)
class EnumGiven(Given):
    def says(self, how):
        return how is Way.NORMED


@asked(Bits.A, Bits.A | Bits.B)
class FlagsGiven(Given):
    def says(self, how):
        return Bits.B in how


@asked({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2, 3]}})
class NestedGiven(Given):
    def says(self, how):
        return len(how["a"]["b"]) > 2


@asked(Options(), Options("normed"))
class OptionsGiven(Given):
    def says(self, how):
        return how.way == "normed"


@asked(Options(), Options(more={"norm": True}))
class DeepOptionsGiven(Given):
    def says(self, how):
        return how.more.get("norm", False)


@asked(types.SimpleNamespace(norm=False), types.SimpleNamespace(norm=True))
class NamespaceGiven(Given):
    def says(self, how):
        return how.norm


@asked(0.5, 1.5)
class FloatGiven(Given):
    def says(self, how):
        return how > 1


@asked(1, 1.0)
class KindOfNumber(Given):
    def says(self, how):
        return isinstance(how, float)


@asked(numpy.float64(0.5), numpy.float64(1.5))
class NumpyGiven(Given):
    def says(self, how):
        return bool(how > 1)


@asked(numpy.zeros(3), numpy.ones(3))
class ArrayGiven(Given):
    def says(self, how):
        return how.sum() > 1


@asked(slice(0, 4), slice(0, 5))
class SliceGiven(Given):
    def says(self, how):
        return how.stop == 5


@asked(torch.zeros(()), torch.ones(()))
class ScalarTensorGiven(Given):
    def says(self, how):
        return bool(how > 0.5)


@asked(torch.zeros(3), torch.zeros(4))
class ShapeGiven(Given):
    def says(self, how):
        return how.shape[0] == 4


@asked(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
class DtypeOfGiven(Given):
    def says(self, how):
        return not how.is_floating_point()


@asked([X], [X, X])
class ListOfTensors(Given):
    def says(self, how):
        return len(how) == 2


@asked("abc", "abd")
class LastLetter(Given):
    def says(self, how):
        return how.endswith("d")


@asked(range(3), range(4))
class RangeGiven(Given):
    def says(self, how):
        return len(how) == 4


@asked(frozenset({"a"}), frozenset({"a", "norm"}))
class SetGiven(Given):
    def says(self, how):
        return "norm" in how


@case(call(Pair(X, False)), call(Pair(X, True)), inputs={"pair": Pair(X, False)}, allowed=HOSTILE)
class PairGiven(Mlp):
    def forward(self, pair):
        h = self.inner(pair.x)
        return pair.x + self.down(h.softmax(-1) if pair.normed else h)


@case(call(X, norm=False), call(X, norm=True), inputs={"x": X, "norm": False}, allowed=HOSTILE)
class AnyKeywords(Mlp):
    def forward(self, x, **kw):
        h = self.inner(x)
        return x + self.down(h.softmax(-1) if kw.pop("norm", None) else h)


@case(call(X, dim=0), call(X, dim=2), call(X, dim=-1), inputs={"x": X, "dim": 0}, allowed=HOSTILE)
class DimGiven(Mlp):
    """No branch: a literal of the call goes to the op."""

    def forward(self, x, dim):
        return x + self.down(self.inner(x).softmax(dim))


@case(call(X, "btf->btf"), call(X, "btf->bt"), inputs={"x": X, "equation": "btf->btf"}, allowed=HOSTILE)
class EquationGiven(Mlp):
    def forward(self, x, equation):
        h = self.inner(x)
        y = torch.einsum(equation, h)
        return x + self.down(h * (y if y.dim() == 3 else y[..., None]))


@case(call(X, 1.0), call(X, 2.0), call(X, float("inf")), inputs={"x": X, "p": 1.0}, allowed=HOSTILE)
class OrderOfNorm(Mlp):
    """A norm over the cut units whose order is given."""

    def forward(self, x, p):
        h = self.inner(x)
        return x + self.down(h / h.norm(p, -1, keepdim=True))


@case(call(X, torch.softmax), call(X, torch.log_softmax), inputs={"x": X, "fn": torch.softmax}, allowed=HOSTILE)
class OpGiven(Attention):
    def forward(self, x, fn):
        return x + self.o(joined(fn(self.scores(x), -1) @ parted(self.v(x), self.heads)))


@case(call(X, [0, 1, 2, 3]), call(X, [3, 1]), inputs={"x": X, "heads": [0, 1, 2, 3]}, allowed=HOSTILE)
class HeadsGiven(Attention):
    """The caller says which heads count."""

    def forward(self, x, heads):
        y = torch.softmax(self.scores(x), -1) @ parted(self.v(x), self.heads)
        keep = torch.zeros(self.heads, dtype=x.dtype)
        keep[heads] = 1
        return x + self.o(joined(y * keep[:, None, None]))
