"""Ways of training and calling, as people's own loops have them: teachers, penalties over gradients, own optimizers."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, Net

X = floats(2, 8, 16)
V = floats(8, 16)
W = floats(8, 16, seed=5)


def mlp(*sizes, norm=False):
    layers = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), *([nn.BatchNorm1d(b)] if norm else []), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def byol_steps(model, one, two):
    optimizer = torch.optim.SGD(model.trainable(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        loss = model(one, two)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update_moving_average()
        losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in model.target.parameters()]


@case(call(V, W, _do=byol_steps, _train=True, _grad=True), vary=False)
class Byol(nn.Module):
    """BYOL: a target net, a copy that follows slowly, moved by a method of the model after each step."""

    def __init__(self, beta=0.9):
        super().__init__()
        self.beta = beta
        self.online = nn.Sequential(mlp(16, 32, 16), mlp(16, 64, 8, norm=True))
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False
        self.predictor = mlp(8, 32, 8)

    def trainable(self):
        return [*self.online.parameters(), *self.predictor.parameters()]

    @torch.no_grad()
    def update_moving_average(self):
        for current, ma in zip(self.online.parameters(), self.target.parameters(), strict=True):
            ma.data = ma.data * self.beta + (1 - self.beta) * current.data

    def forward(self, one, two):
        p1, p2 = self.predictor(self.online(one)), self.predictor(self.online(two))
        with torch.no_grad():
            z1, z2 = self.target(one).detach_(), self.target(two).detach_()
        loss = lambda x, y: 2 - 2 * (F.normalize(x, dim=-1) * F.normalize(y, dim=-1)).sum(dim=-1)  # noqa: E731
        return (loss(p1, z2) + loss(p2, z1)).mean()


@case(call(floats(6, 2, 16), torch.tensor([0, 1, 0, 2, 1, 2])), vary=False)
class SupervisedContrast(nn.Module):
    """Two views of each sample; all of one label are positives; the largest logit taken away first."""

    def __init__(self, temperature=0.1):
        super().__init__()
        self.temperature, self.encoder, self.head = temperature, mlp(16, 64, 32), mlp(32, 32, 8)

    def forward(self, views, labels):
        b, n = views.shape[:2]
        features = F.normalize(self.head(self.encoder(views.flatten(0, 1))), dim=-1).view(b, n, -1)
        mask = torch.eq(labels.view(-1, 1), labels.view(-1, 1).T).to(features.dtype)
        contrast = torch.cat(torch.unbind(features, dim=1), dim=0)
        dots = torch.div(torch.matmul(contrast, contrast.T), self.temperature)
        logits = dots - dots.max(dim=1, keepdim=True)[0].detach()
        mask = mask.repeat(n, n)
        other = torch.scatter(torch.ones_like(mask), 1, torch.arange(b * n).view(-1, 1), 0)
        mask = mask * other
        log_prob = logits - torch.log((torch.exp(logits) * other).sum(1, keepdim=True))
        return -((mask * log_prob).sum(1) / mask.sum(1)).view(n, b).mean()


@case(call(V, W, _train=True), vary=False)
class BarlowTwins(nn.Module):
    """The cross-correlation of two views over the batch is to be the identity."""

    def __init__(self):
        super().__init__()
        self.backbone = mlp(16, 32, 32)
        self.projector = nn.Sequential(
            nn.Linear(32, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 12, bias=False)
        )
        self.bn = nn.BatchNorm1d(12, affine=False)

    def forward(self, y1, y2):
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2)
        c = c / y1.shape[0]
        on = torch.diagonal(c).add_(-1).pow_(2).sum()
        n = c.shape[0]
        off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten().pow_(2).sum()
        return on + 0.0051 * off


def critic_step(model, real, fake):
    alpha = torch.linspace(0, 1, len(real), dtype=real.dtype)[:, None]
    between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = model(between)
    grads = torch.autograd.grad(scores, between, torch.ones_like(scores), create_graph=True, retain_graph=True)[0]
    penalty = ((grads.view(len(grads), -1).norm(2, dim=1) - 1) ** 2).mean()
    return model(fake).mean() - model(real).mean() + 10 * penalty


@case(call(V, W, _do=critic_step), inputs={"x": V.clone().requires_grad_()}, vary=False)
class GradientPenalty(nn.Module):
    """WGAN-GP: the norm of the critic's gradient between real and made samples is to be one."""

    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.LayerNorm(64), nn.Linear(64, 32), nn.Softplus(), nn.Linear(32, 1)
        )

    def forward(self, x):
        return self.main(x)


