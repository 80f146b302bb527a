"""What callers do with outputs: losses and choices of their own on logits, on hidden states, on weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, ids
from ..parts import Attention, Mlp

T = ids(2, 6)
L = ids(2, 6, seed=1)
BOTH = (2, 4)


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block, self.mlp, self.head = nn.Embedding(32, 16), Attention(), Mlp(), nn.Linear(16, 32)

    def forward(self, input_ids):
        return self.head(self.mlp(self.block(self.table(input_ids))))


@dataclass
class Result:
    logits: torch.Tensor
    hidden: torch.Tensor


class Rich(Lm):
    def forward(self, input_ids):
        h = self.mlp(self.block(self.table(input_ids)))
        return Result(self.head(h), h)


def after(do, tp=BOTH, base=Lm, **options):
    """Register a case that does something with what the model returns. `do` takes logits."""
    build = type(do.__name__, (base,), {"__module__": __name__, "__doc__": do.__doc__})
    case(call(T, _do=lambda m, x: do(m(x))), tp=tp, vary=False, **options)(build)
    return do


@after
def LowestOfOne(z):
    z[..., 0] = -9
    return F.cross_entropy(z.flatten(0, 1), L.flatten())


@after
def Centred(z):
    return F.cross_entropy((z - z.mean(-1, keepdim=True)).flatten(0, 1), L.flatten()), z.std(-1)


@after
def TopProbability(z):
    """Nucleus: sorted, cumulated, cut, scattered back."""
    value, at = z.sort(-1, descending=True)
    gone = value.softmax(-1).cumsum(-1) > 0.9
    return z.masked_fill(torch.zeros_like(gone).scatter(-1, at, gone), -1e9).softmax(-1)


@after
def Rolled(z):
    return z.roll(1, -1) * z, z.flip(-1), F.pad(z, (1, 2)), z.diff(dim=-1)


@after
def Halved(z):
    a, b = z.chunk(2, -1)
    return torch.logaddexp(a, b), z.unflatten(-1, (4, 8)).amax(-1), z[..., 3:17:2], z[:, -1, [1, 30]]


@after
def Joined(z):
    return torch.cat([z, z.new_zeros(*z.shape[:-1], 3)], -1).log_softmax(-1), torch.stack([z, z * 2], -1)


@after
def PairsOfLogits(z):
    return z @ z.mT, torch.einsum("btv,bsv->bts", z, z), z.norm(), torch.cdist(z, z), torch.outer(z[0, 0], z[0, 1])


@after
def EntropyAndMargin(z):
    p = torch.distributions.Categorical(logits=z)
    top = z.topk(2, -1).values
    return p.entropy(), top[..., 0] - top[..., 1], p.log_prob(L), z.argmax(-1), z.median(-1).values


@after
def Distilled(z):
    teacher = torch.linspace(-1, 1, 32, dtype=z.dtype).expand_as(z)
    mse = F.mse_loss(z, teacher)
    return (
        mse,
        F.kl_div(z.log_softmax(-1), teacher.softmax(-1), reduction="none"),
        F.cosine_similarity(z, teacher, dim=-1),
    )


@after
def Smoothed(z):
    weight = torch.linspace(0.5, 1.5, 32, dtype=z.dtype)
    flat, y = z.view(-1, 32), L.view(-1)
    hinge = F.multi_margin_loss(flat, y)
    return F.cross_entropy(flat, y, weight=weight, label_smoothing=0.2, reduction="none"), hinge


@after
def SigmoidOfAll(z):
    target = F.one_hot(L, 32).to(z.dtype)
    return F.binary_cross_entropy_with_logits(z, target), F.softplus(z).sum(), z.sigmoid().prod(-1)


@partial(after, allowed=HOSTILE)
def ToNumpy(z):
    best = z.detach().numpy().argmax(-1)
    return z.gather(-1, torch.from_numpy(best)[..., None]), z.tolist()[0][0][0], z.max().item()


@after
def ChangedInPlace(z):
    z = z.clone()
    z.div_(0.7).clamp_(-3, 3)
    z[:, 0].zero_()
    z[z < -1] = -1
    z.scatter_(-1, L[..., None], 2.0)
    return z.softmax(-1)


@after
def Reshaped(z):
    return (
        z.permute(2, 0, 1).softmax(0),
        z.reshape(4, -1).sum(1),
        z.flatten().logsumexp(0),
        z.unsqueeze(1).repeat(1, 2, 1, 1),
    )


@after
def Shifted(z):
    """The usual loss, by hand, with positions that do not count."""
    z, y = z[:, :-1].float(), L[:, 1:].masked_fill(L[:, 1:] < 8, -100)
    logp = z.log_softmax(-1)
    nll = -logp.gather(-1, y.clamp(min=0)[..., None]).squeeze(-1) * (y != -100)
    return nll.sum() / (y != -100).sum()


@case(call(T, _do=lambda m, x: m(x).hidden @ m(x).hidden.mT), tp=BOTH, vary=False, sequence=None)
class HiddenOfDataclass(Rich):
    """Two runs meet in one product of what they kept."""


@case(call(T, _do=lambda m, x: (m(x), m(x.flip(1)).detach())), tp=BOTH, vary=False)
class TwoRunsOneDetached(Lm):
    pass


def replaced(m, x):
    return torch.func.functional_call(m, {name: p * 1.1 for name, p in m.named_parameters()}, (x,))


@case(call(T, _do=replaced), tp=2, vary=False, allowed=HOSTILE)
class CalledWithOtherWeights(Lm):
    """functional_call from outside, with changed weights."""


def scaled(m):
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(0.5).add_(0.01)
        m.head.bias.fill_(0.3)
        m.table.weight.copy_(m.table.weight * 2)


@case(call(T), prepare=scaled, tp=BOTH, vary=False)
class WeightsChangedInPlace(Lm):
    pass


def reset(m):
    for part in m.modules():
        if isinstance(part, nn.Linear):
            nn.init.constant_(part.weight, 0.05)
            nn.init.zeros_(part.bias)


@case(call(T), prepare=reset, tp=BOTH, vary=False)
class InitialisedAnew(Lm):
    pass


def row(m):
    m.table.weight.data[3] = 0
    with torch.no_grad():
        m.head.weight[:, 2].zero_()


@case(call(T), prepare=row, tp=BOTH, vary=False, allowed=HOSTILE)
class RowOfTableZeroed(Lm):
    """Rows and columns of weights are set from outside."""
