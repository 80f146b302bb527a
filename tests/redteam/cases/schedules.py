"""What a module does changes from call to call: curricula, swapped parts, callbacks, scopes, growing state."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import types
from collections import OrderedDict, defaultdict

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, parted

X = floats(2, 6, 16)
LONG = floats(2, 9, 16)
THRICE = (call(X), call(X), call(X))


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class DropsLaterLayers(nn.Module):
    """Progressive layer dropping: how deep it runs depends on a count in a buffer, without chance."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(4)])
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.step += 1
        for depth, block in enumerate(self.blocks):
            keep = torch.tanh(self.step * 0.2) if depth % 2 else torch.ones(())
            x = x + keep.to(x.dtype) * (block(x) - x)
        return x


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class GrowsDeeper(nn.Module):
    """Each call runs one block more, until all run."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(3)])
        self.active = 1

    def forward(self, x):
        for block in self.blocks[: self.active]:
            x = block(x)
        self.active = min(self.active + 1, len(self.blocks))
        return x


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class WidthOfTurn(nn.Module):
    """Slimmable: the width of the hidden layer changes from call to call."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.widths = itertools.cycle((32, 16, 8))

    def forward(self, x):
        width = next(self.widths)
        h = F.relu(F.linear(x, self.up.weight[:width], self.up.bias[:width]))
        return x + F.linear(h, self.down.weight[:, :width], self.down.bias)


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class ActivationSwapped(nn.Module):
    """It puts another activation in after its first call."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)

    def forward(self, x):
        y = x + self.down(self.act(self.up(x)))
        self.act = nn.Softmax(-1)
        return y


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class ForwardSwapped(nn.Module):
    """A warm-up forward replaces itself by the usual one."""

    def __init__(self):
        super().__init__()
        self.net = Mlp()
        self.net.forward = types.MethodType(self.first, self.net)

    @staticmethod
    def first(net, x):
        net.forward = types.MethodType(type(net).forward, net)
        return x + net.down(net.inner(x).cumsum(-1))

    def forward(self, x):
        return self.net(x)


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class LayerAddedInForward(nn.Module):
    """A layer without weights is appended to a list of layers in the first call."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.after = nn.Sequential(nn.Tanh())

    def forward(self, x):
        y = x + self.down(self.after(self.up(x)))
        if len(self.after) < 2:
            self.after.append(nn.Softmax(-1))
        return y


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class ThresholdFollows(nn.Module):
    """A threshold in a Python float follows the quantile of hidden sizes; what lies below is cut."""

    def __init__(self):
        super().__init__()
        self.net, self.threshold = Mlp(), 0.0

    def forward(self, x):
        h = self.net.inner(x)
        y = x + self.net.down(torch.where(h.abs() > self.threshold, h, torch.zeros_like(h)))
        self.threshold = 0.5 * self.threshold + 0.5 * h.detach().abs().flatten().kthvalue(h.numel() // 4).values.item()
        return y


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class PenaltyIfLoud(nn.Module):
    """A running largest value of hidden units decides whether a penalty is added."""

    def __init__(self):
        super().__init__()
        self.net = Mlp()
        self.register_buffer("loudest", torch.zeros(()))

    def forward(self, x):
        h = self.net.inner(x)
        self.loudest = torch.maximum(self.loudest * 0.9, h.detach().abs().amax())
        y = x + self.net.down(h)
        if self.loudest > 1.0:
            y = y - 0.1 * h.logsumexp(-1, keepdim=True)
        return y


SCALE = contextvars.ContextVar("SCALE", default=1.0)


@case(call(X), tp=(2, 4))
class ScopedScale(nn.Module):
    """A context variable is set around the call of a part, and read in a helper."""

    class Part(Mlp):
        def inner(self, x):
            h = F.gelu(self.up(x))
            return h.sort(-1).values if SCALE.get() > 1.0 else h * SCALE.get()

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([self.Part() for _ in range(2)])

    @contextlib.contextmanager
    def scaled(self, value):
        token = SCALE.set(value)
        try:
            yield
        finally:
            SCALE.reset(token)

    def forward(self, x):
        for n, part in enumerate(self.parts):
            with self.scaled(1.0 + n):
                x = part(x)
        return x


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class Callbacks(nn.Module):
    """Callbacks registered by name are called with what is hidden; some return a new value."""

    def __init__(self):
        super().__init__()
        self.net, self.events, self.log = Mlp(), defaultdict(list), OrderedDict()
        self.events["hidden"].append(lambda m, h: m.log.__setitem__("mean", h.detach().mean()))
        self.events["hidden"].append(lambda m, h: h - h.mean(-1, keepdim=True))
        self.events["hidden"].append(lambda m, h: h / (1e-3 + h.norm(dim=-1, keepdim=True)))

    def fire(self, name, value):
        for listener in self.events[name]:
            changed = listener(self, value)
            value = value if changed is None else changed
        return value

    def forward(self, x):
        return x + self.net.down(self.fire("hidden", self.net.up(x))), self.log["mean"]


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class PropertyThatCounts(nn.Module):
    """Reading the weight counts, and each third reading is of the normalised one."""

    def __init__(self):
        super().__init__()
        self.raw, self.down, self.reads = nn.Parameter(torch.randn(32, 16) * 0.2), nn.Linear(32, 16), 0

    @property
    def weight(self):
        self.reads += 1
        return self.raw / self.raw.norm() if self.reads % 3 == 0 else self.raw

    def forward(self, x):
        return x + self.down(torch.relu(F.linear(x, self.weight)))


@case(call(X), call(LONG), call(X), tp=(2, 4), allowed=HOSTILE)
class TableGrows(nn.Module):
    """A table of hidden positions grows where a longer input comes, and stays so."""

    def __init__(self):
        super().__init__()
        self.net = Mlp()
        self.register_buffer("table", torch.zeros(0, 32), persistent=False)

    def forward(self, x):
        h = self.net.inner(x)
        if self.table.shape[0] < h.shape[1]:
            place = torch.arange(h.shape[1], dtype=h.dtype)[:, None]
            self.table = torch.sin(place * torch.linspace(0.1, 1.0, h.shape[-1], dtype=h.dtype))
        return x + self.net.down(h * self.table[: h.shape[1]])


@case(call(X), call(X[:, -1:]), call(X[:, -1:]), tp=(2, 4), allowed=HOSTILE, vary=False)
class GrowingKeys(nn.Module):
    """Keys and values of all calls are kept in a list on the module, and read by the next."""

    def __init__(self):
        super().__init__()
        self.attn, self.past = Attention(), []

    def forward(self, x):
        a = self.attn
        q, k, v = (parted(layer(x), a.heads) for layer in (a.q, a.k, a.v))
        self.past.append((k.detach(), v.detach()))
        k = torch.cat([*(pair[0] for pair in self.past[:-1]), k], 2)
        v = torch.cat([*(pair[1] for pair in self.past[:-1]), v], 2)
        return x + a.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def run_with(model, x):
    first = model(x)
    with model.frozen_statistics():
        second = model(x * 2)
    return first, second, model(x)


@case(call(X, _do=run_with, _train=True), tp=(2, 4), vary=False, allowed=HOSTILE)
class ScopeFromOutside(nn.Module):
    """A context manager of the model's own that its user enters: statistics stand still inside."""

    def __init__(self):
        super().__init__()
        self.net, self.moving = Mlp(), True
        self.register_buffer("mean", torch.zeros(32))

    @contextlib.contextmanager
    def frozen_statistics(self):
        self.moving = False
        yield self
        self.moving = True

    def forward(self, x):
        h = self.net.inner(x)
        if self.moving:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        return x + self.net.down(h - self.mean)


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class AlternatesHeads(nn.Module):
    """Even calls use four heads, odd ones two."""

    def __init__(self):
        super().__init__()
        self.attn, self.turn = Attention(), 0

    def forward(self, x):
        self.attn.heads = (4, 2)[self.turn % 2]
        self.turn += 1
        return self.attn(x)


@case(call(X), tp=(2, 4))
class SettingsRestored(nn.Module):
    """An attribute of a part is changed for one call, and put back."""

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x):
        before, self.attn.heads = self.attn.heads, 2
        try:
            x = self.attn(x)
        finally:
            self.attn.heads = before
        return self.mlp(self.attn(x))


