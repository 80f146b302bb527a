"""What leaves by another way than the output: kept values, hooks, methods that are called directly."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)


class Net(nn.Module):
    def __init__(self, block=Mlp):
        super().__init__()
        self.block, self.head = block(), nn.Linear(16, 16)

    def forward(self, x):
        return self.head(self.block(x))


class KeepingAttention(Attention):
    def mixed(self, x):
        self.p = torch.softmax(self.scores(x), -1)
        return joined(self.p @ parted(self.v(x), self.heads))


@case(call(X, _do=lambda m, x: (m(x), m.block.p)), allowed=HOSTILE)
class KeptProbabilities(Net):
    def __init__(self):
        super().__init__(KeepingAttention)


@case(call(X, _do=lambda m, x: m(x).pow(2).mean() + m.block.p.pow(2).sum()), allowed=HOSTILE)
class KeptRegulariser(Net):
    """A regulariser over the kept probabilities: the sum misses heads of other ranks."""

    def __init__(self):
        super().__init__(KeepingAttention)


class KeepingMlp(Mlp):
    def forward(self, x):
        h = self.inner(x)
        self.losses = [h.abs().mean()]
        self.found = {"hidden": h}
        return x + self.down(h)


@case(call(X, _do=lambda m, x: (m(x), m.block.losses[0])), allowed=HOSTILE)
class KeptLossInList(Net):
    def __init__(self):
        super().__init__(KeepingMlp)


@case(call(X, _do=lambda m, x: (m(x), m.block.found["hidden"].norm(dim=-1))), allowed=HOSTILE)
class KeptInDict(Net):
    def __init__(self):
        super().__init__(KeepingMlp)


def hooked(pick):
    """Call the model with a forward hook on one of its modules, and return what the hook saw too."""

    def run(model, x):
        seen = []
        handle = pick(model).register_forward_hook(lambda m, args, out: seen.append(out))
        try:
            return model(x), seen
        finally:
            handle.remove()

    return run


@case(call(X, _do=hooked(lambda m: m.block.up)), allowed=HOSTILE)
class HookOnUp(Net):
    """A forward hook on a layer whose output is split."""


@case(call(X, _do=hooked(lambda m: m.block)))
class HookOnBlock(Net):
    """A forward hook on a whole block: sound."""


@case(call(X, _do=hooked(lambda m: m.block.down)))
class HookOnDown(Net):
    """A forward hook on the layer whose output is summed."""


def changing(model, x):
    handle = model.block.up.register_forward_hook(lambda m, args, out: out - out.mean(-1, keepdim=True))
    try:
        return model(x)
    finally:
        handle.remove()


@case(call(X, _do=changing), allowed=HOSTILE)
class HookChangesHidden(Net):
    """A hook replaces the output by one that needs all hidden units."""


def before(model, x):
    handle = model.block.down.register_forward_pre_hook(lambda m, args: (F.normalize(args[0], dim=-1),))
    try:
        return model(x)
    finally:
        handle.remove()


@case(call(X, _do=before), allowed=HOSTILE)
class PreHookNorms(Net):
    """A hook before the second layer norms over the hidden units."""


def hook_first(model):
    model.block.up.register_forward_hook(lambda m, args, out: F.softmax(out, -1))


@case(call(X), prepare=hook_first, allowed=HOSTILE)
class HookAfterSharding(Net):
    """The hook stays for all calls."""


def hook_gradient(model, x):
    seen = []
    handle = model.block.up.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].norm()))
    y = model(x)
    y.pow(2).sum().backward(retain_graph=True)
    handle.remove()
    return y, seen


@case(call(X, _do=hook_gradient), allowed=HOSTILE, vary=False)
class BackwardHook(Net):
    """A backward hook measures the gradient of a split output."""


class Coder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def encode(self, x):
        return self.first(x).relu()

    def decode(self, h):
        return self.out(self.second(h).relu())

    def forward(self, x):
        return self.decode(self.encode(x))


@case(call(X), call(X, _do=lambda m, x: m.encode(x)), allowed=HOSTILE)
class EncodeAlone(Coder):
    pass


@case(call(X), call(X, _do=lambda m, x: m.decode(m.encode(x).softmax(-1))), allowed=HOSTILE)
class EncodeChangedDecode(Coder):
    pass


@case(call(X), call(X, _do=lambda m, x: m.first(x)), allowed=HOSTILE)
class LayerCalledDirectly(Coder):
    pass


@case(call(X), call(X, _do=lambda m, x: F.linear(x, m.first.weight, m.first.bias).norm(dim=-1)), allowed=HOSTILE)
class WeightUsedOutside(Coder):
    """The user computes with a layer's weight, outside of the model."""


@case(call(X, _do=lambda m, x: (m(x), sum(p.pow(2).sum() for p in m.parameters()))), allowed=HOSTILE)
class WeightDecayInLoss(Coder):
    """The user adds the squares of all parameters to the loss."""


@case(call(ids(2, 6), _do=lambda m, i: (m(i), m.table.weight.norm(dim=-1).mean())), allowed=HOSTILE)
class TableInLoss(nn.Module):
    """The loss reads a table that is split by rows."""

    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(32, 16), Mlp(), nn.Linear(16, 32)

    def forward(self, input_ids):
        return self.head(self.block(self.table(input_ids)))


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.classifier = nn.Linear(32, 16)

    def forward(self, x):
        return self.classifier(self.features(x))


@case(call(X), call(X, _do=lambda m, x: m.features(x)), allowed=HOSTILE)
class FeaturesAlone(Features):
    pass


@case(call(X), call(X, _do=lambda m, x: nn.Sequential(m.features, nn.Softmax(-1), m.classifier)(x)), allowed=HOSTILE)
class PartsJoinedAnew(Features):
    """Children are joined in a new model, with something between them."""


@case(call(X, _do=lambda m, x: list(m.steps(x))), allowed=HOSTILE)
class GeneratorMethod(Coder):
    """A generator yields what lies between."""

    def steps(self, x):
        h = self.encode(x)
        yield h
        yield self.decode(h)
