"""Tricks of training that live inside of the forward: mixing of samples, consistency, gates that learn, quantisers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(4, 6, 16)
LABELS = ids(4, below=8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)


@case(call(X), tp=(2, 4))
class ManifoldMixup(Net):
    """Hidden values of neighbours in the batch are mixed by a rate that a buffer counts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rate", torch.tensor(0.3))

    def forward(self, x):
        h = F.gelu(self.up(x))
        h = self.rate * h + (1 - self.rate) * h.flip(0)
        return self.down(F.gelu(self.mid(h)))


@case(call(X), tp=(2, 4))
class MixedStatistics(Net):
    """MixStyle: means and deviations of hidden maps are exchanged between samples."""

    def forward(self, x):
        h = self.up(x)
        mean, std = h.mean(1, keepdim=True), h.std(1, keepdim=True) + 1e-5
        h = (h - mean) / std * (std + std.roll(1, 0)) / 2 + (mean + mean.roll(1, 0)) / 2
        return self.down(torch.relu(self.mid(h)))


@case(call(X), tp=(2, 4))
class CutUnits(Net):
    """A block of units is cut, which moves with a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("start", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = F.gelu(self.up(x))
        units = torch.arange(32)
        h = h * ((units < self.start) | (units >= self.start + 6)).to(h.dtype)
        self.start = (self.start + 5) % 26
        return self.down(h)


@case(call(X), tp=(2, 4))
class HardConcrete(Net):
    """Gates of L0 regularisation, at their expected value, for each unit; the penalty counts open ones."""

    def __init__(self):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.randn(32))

    def forward(self, x):
        gate = (torch.sigmoid(self.log_alpha) * 1.2 - 0.1).clamp(0, 1)
        penalty = torch.sigmoid(self.log_alpha + 0.6).sum()
        return self.down(F.gelu(self.up(x)) * gate), penalty, (gate > 0.5).sum()


class Quantised(torch.autograd.Function):
    """LSQ: the gradient of the step is scaled by the number of elements."""

    @staticmethod
    def forward(ctx, x, step, low, high):
        ctx.save_for_backward(x, step)
        ctx.bounds = low, high, 1.0 / (x.numel() * high) ** 0.5
        return (x / step).round().clamp(low, high) * step

    @staticmethod
    def backward(ctx, given):
        x, step = ctx.saved_tensors
        low, high, scale = ctx.bounds
        q = x / step
        inside = (q >= low) & (q <= high)
        by_step = torch.where(inside, q.round() - q, q.clamp(low, high))
        return given * inside, (given * by_step).sum().view_as(step) * scale, None, None


@case(call(X), tp=(2, 4))
class LearnedSteps(Net):
    """Weights and hidden values are quantised with steps that learn; the scale of their gradient asks for sizes."""

    def __init__(self):
        super().__init__()
        self.of_weight, self.of_hidden = nn.Parameter(torch.tensor(0.05)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        h = F.relu(F.linear(x, Quantised.apply(self.up.weight, self.of_weight, -8, 7), self.up.bias))
        return self.down(Quantised.apply(h, self.of_hidden, 0, 15))


@case(call(X), tp=(2, 4))
class BlocksOfScales(Net):
    """MX formats: each block of eight units has one scale, a power of two of the largest."""

    def forward(self, x):
        h = F.gelu(self.up(x))
        blocks = h.unflatten(-1, (-1, 8))
        scale = torch.exp2(torch.floor(torch.log2(blocks.detach().abs().amax(-1, keepdim=True) + 1e-9)))
        low = (blocks / scale * 4).round() / 4 * scale
        return self.down((blocks + (low - blocks).detach()).flatten(-2))


@case(call(X), tp=(2, 4))
class RowAndColumnScales(Net):
    """Weights and values are put on a grid of scales of rows, columns and samples (SmoothQuant)."""

    def forward(self, x):
        h = F.gelu(self.up(x))
        smooth = (h.detach().abs().amax((0, 1)) / self.down.weight.detach().abs().amax(0)).sqrt().clamp(min=1e-3)
        h, w = h / smooth, self.down.weight * smooth
        step = w.detach().abs().amax(1, keepdim=True) / 7
        w = w + ((w / step).round() * step - w).detach()
        return F.linear(h, w, self.down.bias)


@case(call(X), tp=(2, 4))
class Consistency(Net):
    """R-Drop with fixed masks: two views of hidden values, and the divergence of what comes of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("masks", (torch.arange(64) % 3 > 0).double().view(2, 32) * 1.5)

    def forward(self, x):
        one, two = (self.down(torch.relu(self.up(x)) * m.to(x.dtype)).log_softmax(-1) for m in self.masks)
        loss = F.kl_div(one, two, log_target=True, reduction="sum") + F.kl_div(
            two, one, log_target=True, reduction="sum"
        )
        return (one + two) / 2, loss / len(x)