@case(
    call(floats(3, 4, 16), floats(3, 4, 2), floats(3, 4, 16, seed=2), floats(3, 4, 2, seed=2)),
    inputs={
        "sx": floats(3, 4, 16),
        "sy": floats(3, 4, 2),
        "qx": floats(3, 4, 16, seed=2),
        "qy": floats(3, 4, 2, seed=2),
    },
    vary=False,
)
class Maml(nn.Module):
    """MAML: some steps of descent inside the forward, through which the gradient goes."""

    def __init__(self, lr=0.1, steps=2):
        super().__init__()
        self.lr, self.steps = lr, steps
        self.w1, self.b1 = nn.Parameter(torch.randn(32, 16) * 0.2), nn.Parameter(torch.zeros(32))
        self.w2, self.b2 = nn.Parameter(torch.randn(2, 32) * 0.2), nn.Parameter(torch.zeros(2))

    def net(self, x, w):
        return F.linear(torch.tanh(F.linear(x, w[0], w[1])), w[2], w[3])

    def forward(self, sx, sy, qx, qy):
        losses = []
        with torch.enable_grad():
            for i in range(sx.shape[0]):
                fast = [self.w1, self.b1, self.w2, self.b2]
                for _ in range(self.steps):
                    grads = torch.autograd.grad(F.mse_loss(self.net(sx[i], fast), sy[i]), fast, create_graph=True)
                    fast = [w - self.lr * g for w, g in zip(fast, grads, strict=True)]
                losses.append(F.mse_loss(self.net(qx[i], fast), qy[i]))
        return torch.stack(losses).mean()


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, decay=1e-3, eta=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "decay": decay, "eta": eta, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if p.ndim > 1:
                    dp = dp.add(p, alpha=g["decay"])
                    param_norm, update_norm, one = torch.norm(p), torch.norm(dp), torch.ones_like(torch.norm(p))
                    q = torch.where(
                        param_norm > 0.0, torch.where(update_norm > 0, g["eta"] * param_norm / update_norm, one), one
                    )
                    dp = dp.mul(q)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                state["mu"].mul_(g["momentum"]).add_(dp)
                p.add_(state["mu"], alpha=-g["lr"])


