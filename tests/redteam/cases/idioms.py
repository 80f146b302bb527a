"""Python as people write it: dispatch, descriptors, contexts, closures, decorators, generators, modules made late."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import operator
import typing
import weakref
from collections import defaultdict

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
BOTH = (2, 4)


@case(call(X))
class Matched(Mlp):
    """A match statement on the shape."""

    def inner(self, x):
        h = self.up(x)
        match h.shape:
            case (_, width):
                return h * width
            case (batch, length, _) if length > 0 and batch > 0:
                return F.gelu(h)
            case _:
                raise ValueError(h.shape)


@case(call(X))
class InExitStack(Mlp):
    """Contexts that are entered on the way, and a callback that changes what comes out."""

    def inner(self, x):
        with contextlib.ExitStack() as stack:
            kept = []
            stack.callback(kept.clear)
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            kept.append(self.up(x))
            return kept[-1].relu()


def doubled(function):
    @functools.wraps(function)
    def wrapped(self, *args, **kwargs):
        return 2 * function(self, *args, **kwargs) - args[0]

    return wrapped


@case(call(X))
class Decorated(Mlp):
    @doubled
    def forward(self, x):
        return super().forward(x)


class Lazily:
    """A descriptor that makes a value from the module's sizes."""

    def __init__(self, make):
        self.make = make

    def __set_name__(self, owner, name):
        self.name = f"_{name}"

    def __get__(self, module, owner=None):
        if self.name not in module.__dict__:
            object.__setattr__(module, self.name, self.make(module))
        return module.__dict__[self.name]


@case(call(X))
class Descriptors(Attention):
    scale = Lazily(lambda module: (module.q.out_features // module.heads) ** -0.5)

    def scores(self, x):
        q, k = parted(self.q(x), self.heads), parted(self.k(x), self.heads)
        return self.scale * q @ k.mT


@case(call(X))
class CachedProperty(Attention):
    @functools.cached_property
    def width(self):
        return self.o.in_features // self.heads

    def mixed(self, x):
        q, k, v = (f(x).reshape(*x.shape[:2], -1, self.width).transpose(1, 2) for f in (self.q, self.k, self.v))
        return joined(F.scaled_dot_product_attention(q, k, v))


@functools.singledispatch
def applied(layer, x):
    raise TypeError(layer)


@applied.register
def _(layer: nn.Linear, x):
    return F.linear(x, layer.weight, layer.bias)


@applied.register(nn.Module)
def _(layer, x):
    return layer(x)


@case(call(X))
class SingleDispatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)])

    def forward(self, x):
        return x + functools.reduce(lambda h, layer: applied(layer, h), self.layers, x)


@case(call(X))
class KnowsItsParent(nn.Module):
    """A child reaches its parent through a weak reference, and asks it for a sibling's output."""

    class Child(nn.Module):
        def __init__(self, parent):
            super().__init__()
            self.parent, self.down = weakref.ref(parent), nn.Linear(32, 16)

        def forward(self, x):
            return self.down(self.parent().up(x).relu())

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.child = self.Child(self)

    def forward(self, x):
        return x + self.child(x)


@case(call(X))
class ForwardInInit(nn.Module):
    """The forward is an inner function that __init__ assigns."""

    def __init__(self):
        super().__init__()
        up, down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.up, self.down = up, down

        def forward(x):
            return x + self.down(F.silu(self.up(x)))

        self.forward = forward


@case(call(X))
class CallOverridden(Mlp):
    """__call__ does something before and after."""

    def __call__(self, x):
        return super().__call__(x * 0.5) + 1


@case(call(X))
class AttributesForwarded(nn.Module):
    """A wrapper that gives out attributes of what it wraps."""

    def __init__(self):
        super().__init__()
        self.inner = Attention()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return x + self.o(self.mixed(x)) * self.heads


@case(call(X))
class MadeLate(nn.Module):
    """LazyLinear, whose size the first call gives, made in __init__ by a dry run."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(16))
        self.net(torch.zeros(1, 16))

    def forward(self, x):
        return x + self.net(x)


class Sizes(typing.NamedTuple):
    batch: int
    length: int
    heads: int
    width: int


@case(call(X), tp=BOTH)
class SizesInTuple(Attention):
    """Sizes go round in a named tuple, and come back with _replace."""

    def mixed(self, x):
        size = Sizes(*x.shape[:2], self.heads, x.shape[2] // self.heads)
        q, k, v = (f(x).view(*size).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        size = size._replace(width=size.heads * size.width, heads=1)
        return y.reshape(size.batch, size.length, size.width)


@case(call(X), tp=BOTH)
class ShapesAsText(Attention):
    """The equation of an einsum is put together; attributes are got by name."""

    def mixed(self, x):
        q, k, v = (parted(operator.attrgetter(name)(self)(x), self.heads) for name in "qkv")
        letters = "bhtd"
        s = torch.einsum(f"{letters},{letters.replace('t', 's')}->bhts", q, k)
        return joined(getattr(torch, "soft" + "max")(s, dim=-1) @ v)


@case(call(X), tp=BOTH)
class AtenDirectly(Mlp):
    def inner(self, x):
        h = torch.ops.aten.addmm(self.up.bias, x.flatten(0, -2), self.up.weight.t())
        return torch.ops.aten.mul.Tensor(h, torch.ops.aten.sigmoid.default(h)).unflatten(0, x.shape[:-1])


@case(call(X))
class FunctionalInside(nn.Module):
    """functional_call with doubled weights of a child."""

    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        doubled = {name: 2 * p for name, p in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, doubled, (x,))


@case(call(X))
class JacobianVector(nn.Module):
    """A derivative along a direction, forward mode, of a block."""

    def __init__(self):
        super().__init__()
        self.inner = Mlp()

    def forward(self, x):
        y, t = torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))
        return y + t


@case(call(X))
class TracedGraph(nn.Module):
    """A GraphModule made by fx inside of the model."""

    def __init__(self):
        super().__init__()
        self.inner = torch.fx.symbolic_trace(Mlp())

    def forward(self, x):
        return self.inner(x)


@case(call(X))
class ScriptedModule(nn.Module):
    """A module compiled by TorchScript inside of the model."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    def __init__(self):
        super().__init__()
        self.inner = torch.jit.script(self.Plain())

    def forward(self, x):
        return self.inner(x)


