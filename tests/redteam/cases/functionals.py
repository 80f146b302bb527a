"""Functions with a state of their own, torch.func, hooks that keep, graphs that are read, modes around calls."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
ROWS = floats(4, 16)


class AddLoss(Function):
    """DeepSeek's way to add a term of the loss to a value's gradient."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype, ctx.needed = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx, given):
        return given, torch.ones(1, dtype=ctx.dtype).squeeze() if ctx.needed else None


@case(call(X), tp=(2, 4))
class LossAddedToHidden(Mlp):
    """The term is a mean over hidden units, added where these are."""

    def inner(self, x):
        h = F.gelu(self.up(x))
        return AddLoss.apply(h, 0.1 * h.pow(2).mean())


@case(call(X), tp=(2, 4))
class LossOfSumsAdded(Mlp):
    """Added to the output, and taken from a softmax over hidden units."""

    def forward(self, x):
        h = self.up(x)
        p = h.softmax(-1).flatten(0, 1).mean(0)
        return AddLoss.apply(x + self.down(torch.relu(h)), (p * p.log()).sum())


class TopUnits(Function):
    """The k largest of each row; what is kept in ctx are numbers and places."""

    @staticmethod
    def forward(ctx, x, k):
        values, places = x.topk(k, -1)
        ctx.size, ctx.k = x.shape, k
        ctx.save_for_backward(places)
        return torch.zeros_like(x).scatter(-1, places, values)

    @staticmethod
    @once_differentiable
    def backward(ctx, given):
        (places,) = ctx.saved_tensors
        kept = torch.zeros(ctx.size, dtype=given.dtype).scatter(-1, places, 1.0)
        return given * kept * (ctx.size[-1] / ctx.k) ** 0.5, None


@case(call(X), tp=(2, 4))
class TopByFunction(Mlp):
    def inner(self, x):
        return TopUnits.apply(F.softplus(self.up(x)), 8)


class Scaled(Function):
    """New style, with outputs that have no gradient, and vmap of its own making."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, scale):
        return x * scale, (x > 0).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.scale = inputs[1]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, given, _):
        return None if given is None else given * ctx.scale * 0.5, None


@case(call(X), tp=(2, 4))
class CountsPositive(Mlp):
    def forward(self, x):
        h, active = Scaled.apply(self.up(x), 1.5)
        return x + self.down(torch.relu(h)) / (1 + active.unsqueeze(-1)), active


class FusedGate(Function):
    """Gate and value in one, with a backward by hand that is differentiable again."""

    @staticmethod
    def forward(ctx, x):
        gate, value = x.chunk(2, -1)
        ctx.save_for_backward(gate, value)
        return torch.sigmoid(gate) * value

    @staticmethod
    def backward(ctx, given):
        gate, value = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return torch.cat([given * value * s * (1 - s), given * s], -1)


@case(call(X), tp=(2, 4))
class FusedGateByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(FusedGate.apply(self.up(x)))


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, given):
        (x,) = ctx.saved_tensors
        return given * (x > 0)


@case(call(X), tp=(2, 4))
class ReluOfOwnInPlace(Mlp):
    def inner(self, x):
        return InPlace.apply(self.up(x) * 1.0)


@case(call(ROWS), tp=(2, 4))
class CurvatureOfRows(nn.Module):
    """Laplacians of a small network: Hessians of each row's value."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 1)

    def value(self, row):
        return self.down(torch.tanh(self.up(row))).squeeze(-1)

    def forward(self, x):
        return self.value(x), vmap(lambda row: hessian(self.value)(row).diagonal().sum())(x)


@case(call(ROWS), tp=(2, 4))
class TransformsOfCalls(nn.Module):
    """vjp, jvp, jacrev and jacfwd of an MLP inside of the forward."""

    def __init__(self):
        super().__init__()
        self.net, self.out = Mlp(), nn.Linear(16, 16)

    def forward(self, x):
        y, pull = vjp(self.net, x)
        (back,) = pull(torch.tanh(y))
        return self.out(y + back), vmap(jacrev(self.net))(x).pow(2).mean()


