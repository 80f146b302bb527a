"""Grad mode and training: code that runs in one of them alone, in the forward, in helpers and in lambdas."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
TRAIN, QUIET = call(X, _train=True), call(X, _grad=False)


def centred(h, training):
    return h - h.mean(-1, keepdim=True) if training else h


scaled = lambda h, on: h / h.norm(dim=-1, keepdim=True) if on else h  # noqa: E731


@case(call(X), TRAIN, allowed=HOSTILE)
class TrainingHelper(Mlp):
    def forward(self, x):
        return x + self.down(centred(self.inner(x), self.training))


@case(call(X), TRAIN, allowed=HOSTILE)
class TrainingLambda(Mlp):
    def forward(self, x):
        return x + self.down(scaled(self.inner(x), self.training))


@case(call(X), TRAIN, allowed=HOSTILE)
class TrainingInline(Mlp):
    def forward(self, x):
        h = self.inner(x)
        if self.training:
            h = F.normalize(h, dim=-1)
        return x + self.down(h)


@case(call(X), QUIET, allowed=HOSTILE)
class AsksForGrad(Mlp):
    def forward(self, x):
        h = self.inner(x)
        if not torch.is_grad_enabled():
            h = h / (1 + h.abs().sum(-1, keepdim=True))
        return x + self.down(h)


@case(call(X), call(X, _do=lambda m, x: m(x.clone().requires_grad_())), QUIET, allowed=HOSTILE)
class AsksInputForGrad(Mlp):
    def forward(self, x):
        h = self.inner(x)
        if x.requires_grad:
            h = h.softmax(-1)
        return x + self.down(h)


@case(call(X), TRAIN)
class RateOfZero(Attention):
    """Reads the mode where it computes with parts; a rate of zero makes it compute the same."""

    rate = 0.0

    def scores(self, x):
        return F.dropout(super().scores(x), self.rate if self.training else 0.0)


@case(call(X), TRAIN)
class NothingInTraining(Mlp):
    keep = 0.0

    def forward(self, x):
        h = self.inner(x)
        if self.training and self.keep:
            h = h * (torch.rand(h.shape[:1]) >= self.keep)[:, None, None]
        return x + self.down(h)


@case(call(X), TRAIN, allowed=HOSTILE)
class AuxiliaryLossInTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Mlp()

    def forward(self, x):
        h = self.block.inner(x)
        y = x + self.block.down(h)
        return (y, h.pow(2).mean() + h.std(-1).mean()) if self.training else y


@case(call(X), call(X, _do=lambda m, x: torch.inference_mode()(m)(x).clone(), _grad=False), allowed=HOSTILE)
class InferenceMode(Attention):
    def scores(self, x):
        s = super().scores(x)
        return s - s.mean(1, keepdim=True) if torch.is_inference_mode_enabled() else s


@case(call(X), TRAIN, allowed=HOSTILE)
class TrainingOfChild(Mlp):
    """Another module's mode is asked for."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        h = self.inner(x)
        h = h * h.amax(-1, keepdim=True) if self.drop.training else self.drop(h)
        return x + self.down(h)


@case(call(X), TRAIN, call(X, _train=True, _grad=False))
class CheckpointedInTraining(nn.Module):
    """Checkpointing in training alone: sound."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(), Attention()])

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return x


@case(call(X), TRAIN, allowed=HOSTILE)
class LayerChosenByChance(nn.Module):
    """Python's random, seeded alike on all ranks, chooses another norm in training."""

    def __init__(self):
        super().__init__()
        self.block = Mlp()

    def forward(self, x):
        h = self.block.inner(x)
        if self.training and random.random() < 0.97:
            h = h - h.mean(-1, keepdim=True)
        return x + self.block.down(h)


@case(call(X), TRAIN)
class StopsGradient(Mlp):
    """In training the norm over all hidden units passes no gradient."""

    def forward(self, x):
        h = self.inner(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.training):
            size = h.pow(2).mean(-1, keepdim=True)
        return x + self.down(h / (1 + size))


@case(call(X), TRAIN, QUIET)
class NoGradInside(Attention):
    """A part under no_grad, always: sound."""

    def mixed(self, x):
        with torch.no_grad():
            p = torch.softmax(self.scores(x), -1)
        return joined(p @ parted(self.v(x), self.heads))


@case(call(X), TRAIN, allowed=HOSTILE)
class OtherModuleInTraining(nn.Module):
    """A projection that only training uses."""

    def __init__(self):
        super().__init__()
        self.block, self.extra = Mlp(), Mlp()

    def forward(self, x):
        y = self.block(x)
        return (y, self.extra(y)) if self.training else (y, None)


@case(call(X), TRAIN, allowed=HOSTILE)
class MethodReplacedByTrain(Mlp):
    """train() exchanges the function that is called."""

    def train(self, mode=True):
        self.shape = self.shaped if mode else torch.relu
        return super().train(mode)

    @staticmethod
    def shaped(h):
        return h.softmax(-1)

    def forward(self, x):
        return x + self.down(self.shape(self.up(x)))


@case(call(X), TRAIN, allowed=HOSTILE)
class PropertyOfMode(Mlp):
    @property
    def norm(self):
        return nn.functional.normalize if self.training else nn.Identity()

    def forward(self, x):
        return x + self.down(self.norm(self.up(x).relu()))