@case(call(X))
class CachedParametrization(nn.Module):
    """A weight that is the product of a scale and a direction, cached for two uses in a call."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(32, 1))

        def forward(self, w):
            return w * self.log_scale.exp()

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        parametrize.register_parametrization(self.up, "weight", self.Scaled())

    def forward(self, x):
        with parametrize.cached():
            return x + self.down(self.up(x).relu() + self.up(x.flip(1)).relu())


@case(call(X))
class Accumulated(nn.Module):
    """itertools: states by accumulate, pairs by pairwise, layers by cycle."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x):
        run = itertools.islice(itertools.cycle(self.layers), 3)
        states = list(itertools.accumulate(run, lambda h, layer: layer(h), initial=x))
        return sum(b - a for a, b in itertools.pairwise(states)), states[-1]


@case(call(X), tp=BOTH)
class Coroutine(Mlp):
    """The forward talks with a generator by send."""

    def talk(self, x):
        h = yield self.up(x)
        yield self.down(h)

    def forward(self, x):
        talk = self.talk(x)
        h = next(talk)
        return x + talk.send(h.relu())


@case(call(X))
class TriesFirst(Mlp):
    """An exception chooses the way: view where it works, else reshape."""

    def inner(self, x):
        h = self.up(x).transpose(0, 1)
        try:
            h = h.view(-1, h.shape[-1])
        except RuntimeError:
            h = h.reshape(-1, h.shape[-1])
        return F.gelu(h).view(x.shape[1], x.shape[0], -1).transpose(0, 1)


@case(call(X), allowed=HOSTILE)
class TriesWidth(Mlp):
    """An exception chooses the way by the width of a hidden value, which is another one on a rank."""

    def inner(self, x):
        h = self.up(x)
        try:
            return h + torch.arange(32.0, dtype=x.dtype)
        except RuntimeError:
            return h


@case(call(X))
class SignatureAsked(nn.Module):
    """Arguments are passed to the child that takes them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(), Attention()])

    def forward(self, x, **more):
        for block in self.blocks:
            taken = inspect.signature(block.forward).parameters
            x = block(x, **{name: value for name, value in more.items() if name in taken})
        return x


@case(call(X))
class Registry(nn.Module):
    """Activations by name out of a table of the class, a ModuleDict by type, results in a defaultdict."""

    ways: typing.ClassVar = {"gelu": F.gelu, "relu": torch.relu}

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({"up_gelu": nn.Linear(16, 32), "down_relu": nn.Linear(32, 16)})

    def forward(self, x):
        seen = defaultdict(list)
        for name, layer in self.layers.items():
            x = self.ways[name.split("_")[1]](layer(x))
            seen[name.split("_")[0]].append(x.shape[0])
        return x, dict(seen)


@case(call(X), tp=BOTH)
class TorchFunctionTable(Attention):
    """Operators written with dunder methods and torch.Tensor's unbound ones."""

    def mixed(self, x):
        q, k, v = (parted(layer.__call__(x), self.heads) for layer in (self.q, self.k, self.v))
        s = torch.Tensor.matmul(q, torch.Tensor.transpose(k, 2, 3)).__mul__(0.5)
        s = operator.isub(s, s.detach().max(dim=-1, keepdim=True)[0])
        p = torch.Tensor.exp(s)
        return joined(operator.matmul(p.__truediv__(p.sum(-1, True)), v))


@case(call(X), call(X, _train=True))
class FrozenByDecorator(nn.Module):
    """A whole block under a decorator that takes no gradients, then one with them."""

    def __init__(self):
        super().__init__()
        self.frozen, self.live = Attention(), Mlp()

    @torch.no_grad()
    def features(self, x):
        return self.frozen(x)

    def forward(self, x):
        return self.live(self.features(x))


@case(call(ids(2, 6)), tp=BOTH, sequence=None)
class Recursive(nn.Module):
    """A block that holds the next block, four deep, and passes a list of states."""

    class Block(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.block, self.next = (Mlp(), Attention())[depth % 2], None
            if depth:
                self.next = type(self)(depth - 1)

        def forward(self, x, states):
            x = self.block(x)
            states.append(x.mean(-1))
            return x if self.next is None else self.next(x, states)

    def __init__(self):
        super().__init__()
        self.table, self.first, self.head = nn.Embedding(32, 16), self.Block(3), nn.Linear(16, 32)

    def forward(self, input_ids):
        states = []
        return self.head(self.first(self.table(input_ids), states)), states


@case(call(X), tp=BOTH)
class ChunkedByBatch(nn.Module):
    """Micro-batches inside: rows are taken one by one, results joined."""

    def __init__(self):
        super().__init__()
        self.block, self.mlp = Attention(), Mlp()

    def forward(self, x):
        return torch.cat([self.mlp(self.block(row)) for row in x.split(1)])