@case(call(ROWS), tp=(2, 4), allowed=HOSTILE)
class ForwardDerivatives(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Mlp()

    def forward(self, x):
        y, tangent = jvp(self.net, (x,), (torch.ones_like(x),))
        return y + tangent, vmap(jacfwd(self.net))(x).diagonal(dim1=-2, dim2=-1).sum(-1)


@case(call(ROWS), tp=(2, 4))
class StackedByName(nn.Module):
    """An ensemble whose states are stacked in the forward, each called by functional_call under vmap."""

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList([Mlp() for _ in range(3)])

    def forward(self, x):
        names = [name for name, _ in self.nets[0].named_parameters()]
        stacked = {name: torch.stack([net.get_parameter(name) for net in self.nets]) for name in names}
        return vmap(lambda state: functional_call(self.nets[0], state, (x,)))(stacked).std(0)


@case(call(ROWS), tp=(2, 4), allowed=HOSTILE)
class InfluenceOfRows(nn.Module):
    """Gradients of a head for each row, by functional_call, weigh the rows."""

    def __init__(self):
        super().__init__()
        self.net, self.head = Mlp(), nn.Linear(16, 4)

    def forward(self, x):
        h = self.net(x)
        state = dict(self.head.named_parameters())

        def loss(state, row):
            return functional_call(self.head, state, (row,)).pow(2).sum()

        each = vmap(grad(loss), (None, 0))(state, h)
        weights = torch.softmax(-each["weight"].flatten(1).norm(dim=1), 0)
        return self.head(h) * weights.unsqueeze(-1)


@case(call(X), tp=(2, 4))
class GradientKeptByHook(nn.Module):
    """A hook on hidden values keeps their gradient's size, and the next forward scales by it."""

    def __init__(self):
        super().__init__()
        self.net = Mlp()
        self.register_buffer("size", torch.ones(()))

    def keep(self, g):
        self.size = 0.9 * self.size + 0.1 * g.detach().abs().mean() * 100

    def forward(self, x):
        h = self.net.inner(x)
        if h.requires_grad:
            h.register_hook(self.keep)
        return x + self.net.down(h) * self.size


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class HooksOnNodes(Mlp):
    """A hook on the node of the graph that made hidden values."""

    def inner(self, x):
        h = F.gelu(self.up(x))
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda given: tuple(None if g is None else g * 0.5 for g in given))
        return h


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class NormedNodes(Mlp):
    """As before, with a norm over all that comes."""

    def inner(self, x):
        h = F.gelu(self.up(x))
        if h.grad_fn is not None:
            h.grad_fn.register_prehook(lambda given: tuple(g / (g.norm() + 1) for g in given))
        return h


@case(call(X), tp=(2, 4))
class CheckpointedVariously(nn.Module):
    """Checkpoints of torch's within each other, in segments, and with closures."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Attention(), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())
        self.three = Mlp()

    def forward(self, x):
        x = checkpoint(lambda a: checkpoint(self.three.inner, self.one(a), use_reentrant=False), x, use_reentrant=False)
        return checkpoint_sequential(self.two, 2, self.three.down(x), use_reentrant=False)


@case(call(X), tp=(2, 4))
class SavedElsewhere(Mlp):
    """Saved tensors go through hooks of torch's own."""

    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            h = self.inner(x)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (t.shape, t.flatten()), lambda kept: kept[1].view(kept[0])
        ):
            return x + self.down(h.sin())


class Replaced(TorchFunctionMode):
    """Functions of torch are replaced while it is on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.gelu:
            return F.silu(*args)
        return func(*args, **(kwargs or {}))


@case(call(X), tp=(2, 4))
class UnderOwnMode(Mlp):
    def forward(self, x):
        with Replaced():
            return super().forward(x)


@case(call(X), tp=(2, 4))
class WithValues(nn.Module):
    """grad_and_value of an energy, whose step is part of the forward, in contexts on a stack."""

    def __init__(self):
        super().__init__()
        self.net = Mlp()

    def energy(self, z):
        return self.net(z).pow(2).mean()

    def forward(self, x):
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            g, value = grad_and_value(self.energy)(x)
        return x - 0.5 * g, value


@case(call(ROWS), tp=(2, 4), allowed=HOSTILE)
class StateStackedAtBirth(nn.Module):
    """Members are stacked once; the base that is called is on meta."""

    def __init__(self):
        super().__init__()
        params, _ = stack_module_state([Mlp() for _ in range(4)])
        self.members = nn.ParameterDict({k.replace(".", "-"): nn.Parameter(v.detach()) for k, v in params.items()})
        self.base = [Mlp().to("meta")]

    def forward(self, x):
        state = {k.replace("-", "."): v for k, v in self.members.items()}
        return vmap(lambda one: functional_call(self.base[0], one, (x,)))(state).mean(0)