def with_lars(model, x):
    optimizer, losses = Lars(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@case(call(X, _do=with_lars, _train=True), vary=False)
class LayerwiseRates(Net):
    """LARS by hand: each weight's step scaled by its norm over that of its gradient."""


def distil(model, x):
    out, loss = model(x)
    return loss, out


@case(call(X, _do=distil))
class HintsByHooks(nn.Module):
    """Distillation: a frozen teacher, features of both caught by forward hooks that the model sets itself."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student, self.hint = (
            nn.Sequential(Mlp(16, 64), Mlp(16, 64)),
            nn.Sequential(Mlp(), Mlp()),
            nn.Linear(16, 16),
        )
        self.teacher.requires_grad_(False)
        self.feats = {}
        self.teacher[0].register_forward_hook(self.saver("t"))
        self.student[0].register_forward_hook(self.saver("s"))

    def saver(self, key):
        def hook(module, args, output):
            self.feats[key] = output

        return hook

    def forward(self, x):
        with torch.no_grad():
            t = self.teacher.eval()(x)
        s = self.student(x)
        hint = F.mse_loss(self.hint(self.feats["s"]), self.feats["t"])
        kd = F.kl_div((s / 2).log_softmax(-1), (t / 2).softmax(-1), reduction="batchmean") * 4
        return s, kd + 0.5 * hint


def with_entropy(model, x):
    out = model(x)
    penalty = sum(
        m.last_attn.clamp(min=1e-9).log().mul(m.last_attn).sum(-1).mean()
        for m in model.modules()
        if hasattr(m, "last_attn")
    )
    return out, penalty


@case(call(X, _do=with_entropy), allowed=HOSTILE)
class KeptAttention(nn.Module):
    """The last attention is kept on the module; a regulariser reads it from outside."""

    class Attn(Attention):
        def mixed(self, x):
            self.last_attn = torch.softmax(self.scores(x), -1)
            v = self.v(x).view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)
            return (self.last_attn @ v).transpose(1, 2).flatten(2)

    def __init__(self):
        super().__init__()
        self.attn, self.mlp = self.Attn(), Mlp()

    def forward(self, x):
        return self.mlp(self.attn(x))


@case(call(floats(2, 6, 16)), call(floats(2, 20, 16)), call(floats(2, 1, 16)), allowed=HOSTILE)
class ChunkedWhenLong(nn.Module):
    """Attention by pieces when there is much of it, and none for one token."""

    def __init__(self, heads=4, limit=16):
        super().__init__()
        self.heads, self.limit = heads, limit
        self.qkv, self.proj, self.temp = nn.Linear(16, 48), nn.Linear(16, 16), nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if n == 1:
            return self.proj((v / (1e-3 + v.std(1, keepdim=True))).transpose(1, 2).reshape(b, n, c))
        if n > self.limit:
            out = torch.cat([(part @ k.transpose(-1, -2) * self.temp).softmax(-1) @ v for part in q.split(8, dim=2)], 2)
        else:
            out = (q @ k.transpose(-1, -2) * self.temp).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(b, n, c))


class Configured(nn.Module):
    def __init__(self, act="gelu", pre_norm=True, scale=None):
        super().__init__()
        self.cfg = {"act": act, "pre_norm": pre_norm, "scale": scale}
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        h = self.up(self.norm(x) if self.cfg["pre_norm"] else x)
        h = getattr(F, self.cfg["act"])(h) if self.cfg["act"] != "softmax" else F.softmax(h, -1)
        if self.cfg["scale"]:
            h = h * self.cfg["scale"] / h.norm(dim=-1, keepdim=True)
        y = x + self.down(h)
        return y if self.cfg["pre_norm"] else self.norm(y)


@case(call(X), plan_for=Configured, allowed=HOSTILE)
def ConfiguredOtherwise():
    """A plan made for one configuration, applied to another of the same sizes."""
    return Configured(pre_norm=False, scale=2.0)


@case(call(X), plan_for=Configured, through="cache", allowed=HOSTILE)
def ConfiguredOtherwiseCached():
    return Configured(act="softmax")


def consolidated(model, x, y):
    fisher = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for one in x:
        model.zero_grad()
        model(one[None]).square().mean().backward()
        for n, p in model.named_parameters():
            if p.grad is not None:
                fisher[n] += p.grad.detach() ** 2 / len(x)
    old = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(2):
        model.zero_grad()
        penalty = sum((fisher[n] * (p - old[n]) ** 2).sum() for n, p in model.named_parameters())
        loss = F.mse_loss(model(x), y) + 100 * penalty
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@case(call(X, floats(2, 8, 16, seed=1), _do=consolidated, _train=True), inputs={"x": X}, vary=False)
class Consolidation(Net):
    """EWC: what the old task needed, as squared gradients, weighs how far weights may go."""


def steered(model):
    direction = floats(16, seed=9).to(next(model.parameters()).dtype)
    model.blocks[0].register_forward_hook(lambda m, args, out: out + 0.5 * direction)
    model.blocks[1].register_forward_pre_hook(lambda m, args: (args[0] - args[0].mean(-1, keepdim=True),))


@case(call(X), prepare=steered, allowed=HOSTILE)
class SteeredByHooks(nn.Module):
    """Activation steering: a vector added to what a block gives, by a hook set after sharding."""

    def __init__(self):
        super().__init__()
        self.blocks, self.norm, self.head = nn.ModuleList([Mlp(), Mlp()]), nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def saved_and_loaded(model, x):
    before = {k: v.clone() for k, v in model.state_dict().items()}
    first = model(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first.square().mean().backward()
    optimizer.step()
    changed = model(x)
    model.load_state_dict(before)
    return first.detach(), changed.detach(), model(x)


@case(call(X, _do=saved_and_loaded, _train=True), vary=False)
class BestKept(Net):
    """The best weights kept in a dict of clones and loaded again."""


def adversarial(model, ids, labels):
    losses = []
    for _ in range(2):
        model.zero_grad()
        loss = F.cross_entropy(model(ids), labels)
        loss.backward()
        name, weight = "emb.weight", model.emb.weight
        backup = weight.data.clone()
        norm = torch.norm(weight.grad)
        weight.data.add_(1.0 * weight.grad / norm)
        again = F.cross_entropy(model(ids), labels)
        again.backward()
        weight.data = backup
        losses += [loss.detach(), again.detach()]
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return name, torch.stack(losses)


@case(
    call(ids(4, 6), torch.tensor([0, 1, 2, 1]), _do=adversarial, _train=True),
    inputs={"tokens": ids(4, 6)},
    allowed=HOSTILE,
    vary=False,
)
class AdversarialEmbeddings(nn.Module):
    """FGM: the table of tokens pushed along its gradient, a second backward, the table put back."""

    def __init__(self):
        super().__init__()
        self.emb, self.block, self.head = nn.Embedding(32, 16), Attention(), nn.Linear(16, 3)

    def forward(self, tokens):
        return self.head(self.block(self.emb(tokens)).mean(1))
