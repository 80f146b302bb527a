"""Terms of losses on hidden values: kernels, correlations, spectra, laws, sensitivities, agreement of tasks."""

from __future__ import annotations

import torch
from torch import distributions as dist
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats
from ..parts import Mlp

X, Z = floats(2, 6, 16), floats(2, 6, 16, seed=1)
ROWS = floats(6, 16)


class Two(nn.Module):
    """Two hidden layers, whose values the penalty reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def hidden(self, x):
        a = torch.tanh(self.a(x))
        return a, torch.tanh(self.b(a))

    def forward(self, x):
        a, b = self.hidden(x)
        return self.out(b), self.penalty(a.flatten(0, -2), b.flatten(0, -2))


@case(call(ROWS), tp=(2, 4))
class KernelAlignment(Two):
    """CKA of two layers: centred products of samples."""

    def penalty(self, a, b):
        a, b = a - a.mean(0), b - b.mean(0)
        return (b.T @ a).pow(2).sum() / ((a.T @ a).norm() * (b.T @ b).norm())


@case(call(ROWS), tp=(2, 4))
class Discrepancy(Two):
    """MMD with a Gaussian kernel whose width is the median distance."""

    def penalty(self, a, b):
        both = torch.cat([a, b])
        apart = torch.cdist(both, both).pow(2)
        kernel = torch.exp(-apart / apart.detach().median())
        n = len(a)
        return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


@case(call(ROWS), tp=(2, 4))
class Independence(Two):
    """HSIC by centring matrices."""

    def penalty(self, a, b):
        n = len(a)
        centre = torch.eye(n, dtype=a.dtype) - 1.0 / n
        near, alike = torch.exp(-torch.cdist(a, a)), b @ b.T
        return torch.trace(near @ centre @ alike @ centre) / (n - 1) ** 2


@case(call(ROWS), tp=(2, 4))
class NuclearNorm(Two):
    """Spectra of a layer's values: the sum of singular values, the rank as an entropy of them, a log-determinant."""

    def penalty(self, a, b):
        values = torch.linalg.svdvals(b)
        p = values / values.sum()
        code = torch.linalg.slogdet(torch.eye(32, dtype=a.dtype) + 4 * a.T @ a)[1]
        return values.sum(), -(p * p.log()).sum(), code, torch.linalg.matrix_norm(a, "nuc")


@case(call(ROWS), tp=(2, 4))
class Correlations(Two):
    def penalty(self, a, b):
        c = torch.corrcoef(torch.cat([a, b], 1).T)
        return c[:32, 32:].pow(2).mean() + torch.cov(a.T).diagonal().sum()


@case(call(X), tp=(2, 4))
class ReductionsOfLosses(Two):
    """Losses of torch's between two layers, with each of their reductions."""

    def penalty(self, a, b):
        log_a, p_b = a.log_softmax(-1), b.softmax(-1)
        return {
            "batchmean": F.kl_div(log_a, p_b, reduction="batchmean"),
            "sum": F.smooth_l1_loss(a, b, reduction="sum", beta=0.5),
            "none": F.huber_loss(a, b, reduction="none", delta=0.3).amax(-1),
            "mean": F.gaussian_nll_loss(a, b, F.softplus(b)),
            "target": F.kl_div(log_a, b.log_softmax(-1), log_target=True, reduction="mean"),
            "soft": F.soft_margin_loss(a, torch.sign(b.detach())),
            "poisson": F.poisson_nll_loss(a, b.exp(), full=False),
        }


@case(call(X), tp=(2, 4))
class MarginsOfLosses(Two):
    def penalty(self, a, b):
        far = a.roll(1, 0)
        one = torch.ones(len(a), dtype=a.dtype)
        return (
            F.triplet_margin_loss(a, b, far, p=2, swap=True),
            F.cosine_embedding_loss(a, b, one, margin=0.1),
            F.pairwise_distance(a, b, p=1).mean(),
            nn.CosineSimilarity(dim=-1)(a, far).pow(2).mean(),
            F.multilabel_soft_margin_loss(a, (b > 0).to(a.dtype)),
            F.margin_ranking_loss(a.sum(-1), b.sum(-1), one, margin=0.5),
            F.cross_entropy(a, b.softmax(-1), label_smoothing=0.1),
        )


