"""Flags and optional arguments that plan's own inputs do not set."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)


@case(call(X), call(X, norm=True), allowed=HOSTILE)
class NormFlag(Mlp):
    def forward(self, x, norm=False):
        h = self.inner(x)
        if norm:
            h = h / h.norm(dim=-1, keepdim=True)
        return x + self.down(h)


@case(call(X), call(X, stats=True), allowed=HOSTILE)
class StatsFlag(Mlp):
    def forward(self, x, stats=False):
        h = self.inner(x)
        y = x + self.down(h)
        return (y, h.mean(-1), h.std(-1)) if stats else y


@case(call(X), call(X, scale=floats(32)), allowed=HOSTILE)
class OptionalScale(Mlp):
    def forward(self, x, scale=None):
        h = self.inner(x)
        if scale is not None:
            h = h * scale
        return x + self.down(h)


@case(call(X), call(X, mode="softmax"), call(X, mode="relu"), allowed=HOSTILE)
class ModeString(Mlp):
    def forward(self, x, mode="relu"):
        h = self.up(x)
        h = h.softmax(-1) if mode == "softmax" else h.relu()
        return x + self.down(h)


@case(call(X), call(X, need_weights=True), allowed=HOSTILE)
class NeedWeights(Attention):
    def forward(self, x, need_weights=False):
        p = torch.softmax(self.scores(x), -1)
        y = self.o(joined(p @ parted(self.v(x), self.heads)))
        return (y, p.mean(1)) if need_weights else y


@case(call(X), call(X, all_heads=True), allowed=HOSTILE)
class WeightsOfAllHeads(Attention):
    def forward(self, x, all_heads=False):
        p = torch.softmax(self.scores(x), -1)
        y = self.o(joined(p @ parted(self.v(x), self.heads)))
        return (y, p) if all_heads else y


@case(call(X), call(X, topk=4), allowed=HOSTILE)
class SparseHidden(Mlp):
    def forward(self, x, topk=0):
        h = self.inner(x)
        if topk:
            h = h * (h >= h.topk(topk, -1).values[..., -1:])
        return x + self.down(h)


@case(call(X), call(X, temperature=0.5), call(X, temperature=2.0))
class Temperature(Attention):
    """A number that changes no branch: sound."""

    def forward(self, x, temperature=1.0):
        p = torch.softmax(self.scores(x) / temperature, -1)
        return self.o(joined(p @ parted(self.v(x), self.heads)))


@case(call(X), call(X, skip=True), allowed=HOSTILE)
class SkipBlock(Mlp):
    """The way without the block needs no sums."""

    def forward(self, x, skip=False):
        return x if skip else super().forward(x)


@case(call(X), call(X, mask=torch.ones(2, 6).bool()), call(X, mask=torch.arange(6).expand(2, 6) < 4), allowed=HOSTILE)
class OptionalMask(Attention):
    def forward(self, x, mask=None):
        s = self.scores(x)
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], -1e9)
        return self.o(joined(torch.softmax(s, -1) @ parted(self.v(x), self.heads)))


@case(call(ids(2, 6)), call(ids(2, 6), labels=ids(2, 6, seed=1)), allowed=HOSTILE)
class OptionalLabels(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(32, 16), Mlp(), nn.Linear(16, 32)

    def forward(self, input_ids, labels=None):
        z = self.head(self.block(self.table(input_ids)))
        if labels is None:
            return z
        return F.cross_entropy(z.flatten(0, 1), labels.flatten())


@case(call(X), call(X, reverse=True), allowed=HOSTILE)
class ReverseHidden(Mlp):
    def forward(self, x, reverse=False):
        h = self.inner(x)
        h = h.flip(-1) if reverse else h
        return x + self.down(h)


@case(call(X), call(X, power=2), call(X, power=3), allowed=HOSTILE)
class PowerLoop(Mlp):
    """The flag says how often a loop runs."""

    def forward(self, x, power=1):
        for _ in range(power):
            x = super().forward(x)
        return x


@case(call(X), call(X, gate=True), call(X, gate=1), allowed=HOSTILE)
class GateByAmax(Mlp):
    def forward(self, x, gate=False):
        h = self.inner(x)
        h = h / h.abs().amax(-1, keepdim=True) if gate else h
        return x + self.down(h)


@case(call(X), call(X, normalise=True), allowed=HOSTILE)
class FlagByBooleanOperator(Mlp):
    """No `if`: the flag stands in an `and`, and in an index."""

    def forward(self, x, normalise=False):
        h = self.inner(x)
        scale = (normalise and h.sum(-1, keepdim=True)) or 1.0 if not normalise else h.sum(-1, keepdim=True)
        return x + self.down((h, h / (1 + scale**2))[normalise])


@case(call(X), call(X, fn=torch.sigmoid), call(X, fn=lambda h: h.softmax(-1)), allowed=HOSTILE)
class FunctionGiven(Mlp):
    def forward(self, x, fn=torch.relu):
        return x + self.down(fn(self.up(x)))


@case(call(X), call(X, last=0), call(X, last=1), inputs={"all": {"x": X}, "first": {"x": X, "last": 0}}, shards=True)
class ListThatEndsEarlier(nn.Module):
    """A head for each round; a call may leave after any of them."""

    def __init__(self):
        super().__init__()
        self.block, self.heads = nn.LayerNorm(16), nn.ModuleList(nn.Linear(16, 10) for _ in range(2))

    def forward(self, x, last=None):
        results = []
        for number, head in enumerate(self.heads):
            x = x + self.block(x).tanh()
            results.append(head(x.mean(1)))
            if number == last:
                break
        return x, results
