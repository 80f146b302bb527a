"""Losses and heads inside the model: shapes and statistics of logits that plain cross entropy does not have."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, ids
from ..parts import Attention, Mlp

T = ids(2, 6)
L = ids(2, 6, seed=1)
G = {"input_ids": T, "labels": L}


class Lm(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(32, 16), Mlp(), nn.Linear(16, 32, bias=bias)

    def hidden(self, input_ids):
        return self.block(self.table(input_ids))

    def logits(self, input_ids):
        return self.head(self.hidden(input_ids))

    def forward(self, input_ids, labels):
        return self.loss(self.logits(input_ids), labels)


def objective(*calls, **options):
    return case(*(calls or (call(T, L), call(T, L, _train=True))), inputs=G, **options)


@objective()
class LabelSmoothing(Lm):
    def loss(self, z, y):
        return F.cross_entropy(z.transpose(1, 2), y, label_smoothing=0.1)


@objective(call(T, L.masked_fill(L < 16, -100)))
class ClassWeights(Lm):
    def __init__(self):
        super().__init__()
        self.register_buffer("weights", torch.rand(32) + 0.5)

    def loss(self, z, y):
        return F.cross_entropy(z.flatten(0, 1), y.flatten(), weight=self.weights)


@objective()
class Focal(Lm):
    def loss(self, z, y):
        p = z.softmax(-1).gather(-1, y[..., None]).squeeze(-1)
        return (-((1 - p) ** 2) * p.log()).mean()


@objective()
class ZLossAndEntropy(Lm):
    def loss(self, z, y):
        lse = torch.logsumexp(z, -1)
        picked = z.gather(-1, y.unsqueeze(-1)).squeeze(-1)
        p = z.softmax(-1)
        entropy = -(p * z.log_softmax(-1)).sum(-1)
        return (lse - picked).mean() + 1e-2 * lse.pow(2).mean() - 0.1 * entropy.mean()


@objective()
class SoftCapped(Lm):
    def loss(self, z, y):
        z = 5 * torch.tanh(z / 5)
        return F.cross_entropy(z.view(-1, 32), y.view(-1), reduction="none").view(y.shape).sum(1), z


@objective()
class TwoTemperatures(Lm):
    """Distilled from its own softened logits, which stop the gradient."""

    def loss(self, z, y):
        teacher = (z.detach() / 2).softmax(-1)
        return F.kl_div(F.log_softmax(z, -1), teacher, reduction="batchmean") + F.cross_entropy(
            z.flatten(0, 1), y.flatten()
        )


@objective()
class MixtureOfSoftmaxes(Lm):
    def __init__(self):
        super().__init__()
        self.prior, self.latent = nn.Linear(16, 3), nn.Linear(16, 48)

    def forward(self, input_ids, labels):
        h = self.hidden(input_ids)
        z = self.head(self.latent(h).tanh().unflatten(-1, (3, 16)))
        p = (z.softmax(-1) * self.prior(h).softmax(-1)[..., None]).sum(-2)
        return F.nll_loss(p.log().flatten(0, 1), labels.flatten())


@objective()
class SeveralTokensAhead(Lm):
    """Two more heads on blocks of their own share the table's head (multi-token prediction)."""

    def __init__(self):
        super().__init__()
        self.more = nn.ModuleList([Attention(), Attention()])

    def forward(self, input_ids, labels):
        h, total = self.hidden(input_ids), 0.0
        for ahead, block in enumerate([nn.Identity(), *self.more]):
            h = block(h)
            z = self.head(h[:, : h.shape[1] - ahead])
            total = total + F.cross_entropy(z.flatten(0, 1), labels[:, ahead:].flatten())
        return total


@objective()
class PolicyAndValue(Lm):
    """PPO: ratios of log probabilities, clipped, with a value head."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(16, 1)

    def forward(self, input_ids, labels):
        h = self.hidden(input_ids)
        logp = self.head(h).log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        value = self.value(h).squeeze(-1)
        advantage = (labels.to(h.dtype) / 32 - value).detach()
        ratio = (logp - logp.detach() * 0.9).exp()
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.min(ratio * advantage, clipped * advantage).mean() + (value - labels / 32).pow(2).mean()


@objective()
class SelectiveLogSoftmax(Lm):
    """TRL's: a loop over rows, gathered before logsumexp."""

    def loss(self, z, y):
        picked = torch.gather(z, -1, y.unsqueeze(-1)).squeeze(-1)
        return picked - torch.stack([torch.logsumexp(row, -1) for row in z])


