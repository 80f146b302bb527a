"""Weights that more than the module's own dicts hold: optimizers, lists, closures, averages, groups made at birth."""

from __future__ import annotations

import copy
import functools
import operator
import weakref

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import autoplan

from ..case import HOSTILE, call, case, floats
from ..parts import Mlp, Net

X, Y = floats(2, 6, 16), floats(2, 6, 16, seed=1)


def whole(model):
    return {name: tensor.detach().clone() for name, tensor in autoplan.full_tensors(model).items()}


def fit(model, x, y):
    losses = [model.fit(x, y) for _ in range(2)]
    return losses, whole(model)


@case(call(X, Y, _do=fit, _train=True), call(X), vary=False, allowed=HOSTILE, tp=(2, 4))
class OwnOptimizer(Net):
    """An agent of reinforcement learning: it makes its optimizer at birth."""

    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def fit(self, x, y):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@case(call(X, Y, _do=fit, _train=True), call(X), vary=False, allowed=HOSTILE)
class OwnScheduler(OwnOptimizer):
    """A schedule beside it, which starts the optimizer's counts."""

    def __init__(self):
        super().__init__()
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def fit(self, x, y):
        loss = super().fit(x, y)
        self.schedule.step()
        return loss


@case(call(X, Y, _do=fit, _train=True), call(X), vary=False, allowed=HOSTILE, tp=(2, 4))
class GroupsAtBirth(Net):
    """Groups for weight decay are made where the module is, an optimizer from them when it is first needed."""

    def __init__(self):
        super().__init__()
        self.groups = [
            {"params": [p for p in self.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = None

    def fit(self, x, y):
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(self.groups, lr=0.01)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class Shadow:
    """An average of weights as repositories copy it from each other: a dict beside the module."""

    def __init__(self, module, decay=0.5):
        self.module, self.decay = module, decay
        self.shadow = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def update(self):
        for name, p in self.module.named_parameters():
            self.shadow[name] = self.decay * self.shadow[name].to(p) + (1 - self.decay) * p.detach()


def averaged(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        model.average.update()
    sums = {name: tensor for name, tensor in model.average.shadow.items()}
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in sums.items()}


@case(call(X, Y, _do=averaged, _train=True), vary=False, allowed=HOSTILE)
class ShadowOfInner(nn.Module):
    """The average of its parts was taken before the model was split."""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.average = Shadow(self.net)

    def forward(self, x):
        return self.net(x)


@case(call(X), tp=(2, 4))
class ClosureOverWeight(Mlp):
    """A closure has the parameter itself, not the layer."""

    def __init__(self):
        super().__init__()
        weight = self.up.weight
        self.project = lambda x: F.linear(x, weight)

    def forward(self, x):
        return x + self.down(torch.relu(self.project(x) + self.up.bias))


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class PartialOverWeight(Mlp):
    def __init__(self):
        super().__init__()
        self.project = functools.partial(F.linear, weight=self.up.weight, bias=self.up.bias)

    def forward(self, x):
        return x + self.down(torch.tanh(self.project(x)))


@case(call(X), allowed=HOSTILE)
class WeakToWeight(Mlp):
    """A regulariser refers to the weights weakly, so that it does not keep them."""

    def __init__(self):
        super().__init__()
        self.watched = [weakref.ref(self.up.weight), weakref.ref(self.down.weight)]

    def forward(self, x):
        penalty = sum(ref().pow(2).sum() for ref in self.watched if ref() is not None)
        return super().forward(x), penalty


@case(call(X), tp=(2, 4))
class ListOfAll(Mlp):
    """All parameters in a plain list, made once for speed, over which a penalty is taken."""

    def __init__(self):
        super().__init__()
        self.everything = list(self.parameters())

    def forward(self, x):
        return super().forward(x), sum(p.abs().sum() for p in self.everything)


@case(call(X), tp=(2, 4))
class DictOfPairs(Mlp):
    """Weights by name in a dict of tuples; the forward reads them there alone."""

    def __init__(self):
        super().__init__()
        self.table = {"up": (self.up.weight, self.up.bias), "down": (self.down.weight, self.down.bias)}

    def forward(self, x):
        return x + F.linear(F.silu(F.linear(x, *self.table["up"])), *self.table["down"])


@case(call(X), allowed=HOSTILE)
class AnchorOfBirth(Mlp):
    """L2-SP: the distance from the weights as they were at birth, kept in a plain dict of tensors."""

    def __init__(self):
        super().__init__()
        self.anchor = {name: p.detach().clone() for name, p in self.named_parameters()}

    def forward(self, x):
        far = sum((p - self.anchor[name].to(p)).pow(2).sum() for name, p in self.named_parameters())
        return super().forward(x), far


@case(call(X), allowed=HOSTILE)
class AnchorVector(Mlp):
    """The same as one vector in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("anchor", parameters_to_vector(self.parameters()).detach().clone() + 0.1)

    def forward(self, x):
        return super().forward(x), (parameters_to_vector(self.parameters()) - self.anchor).square().sum()


@case(call(X), tp=(2, 4), allowed=HOSTILE)
class BoundMethods(Mlp):
    """Bound methods of layers, and getters by path, are what the forward calls."""

    def __init__(self):
        super().__init__()
        self.steps = [self.up.forward, F.gelu, operator.attrgetter("down")(self).forward]

    def forward(self, x):
        return x + functools.reduce(lambda value, step: step(value), self.steps, x)


@case(call(X), allowed=HOSTILE)
class TeacherCopiedAtFirst(Mlp):
    """A frozen teacher is copied from the layers in the first forward."""

    def __init__(self):
        super().__init__()
        self.teacher = None

    def forward(self, x):
        if self.teacher is None:
            self.teacher = [copy.deepcopy(self.up).requires_grad_(False)]
        hidden = self.inner(x)
        return x + self.down(hidden), (hidden - F.gelu(self.teacher[0](x))).pow(2).mean()


@case(call(X), allowed=HOSTILE)
class ForeachAverage(Mlp):
    """Averages of all weights in buffers, by one call for all; a consistency loss against them in training."""

    def __init__(self):
        super().__init__()
        for name, p in self.named_parameters():
            self.register_buffer("mean_" + name.replace(".", "_"), p.detach().clone())

    def forward(self, x):
        y = super().forward(x)
        if self.training:
            means = [self.get_buffer("mean_" + n.replace(".", "_")) for n, _ in self.named_parameters()]
            with torch.no_grad():
                torch._foreach_lerp_(means, [p.detach() for p in self.parameters()], 0.1)
        up, bias = self.mean_up_weight, self.mean_up_bias
        slow = x + F.linear(F.gelu(F.linear(x, up, bias)), self.mean_down_weight, self.mean_down_bias)
        return y, F.mse_loss(y, slow)
