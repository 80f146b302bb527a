"""What modules are made of: lazy layers, ragged tensors, flat weights, functional calls, hooks, results."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
ASKING = X.clone().requires_grad_()
BOTH = (2, 4)


@case(call(X), tp=BOTH)
class LazyAndRun(nn.Module):
    """Lazy layers, whose weights a run in the constructor makes."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.LazyLinear(32), nn.LayerNorm(16), nn.LazyLinear(16)
        self(torch.zeros(1, 2, 16))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


@case(call(X), allowed=HOSTILE)
class LazyNeverRun(nn.Module):
    """Lazy layers whose weights are not there yet."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.LazyLinear(32), nn.LazyLinear(16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


@case(call(X, MASK), tp=BOTH)
class RowsOfMask(nn.Module):
    """A BERT-like head computes at masked places alone: how many there are is in the data."""

    def __init__(self):
        super().__init__()
        self.body, self.dense, self.norm, self.head = Attention(), nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x, mask):
        return self.head(self.norm(F.gelu(self.dense(self.body(x)[mask]))))


@case(call(X, MASK), vary=False)
class Ragged(Mlp):
    """Rows of unequal lengths as a jagged nested tensor, padded again at the end."""

    def forward(self, x, mask):
        rows = torch.nested.as_nested_tensor(
            [row[keep] for row, keep in zip(x, mask, strict=True)], layout=torch.jagged
        )
        return torch.nested.to_padded_tensor(self.down(F.gelu(self.up(rows))), 0.0)


class Flat(nn.Module):
    """All weights lie in one flat parameter, as in fused optimisers and hypernetworks."""

    shapes = ((32, 16), (32,), (16, 32), (16,))

    def __init__(self):
        super().__init__()
        self.flat = nn.Parameter(floats(32 * 16 + 32 + 16 * 32 + 16) * 0.2)

    def weights(self):
        pieces = self.flat.split([torch.Size(shape).numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


@case(call(X), tp=BOTH)
class FlatWeights(Flat):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x):
        w1, b1, w2, b2 = self.weights()
        return self.mlp(x + F.linear(F.silu(F.linear(x, w1, b1)), w2, b2))


class Hidden(NamedTuple):
    last: Tensor
    states: tuple[Tensor, ...]
    extra: dict[str, Any]


@case(call(X), tp=BOTH)
class ReturnsNamedTuple(nn.Module):
    """Results in a named tuple, with nested dicts, None, numbers and words."""

    def __init__(self):
        super().__init__()
        self.blocks, self.heads = nn.ModuleList([Mlp(), Attention(), Mlp()]), nn.ModuleDict({"a": nn.Linear(16, 3)})

    def forward(self, x):
        states = [x]
        for block in self.blocks:
            states.append(block(states[-1]))
        extra = {"heads": {name: head(states[-1]) for name, head in self.heads.items()}, "loss": None, "steps": 3}
        return Hidden(states[-1], tuple(states), extra)


@dataclass
class Prediction:
    logits: Tensor
    probabilities: Tensor | None = None
    parts: list[Tensor] = field(default_factory=list)

    def __post_init__(self):
        if self.probabilities is None:
            self.probabilities = self.logits.softmax(-1)

    @property
    def best(self) -> Tensor:
        return self.probabilities.argmax(-1)


@case(call(X), call(X, _do=lambda m, x: (m(x).best, m(x).parts[0])))
class ReturnsComputedDataclass(nn.Module):
    """A dataclass whose constructor computes a further result, and whose property does."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Mlp(), nn.Linear(16, 8)

    def forward(self, x):
        h = self.body(x)
        return Prediction(self.head(h), parts=[h])


class Output(OrderedDict):
    """As transformers writes it: values by name, by attribute and by place."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


@case(call(X), call(X, _do=lambda m, x: (m(x)[0], m(x).hidden)))
class ReturnsOwnMapping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = Attention(), nn.Linear(16, 8)

    def forward(self, x):
        h = self.body(x)
        return Output(scores=self.head(h), hidden=h)


def halve(module, given, gave):
    return tuple(g * 0.5 if g is not None else None for g in given)


@case(call(X), inputs={"x": ASKING}, input_gradients=True)
class ScaledByBackwardHook(nn.Module):
    """A hook made in the constructor halves what flows back into a block."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Mlp(), Mlp()
        self.b.register_full_backward_hook(halve)

    def forward(self, x):
        return self.b(self.a(x))


class ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.scale, None


@case(call(X), tp=BOTH, inputs={"x": ASKING}, input_gradients=True)
class GradientScaled(Mlp):
    """fairseq's GradMultiply on hidden values and on the stream."""

    def forward(self, x):
        return x + ScaleGradient.apply(self.down(ScaleGradient.apply(F.gelu(self.up(x)), 0.5)), 0.1)


