"""What is done with a model between calls: frozen, copied, loaded, patched, accumulated, differentiated twice."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Attention(), Mlp()

    def forward(self, x):
        return self.b(self.a(x))


def frozen(model, x):
    model.a.requires_grad_(False)
    return model(x)


def thawed(model, x):
    model.requires_grad_(True)
    return model(x)


@case(call(X), call(X, _do=frozen), call(X, _do=thawed))
class FrozenBetween(Net):
    pass


@case(call(X, _do=frozen), call(X, _do=thawed))
class FrozenFirst(Net):
    pass


def start_frozen(model):
    model.b.up.requires_grad_(False)


@case(call(X), call(X, _do=thawed), prepare=start_frozen)
class FrozenBySharding(Net):
    pass


def accumulated(model, x, y):
    model(x).pow(2).sum().backward()
    model(y).pow(2).sum().backward()
    return model(x)


@case(call(X), call(X, Y, _do=accumulated))
class Accumulated(Net):
    pass


def twice(model, x):
    out = model(x)
    return out, model(out), model(out.detach())


@case(call(X), call(X, _do=twice))
class CalledTwice(Net):
    """Its output is its next input, and all are in one graph."""


def double_backward(model, x):
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    return g.pow(2).sum()


@case(call(X), call(X, _do=double_backward), allowed=HOSTILE)
class GradientPenalty(Net):
    """A penalty on the gradient of the input, which the plan did not see."""


@case(call(X), call(X, _do=double_backward), inputs={"x": X.clone().requires_grad_()}, allowed=HOSTILE)
class GradientPenaltyPlanned(Net):
    """The plan saw an input that asks for its gradient."""


def retained(model, x):
    out = model(x)
    loss = out.pow(2).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    return out


@case(call(X), call(X, _do=retained))
class BackwardTwice(Net):
    pass


def copied(model, x):
    return copy.deepcopy(model)(x)


@case(call(X), call(X, _do=copied, _grad=False), allowed=HOSTILE)
class DeepCopied(Net):
    """A copy of the sharded model is called."""


class WithEma(Net):
    """Keeps an average of its weights in a copy, and returns both outputs."""

    def __init__(self):
        super().__init__()
        self.ema = Mlp().requires_grad_(False)

    def forward(self, x):
        x = self.a(x)
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(self.ema.parameters(), self.b.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
        return self.b(x), self.ema(x)


@case(call(X), call(X, _train=True), call(X))
class EmaInForward(WithEma):
    pass


class Momentum(WithEma):
    def forward(self, x):
        x = self.a(x)
        for name, slow in self.ema.named_parameters():
            slow.data.mul_(0.9).add_(self.b.get_parameter(name).data, alpha=0.1)
        return F.cosine_similarity(self.b(x), self.ema(x).detach(), dim=-1)


@case(call(X), call(X))
class MomentumEncoder(Momentum):
    """BYOL: the target is moved in each forward, by .data."""


def loaded(model, x):
    state = model.state_dict()
    model.load_state_dict({name: tensor * 0.5 for name, tensor in state.items()})
    return model(x)


@case(call(X), call(X, _do=loaded))
class LoadedBetween(Net):
    pass


def patched(model, x):
    model.b.forward = lambda x: x + model.b.down(torch.tanh(model.b.up(x)))
    try:
        return model(x)
    finally:
        del model.b.forward


def patched_norm(model, x):
    model.b.inner = lambda x: model.b.up(x).softmax(-1)
    try:
        return model(x)
    finally:
        del model.b.inner


@case(call(X), call(X, _do=patched), allowed=HOSTILE)
class ForwardPatchedLater(Net):
    """Another elementwise function, after sharding."""


@case(call(X), call(X, _do=patched_norm), allowed=HOSTILE)
class InnerPatchedLater(Net):
    """A softmax over the cut dim, after sharding."""


def other_activation(model, x):
    model.act = nn.Softmax(-1)
    return model(x)


class Activated(Net):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x):
        return x + self.b.down(self.act(self.b.up(x)))


@case(call(X), call(X, _do=other_activation), allowed=HOSTILE, vary=False)
class ActivationSwapped(Activated):
    """An activation module is replaced by one over the cut dim, after sharding."""


def other_rate(model, x):
    model.drop.p = 0.5
    model.train()
    try:
        return model(x).shape
    finally:
        model.drop.p = 0.0


class Dropped(Net):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.b.down(self.drop(self.b.inner(x)))


@case(call(X), call(X, _do=other_rate), call(X))
class RateRaised(Dropped):
    pass


def scaled(model, x):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
        model.b.up.bias.zero_()
        model.b.down.weight.copy_(model.b.down.weight * 2)
    return model(x)


@case(call(X), call(X, _do=scaled))
class WeightsScaledInPlace(Net):
    pass


def clipped(model, x):
    out = model(x)
    out.pow(2).sum().backward(retain_graph=True)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    model.zero_grad()
    return out, norm.full_tensor().item() if hasattr(norm, "full_tensor") else norm.item()


@case(call(X), call(X, _do=clipped))
class ClippedByTorch(Net):
    pass


def hooked_parameter(model, x):
    handle = model.b.up.weight.register_hook(lambda g: g * 0.5)
    out = model(x)
    out.pow(2).sum().backward()
    handle.remove()
    return model(x)


@case(call(X), call(X, _do=hooked_parameter))
class ParameterHook(Net):
    """A hook on a weight halves its gradient."""


def hooked_tensor(model, x):
    out = model(x)
    out.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return out


@case(call(X), call(X, _do=hooked_tensor))
class OutputHook(Net):
    pass


def jacobian(model, x):
    return torch.autograd.functional.jacobian(lambda x: model(x)[0, 0, :3], x).detach()


@case(call(X), call(X[:1, :2], _do=jacobian, _grad=False), allowed=HOSTILE, vary=False)
class JacobianOfInput(Net):
    """The plan saw no input that asks for a gradient."""
