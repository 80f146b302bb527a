"""Weights that are held to a law, Functions that hide whole networks, kernels of torch's, and models that change."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
PICTURE = floats(2, 16, 8, 8)
BOTH = (2, 4)


@case(call(X), call(X, _train=True), tp=BOTH)
class RowsRenormed(Mlp):
    """EEGNet: each forward holds the rows of a weight to a norm, by .data."""

    def forward(self, x):
        self.up.weight.data = torch.renorm(self.up.weight.data, p=2, dim=0, maxnorm=0.5)
        self.down.weight.data = torch.renorm(self.down.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


@case(call(X), call(X, _train=True), tp=BOTH)
class WeightsClamped(Mlp):
    """A critic whose weights are clamped in its forward."""

    def forward(self, x):
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.1, 0.1)
        return super().forward(x)


def equalised(module, args):
    module.weight = module.raw * module.gain


@case(call(X), tp=BOTH)
class EqualisedRates(nn.Module):
    """StyleGAN: before each call a hook makes the weight from a raw one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        for layer in (self.up, self.down):
            weight = layer.weight
            del layer._parameters["weight"]
            layer.raw, layer.gain = nn.Parameter(weight.detach().clone()), 1.4
            layer.register_forward_pre_hook(equalised)

    def forward(self, x):
        return x + self.down(F.leaky_relu(self.up(x), 0.2))


class Adjoint(torch.autograd.Function):
    """Solves forward without a graph; backward runs each step again and takes its gradients, weights among them."""

    @staticmethod
    def forward(ctx, net, steps, x, *weights):
        ctx.net, ctx.steps, ctx.weights, states = net, steps, weights, []
        for _ in range(steps):
            states.append(x)
            x = x + net(x) / steps
        ctx.save_for_backward(*states)
        return x

    @staticmethod
    def backward(ctx, g):
        total = [torch.zeros_like(w) for w in ctx.weights]
        for state in reversed(ctx.saved_tensors):
            with torch.enable_grad():
                state = state.detach().requires_grad_()
                y = state + ctx.net(state) / ctx.steps
            g, *found = torch.autograd.grad(y, (state, *ctx.weights), g)
            total = [a + b for a, b in zip(total, found, strict=True)]
        return None, None, g, *total


@case(call(X))
class SolvedByAdjoint(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.out = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)), Mlp()

    def forward(self, x):
        return self.out(Adjoint.apply(self.net, 3, x, *self.net.parameters()))


class FusedLoss(torch.autograd.Function):
    """Liger: the head and its loss in pieces of tokens, whose gradients are made in forward."""

    @staticmethod
    def forward(ctx, x, weight, target):
        gx, gw, loss = torch.zeros_like(x), torch.zeros_like(weight), x.new_zeros(())
        for n in range(0, x.shape[0], 4):
            part, at = x[n : n + 4], target[n : n + 4]
            z = part @ weight.T
            p = z.softmax(-1)
            loss += (torch.logsumexp(z, -1) - z.gather(1, at[:, None])[:, 0]).sum()
            p.scatter_add_(1, at[:, None], torch.full_like(p[:, :1], -1.0))
            gx[n : n + 4] = p @ weight
            gw += p.T @ part
        ctx.save_for_backward(gx / x.shape[0], gw / x.shape[0])
        return loss / x.shape[0]

    @staticmethod
    def backward(ctx, g):
        gx, gw = ctx.saved_tensors
        return g * gx, g * gw, None


