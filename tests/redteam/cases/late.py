"""Calls beyond the first few of their kind, that differ in what a cheap look at arguments and state does not show."""

from __future__ import annotations

import torch
from torch import nn

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Mlp

X = floats(2, 6, 16)


class Late(nn.Module):
    """`odd` says whether this call does something that the plan never saw."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, *more):
        h = self.up(x)
        if self.odd(x, *more):
            h = h - h.mean(-1, keepdim=True)
        return x + self.down(h.relu())


def late(usual, odd, **options):
    """Four usual calls, then the odd one."""
    inputs = {"x": X, "more": usual[0]} if len(usual) == 1 else {"x": X}
    return case(*[call(X, *usual)] * 4, call(X, *odd), inputs=inputs, vary=False, allowed=HOSTILE, **options)


class Given(Late):
    def forward(self, x, more):
        return super().forward(x, more)


@late(({"gate"},), ({"norm"},))
class WordInSet(Given):
    def odd(self, x, more):
        return "norm" in more


@late(([False] * 20,), ([False] * 18 + [True, False],))
class FarInList(Given):
    def odd(self, x, more):
        return any(more)


@late(({"a": {"b": {"c": {"d": {"e": False}}}}},), ({"a": {"b": {"c": {"d": {"e": True}}}}},))
class DeepInDict(Given):
    def odd(self, x, more):
        return more["a"]["b"]["c"]["d"]["e"]


@late((torch.tensor([0, 1]),), (torch.tensor([1, 1]),))
class FlagByNumpy(Given):
    def odd(self, x, more):
        return more.numpy()[0] == 1


@late((torch.tensor([0, 1]),), (torch.tensor([3, 1]),))
class FoundInTensor(Given):
    def odd(self, x, more):
        return 3 in more


@late((torch.tensor([0, 1, 0, 0]),), (torch.tensor([1, 1, 1, 0]),))
class CountOfNonzero(Given):
    """Data-dependent sizes are no values that were read."""

    def odd(self, x, more):
        return more.nonzero().shape[0] > 2


@late((torch.tensor([0, 1, 0, 0]),), (torch.tensor([1, 1, 1, 0]),))
class CountOfMask(Given):
    def odd(self, x, more):
        return len(more[more > 0]) > 2


@late((torch.tensor([0, 1, 0, 0]),), (torch.tensor([1, 2, 3, 0]),))
class CountOfUnique(Given):
    def odd(self, x, more):
        return more.unique().numel() > 2


@late((torch.tensor([0, 1]),), (torch.tensor([9, 1]),))
class FlagByText(Given):
    def odd(self, x, more):
        return "9" in str(more)


@late((torch.tensor([0, 1]),), (torch.tensor([9, 1]),))
class FlagByArray(Given):
    def odd(self, x, more):
        import numpy

        return numpy.asarray(more).max() > 5


@case(*[call(X)] * 4, call(X, _do=lambda m, x: m(x.mT.contiguous().mT)), vary=False, allowed=HOSTILE)
class NotContiguous(Late):
    def odd(self, x):
        return not x.is_contiguous()


def flagged(m, x):
    m.block.normed = True
    return m(x)


class Child(Mlp):
    normed = False


@case(*[call(X)] * 4, call(X, _do=flagged), vary=False, allowed=HOSTILE)
class FlagOfChild(Late):
    """The parent alone reads it."""

    def __init__(self):
        super().__init__()
        self.block = Child()

    def odd(self, x):
        return self.block.normed


def in_list(m, x):
    m.blocks[1].normed = True
    return m(x)


@case(*[call(X)] * 4, call(X, _do=in_list), vary=False, allowed=HOSTILE)
class FlagInModuleList(Late):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Child(), Child()])

    def odd(self, x):
        return any(block.normed for block in self.blocks)


def frozen(m, x):
    m.down.bias.requires_grad_(False)
    return m(x)


@case(*[call(X)] * 4, call(X, _do=frozen), vary=False, allowed=HOSTILE)
class FrozenBias(Late):
    """A parameter's flag is asked."""

    def odd(self, x):
        return not self.down.bias.requires_grad


@case(call(X), call(X, _grad=False))
class AsksWeightsForGrad(Mlp):
    """Whether weights are frozen is asked, with and without recording gradients."""

    def inner(self, x):
        h = super().inner(x)
        return h if self.up.weight.requires_grad and self.down.bias.requires_grad else h - h.mean(-1, keepdim=True)


def deterministic(m, x):
    torch.use_deterministic_algorithms(True)
    try:
        return m(x)
    finally:
        torch.use_deterministic_algorithms(False)


@case(*[call(X)] * 4, call(X, _do=deterministic), vary=False, allowed=HOSTILE)
class DeterministicAsked(Late):
    def odd(self, x):
        return torch.are_deterministic_algorithms_enabled()


def anomaly(m, x):
    with torch.autograd.set_detect_anomaly(True):
        return m(x)


@case(*[call(X)] * 4, call(X, _do=anomaly), vary=False, allowed=HOSTILE)
class AnomalyAsked(Late):
    def odd(self, x):
        return torch.is_anomaly_enabled()


def listening(m, x):
    handle = m.up.register_forward_hook(lambda *_: None)
    try:
        return m(x)
    finally:
        handle.remove()


@case(*[call(X)] * 4, call(X, _do=listening), vary=False, allowed=HOSTILE)
class HooksCounted(Late):
    def odd(self, x):
        return len(self.up._forward_hooks) > len(self.down._forward_hooks) + 1 or bool(
            [hook for hook in self.up._forward_hooks.values() if "listening" in getattr(hook, "__qualname__", "")]
        )


@case(*[call(ids(2, 6))] * 4, call(ids(2, 6) * 0 + 31), vary=False, allowed=HOSTILE)
class SizeOfBincount(nn.Module):
    """The largest id gives a size, which chooses."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, input_ids):
        h = self.up(self.table(input_ids.clamp(max=30)))
        if torch.bincount(input_ids.flatten()).shape[0] > 31:
            h = h - h.mean(-1, keepdim=True)
        return self.down(h)
