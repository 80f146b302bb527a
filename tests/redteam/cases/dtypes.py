"""Dtypes and autocast: the same model in another precision, and code that asks for it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
HALF = {"tolerance": 0.06, "dtype": torch.float32}


def in_bfloat(model, x):
    """Cast the model and call it; it is cast back for the calls that follow."""
    try:
        return model.to(torch.bfloat16)(x.to(torch.bfloat16)).float()
    finally:
        model.to(torch.float32)


def cast_and_call(model, x):
    return model.to(torch.float32)(x.float())


@case(call(X), call(X, _do=in_bfloat, _grad=False), allowed=HOSTILE, vary=False, **HALF)
class NormsInHalf(Mlp):
    def forward(self, x):
        h = self.inner(x)
        if h.dtype == torch.bfloat16:
            h = h / h.float().norm(dim=-1, keepdim=True).to(h.dtype)
        return x + self.down(h)


@case(call(X), call(X, _autocast=torch.bfloat16), **HALF)
class AutocastMlp(Mlp):
    """Plain autocast: sound."""


@case(call(X), call(X, _autocast=torch.bfloat16), **HALF)
class AutocastAttention(Attention):
    """Plain autocast over attention: sound."""


@case(call(X), call(X, _autocast=torch.bfloat16), allowed=HOSTILE, **HALF)
class AsksForAutocast(Mlp):
    def forward(self, x):
        h = self.inner(x)
        if torch.is_autocast_enabled("cpu"):
            h = h.float() - h.float().mean(-1, keepdim=True)
        return x + self.down(h)


@case(call(X), call(X, _do=cast_and_call, _grad=False), allowed=HOSTILE, vary=False, tolerance=1e-3)
class EpsilonByDtype(Mlp):
    """A number looked up by the dtype: no branch."""

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h.clamp(min=torch.finfo(h.dtype).tiny))


@case(call(X), tolerance=1e-5)
class FloatIslands(Attention):
    """Softmax in float32 within double."""

    def mixed(self, x):
        p = torch.softmax(self.scores(x).float(), -1).to(x.dtype)
        return joined(p @ parted(self.v(x), self.heads))


@case(call(X), tolerance=1e-5)
class FloatNorm(nn.Module):
    """An RMS norm that computes in float32, over the stream."""

    def __init__(self):
        super().__init__()
        self.scale, self.block = nn.Parameter(torch.ones(16)), Mlp()

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.block(self.scale * y.to(x.dtype))


@case(call(X), call(X, _autocast=torch.bfloat16), **HALF)
class AutocastOff(Mlp):
    """A part that leaves autocast."""

    def forward(self, x):
        h = self.up(x)
        with torch.autocast("cpu", enabled=False):
            h = F.gelu(h.float())
        return x + self.down(h)


@case(call(X), tolerance=1e-5)
class MixedWeights(nn.Module):
    """One linear layer stays in float32."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.down.to(torch.float32)
        return self

    def forward(self, x):
        return x + self.down(self.up(x).relu().float()).to(x.dtype)


@case(call(X), dtype=torch.bfloat16, tolerance=0.08, vary=False)
class WholeInBfloat(Mlp):
    """Everything in bfloat16: sound."""


@case(call(X), dtype=torch.float32, tolerance=1e-4)
class WholeInSingle(Attention):
    """Everything in float32: sound."""


@case(call(X))
class ComplexHidden(nn.Module):
    """A complex elementwise rotation of the hidden units."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        h = torch.view_as_complex(self.up(x).unflatten(-1, (16, 2)).contiguous())
        h = torch.view_as_real(h * torch.polar(torch.ones(16), torch.arange(16.0)).to(h.dtype)).flatten(-2)
        return x + self.down(h)


@case(call(X), call(X, _do=lambda m, x: m(x.float())), allowed=HOSTILE, vary=False, tolerance=1e-5)
class InputsInSingle(Mlp):
    """An input of another dtype is normed before it is cast."""

    def forward(self, x):
        h = self.inner(x.to(self.up.weight.dtype))
        if x.dtype is torch.float32:
            h = h.softmax(-1)
        return self.down(h)


@case(call(X), call(X, dtype=torch.float32), allowed=HOSTILE, tolerance=1e-4)
class DtypeArgument(Mlp):
    def forward(self, x, dtype=None):
        h = self.inner(x)
        h = h if dtype is None else F.softmax(h, -1, dtype=dtype).to(h.dtype)
        return x + self.down(h)