class KeepLargest(torch.autograd.Function):
    """Two results, one of them without a gradient; what is kept is in the context."""

    @staticmethod
    def forward(ctx, x, count):
        at = x.topk(count, -1).indices
        mask = torch.zeros_like(x).scatter_(-1, at, 1.0)
        ctx.save_for_backward(mask)
        ctx.mark_non_differentiable(at)
        return x * mask, at

    @staticmethod
    def backward(ctx, g, _):
        (mask,) = ctx.saved_tensors
        return g * mask, None


@case(call(X), tp=BOTH, inputs={"x": ASKING}, input_gradients=True)
class KeepsLargestUnits(Mlp):
    """k-winners: a Function that asks for the largest of all units."""

    def forward(self, x):
        h, at = KeepLargest.apply(self.up(x), 5)
        return x + self.down(h), at


@case(call(x=X, context=Y, mask=MASK), inputs={"x": X, "context": Y, "mask": MASK})
class NamesAlone(nn.Module):
    """diffusers: all is given by name, and `context` may be left out."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GLU(-1), nn.Linear(32, 16))

    def forward(self, *, x, context=None, mask=None):
        context = x if context is None else context
        q, k, v = (parted(f(y), 4) for f, y in ((self.q, x), (self.k, context), (self.v, context)))
        bias = None if mask is None else mask[:, None, None]
        x = x + self.o(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))
        return x + self.net(x)


def averaged(value):
    """As contrastive and normalising code does it on several devices."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        value = value.clone()
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value


@case(call(X, _grad=False), vary=False, allowed=HOSTILE)
class StreamMeanOverRanks(Mlp):
    """A mean of the stream over all ranks, where there are any: as much on one as on two."""

    def forward(self, x):
        return super().forward(x - averaged(x.mean((0, 1))))


@case(call(X, _grad=False), vary=False, allowed=HOSTILE)
class HiddenMeanOverRanks(Mlp):
    """Of hidden values each rank has its own."""

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h - averaged(h.mean((0, 1))))


@case(call(X))
class LoggedByFirst(Mlp):
    """The first rank counts and logs, all others do not."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        y = super().forward(x)
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.calls += 1
            self.told = f"{self.calls}: {y.norm().item():.2f}"
        return y


@case(call(ids(2, 6)), tp=BOTH)
class SharedFarApart(nn.Module):
    """Blocks 0 and 2 are one, and so are the MLPs of 1 and 3; each use has a norm and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, 16)
        a, m = Attention(), Mlp()
        self.attentions = nn.ModuleList([a, Attention(), a])
        self.mlps = nn.ModuleList([Mlp(), m, Mlp(), m])
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(4))
        self.scales = nn.Parameter(torch.ones(4, 16))

    def forward(self, input_ids):
        x = self.table(input_ids)
        for n, norm in enumerate(self.norms):
            x = self.mlps[n](x + self.scales[n] * self.attentions[n % 3](norm(x)))
        return x @ self.table.weight.T


@case(call(X), tp=BOTH)
class FunctionalAttention(nn.Module):
    """torch's functional attention on parameters of one's own."""

    def __init__(self):
        super().__init__()
        self.packed, self.bias = nn.Parameter(floats(48, 16) * 0.2), nn.Parameter(floats(48) * 0.1)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        x = x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            x, x, x, 16, 4, self.packed, self.bias, None, None, False, 0.0, self.out.weight, self.out.bias,
            self.training, need_weights=False,
        )  # fmt: skip
        return y.transpose(0, 1)


@case(call(X), tp=BOTH)
class ConvexInInput(nn.Module):
    """An input-convex network: weights along the depth are kept positive by softplus."""

    def __init__(self):
        super().__init__()
        self.enter, self.skip = nn.Linear(16, 32), nn.Linear(16, 32)
        self.raw, self.last = nn.Parameter(floats(32, 32)), nn.Parameter(floats(1, 32))

    def forward(self, x):
        h = F.softplus(self.enter(x))
        h = F.softplus(F.linear(h, F.softplus(self.raw)) / 32 + self.skip(x))
        return F.linear(h, self.last.clamp(min=0))


@case(call(X), tp=BOTH)
class WrittenByOut(Mlp):
    """Without gradients results are written into what is there, with `out=`."""

    def forward(self, x):
        h = self.up(x)
        with torch.no_grad():
            scale = torch.empty(h.shape[0], h.shape[1], 1, dtype=h.dtype)
            torch.amax(h.detach().abs(), -1, keepdim=True, out=scale)
        return x + self.down(h / (scale + 1))


@case(call(X), tp=BOTH)
class PartsAssigned(Mlp):
    """A result is prepared and its slices are filled by two branches, by index and by mask."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(16, 32)

    def forward(self, x):
        h = torch.zeros(x.shape[0], x.shape[1], 32, dtype=x.dtype)
        h[:, ::2] = self.up(x[:, ::2])
        h[:, 1::2] = self.other(x[:, 1::2])
        h[h < 0] *= 0.1
        return x + self.down(h)