class Turn:
    """A plain object that counts."""

    def __init__(self, *widths):
        self.widths, self.at = widths, 0

    def following(self):
        self.at += 1
        return self.widths[(self.at - 1) % len(self.widths)]


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class WidthFromObject(nn.Module):
    """As WidthOfTurn, with the count in an object beside it."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.turn = nn.Linear(16, 32), nn.Linear(32, 16), Turn(32, 16, 8)

    def forward(self, x):
        width = self.turn.following()
        h = F.relu(F.linear(x, self.up.weight[:width], self.up.bias[:width]))
        return x + F.linear(h, self.down.weight[:, :width], self.down.bias)


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class WidthFromGenerator(nn.Module):
    """As WidthOfTurn, by a function that keeps the count in its closure."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        at = [0]

        def following():
            at[0] += 1
            return (32, 16, 8)[(at[0] - 1) % 3]

        self.following = following

    def forward(self, x):
        width = self.following()
        h = F.relu(F.linear(x, self.up.weight[:width], self.up.bias[:width]))
        return x + F.linear(h, self.down.weight[:, :width], self.down.bias)


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class WidthInDict(nn.Module):
    """As WidthOfTurn, from a list that is turned at each call."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.settings = nn.Linear(16, 32), nn.Linear(32, 16), {"widths": [32, 16, 8]}

    def forward(self, x):
        width = self.settings["widths"][0]
        self.settings["widths"].append(self.settings["widths"].pop(0))
        h = F.relu(F.linear(x, self.up.weight[:width], self.up.bias[:width]))
        return x + F.linear(h, self.down.weight[:, :width], self.down.bias)


@case(*THRICE, tp=(2, 4), allowed=HOSTILE)
class SpreadOfTurn(nn.Module):
    """Every second call takes all units, the others one half of them for both."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.halves = nn.Linear(16, 32), nn.Linear(32, 16), itertools.cycle((False, True))

    def forward(self, x):
        h = F.gelu(self.up(x))
        if next(self.halves):
            h = h[..., :16].repeat(1, 1, 2)
        return x + self.down(h)
