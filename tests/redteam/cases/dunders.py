"""Special methods and overrides of the modules' own: lengths, truth, equality, copies, pickles, lists of parameters."""

from __future__ import annotations

import abc
import copy
import threading
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp

X = floats(2, 6, 16)


class Pair(nn.Module):
    """A block with a part of another kind before and behind it."""

    def __init__(self, block):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(16, 16), block, nn.Linear(16, 16)

    def forward(self, x):
        return self.last(self.block(torch.tanh(self.first(x))))


@case(call(X), tp=(2, 4))
class LengthOfNothing(Pair):
    """A container that is false where it is asked, since its length is 0."""

    class Memory(Mlp):
        def __init__(self):
            super().__init__()
            self.items = []

        def __len__(self):
            return len(self.items)

    def __init__(self):
        super().__init__(self.Memory())


@case(call(X), tp=(2, 4))
class EqualByWeights(Pair):
    """Modules compare by their weights, and have no hash but their name's."""

    class Compared(Mlp):
        def __eq__(self, other):
            return isinstance(other, type(self)) and torch.equal(self.up.weight, other.up.weight)

        def __hash__(self):
            return hash(type(self).__name__)

    def __init__(self):
        super().__init__(nn.Sequential(self.Compared(), self.Compared()))


@case(call(X), tp=(2, 4))
class HasALock(Pair):
    """It leaves a lock out of its pickles and copies."""

    class Locked(Mlp):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

        def __getstate__(self):
            state = self.__dict__.copy()
            state.pop("lock", None)
            return state

        def __setstate__(self, state):
            super().__setstate__(state)
            self.lock = threading.Lock()

        def forward(self, x):
            with self.lock:
                return super().forward(x)

    def __init__(self):
        super().__init__(self.Locked())


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class HasALockPlainly(Pair):
    """A lock that no pickle takes."""

    class Locked(Mlp):
        def __init__(self):
            super().__init__()
            self.lock = threading.RLock()

        def forward(self, x):
            with self.lock:
                return super().forward(x)

    def __init__(self):
        super().__init__(self.Locked())


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class CopiesItsOwnWay(Pair):
    """Its copy shares the table of frequencies, and copies the rest."""

    class Shared(Mlp):
        def __init__(self):
            super().__init__()
            self.table = torch.linspace(0.5, 1.5, 32, dtype=torch.float64)

        def __deepcopy__(self, memo):
            made = type(self)()
            made.load_state_dict(self.state_dict())
            made.to(self.up.weight.dtype).train(self.training)
            made.table = self.table
            return made

        def inner(self, x):
            return super().inner(x) * self.table.to(x.dtype)

    def __init__(self):
        super().__init__(self.Shared())


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class HidesItsTeacher(nn.Module):
    """`parameters()` leaves the teacher out, as the optimizer shall not see it."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Mlp(), Mlp()

    def named_parameters(self, *args, **kwargs):
        return ((name, p) for name, p in super().named_parameters(*args, **kwargs) if not name.startswith("teacher"))

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        y = self.student(x)
        return y, F.mse_loss(y, target)


@case(call(X), tp=(2, 4))
class KeepsEval(nn.Module):
    """A frozen backbone stays in evaluation whatever `train` is called with, and a part is told so."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(6), nn.GELU(), nn.Linear(32, 16))
        self.head = Mlp()

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x):
        return self.head(self.backbone(x))


@case(call(X), tp=(2, 4))
class FindsAttributes(Pair):
    """Attributes that it lacks are looked for in what it wraps."""

    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("inner"), name)

        def forward(self, x):
            return x + self.down(F.silu(self.up(x)))

    def __init__(self):
        super().__init__(self.Wrapper(self.Wrapper(Mlp())))


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class Frozen(Pair):
    """Nothing may be set on it once it is made."""

    class Sealed(Mlp):
        def __init__(self):
            super().__init__()
            self.width = 32
            self.__dict__["sealed"] = True

        def __setattr__(self, name, value):
            if self.__dict__.get("sealed") and name not in self.__dict__.get("_parameters", {}) and name != "training":
                raise AttributeError(f"{name}: this module is sealed")
            super().__setattr__(name, value)

        def forward(self, x):
            return x + self.down(
                self.inner(x).view(*x.shape[:2], 4, -1).cumsum(-1).reshape(*x.shape[:2], -1) / self.width
            )

    def __init__(self):
        super().__init__(self.Sealed())


@dataclass(eq=False)
class DataModule(nn.Module):
    """A module that is a dataclass."""

    d: int = 16
    hidden: int = 32
    rates: list = field(default_factory=lambda: [1.0, 0.5])

    def __post_init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(self.d, self.hidden), nn.Linear(self.hidden, self.d)

    def forward(self, x):
        for rate in self.rates:
            x = x + rate * self.down(F.gelu(self.up(x))[..., : self.hidden])
        return x


case(call(X), tp=(2, 4))(DataModule)


class Meta(abc.ABCMeta):
    """Wraps what the class makes: arguments are kept on the module."""

    def __call__(cls, *args, **kwargs):
        made = super().__call__(*args, **kwargs)
        made.made_with = {"args": args, **kwargs}
        return made


class Projects(Protocol):
    def project(self, x): ...


@case(call(X), tp=(2, 4))
class MadeByMetaclass(nn.Module, metaclass=Meta):
    """An abstract class of modules with a metaclass of its own; sizes are read from what it was made with."""

    class Inner(nn.Module, metaclass=Meta):
        def __init__(self, d, heads=4):
            super().__init__()
            self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

        @property
        def heads(self):
            return self.made_with["heads"]

        def project(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

        def forward(self, x):
            return x + self.project(x)

    def __init__(self):
        super().__init__()
        self.inner, self.last = self.Inner(16, heads=4), Mlp()

    def forward(self, x):
        return self.last(self.inner(x))


@case(call(X), tp=(2, 4))
class OperatorsOfModules(nn.Module):
    """Blocks that are added and chained by operators, and iterate over their parts."""

    class Chain(nn.Module):
        def __init__(self, *parts):
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def __or__(self, other):
            return type(self)(*self.parts, other)

        def __iter__(self):
            return iter(self.parts)

        def __getitem__(self, key):
            return self.parts[key]

        def __contains__(self, part):
            return any(part is one for one in self.parts)

        def forward(self, x):
            for part in self:
                x = part(x)
            return x

    def __init__(self):
        super().__init__()
        self.chain = self.Chain(Attention()) | Mlp() | Mlp()

    def forward(self, x):
        return self.chain(x) + self.chain[1](x)


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class CopiedShallowly(nn.Module):
    """A shallow copy of a layer with another activation shares its weights, and runs in the forward."""

    class Layer(Mlp):
        act = staticmethod(F.gelu)

        def inner(self, x):
            return self.act(self.up(x))

    def __init__(self):
        super().__init__()
        self.layer = self.Layer()

    def forward(self, x):
        other = copy.copy(self.layer)
        other.act = torch.tanh
        return self.layer(x) + other(x)


def saved(model, x):
    before = model(x).detach()
    state = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    model.load_state_dict(state)
    return before, model(x)


@case(call(X, _do=saved), tp=(2, 4), vary=False)
class MoreInState(Pair):
    """State of its own beside the tensors: `get_extra_state`, and a hook that renames an old key."""

    class Counted(Mlp):
        def __init__(self):
            super().__init__()
            self.seen = 3

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"] + 1

        def forward(self, x):
            return super().forward(x) * self.seen

    def __init__(self):
        super().__init__(self.Counted())
