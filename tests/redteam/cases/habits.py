"""Habits of code: casts, counters, plans of widths, helpers on classes, results kept for later, several devices."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from types import MethodType, SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)
BOTH = (2, 4)


@case(call(X), dtype=torch.float32, tolerance=2e-2, tp=BOTH)
class CastsForSpeed(Mlp):
    """Products are computed in bfloat16, sums in float32."""

    def forward(self, x):
        w1, w2 = self.up.weight.bfloat16(), self.down.weight.bfloat16()
        h = F.gelu(F.linear(x.bfloat16(), w1, self.up.bias.bfloat16()).float())
        return x + F.linear(h.bfloat16(), w2).float() + self.down.bias


@case(call(X), tp=BOTH)
class MomentsInBuffers(Mlp):
    """A running mean and variance of the stream are updated in place and used at once, as in RL and VQ code."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("var", torch.ones(16))
        self.register_buffer("count", torch.tensor(1e-4))

    def forward(self, x):
        if self.training:
            flat = x.detach().flatten(0, 1)
            n, total = flat.shape[0], self.count + flat.shape[0]
            delta = flat.mean(0) - self.mean
            self.mean += delta * n / total
            self.var.copy_((self.var * self.count + flat.var(0) * n + delta**2 * self.count * n / total) / total)
            self.count.fill_(total)
        return super().forward(((x - self.mean) / (self.var + 1e-5).sqrt()).clamp(-5, 5))


@case(call(X), call(Y), tp=BOTH, allowed=HOSTILE)
class MomentsOfHidden(Mlp):
    """Buffers follow hidden units: each rank holds those of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x):
        h = self.inner(x)
        self.seen = 0.9 * self.seen + 0.1 * h.detach().mean((0, 1))
        return x + self.down(h - self.seen)


class Layer(ABC, nn.Module):
    @abstractmethod
    def change(self, h): ...

    def forward(self, x):
        return x + self.down(self.change(self.up(x)))

    @classmethod
    def make(cls, d, times):
        made = cls()
        made.up, made.down = nn.Linear(d, d * times), nn.Linear(d * times, d)
        return made


class Squared(Layer):
    def change(self, h):
        return F.relu(h) ** 2


class Gated(Layer):
    def change(self, h):
        return h * torch.sigmoid(1.702 * h)


@case(call(X), tp=BOTH)
class MadeByClassMethod(nn.Module):
    """Abstract layers, made by class methods that set modules from outside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(kind.make(16, 2) for kind in (Squared, Gated, Squared))

    def forward(self, x):
        return functools.reduce(lambda y, layer: layer(y), self.layers, x)


@case(call(X, skip=(1,)), call(X, skip=()), inputs={"x": X, "skip": (1,)}, allowed=HOSTILE)
class SkipsGivenLayers(nn.Module):
    """A tuple says which layers are left out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Mlp(), Mlp()])

    def forward(self, x, skip=()):
        for n, layer in enumerate(self.layers):
            if n in skip:
                continue
            x = layer(x)
        return x


@case(call(X), tp=BOTH)
class KeepsFeatures(nn.Module):
    """torchvision's feature extractor: hooks made in the constructor write into a dict, which is returned."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(Mlp(), Attention(), Mlp())
        self.found = {}
        for name, module in self.body.named_children():
            module.register_forward_hook(functools.partial(self.keep, name))

    def keep(self, name, module, args, output):
        self.found[name] = output

    def forward(self, x):
        self.found.clear()
        last = self.body(x)
        return {"last": last, **self.found}


@case(call(X), tp=BOTH)
class HookOnHidden(nn.Module):
    """A hook of the model's own reads hidden units, and their penalty is returned."""

    def __init__(self):
        super().__init__()
        self.mlp, self.kept = Mlp(), []
        self.mlp.up.register_forward_hook(lambda module, args, output: self.kept.append(output))

    def forward(self, x):
        self.kept.clear()
        y = self.mlp(x)
        return y, sum(h.relu().mean() for h in self.kept)


@case(call(X), tp=BOTH)
class MethodsBound(Mlp):
    """Methods are bound to the instance: an adapter around a layer's forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.up.forward = MethodType(
            lambda layer, x: F.linear(x, layer.weight, layer.bias) + self.b(self.a(x)), self.up
        )


@case(call(X), tp=BOTH)
class ReadsPlanOfWidths(nn.Module):
    """Widths and kinds are in a list of dicts, as in configs of convolutional nets."""

    plan = [{"kind": "mlp", "hidden": 32}, {"kind": "attention", "heads": 4}, {"kind": "mlp", "hidden": 64}]

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict()
        for n, one in enumerate(self.plan):
            hidden = one.get("hidden", 16)
            self.layers[f"{one['kind']}{n}"] = nn.ModuleList([nn.Linear(16, hidden), nn.Linear(hidden, 16)])

    def forward(self, x):
        for (name, (enter, leave)), one in zip(self.layers.items(), self.plan, strict=True):
            if name.startswith("mlp"):
                x = x + leave(F.silu(enter(x)))
            else:
                h = enter(x).unflatten(-1, (one["heads"], -1)).transpose(1, 2)
                x = x + leave(F.scaled_dot_product_attention(h, h, h).transpose(1, 2).flatten(-2))
        return x


@case(call(X), tp=BOTH)
class AuxiliaryByContext(nn.Module):
    """Losses of layers are collected by a context manager that the model opens."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])

    @contextlib.contextmanager
    def collecting(self):
        losses = []
        self.add = losses.append
        try:
            yield losses
        finally:
            del self.add

    def forward(self, x):
        with self.collecting() as losses:
            for layer in self.layers:
                h = layer.inner(x)
                self.add(h.pow(2).mean() + 0.1 * h.abs().sum(-1).mean())
                x = x + layer.down(h)
        return x, torch.stack(losses).sum()


