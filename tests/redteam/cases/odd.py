"""Sound models with odd habits. A refusal of these is a fault too."""

from __future__ import annotations

import random
from typing import Generic, TypeVar

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
T = TypeVar("T")


class Base(Generic[T], nn.Module):
    def block(self, d: int) -> nn.Module:
        return Mlp(d)


@case(call(X))
class GenericBase(Base[int]):
    def __init__(self):
        super().__init__()
        self.inner = self.block(16)

    def forward(self, x):
        return self.inner(x)


class GenericLast(nn.Module, Generic[T]):
    pass


@case(call(X))
class GenericAfterModule(GenericLast[str]):
    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def forward(self, x):
        return self.inner(x)


@case(call(X))
class NanOnPurpose(Mlp):
    """Places that mean nothing are NaN."""

    def forward(self, x):
        y = super().forward(x)
        return y.masked_fill((torch.arange(x.shape[1]) == 0)[:, None], float("nan"))


@case(call(X))
class InfinityOnPurpose(Mlp):
    def forward(self, x):
        y = super().forward(x)
        return y.masked_fill((torch.arange(16) == 3), float("-inf"))


@case(call(X))
class NumpyDraws(Mlp):
    """A number of numpy's, seeded alike on all ranks, scales the stream."""

    def forward(self, x):
        return super().forward(x * (1 + numpy.random.rand()))


@case(call(X))
class PythonDraws(Mlp):
    def forward(self, x):
        return super().forward(x * random.uniform(0.5, 1.5))


@case(call(X), vary=False)
class ScipyWindow(Mlp):
    """A window of scipy's over the sequence."""

    def forward(self, x):
        from scipy.signal import windows

        return super().forward(x * torch.from_numpy(windows.hann(x.shape[1])).to(x.dtype)[:, None])


@case(call(X))
class ChangesArgument(Mlp):
    """The argument is scaled in place."""

    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


@case(call(X, [], _do=lambda m, x, out: (m(x, out), out)), inputs={"x": X, "out": []}, allowed=HOSTILE)
class FillsArgument(Mlp):
    """Results are appended to a list that is given."""

    def forward(self, x, out):
        y = super().forward(x)
        out.append(y)
        return y


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return g * (s * (1 + x * (1 - s)))


@case(call(X))
class OwnSilu(Mlp):
    """An elementwise autograd Function of one's own."""

    def inner(self, x):
        return Double.apply(self.up(x))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


@case(call(X))
class StraightThrough(Mlp):
    def inner(self, x):
        return Straight.apply(self.up(x) * 4)


class Recomputed(torch.autograd.Function):
    """OpenAI's checkpoint function: parameters are arguments, the forward runs again in the backward."""

    @staticmethod
    def forward(ctx, run, length, *args):
        ctx.run, ctx.inputs, ctx.parameters = run, list(args[:length]), list(args[length:])
        with torch.no_grad():
            return run(*ctx.inputs)

    @staticmethod
    def backward(ctx, *grads):
        inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            out = ctx.run(*[x.view_as(x) for x in inputs])
        found = torch.autograd.grad(out, inputs + ctx.parameters, grads, allow_unused=True)
        return (None, None, *found)


@case(call(X))
class OwnCheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(16, 16), Mlp()

    def forward(self, x):
        return Recomputed.apply(self.block, 1, self.first(x), *self.block.parameters())


@case(call(X))
class ReentrantCheckpoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block = nn.Linear(16, 16), Attention()

    def forward(self, x):
        return checkpoint(self.block, self.first(x), use_reentrant=True)


class Adapted(nn.Linear):
    """LoRA that is merged into the weight in eval, and taken out in training (loralib's)."""

    def __init__(self, a, b):
        super().__init__(a, b)
        self.a, self.b = nn.Parameter(torch.randn(2, a) / 4), nn.Parameter(torch.randn(b, 2) / 4)
        self.merged = False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.b @ self.a).data * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y if self.merged else y + x @ self.a.T @ self.b.T


@case(call(X), call(X, _train=True), call(X))
class LoraMerging(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Adapted(16, 32), Adapted(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


@case(call(X))
class FrozenHalf(Mlp):
    """A weight without gradient."""

    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)


@case(call(X))
class WithoutParametersBetween(nn.Module):
    """Plain functions and lambdas as modules."""

    class Apply(nn.Module):
        def __init__(self, fn):
            super().__init__()
            self.fn = fn

        def forward(self, x):
            return self.fn(x)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), self.Apply(lambda h: h.sin()), nn.Linear(32, 16))

    def forward(self, x):
        return self.net(x)


@case(call(X))
class CallsSuperTwice(Mlp):
    def forward(self, x):
        return super().forward(super().forward(x)) - x


@case(call(X))
class ScriptedPart(Mlp):
    """An elementwise function that is scripted."""

    def inner(self, x):
        return _scripted(self.up(x))


@torch.jit.script
def _scripted(h: torch.Tensor) -> torch.Tensor:
    return h * torch.sigmoid(1.702 * h)


@case(call(X))
class PropertiesAndSlots(nn.Module):
    """Layers are reached through properties."""

    def __init__(self):
        super().__init__()
        self._layers = nn.ModuleList([nn.Linear(16, 32), nn.Linear(32, 16)])

    @property
    def up(self):
        return self._layers[0]

    @property
    def down(self):
        return self._layers[-1]

    def forward(self, x):
        return x + self.down(self.up(x).relu())


@case(call(X))
class VmappedHeads(Attention):
    """torch.vmap over the batch."""

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        one = lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1) @ v  # noqa: E731
        return joined(torch.vmap(one)(q, k, v))


@case(call(X))
class GradInside(Mlp):
    """A gradient is taken in the forward (an energy's force), of the stream alone."""

    def forward(self, x):
        with torch.enable_grad():
            y = x.detach().requires_grad_(True)
            (force,) = torch.autograd.grad(y.pow(3).sum(), y)
        return super().forward(x - 0.1 * force)


@case(call(ids(2, 6)))
class IntegersOnly(nn.Module):
    """Returns ids and a mask next to logits."""

    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(32, 16), Mlp(), nn.Linear(16, 32)

    def forward(self, input_ids):
        z = self.head(self.block(self.table(input_ids)))
        return z, input_ids > 3, input_ids.cumsum(1)


@case(call(X), input_gradients=True, inputs={"x": floats(2, 6, 16).requires_grad_()})
class InputGradients(Mlp):
    """The input asks for its gradient, as it did when the plan was made."""


@case(call(X))
class PenaltyOverParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Mlp(16)

    def forward(self, x):
        return self.inner(x) + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


@case(call(X))
class PenaltyByName(nn.Module):
    """Of another module's weights, by their names."""

    def __init__(self):
        super().__init__()
        self.inner, self.rate = Mlp(16), 0.1

    def forward(self, x):
        lasso = sum(p.abs().sum() for name, p in self.inner.named_parameters(prefix="of") if name.endswith("weight"))
        return self.inner(x), self.rate * lasso
