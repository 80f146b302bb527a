"""What a model does changes after some calls, by a count that it keeps anywhere: the later way was not seen."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import itertools
import threading
import weakref

import numpy
import torch

from ..case import HOSTILE, call, case, floats
from ..parts import Mlp

X = floats(2, 6, 16)
AFTER = 6


def afresh(model, x):
    """Counts of the process begin anew for each of the two models."""
    model.reset()
    return model(x)


CALLS = (call(X, _do=afresh), *(call(X) for _ in range(AFTER + 2)))


class Counting(Mlp):
    """After six calls the hidden units are normed by a softmax."""

    def reset(self):
        pass

    def late(self):
        raise NotImplementedError

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h.softmax(-1) if self.late() else h)


def counted(cls):
    return case(*CALLS, allowed=HOSTILE, vary=False)(cls)


@counted
class IteratorCount(Counting):
    def __init__(self):
        super().__init__()
        self.count = itertools.count()

    def late(self):
        return next(self.count) >= AFTER


@counted
class ListLength(Counting):
    def __init__(self):
        super().__init__()
        self.log = []

    def late(self):
        self.log.append(0.5)
        return len(self.log) > AFTER


@counted
class DequeFull(Counting):
    def __init__(self):
        super().__init__()
        self.last = collections.deque(maxlen=AFTER)

    def late(self):
        full = len(self.last) == AFTER
        self.last.append(1)
        return full


@counted
class CounterOfKeys(Counting):
    def __init__(self):
        super().__init__()
        self.seen = collections.Counter()

    def late(self):
        self.seen["calls"] += 1
        return self.seen["calls"] > AFTER


@counted
class NumpyCount(Counting):
    def __init__(self):
        super().__init__()
        self.seen = numpy.zeros(1, dtype=numpy.int64)

    def late(self):
        self.seen += 1
        return bool(self.seen[0] > AFTER)


class Settings:
    __slots__ = ("steps",)

    def __init__(self):
        self.steps = 0


@counted
class SlotOfSettings(Counting):
    def __init__(self):
        super().__init__()
        self.settings = Settings()

    def late(self):
        self.settings.steps += 1
        return self.settings.steps > AFTER


@dataclasses.dataclass
class Deep:
    inner: dict


@counted
class DeepInSettings(Counting):
    def __init__(self):
        super().__init__()
        self.settings = Deep({"a": [{"steps": 0}]})

    def late(self):
        self.settings.inner["a"][0]["steps"] += 1
        return self.settings.inner["a"][0]["steps"] > AFTER


def _closure():
    steps = 0

    def late():
        nonlocal steps
        steps += 1
        return steps > AFTER

    return late


@counted
class InClosure(Counting):
    def __init__(self):
        super().__init__()
        self.ask = _closure()

    def late(self):
        return self.ask()


@counted
class InDefault(Counting):
    def reset(self):
        type(self).late.__defaults__[0][0] = 0

    def late(self, seen=[0]):  # noqa: B006
        seen[0] += 1
        return seen[0] > AFTER


def _generator():
    for _ in range(AFTER):
        yield False
    while True:
        yield True


class Schedule:
    """A generator that a copy begins anew."""

    def __init__(self):
        self.steps = _generator()

    def __deepcopy__(self, memo):
        return Schedule()


@counted
class InGenerator(Counting):
    def __init__(self):
        super().__init__()
        self.schedule = Schedule()

    def late(self):
        return next(self.schedule.steps)


_STEPS = contextvars.ContextVar("steps", default=0)


@counted
class InContextVariable(Counting):
    def reset(self):
        _STEPS.set(0)

    def late(self):
        _STEPS.set(_STEPS.get() + 1)
        return _STEPS.get() > AFTER


class Local(threading.local):
    steps = 0

    def __deepcopy__(self, memo):
        return Local()


@counted
class InThread(Counting):
    def __init__(self):
        super().__init__()
        self.here = Local()

    def late(self):
        self.here.steps += 1
        return self.here.steps > AFTER


@counted
class GrowingTensor(Counting):
    """The number of rows of a tensor that it keeps, which is no buffer."""

    def __init__(self):
        super().__init__()
        self.rows = [torch.zeros(0)]

    def late(self):
        self.rows[0] = torch.cat([self.rows[0], torch.zeros(1)])
        return self.rows[0].shape[0] > AFTER


@counted
class TensorValue(Counting):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def late(self):
        self.steps += 1
        return bool(self.steps > AFTER)


@counted
class CachedMisses(Counting):
    """The statistics of an lru_cache of its own."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def reset(self):
        _made.cache_clear()

    def late(self):
        self.number += 1
        _made(self.number % 16)
        return _made.cache_info().misses > AFTER


@functools.lru_cache
def _made(number):
    return number * 2


@counted
class WeakEntries(Counting):
    def __init__(self):
        super().__init__()
        self.kept, self.names = [], weakref.WeakSet()

    def late(self):
        one = Mlp
        self.kept.append(Settings2())
        self.names.add(self.kept[-1])
        return len(self.names) > AFTER and one is Mlp


class Settings2:
    pass


@counted
class Swapped(Counting):
    """After six calls it takes another activation from a list, by an index."""

    def __init__(self):
        super().__init__()
        self.turn, self.acts = 0, [torch.relu, lambda h: h.softmax(-1)]

    def forward(self, x):
        self.turn += 1
        return x + self.down(self.acts[self.turn > AFTER](self.up(x)))


@counted
class ByException(Counting):
    """A list of leave runs out, and the way after is in an except."""

    def __init__(self):
        super().__init__()
        self.leave = [False] * AFTER

    def late(self):
        try:
            return self.leave.pop()
        except IndexError:
            return True


@case(*CALLS, vary=False)
class CountsForItself(Counting):
    """It counts, and nothing follows from it: sound."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def late(self):
        self.count += 1
        return False