@case(call(X), tp=(2, 4))
class LawsOfHidden(Two):
    """Distributions of torch's over hidden values: what they are scored with is no sample."""

    def penalty(self, a, b):
        posterior = dist.Independent(dist.Normal(a, F.softplus(b) + 0.1), 1)
        prior = dist.Independent(dist.Laplace(torch.zeros_like(a), torch.ones_like(b)), 1)
        bits = dist.Bernoulli(logits=b)
        return (
            posterior.log_prob(b).mean(),
            prior.log_prob(a).mean(),
            posterior.entropy().sum(),
            dist.kl_divergence(posterior, dist.Independent(dist.Normal(b, torch.ones_like(a)), 1)).mean(),
            bits.log_prob((a > 0).to(a.dtype)).sum(-1).mean(),
            dist.Categorical(logits=a).entropy().mean(),
        )


@case(call(ROWS), tp=(2, 4))
class NormalOfManyUnits(Two):
    """A normal law with a factor made from hidden values, and a mixture over pieces of them."""

    def penalty(self, a, b):
        wide = dist.LowRankMultivariateNormal(a, b.unflatten(-1, (32, 1)), torch.ones_like(a))
        parts = dist.MixtureSameFamily(
            dist.Categorical(logits=a[:, :4]),
            dist.Independent(dist.Normal(b.unflatten(-1, (4, 8)), 0.5), 1),
        )
        return wide.log_prob(b).mean(), parts.log_prob(a[:, 8:16]).mean()


@case(call(X), tp=(2, 4))
class JacobianOfHidden(Two):
    """The size of the Jacobian from one hidden layer to the next, by a product with a fixed direction."""

    def forward(self, x):
        a, b = self.hidden(x)
        direction = torch.ones_like(b) / b.shape[-1] ** 0.5
        (g,) = torch.autograd.grad(b, a, direction, create_graph=True)
        return self.out(b), g.pow(2).sum(-1).mean()


@case(call(X), tp=(2, 4), vary=True)
class Adversarial(Two):
    """VAT: a step towards what changes the prediction most, then the divergence there."""

    def forward(self, x):
        logits = self.out(self.hidden(x)[1])
        with torch.enable_grad():
            d = torch.full_like(x, 1e-2).requires_grad_()
            near = self.out(self.hidden(x.detach() + d)[1])
            div = F.kl_div(near.log_softmax(-1), logits.detach().softmax(-1), reduction="batchmean")
            (g,) = torch.autograd.grad(div, d)
        r = 0.5 * g / (g.norm() + 1e-8)
        far = self.out(self.hidden(x + r)[1])
        return logits, F.kl_div(far.log_softmax(-1), logits.detach().softmax(-1), reduction="batchmean")


@case(call(X), tp=(2, 4))
class BalancedByGradients(nn.Module):
    """GradNorm: norms of each task's gradient on the shared layer balance the tasks' weights."""

    def __init__(self):
        super().__init__()
        self.shared, self.one, self.two = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.rates = nn.Parameter(torch.tensor([1.0, 0.5]))

    def forward(self, x):
        h = torch.tanh(self.shared(x))
        losses = torch.stack([self.one(h).pow(2).mean(), (self.two(h) - x).abs().mean()])
        if not torch.is_grad_enabled():
            return losses
        norms = [
            torch.autograd.grad(rate * loss, self.shared.weight, retain_graph=True, create_graph=True)[0].norm()
            for rate, loss in zip(self.rates, losses, strict=True)
        ]
        norms = torch.stack(norms)
        return losses, (norms - norms.mean().detach()).abs().sum()


@case(call(X), tp=(2, 4))
class AgreementOfTasks(nn.Module):
    """Gradients of two tasks on shared features: the cosine between them decides what is added."""

    def __init__(self):
        super().__init__()
        self.shared, self.one, self.two = Mlp(), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        h = self.shared.inner(x)
        y = x + self.shared.down(h)
        a, b = self.one(y).pow(2).mean(), (self.two(y) - x).pow(2).mean()
        if not torch.is_grad_enabled():
            return a, b
        g = torch.autograd.grad(a, h, retain_graph=True)[0]
        k = torch.autograd.grad(b, h, retain_graph=True)[0]
        cosine = F.cosine_similarity(g.flatten(1), k.flatten(1), dim=-1)
        return a + cosine.clamp(min=0).mean() * b, cosine


@case(call(X), tp=(2, 4))
class TotalVariation(Two):
    """Differences of neighbours: units, positions; a hinge on the largest, a penalty on unused units."""

    def penalty(self, a, b):
        rough = (a[:, 1:] - a[:, :-1]).abs().mean() + torch.diff(b, dim=-1).pow(2).mean()
        unused = (a.abs().mean(0) < 0.1).to(a.dtype)
        return rough, (unused * (0.1 - a.abs().mean(0))).sum(), b.amax(-1).sub(0.5).relu().mean()