@case(call(ids(2, 6), ids(2, 6, seed=1)), tp=BOTH)
class LossInPieces(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(32, 16), Mlp(), nn.Linear(16, 32, bias=False)

    def forward(self, input_ids, labels):
        h = self.body(self.table(input_ids))
        return FusedLoss.apply(h.flatten(0, 1), self.head.weight, labels.flatten())


@case(call(X), tp=BOTH)
class QuaternionLinear(nn.Module):
    """Four small matrices make one large matrix, by the products of quaternions."""

    def __init__(self):
        super().__init__()
        self.r, self.i, self.j, self.k = (nn.Parameter(floats(8, 4, seed=n) * 0.3) for n in range(4))
        self.out = nn.Linear(32, 16)

    def forward(self, x):
        r, i, j, k = self.r, self.i, self.j, self.k
        rows = [torch.cat([r, -i, -j, -k], 1), torch.cat([i, r, -k, j], 1)]
        rows += [torch.cat([j, k, r, -i], 1), torch.cat([k, -j, i, r], 1)]
        return x + self.out(F.relu(F.linear(x, torch.cat(rows, 0))))


@case(call(X), tp=BOTH)
class SplineEdges(nn.Module):
    """KAN: each edge has a function of its own, a spline on a grid in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 8).repeat(16, 1))
        self.base, self.spline, self.scale = (
            nn.Linear(16, 32),
            nn.Parameter(floats(32, 16, 5) * 0.1),
            nn.Parameter(floats(32, 16)),
        )
        self.out = nn.Linear(32, 16)

    def basis(self, x):
        x, grid = x[..., None], self.grid
        b = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in (1, 2):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * b[..., :-1]
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k]) * b[..., 1:]
            b = left + right
        return b

    def forward(self, x):
        weight = (self.spline * self.scale[..., None]).flatten(1)
        h = self.base(F.silu(x)) + F.linear(self.basis(x).flatten(-2), weight)
        return x + self.out(h)


@case(call(floats(4, 16, 8, 8)), tp=BOTH, vary=False)
class StatisticOfBatch(nn.Module):
    """StyleGAN: a fixed blur of each channel, a norm over channels, and one more channel with the batch's deviation."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = (
            nn.Conv2d(16, 32, 3, padding=1),
            nn.Conv2d(33, 16, 3, padding=1),
            nn.Conv2d(16, 8, 1),
        )
        self.register_buffer(
            "blur", torch.tensor([1.0, 3.0, 3.0, 1.0])[:, None] * torch.tensor([1.0, 3.0, 3.0, 1.0]) / 64
        )

    def forward(self, x):
        h = F.leaky_relu(self.up(x), 0.2)
        h = F.conv2d(F.pad(h, (2, 1, 2, 1)), self.blur.expand(h.shape[1], 1, 4, 4), groups=h.shape[1])
        h = h * torch.rsqrt(h.pow(2).mean(1, keepdim=True) + 1e-8)
        n, c, height, width = h.shape
        y = h.view(2, n // 2, 1, c, height, width)
        y = (y - y.mean(0)).pow(2).mean(0).add(1e-8).sqrt().mean((2, 3, 4), keepdim=True).squeeze(2)
        y = y.repeat(2, 1, height, width)
        return self.last(F.leaky_relu(self.down(torch.cat([h, y], 1)), 0.2))


@case(call(floats(8, 16)), call(floats(8, 16, seed=1), _train=True), tp=BOTH)
class NormOfVirtualBatches(nn.Module):
    """TabNet: batch norms of chunks of the batch, gates from halves, a sparse mask over features."""

    def __init__(self):
        super().__init__()
        self.shared, self.norm, self.own, self.norm2 = (
            nn.Linear(16, 64, bias=False),
            nn.BatchNorm1d(64, momentum=0.1),
            nn.Linear(32, 64),
            nn.BatchNorm1d(64),
        )
        self.attend, self.out = nn.Linear(32, 16), nn.Linear(32, 4)

    def ghost(self, norm, x):
        return torch.cat([norm(part) for part in x.chunk(2, 0)], 0)

    def forward(self, x):
        h = F.glu(self.ghost(self.norm, self.shared(x)), -1)
        h = (h + F.glu(self.ghost(self.norm2, self.own(h)), -1)) * 0.5**0.5
        mask = F.softmax(self.attend(h), -1)
        return self.out(F.relu(F.glu(self.ghost(self.norm, self.shared(mask * x)), -1))), mask


def per_sample(m, x):
    weights = {name: p.detach() for name, p in m.named_parameters()}

    def loss(w, one):
        return functional_call(m, w, (one[None],)).pow(2).mean()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    return {name: g.flatten(1).norm(dim=1) for name, g in found.items()}


@case(call(X), call(X, _do=per_sample, _grad=False), allowed=HOSTILE, vary=False)
class GradientsOfSamples(Mlp):
    """DP-SGD: gradients of each sample by vmap over a functional call, outside of the model."""


def converted(m, x):
    low = m.float()(x.float())
    return low.double().round(decimals=4), m.double()(x)


@case(call(X), call(X, _do=converted, _grad=False), vary=False, tolerance=1e-3)
class ConvertedBetween(nn.Module):
    """The model is moved to another precision and back."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Attention(), Mlp()

    def forward(self, x):
        return self.b(self.a(x))


def listened(m, x):
    seen = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: seen.append(tuple(output.shape))
    )
    try:
        return m(x), len(seen)
    finally:
        handle.remove()


@case(call(X), call(X, _do=listened), allowed=HOSTILE)
class HookOnAllModules(Mlp):
    """A global hook counts the calls of all modules."""


@case(call(X), call(X), tp=BOTH)
class TiedInForward(nn.Module):
    """The head is given the table's weight anew in each forward."""

    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Linear(16, 32, bias=False), Mlp(32, 64), nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        self.head.weight = self.table.weight
        h = self.body(self.table(x))
        return F.linear(h, self.head.weight.T)


@case(call(X), call(X, _train=True))
class CheckpointedInSegments(nn.Module):
    """torch's `checkpoint_sequential` over a stack."""

    def __init__(self):
        super().__init__()
        self.stack = nn.Sequential(Mlp(), Attention(), Mlp(), Mlp())

    def forward(self, x):
        if self.training:
            return checkpoint_sequential(self.stack, 2, x, use_reentrant=False)
        return self.stack(x)


@case(call(X), call(X, _train=True))
class MasksOfPadding(nn.Module):
    """torch's encoder stack with a mask of padding, whose fast path in eval mode makes nested tensors."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)

    def forward(self, x):
        pad = torch.arange(x.shape[1]).expand(x.shape[:2]) >= x.shape[1] - 2
        return self.stack(x, src_key_padding_mask=pad)
