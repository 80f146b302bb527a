"""Two passes of one network, teachers, critics, codes and flows: objectives of several parts that share weights."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(4, 16)
Y = floats(4, 16, seed=1)
XY = {"a": X, "b": Y}
S = floats(2, 6, 16)
BOTH = (2, 4)


class Net(nn.Module):
    def __init__(self, out=16):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, out)

    def forward(self, x):
        return self.down(self.up(x).relu())


@case(call(X, Y), inputs=XY, tp=BOTH)
class Siamese(nn.Module):
    """A contrastive margin, and BatchNorm-free projections shared by both sides."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, a, b):
        far = (self.net(a) - self.net(b) + 1e-6).norm(dim=-1)
        same = (a[:, 0] > 0).to(a.dtype)
        return (same * far.pow(2) + (1 - same) * (1 - far).clamp(min=0).pow(2)).mean(), far


@case(call(X, Y), call(X, Y, _train=True), inputs=XY, tp=BOTH)
class TargetNetwork(nn.Module):
    """BYOL: the target follows the online network by averages in training, and has no gradient."""

    def __init__(self):
        super().__init__()
        self.online, self.predictor = Net(), Net()
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, a, b):
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.online.parameters(), self.target.parameters(), strict=True):
                    q.mul_(0.9).add_(p, alpha=0.1)
        with torch.no_grad():
            y = self.target(b)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), y, dim=-1)


@case(call(X, Y), call(X, Y, _train=True), inputs=XY, tp=BOTH)
class CentredTeacher(nn.Module):
    """DINO: sharpened and centred teacher, prototypes with normed weights, a centre that moves in training."""

    def __init__(self):
        super().__init__()
        self.net, self.prototypes = Net(), nn.Linear(16, 32, bias=False)
        self.register_buffer("centre", torch.zeros(1, 32))

    def head(self, x):
        return F.linear(F.normalize(self.net(x), dim=-1), F.normalize(self.prototypes.weight, dim=-1))

    def forward(self, a, b):
        t = self.head(b).detach()
        p = ((t - self.centre) / 0.1).softmax(-1)
        if self.training:
            self.centre.mul_(0.9).add_(0.1 * t.mean(0, keepdim=True))
        return -(p * (self.head(a) / 0.2).log_softmax(-1)).sum(-1).mean()


@case(call(X, Y), call(X, Y, _train=True), inputs=XY, tp=BOTH)
class Queue(nn.Module):
    """MoCo: a queue of keys in a buffer, a pointer that goes round, in training."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.register_buffer("queue", F.normalize(torch.randn(16, 12), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, a, b):
        q, k = F.normalize(self.net(a), dim=-1), F.normalize(self.net(b), dim=-1).detach()
        z = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().detach()], 1) / 0.2
        if self.training:
            at = (int(self.at) + torch.arange(len(k))) % self.queue.shape[1]
            self.queue[:, at] = k.T
            self.at[0] = (int(self.at) + len(k)) % self.queue.shape[1]
        return F.cross_entropy(z, torch.zeros(len(z), dtype=torch.long))


@case(call(X, Y), inputs=XY, tp=BOTH)
class VarianceCovariance(nn.Module):
    """VICReg on the wide expander's outputs, which are hidden units of the whole."""

    def __init__(self):
        super().__init__()
        self.net = Net(32)

    def part(self, z):
        z = z - z.mean(0)
        cov = z.T @ z / (len(z) - 1)
        off = cov.pow(2).sum() - cov.diagonal().pow(2).sum()
        return (1 - (z.var(0) + 1e-4).sqrt()).relu().mean(), off / z.shape[1]

    def forward(self, a, b):
        a, b = self.net(a), self.net(b)
        return (F.mse_loss(a, b), *self.part(a), *self.part(b))


@case(call(X, Y, floats(4, 16, seed=2)), inputs=XY | {"c": floats(4, 16, seed=2)}, tp=BOTH)
class Triplets(nn.Module):
    """The hardest negative of the batch, mined without gradient."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, a, b, c):
        a, b, c = (F.normalize(self.net(v), dim=-1) for v in (a, b, c))
        with torch.no_grad():
            hard = torch.cdist(a, c).argmin(1)
        return F.triplet_margin_loss(a, b, c[hard], margin=0.5), hard


@case(call(X, Y), inputs=XY, tp=BOTH)
class GanBothSides(nn.Module):
    """Losses of generator and discriminator in one forward; parameters of the other are off meanwhile."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = Net(), Net(1)

    def forward(self, a, b):
        fake = self.generator(a)
        d = F.softplus(self.critic(fake.detach())).mean() + F.softplus(-self.critic(b)).mean()
        self.critic.requires_grad_(False)
        g = F.softplus(-self.critic(fake)).mean()
        self.critic.requires_grad_(True)
        return d, g


