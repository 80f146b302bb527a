"""What people do with a sharded model afterwards, and state that a trial does not see."""

from __future__ import annotations

import io

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import autoplan

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Mlp, Net

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=1)
T = ids(2, 6)


def whole(model):
    return {name: tensor.detach().clone() for name, tensor in autoplan.full_tensors(model).items()}


def steps(model, optimizer, x, y, turns=2):
    for _ in range(turns):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return whole(model)


@case(call(X), call(X), call(X), vary=False, allowed=HOSTILE)
class LastHiddenInList(Net):
    """Adds what the call before left in a list: nothing the first time."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        h = self.feed.up(x)
        if self.seen:
            h = h + 0.5 * self.seen[-1]
        self.seen.append(h.detach())
        return self.feed.down(h.relu())


@case(call(X), call(X))
class RowOfMemoryByView(nn.Module):
    """A row of a buffer of hidden width is written through a view of it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("memory", torch.zeros(4, 32))

    def forward(self, x):
        h = self.up(x).tanh()
        row = self.memory[1:3].view(-1, 32)[0]
        row.copy_(0.5 * row + h.detach().mean((0, 1)))
        return self.down(h + self.memory.sum(0))


def through_bytes(model, x, y):
    first = model(x).detach()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    return first, model(x)


@case(call(X, Y, _do=through_bytes), vary=False, allowed=HOSTILE)
class ThroughBytes(Net):
    pass


def assigned(model, x):
    torch.manual_seed(5)
    other = Net().to(x.dtype)
    model.load_state_dict(other.state_dict(), assign=True)
    return model(x)


@case(call(X, _do=assigned), vary=False, allowed=HOSTILE)
class LoadedByAssign(Net):
    pass


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(32, 16), Net(), nn.Linear(16, 32, bias=False)

    def forward(self, ids):
        return self.head(self.body(self.table(ids)))


def tied(model, x):
    model.head.weight = model.table.weight
    F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    return autoplan.full_tensors(model, grads=True)["table.weight"].clone()


@case(call(T, _do=tied), vary=False, allowed=HOSTILE)
class TiedAfterwards(Lm):
    pass


def scaled(model, x, y):
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * (float("inf") if turn == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), whole(model)


@case(call(X, Y, _do=scaled), vary=False)
class ScaledLoss(Net):
    pass


@case(call(X, _train=True), call(X))
class ObservedHidden(nn.Module):
    """Fake quantisation of hidden values by the least and largest that was seen."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.ones(()))

    def forward(self, x):
        h = self.up(x)
        if self.training:
            self.low.copy_(torch.minimum(self.low, h.detach().amin()))
            self.high.copy_(torch.maximum(self.high, h.detach().amax()))
        scale = (self.high - self.low) / 255
        q = ((h - self.low) / scale).round().clamp(0, 255) * scale + self.low
        return self.down(h + (q - h).detach())


@case(call(X), allowed=HOSTILE)
class CaughtView(Mlp):
    """Tries a view that the whole width alone allows."""

    def inner(self, x):
        h = self.up(x)
        try:
            h = h.view(*h.shape[:-1], -1, 32).softmax(-1).flatten(-2)
        except RuntimeError:
            h = h * 2
        return h


@case(call(X), tp=(2, 4))
class DefaultDtypeInside(Mlp):
    def inner(self, x):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return (self.up(x) * torch.linspace(0, 1, 32)).relu()
        finally:
            torch.set_default_dtype(before)


@case(call(X), call(X, _train=True), call(X))
class FusedInEval(nn.Module):
    """Sums its branches into one weight in eval, and keeps it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.down = nn.Linear(16, 32), nn.Linear(16, 32, bias=False), nn.Linear(32, 16)
        self.fused = None

    def train(self, mode=True):
        super().train(mode)
        self.fused = None if mode else (self.a.weight + self.b.weight).detach()
        return self

    def forward(self, x):
        if self.training:
            return self.down((self.a(x) + self.b(x)).relu())
        return self.down(F.linear(x, self.fused, self.a.bias).relu())


def in_backward(model, x, y):
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in optimizers]
    for _ in range(2):
        F.mse_loss(model(x), y).backward()
    for handle in handles:
        handle.remove()
    return whole(model)


@case(call(X, Y, _do=in_backward), vary=False)
class OptimizersInBackward(Net):
    pass


def soft(model, x, y):
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.data = (p - 0.1 * p.grad).sign() * ((p - 0.1 * p.grad).abs() - 0.01).clamp(min=0)
    return sum((p == 0).sum() for p in whole(model).values()), model(x)


@case(call(X, Y, _do=soft), vary=False, allowed=HOSTILE)
class SoftThreshold(Net):
    pass


def muon(model, x, y):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    return steps(model, torch.optim.Muon(matrices, lr=0.02), x, y)


@case(call(X, Y, _do=muon), vary=False, allowed=HOSTILE, dtype=torch.float32, tolerance=0.02)
class MuonOfTorch(Net):
    pass


@case(call(X, 32), call(X, 16), vary=False, allowed=HOSTILE, inputs={"x": X, "k": 32})
class RowsByNumber(nn.Module):
    """Rows are formed by a number that is the leading size when planned, and a rank's leading size later."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, k: int):
        h = self.up(x).flatten(0, 1).mT
        h = h.reshape(k, -1)
        h = (h / (1 + h.pow(2).mean(-1, keepdim=True))).reshape(32, -1)
        return self.down(h.mT.view(x.shape[0], -1, 32))


def lbfgs(model, x, y):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return whole(model)


@case(call(X, Y, _do=lbfgs), vary=False, allowed=HOSTILE)
class QuasiNewton(Net):
    pass


def adafactor(model, x, y):
    return steps(model, torch.optim.Adafactor(model.parameters(), lr=0.05), x, y, 3)


@case(call(X, Y, _do=adafactor), vary=False, allowed=HOSTILE)
class AdafactorOfTorch(Net):
    pass


def pruned(model, x):
    prune.l1_unstructured(model.feed.up, "weight", amount=0.25)
    first = model(x)
    prune.remove(model.feed.up, "weight")
    return first, model(x), (whole(model)["feed.up.weight"] == 0).sum()


@case(call(X, _do=pruned), vary=False, allowed=HOSTILE)
class PrunedAfterwards(Net):
    pass