@case(call(X, LABELS), tp=(2, 4))
class ProxiesOfClasses(Net):
    """Proxies learn as centres of classes; margins by classes with few samples are larger."""

    def __init__(self):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(8, 32))
        self.register_buffer("counts", torch.arange(1, 9).double())

    def forward(self, x, labels):
        z = F.normalize(F.gelu(self.up(x)).mean(1), dim=-1)
        cosine = z @ F.normalize(self.proxies, dim=-1).T
        margin = F.one_hot(labels, 8) * (0.5 / self.counts.to(x.dtype).pow(0.25))
        return F.cross_entropy((cosine - margin) * 8, labels, reduction="none"), cosine


@case(call(X), tp=(2, 4))
class ReZeroAndScales(nn.Module):
    """Residual branches with gates that start at nothing, scales of layers, a sum of all that came before."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Attention(), Mlp(), Mlp()])
        self.gates = nn.ParameterList([nn.Parameter(torch.full((16,), 0.1 * n)) for n in range(1, 4)])
        self.mix = nn.Parameter(torch.randn(3, 4) * 0.3)

    def forward(self, x):
        seen = [x]
        for n, (part, gate) in enumerate(zip(self.parts, self.gates, strict=True)):
            weights = self.mix[n, : len(seen)].softmax(0)
            x = sum(w * one for w, one in zip(weights, seen, strict=True))
            seen.append(x + gate * (part(x) - x))
        return seen[-1]


@case(call(X), tp=(2, 4))
class EarlyExitsVote(nn.Module):
    """Exits after each block vote with weights of their certainty; deeper ones teach the others."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mlp() for _ in range(3)])
        self.exits = nn.ModuleList([nn.Linear(16, 8) for _ in range(3)])

    def forward(self, x):
        logits = []
        for block, exit_ in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            logits.append(exit_(x.mean(1)))
        votes = torch.stack(logits)
        sure = 1 - torch.distributions.Categorical(logits=votes).entropy() / 8**0.5
        teach = F.kl_div(
            votes[:-1].log_softmax(-1), votes[-1:].detach().softmax(-1).expand_as(votes[:-1]), reduction="batchmean"
        )
        return (votes * sure.softmax(0).unsqueeze(-1)).sum(0), teach


@case(call(X), tp=(2, 4))
class SpeculativeHeads(nn.Module):
    """Heads that guess several tokens ahead share the unembedding, each with a residual block (Medusa)."""

    def __init__(self):
        super().__init__()
        self.trunk, self.unembed = Mlp(), nn.Linear(16, 32, bias=False)
        self.guess = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.SiLU()) for _ in range(3)])

    def forward(self, x):
        h = self.trunk(x)
        heads = torch.stack([h, *(h + g(h) for g in self.guess)])
        logits = self.unembed(heads)
        agreed = (logits[1:, :, :-1].argmax(-1) == logits[:1, :, 1:].argmax(-1)).cumprod(0).sum(0)
        return logits, agreed


@case(call(X), tp=(2, 4))
class ShrunkAndPerturbed(Net):
    """Spectral tricks on weights: an orthogonal penalty, a soft threshold of singular values, a projection."""

    def forward(self, x):
        u, s, v = torch.linalg.svd(self.mid.weight, full_matrices=False)
        low = (u * F.softplus(s - 0.5)) @ v
        gram = self.up.weight @ self.up.weight.T
        off = (gram - torch.diag_embed(gram.diagonal())).pow(2).sum()
        return self.down(torch.tanh(F.linear(torch.tanh(self.up(x)), low))), off


@case(call(X), tp=(2, 4))
class LipschitzLayers(Net):
    """Weights are divided by what bounds them: absolute sums of rows, Gram sums (SLL), and a convex mix."""

    def forward(self, x):
        w = self.up.weight / self.up.weight.abs().sum(1, keepdim=True).clamp(min=1)
        h = torch.relu(F.linear(x, w, self.up.bias))
        t = (self.mid.weight.T @ self.mid.weight).abs().sum(1)
        h = h - 2 * F.linear(torch.relu(F.linear(h, self.mid.weight)) / t, self.mid.weight.T)
        return self.down(h)


@case(call(X), tp=(2, 4))
class FourierEnsembles(Net):
    """BatchEnsemble and SNGP: fast weights of members of the batch, and random features with a running precision."""

    def __init__(self):
        super().__init__()
        self.r, self.s = nn.Parameter(torch.randn(2, 16) * 0.2 + 1), nn.Parameter(torch.randn(2, 32) * 0.2 + 1)
        self.register_buffer("precision", torch.eye(32))

    def forward(self, x):
        members = x.view(2, -1, *x.shape[1:])
        h = self.up(members * self.r[:, None, None]) * self.s[:, None, None]
        features = torch.cos(self.mid(h)) * (2 / 32) ** 0.5
        if self.training:
            flat = features.detach().flatten(0, -2)
            self.precision = 0.9 * self.precision + 0.1 * flat.T @ flat
        covariance = torch.linalg.inv(self.precision)
        variance = (features @ covariance * features).sum(-1, keepdim=True)
        return (self.down(features) / (1 + variance).sqrt()).view_as(x)
