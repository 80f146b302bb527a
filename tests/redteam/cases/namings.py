"""How parts are called and registered: odd names, names of torch's own, gaps, aliases, parts that are None or empty."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(2, 6, 16)


@case(call(X), tp=(2, 4))
class LettersOfPatterns(nn.Module):
    """Names with the letters of patterns, quotes and paths."""

    def __init__(self):
        super().__init__()
        for name in ("up*", "up[0]", "up?", "{up}"):
            self.add_module(name, nn.Linear(16, 32))
        self.add_module("down/out", nn.Linear(32, 16))

    def forward(self, x):
        parts = dict(self.named_children())
        hidden = torch.relu(parts["up*"](x)) * torch.sigmoid(parts["up[0]"](x)) + parts["up?"](x).tanh()
        return x + parts["down/out"](hidden * F.softplus(parts["{up}"](x)))


@case(call(X), tp=(2, 4))
class WordsOfFiles(nn.Module):
    """Names that a file format reads as something else."""

    def __init__(self):
        super().__init__()
        names = ("no", "null", "1e3", "~", "key: value", "#note", "yes")
        self.parts = nn.ModuleDict({name: Mlp() for name in names})

    def forward(self, x):
        for name in self.parts:
            x = self.parts[name](x)
        return x


@case(call(X), tp=(2, 4))
class NamesOfMethods(nn.Module):
    """Children and parameters called as methods and attributes of modules and tensors are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(16, 32)
        self.grad = nn.Linear(32, 16)
        self.data = nn.Parameter(torch.randn(32) * 0.1)
        self.shape = nn.Parameter(torch.randn(16) * 0.1)
        self.device = nn.LayerNorm(16)
        self.dtype = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x):
        return self.dtype[0](self.device(x + self.grad(torch.tanh(self.weight(x)) * self.data) + self.shape))


@case(call(X))
class Spaces(nn.Module):
    """Names with spaces and letters of other alphabets."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict(
            {"first layer": nn.Linear(16, 32), "größe": nn.Linear(16, 32), "выход": nn.Linear(32, 16)}
        )

    def forward(self, x):
        return x + self.parts["выход"](self.parts["first layer"](x).sigmoid() * self.parts["größe"](x))


@case(call(X), tp=(2, 4))
class GapsInNumbers(nn.Module):
    """Numbered blocks with gaps, as pruning and stages leave them, whose order is not that of their numbers."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({name: Mlp() for name in ("10", "2", "07", "33")})

    def forward(self, x):
        for name in sorted(self.blocks, key=int):
            x = self.blocks[name](x)
        return x


@case(call(X), tp=(2, 4))
class NumberedAttributes(nn.Module):
    """Blocks as attributes with numbers, run by name."""

    def __init__(self, depth=3):
        super().__init__()
        self.depth = depth
        for n in range(depth):
            setattr(self, f"attn{n}", Attention())
            setattr(self, f"mlp_{n}_", Mlp())

    def forward(self, x):
        for n in range(self.depth):
            x = getattr(self, f"mlp_{n}_")(getattr(self, f"attn{n}")(x))
        return x


