"""Policies, values and worlds: several heads on a trunk, laws of actions, targets without gradient."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.nn import functional as F

from ..case import call, case, floats, ids
from ..parts import Attention, Mlp

O = floats(4, 16)  # noqa: E741
A = ids(4, below=6)
OA = {"obs": O, "action": A}
R = floats(4)
BOTH = (2, 4)


class Trunk(nn.Module):
    def __init__(self, out=6):
        super().__init__()
        self.up, self.down, self.policy, self.value = (
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.Linear(16, out),
            nn.Linear(16, 1),
        )

    def trunk(self, obs):
        return self.down(self.up(obs).tanh()).tanh()


@case(call(O, A), inputs=OA, tp=BOTH)
class ActorCritic(Trunk):
    """Categorical's log probability and entropy beside a value."""

    def forward(self, obs, action):
        h = self.trunk(obs)
        law = Categorical(logits=self.policy(h))
        return law.log_prob(action), law.entropy(), self.value(h).squeeze(-1)


@case(call(O, A), inputs=OA, tp=BOTH)
class ImpossibleActions(Trunk):
    """Illegal actions get the least number of the dtype; the best legal one comes out."""

    def forward(self, obs, action):
        z = self.policy(self.trunk(obs))
        legal = (torch.arange(6) != action[:, None]) & (obs[:, :6] > -2)
        z = torch.where(legal, z, torch.finfo(z.dtype).min)
        return z.log_softmax(-1).clamp(min=-50), z.argmax(-1)


@case(call(O), tp=BOTH)
class Dueling(Trunk):
    def forward(self, obs):
        h = self.trunk(obs)
        a = self.policy(h)
        return self.value(h) + a - a.mean(-1, keepdim=True)


@case(call(O, A, R), inputs=OA | {"reward": R}, tp=BOTH, vary=False)
class Categories(Trunk):
    """C51: a law over returns, projected onto atoms of the next state's law."""

    def __init__(self):
        super().__init__(6 * 8)
        self.register_buffer("atoms", torch.linspace(-2, 2, 8))

    def forward(self, obs, action, reward):
        z = self.policy(self.trunk(obs)).view(-1, 6, 8).log_softmax(-1)
        with torch.no_grad():
            p = z.exp()
            best = (p * self.atoms).sum(-1).argmax(-1)
            p = p[torch.arange(len(p)), best]
            to = (reward[:, None] + 0.9 * self.atoms).clamp(-2, 2)
            at = (to + 2) / (4 / 7)
            low, high = at.floor().long(), at.ceil().long()
            m = torch.zeros_like(p)
            m.scatter_add_(1, low, p * (high - at + (low == high)))
            m.scatter_add_(1, high, p * (at - low))
        return -(m * z[torch.arange(len(p)), action]).sum(-1).mean()


@case(call(O, A), inputs=OA, tp=BOTH)
class QuantileHuber(Trunk):
    """QR-DQN: pairs of quantiles under a Huber loss."""

    def __init__(self):
        super().__init__(6 * 5)

    def forward(self, obs, action):
        q = self.policy(self.trunk(obs)).view(-1, 6, 5)
        q = q.gather(1, action[:, None, None].expand(-1, 1, 5)).squeeze(1)
        off = q.detach().flip(0)[:, None] - q[:, :, None]
        tau = (torch.arange(5, dtype=q.dtype) + 0.5) / 5
        loss = F.huber_loss(off, torch.zeros_like(off), reduction="none")
        return ((tau[:, None] - (off.detach() < 0).to(q.dtype)).abs() * loss).mean(2).sum(1).mean()


