"""Data that travels through Python: dicts, dataclasses, lists, generators, closures, globals, keyword arguments."""

from __future__ import annotations

import dataclasses
import functools
import types

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
_SETTINGS = {"normed": False, "power": 2.0}
_STACK = []


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)


@dataclasses.dataclass
class State:
    stream: torch.Tensor
    hidden: torch.Tensor | None = None
    notes: dict = dataclasses.field(default_factory=dict)


@case(call(X))
class ThroughDataclass(Parts):
    def forward(self, x):
        state = State(x)
        state.hidden = self.up(state.stream).relu()
        state.notes["out"] = self.down(state.hidden)
        return state.stream + state.notes["out"]


@case(call(X), allowed=HOSTILE)
class ReturnsDataclass(Parts):
    """What is returned holds the hidden units too."""

    def forward(self, x):
        h = self.up(x).relu()
        return State(x + self.down(h), h, {"norm": h.norm(dim=-1)})


@case(
    call({"x": X, "scale": floats(16)}, _do=lambda m, batch: m(batch)),
    inputs={"batch": {"x": X, "scale": floats(16)}},
    allowed=HOSTILE,
)
class TakesDict(Parts):
    def forward(self, batch):
        return {"y": batch["x"] * batch["scale"] + self.down(self.up(batch["x"]).relu())}


@case(call([X, X + 1]), inputs={"parts": [X, X + 1]}, allowed=HOSTILE)
class TakesList(Parts):
    def forward(self, parts):
        return [p + self.down(self.up(p).relu()) for p in parts]


@case(call(x=X), call(x=X, unused=3), allowed=HOSTILE)
class KeywordArguments(Parts):
    def forward(self, **kwargs):
        x = kwargs["x"]
        return x + self.down(self.up(x).relu())


KeywordArguments.__doc__ = "Everything comes as a keyword."


@case(call(X), allowed=HOSTILE)
class StarArguments(Parts):
    def forward(self, *args):
        return args[0] + self.down(self.up(args[0]).relu())


@case(call(X))
class Generators(Parts):
    def pieces(self, x):
        for piece in x.unbind(1):
            yield self.up(piece).relu()

    def forward(self, x):
        return x + torch.stack([self.down(h) for h in self.pieces(x)], 1)


@case(call(X))
class Closures(Parts):
    def forward(self, x):
        h = self.up(x)

        def finish(shape):
            return x + self.down(shape(h))

        return finish(torch.relu)


@case(call(X), allowed=HOSTILE)
class GlobalStack(Parts):
    """The hidden units lie in a list of the file between two methods."""

    def forward(self, x):
        _STACK.append(self.up(x).relu())
        y = x + self.down(_STACK[-1])
        return y * (1 + _STACK.pop().amax(-1, keepdim=True))


def switched(model, x):
    _SETTINGS["normed"] = True
    try:
        return model(x)
    finally:
        _SETTINGS["normed"] = False


@case(call(X), call(X, _do=switched), allowed=HOSTILE)
class GlobalSettings(Parts):
    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(F.normalize(h, dim=-1) if _SETTINGS["normed"] else h)


@case(call(X))
class PartialAndReduce(Parts):
    def forward(self, x):
        steps = [self.up, torch.relu, functools.partial(torch.mul, 2.0), self.down]
        return x + functools.reduce(lambda value, step: step(value), steps, x)


@case(call(X), allowed=HOSTILE)
class HostNumber(Parts):
    """A number is read to Python, and comes back as a factor."""

    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h) * float(h.detach().sum())


@case(call(X), allowed=HOSTILE)
class HostBranch(Parts):
    """A branch on values of the hidden units."""

    def forward(self, x):
        h = self.up(x).relu()
        if h.max() > 1.0:
            h = h / h.max()
        return x + self.down(h)


@case(call(X), allowed=HOSTILE)
class HostList(Parts):
    """The norms of rows are read as a list, and sorted by Python."""

    def forward(self, x):
        h = self.up(x).relu()
        order = sorted(range(x.shape[1]), key=lambda t: h[0, t].detach().norm().item())
        return x + self.down(h[:, order])


@case(call(X), allowed=HOSTILE)
class PlainModulesInList(nn.Module):
    """Layers in a plain list: torch does not know them, so they stay where they are."""

    def __init__(self):
        super().__init__()
        self.block, self.more = Mlp(), [Mlp().double()]

    def forward(self, x):
        return self.more[0](self.block(x))


@case(call(X), allowed=HOSTILE)
class ParameterLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.ups = nn.ParameterList([nn.Parameter(torch.randn(16, 32) / 4) for _ in range(2)])
        self.downs = nn.ParameterDict({str(n): nn.Parameter(torch.randn(32, 16) / 6) for n in range(2)})

    def forward(self, x):
        for n, up in enumerate(self.ups):
            x = x + (x @ up).relu() @ self.downs[str(n)]
        return x


@case(call(X), allowed=HOSTILE)
class Namespace(Parts):
    """Values travel on a namespace, and one more is returned on it."""

    def forward(self, x):
        box = types.SimpleNamespace(x=x)
        box.h = self.up(box.x).relu()
        box.y = box.x + self.down(box.h)
        box.size = box.h.shape[-1]
        return box


@case(call(X), allowed=HOSTILE)
class WidthReturned(Parts):
    """A plain number of the hidden width is returned, and used."""

    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h) / h.shape[-1], h.shape[-1], h.numel()


@case(call(X))
class ModulesByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"a": Attention(), "b": Mlp()})

    def forward(self, x):
        for name in sorted(self.layers, reverse=True):
            x = getattr(self.layers, name)(x) if name == "a" else self.layers[name](x)
        return x


@case(call(X), allowed=HOSTILE)
class CalledByAnother(nn.Module):
    """A helper object that is no module holds the layers and calls them."""

    class Helper:
        def __init__(self, up, down):
            self.up, self.down = up, down

        def __call__(self, x):
            return self.down(F.gelu(self.up(x)))

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.Helper(self.up, self.down)(x)