@case(call(X), tp=(2, 4))
class SameNameDeeper(nn.Module):
    """`model.model.model`: the same name at each depth, each with layers of its own."""

    class Shell(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.model, self.proj = inner, Mlp()

        def forward(self, x):
            return self.proj(self.model(x))

    def __init__(self):
        super().__init__()
        self.model = self.Shell(self.Shell(self.Shell(Attention())))

    def forward(self, x):
        return self.model(x)


@case(call(X), tp=(2, 4))
class OneLayerTwoNames(nn.Module):
    """A layer under two names of two parents, called through both."""

    class Head(nn.Module):
        def __init__(self, trunk):
            super().__init__()
            self.trunk, self.out = trunk, nn.Linear(32, 16)

        def forward(self, x):
            return self.out(torch.relu(self.trunk(x)))

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(16, 32)
        self.heads = nn.ModuleList([self.Head(self.trunk), self.Head(self.trunk)])

    def forward(self, x):
        return self.heads[0](x), self.heads[1](x).tanh(), self.trunk(x).logsumexp(-1)


@case(call(X), tp=(2, 4), dp=2)
class NothingThere(nn.Module):
    """Children and parameters that are None, empty lists, a parameter without elements."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), None
        self.register_parameter("gamma", None)
        self.register_buffer("mask", None)
        self.extra = nn.ModuleList()
        self.prompt = nn.Parameter(torch.empty(0, 16))
        self.act = nn.Identity()

    def forward(self, x):
        hidden = self.act(F.gelu(self.up(x)))
        if self.gamma is not None:
            hidden = hidden * self.gamma
        for layer in self.extra:
            hidden = layer(hidden)
        x = torch.cat([self.prompt.expand(x.shape[0], -1, -1), x + self.down(hidden)], 1)
        return x if self.norm is None else self.norm(x)


@case(call(X), tp=(2, 4))
class OddShapesOfWeights(nn.Module):
    """A weight of no dims, one of five, one that is stored transposed, one whose rows are a step apart."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.mix = nn.Parameter(torch.randn(1, 1, 4, 8, 1) * 0.3)
        self.up = nn.Parameter(torch.randn(16, 32).t() * 0.2)
        self.down = nn.Parameter((torch.randn(32, 32) * 0.2)[::2])

    def forward(self, x):
        hidden = (F.linear(x, self.up) * self.scale).unflatten(-1, (4, 8))
        hidden = (hidden.unsqueeze(-1) * self.mix).squeeze(-1).flatten(-2).tanh()
        return x + F.linear(hidden, self.down)


def marks(model, x):
    kinds = {name: (getattr(p, "rate", 1.0), getattr(p, "no_decay", False)) for name, p in model.named_parameters()}
    return model(x), kinds


@case(call(X, _do=marks), tp=(2, 4), vary=False)
class MarkedWeights(Mlp):
    """Attributes on parameters, by which an optimizer's groups are made later."""

    def __init__(self):
        super().__init__()
        self.up.weight.rate = 0.25
        self.up.bias.no_decay = self.down.bias.no_decay = True


@case(call(X), tp=(2, 4))
class FactorOnWeight(Mlp):
    """muP: a multiplier lies on the weight as an attribute, and the forward reads it."""

    def __init__(self):
        super().__init__()
        self.up.weight.multiplier, self.down.weight.multiplier = 0.5, 2.0

    def forward(self, x):
        h = F.gelu(F.linear(x, self.up.weight) * self.up.weight.multiplier)
        return x + F.linear(h, self.down.weight) * self.down.weight.multiplier


@case(call(X), call(X), tp=(2, 4))
class ScaledOnceByMark(Mlp):
    """A weight is scaled at the first call, and marked so that it is not scaled again."""

    def forward(self, x):
        if not getattr(self.up.weight, "scaled", False):
            with torch.no_grad():
                self.up.weight.mul_(0.5)
            self.up.weight.scaled = True
        return super().forward(x)


@case(call(X), call(X), tp=(2, 4))
class AverageOnWeight(nn.Module):
    """The running norm of a weight lies on the weight itself."""

    def __init__(self):
        super().__init__()
        self.a, self.out = Mlp(), nn.Linear(16, 16)

    def forward(self, x):
        w = self.out.weight
        now = w.detach().pow(2).mean()
        w.average = 0.9 * getattr(w, "average", now) + 0.1 * now
        return self.out(self.a(x)) / w.average.sqrt()


@case(call(X), tp=(2, 4))
class QuantStateOnWeight(nn.Module):
    """Codes as a weight that takes no gradient, with scales on it as an attribute (bitsandbytes)."""

    def __init__(self):
        super().__init__()
        self.a, self.w = Mlp(), nn.Parameter(torch.randn(16, 16).sign(), requires_grad=False)
        self.w.state = {"scale": 0.3, "shape": (16, 16)}

    def forward(self, x):
        return F.linear(self.a(x), self.w.reshape(self.w.state["shape"]) * self.w.state["scale"])


@case(call(X), allowed=HOSTILE)
class MaskByWeight(nn.Module):
    """Masks of the first call are kept in a dict by the weight itself."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.masks = Mlp(), Mlp(), {}

    def forward(self, x):
        for m in (self.a, self.b):
            w = m.up.weight
            if w not in self.masks:
                self.masks[w] = (w.detach().abs() > 0.1).to(w.dtype)
            x = x + m.down(F.gelu(F.linear(x, w * self.masks[w], m.up.bias)))
        return x


@case(call(ids(2, 6, below=30)), tp=(2, 4))
class OwnKindOfParameter(nn.Module):
    """A class of parameters with a method of its own, which the forward calls."""

    class Gain(nn.Parameter):
        def applied(self, x):
            return x * (1 + torch.tanh(self))

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(30, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.gain = self.Gain(torch.randn(32) * 0.3)

    def forward(self, tokens):
        x = self.table(tokens)
        return x + self.down(self.gain.applied(F.relu(self.up(x))))


@case(call(X), tp=(2, 4))
class FlagsAndCounts(nn.Module):
    """Buffers of bools and integers, an integer parameter without gradient, a complex buffer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("alive", torch.arange(32) % 5 != 0)
        self.shift = nn.Parameter(torch.arange(32) % 3, requires_grad=False)
        self.register_buffer("phase", torch.polar(torch.ones(32), torch.arange(32) * 0.1))

    def forward(self, x):
        hidden = F.gelu(self.up(x)).masked_fill(~self.alive, 0.0) * (1 + self.shift)
        return x + self.down(hidden * self.phase.real.to(x.dtype))