@case(call(O, floats(4, 3)), inputs={"obs": O, "noise": floats(4, 3)}, tp=BOTH)
class SquashedGaussian(Trunk):
    """SAC: the noise is given, two critics share it, the smaller one counts."""

    def __init__(self):
        super().__init__()
        self.critics = nn.ModuleList([nn.Sequential(nn.Linear(19, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2)])
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def forward(self, obs, noise):
        mean, std = self.policy(self.trunk(obs)).chunk(2, -1)
        std = std.clamp(-5, 2).exp()
        raw = mean + std * noise
        logp = Normal(mean, std).log_prob(raw).sum(-1) - (2 * (0.6931 - raw - F.softplus(-2 * raw))).sum(-1)
        q = torch.cat([critic(torch.cat([obs, raw.tanh()], -1)) for critic in self.critics], -1).amin(-1)
        alpha = self.log_alpha.exp()
        return (alpha.detach() * logp - q).mean(), -(self.log_alpha * (logp - 3).detach()).mean()


@case(call(O, floats(4, 3)), inputs={"obs": O, "action": floats(4, 3)}, tp=BOTH)
class Transformed(Trunk):
    """torch's TransformedDistribution over a normal law with a deviation that no input moves."""

    def __init__(self):
        super().__init__(3)
        self.log_std = nn.Parameter(torch.zeros(3))

    def forward(self, obs, action):
        law = Independent(Normal(self.policy(self.trunk(obs)), self.log_std.exp()), 1)
        squashed = TransformedDistribution(law, [TanhTransform(cache_size=1)])
        return squashed.log_prob((action / 4).tanh())


@case(
    call(floats(2, 5, 16), ids(2, 5, below=6), floats(2, 5)),
    inputs={"obs": floats(2, 5, 16), "action": ids(2, 5, below=6), "togo": floats(2, 5)},
    tp=BOTH,
    sequence=None,
)
class DecisionTransformer(nn.Module):
    """Returns, states and actions take turns as tokens; a causal block; actions from the states' places."""

    def __init__(self):
        super().__init__()
        self.state, self.togo, self.action = nn.Linear(16, 16), nn.Linear(1, 16), nn.Embedding(6, 16)
        self.when, self.block, self.mlp, self.head = nn.Embedding(8, 16), Attention(), Mlp(), nn.Linear(16, 6)

    def forward(self, obs, action, togo):
        b, t = action.shape
        at = self.when(torch.arange(t))
        three = torch.stack([self.togo(togo[..., None]) + at, self.state(obs) + at, self.action(action) + at], 2)
        x = self.mlp(self.block(three.view(b, 3 * t, -1)))
        return self.head(x.view(b, t, 3, -1)[:, :, 1])


@case(
    call(floats(2, 5, 16), floats(2, 5)), inputs={"obs": floats(2, 5, 16), "reward": floats(2, 5)}, tp=BOTH, vary=False
)
class Advantages(Trunk):
    """Generalised advantages by a loop from behind, normed, without gradient, in the loss."""

    def forward(self, obs, reward):
        h = self.trunk(obs)
        v = self.value(h).squeeze(-1)
        with torch.no_grad():
            last, out = torch.zeros_like(v[:, 0]), []
            for t in reversed(range(v.shape[1])):
                after = v[:, t + 1] if t + 1 < v.shape[1] else torch.zeros_like(last)
                last = reward[:, t] + 0.9 * after - v[:, t] + 0.8 * last
                out.insert(0, last)
            gae = torch.stack(out, 1)
            to = gae + v
            gae = (gae - gae.mean()) / (gae.std() + 1e-8)
        logp = self.policy(h).log_softmax(-1)
        return -(logp[..., 0] * gae).mean() + F.smooth_l1_loss(v, to)


@case(call(O), tp=BOTH)
class SeveralDiscrete(Trunk):
    """A factor of the action each: unequal numbers of choices, heads of their own, packed into one tensor."""

    def __init__(self):
        super().__init__(2 + 5 + 3)

    def forward(self, obs):
        z = self.policy(self.trunk(obs)).split([2, 5, 3], -1)
        laws = [Categorical(logits=part) for part in z]
        return torch.stack([law.entropy() for law in laws], -1), torch.stack([law.probs.argmax(-1) for law in laws], -1)


@case(call(O, A, R), call(O, A, R, _train=True), inputs=OA | {"reward": R}, tp=BOTH)
class RescaledValues(Trunk):
    """PopArt: running statistics of returns rescale the value layer's weight, out of the graph, in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mu", torch.zeros(1))
        self.register_buffer("sigma", torch.ones(1))

    def forward(self, obs, action, reward):
        if self.training:
            with torch.no_grad():
                mu, sigma = 0.9 * self.mu + 0.1 * reward.mean(), 0.9 * self.sigma + 0.1 * reward.std()
                self.value.weight.mul_(self.sigma / sigma)
                self.value.bias.mul_(self.sigma).add_(self.mu - mu).div_(sigma)
                self.mu.copy_(mu)
                self.sigma.copy_(sigma)
        return self.value(self.trunk(obs)).squeeze(-1) * self.sigma + self.mu


@case(call(O, R), inputs={"obs": O, "reward": R}, tp=BOTH)
class TwoHotSymlog(Trunk):
    """Dreamer: returns under symlog as two neighbouring bins, cross entropy."""

    def __init__(self):
        super().__init__(9)
        self.register_buffer("bins", torch.linspace(-4, 4, 9))

    def forward(self, obs, reward):
        z = self.policy(self.trunk(obs))
        y = reward.sign() * reward.abs().log1p()
        over = (self.bins <= y[:, None]).sum(-1).clamp(1, 8)
        low, high = self.bins[over - 1], self.bins[over]
        part = ((y - low) / (high - low)).clamp(0, 1)
        two = F.one_hot(over - 1, 9) * (1 - part)[:, None] + F.one_hot(over, 9) * part[:, None]
        value = (z.softmax(-1) * self.bins).sum(-1)
        return -(two * z.log_softmax(-1)).sum(-1).mean(), value.sign() * value.abs().expm1()


@case(call(floats(2, 5, 16)), tp=BOTH, vary=False)
class WorldModel(nn.Module):
    """RSSM: a GRU cell, a categorical latent with straight-through gradients, a free-bits KL in both directions."""

    def __init__(self):
        super().__init__()
        self.cell, self.prior, self.post = nn.GRUCell(16, 16), Mlp(), nn.Linear(32, 16)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, obs):
        h = obs.new_zeros(obs.shape[0], 16)
        s, loss = torch.zeros_like(h), 0
        for t in range(obs.shape[1]):
            h = self.cell(s, h)
            prior = self.prior(h).view(-1, 4, 4).log_softmax(-1)
            post = self.post(torch.cat([h, obs[:, t]], -1)).view(-1, 4, 4).log_softmax(-1)
            hard = F.one_hot(post.argmax(-1), 4).to(obs.dtype)
            s = (hard + post.exp() - post.exp().detach()).flatten(1)
            kl = lambda p, q: (p.exp() * (p - q)).sum((-1, -2)).clamp(min=0.01).mean()  # noqa: E731
            loss = loss + 0.8 * kl(post.detach(), prior) + 0.2 * kl(post, prior.detach())
            loss = loss + F.mse_loss(self.down(self.up(torch.cat([h, s], -1)).relu()), obs[:, t])
        return loss, h


@case(call(O, A), inputs=OA, tp=BOTH)
class Recalled(Trunk):
    """Episodic memory: values of the nearest keys, weighted by an inverse distance."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(12, 6))

    def forward(self, obs, action):
        h = self.trunk(obs)
        far, at = torch.cdist(h, self.keys).pow(2).topk(3, largest=False)
        weight = 1 / (far + 1e-3)
        q = (self.values[at] * (weight / weight.sum(-1, keepdim=True))[..., None]).sum(1)
        return (self.policy(h) + q).gather(1, action[:, None])