@case(call(X, Y), inputs=XY, tp=BOTH)
class ReversedGradient(nn.Module):
    """Domain adversary: a Function turns gradients round before the domain's head."""

    class Turn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, rate):
            ctx.rate = rate
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return -ctx.rate * g, None

    def __init__(self):
        super().__init__()
        self.net, self.label, self.domain = Net(), Net(3), Net(1)

    def forward(self, a, b):
        h = self.net(torch.cat([a, b]))
        return self.label(h), self.domain(self.Turn.apply(h, 0.5))


@case(call(X, Y), inputs=XY, tp=BOTH)
class Autoencoder(nn.Module):
    """A VAE whose noise is given, with a decoder that is the encoder transposed."""

    def __init__(self):
        super().__init__()
        self.up, self.mean, self.log_variance = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, a, b):
        h = self.up(a).tanh()
        m, v = self.mean(h), self.log_variance(h).clamp(-6, 2)
        z = m + (v / 2).exp() * b
        back = F.linear(F.linear(z, self.mean.weight.T).tanh(), self.up.weight.T)
        return F.mse_loss(back, a), -0.5 * (1 + v - m.pow(2) - v.exp()).sum(-1).mean()


@case(call(S), call(S, _train=True), tp=BOTH, vary=False)
class ProductCodes(nn.Module):
    """Four codebooks, nearest codes, straight-through, a commitment loss, the perplexity of codes."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.codes = nn.Linear(16, 32), nn.Linear(32, 16), nn.Parameter(torch.randn(4, 6, 8))

    def forward(self, x):
        h = self.up(x).unflatten(-1, (4, 8))
        far = (h[..., None, :] - self.codes).pow(2).sum(-1)
        at = far.argmin(-1)
        q = torch.stack([self.codes[n][at[..., n]] for n in range(4)], -2)
        p = F.one_hot(at, 6).to(x.dtype).mean((0, 1))
        perplexity = (-(p * (p + 1e-9).log()).sum(-1)).exp().mean()
        loss = F.mse_loss(q, h.detach()) + 0.25 * F.mse_loss(h, q.detach())
        return self.down((h + (q - h).detach()).flatten(2)), loss, perplexity


@case(call(S), tp=BOTH)
class FiniteScalars(nn.Module):
    """FSQ: bounded, rounded with offsets by unit, straight-through; indices by a basis."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 4), nn.Linear(4, 16)
        self.mlp = Mlp()
        self.register_buffer("levels", torch.tensor([8, 5, 5, 4]))
        self.register_buffer("basis", torch.tensor([1, 8, 40, 200]))

    def forward(self, x):
        half = (self.levels - 1) * 0.999 / 2
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)
        z = (self.up(self.mlp(x)) + (offset / half).tan()).tanh() * half - offset
        z = z + (z.round() - z).detach()
        index = ((z + self.levels // 2) * self.basis).sum(-1).round().long()
        return self.down(z / (self.levels // 2)), index


@case(call(X), tp=BOTH)
class Flow(nn.Module):
    """RealNVP with an invertible mix (slogdet), ActNorm, log likelihood."""

    def __init__(self):
        super().__init__()
        self.mix, self.scale, self.bias = (
            nn.Parameter(torch.eye(16) + 0.05),
            nn.Parameter(torch.rand(16) + 0.5),
            nn.Parameter(torch.zeros(16)),
        )
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 16)

    def forward(self, x):
        x, det = (x + self.bias) * self.scale, self.scale.abs().log().sum()
        x, det = x @ self.mix, det + torch.linalg.slogdet(self.mix).logabsdet
        a, b = x.chunk(2, -1)
        s, t = self.down(self.up(a).relu()).chunk(2, -1)
        z = torch.cat([a, b * s.tanh().exp() + t], -1)
        return z, -(z.pow(2) / 2 + 0.5 * math.log(2 * math.pi)).sum(-1) + det + s.tanh().sum(-1)


@case(call(S), tp=BOTH, vary=False)
class MaskedAutoencoder(nn.Module):
    """MAE: kept tokens by an order that is given, mask tokens put back, loss on those that were left out."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.token = Attention(), Mlp(), nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x):
        b, t, d = x.shape
        order = x.sum(-1).argsort(1)
        back = order.argsort(1)
        kept = x.gather(1, order[:, :3, None].expand(-1, -1, d))
        h = torch.cat([self.encoder(kept), self.token.expand(b, t - 3, -1)], 1)
        y = self.decoder(h.gather(1, back[..., None].expand(-1, -1, d)))
        mask = (back >= 3).to(x.dtype)
        return ((y - x).pow(2).mean(-1) * mask).sum() / mask.sum(), y


@case(call(X, Y), inputs=XY, tp=BOTH)
class MixtureDensity(nn.Module):
    """A mixture of Gaussians with full Cholesky factors, by logsumexp."""

    def __init__(self):
        super().__init__()
        self.net = Net(3 * (1 + 2 + 3))

    def forward(self, a, b):
        z = self.net(a).unflatten(-1, (3, 6))
        logit, mean, tri = z.split([1, 2, 3], -1)
        low = torch.zeros(*tri.shape[:-1], 2, 2, dtype=a.dtype)
        i, j = torch.tril_indices(2, 2)
        low[..., i, j] = tri
        low = low.tril(-1) + torch.diag_embed(F.softplus(low.diagonal(dim1=-2, dim2=-1)) + 1e-2)
        law = torch.distributions.MultivariateNormal(mean, scale_tril=low, validate_args=False)
        return -(logit.squeeze(-1).log_softmax(-1) + law.log_prob(b[:, None, :2])).logsumexp(-1).mean()


@case(call(S), tp=BOTH, sequence=None, options={"sequence_padding": "pad"})
class DeepSupervision(nn.Module):
    """One head reads every layer, later ones count more; a loss pulls layers together."""

    def __init__(self):
        super().__init__()
        self.blocks, self.norm, self.head = (
            nn.ModuleList([Attention(), Mlp(), Mlp()]),
            nn.LayerNorm(16),
            nn.Linear(16, 8),
        )

    def forward(self, x):
        outs = []
        for block in self.blocks:
            x = block(x)
            outs.append(self.head(self.norm(x)))
        weight = torch.arange(1, len(outs) + 1, dtype=x.dtype).softmax(0)
        pull = sum(F.kl_div(z.log_softmax(-1), outs[-1].detach().softmax(-1), reduction="batchmean") for z in outs[:-1])
        return sum(w * z for w, z in zip(weight, outs, strict=True)), pull


@case(call(ids(2, 6), ids(2, 5, seed=2)), inputs={"words": ids(2, 6), "other": ids(2, 5, seed=2)}, tp=BOTH, vary=False)
class LateInteraction(nn.Module):
    """ColBERT: the largest similarity of each word, summed, for all pairs of the batch."""

    def __init__(self):
        super().__init__()
        self.table, self.block, self.out = nn.Embedding(32, 16), Attention(), nn.Linear(16, 8, bias=False)

    def forward(self, words, other):
        q, d = (F.normalize(self.out(self.block(self.table(v))), dim=-1) for v in (words, other))
        s = torch.einsum("aqd,bkd->abqk", q, d).masked_fill((other == 0)[None, :, None], -1e4)
        z = s.amax(-1).sum(-1)
        return F.cross_entropy(z, torch.arange(len(z))), z


@case(call(X, Y), inputs=XY, tp=BOTH, allowed=HOSTILE)
class SharpnessAware(nn.Module):
    """A mean of hidden maps of both sides is matched by Gram matrices, and by moments of each unit."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, a, b):
        h, g = self.net.up(a).relu(), self.net.up(b).relu()
        gram = F.mse_loss(h @ h.T, g @ g.T)
        kernel = lambda u, v: (-torch.cdist(u, v).pow(2) / 8).exp().mean()  # noqa: E731
        mmd = kernel(h, h) + kernel(g, g) - 2 * kernel(h, g)
        return gram, mmd, F.mse_loss(h.mean(0), g.mean(0)), self.net.down(h)