@objective()
class ChunkedCrossEntropy(Lm):
    """Logits are made for pieces of the sequence, under checkpointing."""

    def forward(self, input_ids, labels):
        h, total = self.hidden(input_ids), 0.0
        piece = lambda h, y: F.cross_entropy(self.head(h).flatten(0, 1), y.flatten(), reduction="sum")  # noqa: E731
        for part, y in zip(h.split(2, 1), labels.split(2, 1), strict=True):
            total = total + torch.utils.checkpoint.checkpoint(piece, part, y, use_reentrant=False)
        return total / labels.numel()


@objective()
class LogitsWithPrior(Lm):
    """Log frequencies are added to the logits, and one column is forbidden."""

    def __init__(self):
        super().__init__(bias=True)
        self.register_buffer("prior", torch.rand(32).log())
        ban = torch.zeros(32)
        ban[5] = float("-inf")
        self.register_buffer("ban", ban, persistent=False)

    def loss(self, z, y):
        return F.cross_entropy((z + self.prior + self.ban).flatten(0, 1), y.flatten().masked_fill(y.flatten() == 5, 6))


@objective()
class TiedAndScaled(Lm):
    """The head is the table, scaled by the root of the width, with a bias of its own."""

    def __init__(self):
        super().__init__()
        del self.head
        self.bias = nn.Parameter(torch.zeros(32))

    def logits(self, input_ids):
        h = self.block(self.table(input_ids) * math.sqrt(16))
        return F.linear(h, self.table.weight, self.bias) / math.sqrt(16)

    def loss(self, z, y):
        return F.cross_entropy(z.flatten(0, 1), y.flatten())


@objective()
class CosineHead(Lm):
    """Logits are cosines (ArcFace), with a margin on the label's."""

    def forward(self, input_ids, labels):
        cosine = F.linear(F.normalize(self.hidden(input_ids), dim=-1), F.normalize(self.head.weight, dim=-1))
        hot = F.one_hot(labels, 32).to(cosine.dtype)
        return F.cross_entropy((4 * (cosine - 0.2 * hot)).flatten(0, 1), labels.flatten())


@objective()
class Ranks(Lm):
    """Metrics in the forward: top-5 accuracy, rank of the label, perplexity."""

    def loss(self, z, y):
        picked = z.gather(-1, y[..., None])
        rank = (z > picked).sum(-1)
        top = (z.topk(5, -1).indices == y[..., None]).any(-1).float().mean()
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
        return loss, rank, top, loss.detach().exp(), z.argmax(-1)


@objective()
class Hinge(Lm):
    """Multi-class margin: the best wrong logit."""

    def loss(self, z, y):
        right = z.gather(-1, y[..., None])
        wrong = z.scatter(-1, y[..., None], float("-inf")).amax(-1, keepdim=True)
        return (1 + wrong - right).clamp(min=0).mean()


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(32, 16), Mlp(), Attention()
        self.left, self.right = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def vectors(self, input_ids, labels):
        x = self.left(self.a(self.table(input_ids)).mean(1))
        y = self.right(self.b(self.table(labels))[:, -1])
        return x, y


@objective()
class Contrastive(Towers):
    """CLIP: normed vectors of two towers, a learned temperature, both directions."""

    def forward(self, input_ids, labels):
        x, y = (F.normalize(v, dim=-1) for v in self.vectors(input_ids, labels))
        z = self.scale.exp() * x @ y.t()
        target = torch.arange(z.shape[0])
        return (F.cross_entropy(z, target) + F.cross_entropy(z.t(), target)) / 2, z


@objective()
class Redundancy(Towers):
    """Barlow twins: the cross-correlation of standardised features, its diagonal against the rest."""

    def forward(self, input_ids, labels):
        x, y = self.vectors(input_ids, labels)
        x, y = ((v - v.mean(0)) / (v.std(0) + 1e-2) for v in (x, y))
        c = x.T @ y / x.shape[0]
        on, off = (c.diagonal() - 1).pow(2).sum(), c.pow(2).sum() - c.diagonal().pow(2).sum()
        return on + 5e-3 * off


@objective()
class Quantised(Towers):
    """Vectors are replaced by the nearest of a codebook, straight through, with a commitment loss."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(12, 16))

    def forward(self, input_ids, labels):
        h = self.a(self.table(input_ids))
        near = torch.cdist(h, self.codes.expand(h.shape[0], -1, -1)).argmin(-1)
        code = self.codes[near]
        out = self.b(h + (code - h).detach())
        return out, (h - code.detach()).pow(2).mean() + (h.detach() - code).pow(2).mean(), near


@objective(allowed=HOSTILE)
class ConnectionistTemporal(Lm):
    def loss(self, z, y):
        lengths = torch.full((z.shape[0],), z.shape[1])
        return F.ctc_loss(
            z.log_softmax(-1).transpose(0, 1), y[:, :2].clamp(min=1), lengths, torch.full_like(lengths, 2)
        )