@case(call(X), tp=BOTH)
class GroupsByDefaultDict(nn.Module):
    """Values are put in groups by name, and joined by a sorted walk."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: nn.Linear(16, 16) for name in ("key_a", "query_a", "key_b", "query_b", "value_a", "value_b")}
        )
        self.out = nn.Linear(32, 16)

    def forward(self, x):
        groups = defaultdict(dict)
        for name, part in self.parts.items():
            what, _, branch = name.partition("_")
            groups[branch][what] = parted(part(x), 2)
        found = [
            joined(F.scaled_dot_product_attention(g["query"], g["key"], g["value"])) for _, g in sorted(groups.items())
        ]
        return x + self.out(torch.cat(found, -1))


@case(call(X), tp=BOTH)
class PairsOfLayers(nn.Module):
    """Each pair of layers meets once; indices come from itertools."""

    def __init__(self):
        super().__init__()
        self.ups, self.down = nn.ModuleList(nn.Linear(16, 32) for _ in range(3)), nn.Linear(32, 16)

    def forward(self, x):
        h = [up(x) for up in self.ups]
        return x + self.down(sum(a * b.tanh() for a, b in itertools.combinations(h, 2)))


class Owner:
    """No module: it holds modules of the model weakly and runs them."""

    def __init__(self, model):
        self.model = weakref.ref(model)

    def run(self, x):
        model = self.model()
        return model.down(F.gelu(model.up(x)))


@case(call(X))
class RunsThroughWeakReference(Mlp):
    def __init__(self):
        super().__init__()
        self.owner = Owner(self)

    def forward(self, x):
        return x + self.owner.run(x)


@case(call(X, _grad=False), vary=False, allowed=HOSTILE)
class GathersFeatures(nn.Module):
    """CLIP's loss gathers features of all processes, where there are any."""

    def __init__(self):
        super().__init__()
        self.body, self.out = Mlp(), nn.Linear(16, 8)

    def forward(self, x):
        z = F.normalize(self.out(self.body(x).mean(1)), dim=-1)
        if dist.is_initialized():
            parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, z.detach())
            parts[dist.get_rank()] = z
            return z @ torch.cat(parts).T
        return z @ z.T


@case(call(X), allowed=HOSTILE)
class CutsByRank(Mlp):
    """Old model-parallel code: a rank takes its own rows of the batch, if it is told to."""

    def forward(self, x):
        if dist.is_initialized() and os.environ.get("OWN_ROWS"):
            x = x.chunk(dist.get_world_size())[dist.get_rank()]
        return super().forward(x)


@case(call(ids(2, 6)), call(ids(2, 6), labels=ids(2, 6, seed=1)), tp=BOTH, allowed=HOSTILE)
class LossIfTrained(nn.Module):
    """Labels smoothed by hand, an ignored index, and a loss in float32, as an attribute of a namespace."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = (
            nn.Embedding(32, 16),
            nn.Sequential(Attention(), Mlp()),
            nn.Linear(16, 32, bias=False),
        )

    def forward(self, input_ids, labels=None):
        z = self.head(self.body(self.table(input_ids)))
        loss = None
        if labels is not None:
            p = F.log_softmax(z[:, :-1].float(), -1)
            keep = labels[:, 1:] != 3
            nll = -p.gather(-1, labels[:, 1:, None])[..., 0]
            loss = (0.9 * nll - 0.1 * p.mean(-1))[keep].mean()
        return SimpleNamespace(logits=z, loss=loss)


@case(call(X), tp=BOTH)
class NormalisedInPlace(Attention):
    """In-place operators on what was just made: -=, /=, masked_fill_, clamp_."""

    def forward(self, x):
        s = self.scores(x)
        s.masked_fill_(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu_(1), float("-inf"))
        s = s - s.amax(-1, keepdim=True).detach()
        s.exp_()
        s = s / s.sum(-1, keepdim=True)
        y = joined(s @ parted(self.v(x), self.heads))
        y *= 0.5
        y += x
        return x + self.o(y.clamp_(-3, 3))
