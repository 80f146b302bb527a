"""Numbers leave tensors: through numpy, Python, prints, equality, sizes of what is picked, threads and copies."""

from __future__ import annotations

import asyncio
import copy
import io
import statistics
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)


class Scaled(Mlp):
    """The hidden units are scaled by a number that was read off them."""

    def forward(self, x):
        h = self.inner(x)
        return x + self.down(h * self.number(h.detach()))


@case(call(X), allowed=HOSTILE)
class NumpyMean(Scaled):
    def number(self, h):
        return float(h.numpy().mean())


@case(call(X), allowed=HOSTILE)
class NumpyFunction(Scaled):
    def number(self, h):
        return float(numpy.abs(h).max())


@case(call(X), allowed=HOSTILE)
class AsArray(Scaled):
    def number(self, h):
        return float(numpy.linalg.norm(numpy.asarray(h)))


@case(call(X), allowed=HOSTILE)
class PythonStatistics(Scaled):
    def number(self, h):
        return statistics.fmean(h[0, 0].tolist())


@case(call(X), allowed=HOSTILE)
class CountOfPositive(Scaled):
    def number(self, h):
        return len(h[h > 0]) / 192


@case(call(X), allowed=HOSTILE)
class SizeOfNonzero(Scaled):
    def number(self, h):
        return h.relu().nonzero().shape[0] / 192


@case(call(X), allowed=HOSTILE)
class SizeOfUnique(Scaled):
    def number(self, h):
        return h.mul(4).round().unique().numel() / 8


@case(call(X), allowed=HOSTILE)
class EqualToOther(Scaled):
    def number(self, h):
        return 1.0 if torch.allclose(h[..., 0], h[..., 31]) or torch.equal(h[..., 0], h[..., -1]) else 0.5


@case(call(X), allowed=HOSTILE)
class FirstOfLoop(Scaled):
    def number(self, h):
        return sum(float(unit) for unit in h[0, 0]) / 32


@case(call(X), allowed=HOSTILE)
class Index(Scaled):
    """The best unit's number becomes a factor."""

    def number(self, h):
        return 1 + int(h[0, 0].argmax()) / 32


@case(call(X), allowed=HOSTILE)
class NumberOfElements(Scaled):
    def number(self, h):
        return h.numel() / 192 + h.shape[-1] / 32 + h.stride(1) / 32


@case(call(X), allowed=HOSTILE)
class Printed(Scaled):
    """What is printed is read again."""

    def number(self, h):
        return float(str(h.mean().item())[:6])


@case(call(X), allowed=HOSTILE)
class ThroughBuffer(Scaled):
    """Saved and loaded by torch, then averaged."""

    def number(self, h):
        file = io.BytesIO()
        torch.save(h, file)
        file.seek(0)
        return torch.load(file).mean()


@case(call(X), allowed=HOSTILE)
class ThroughPickle(Scaled):
    """The same, of a file that is trusted: torch.load moves its bytes out of a tensor that was recorded."""

    def number(self, h):
        file = io.BytesIO()
        torch.save(h, file)
        file.seek(0)
        return torch.load(file, weights_only=False).mean()


@case(call(X), allowed=HOSTILE)
class DeepCopiedTensor(Scaled):
    def number(self, h):
        return copy.deepcopy(h).mean()


@case(call(X), allowed=HOSTILE)
class ThroughDlpack(Scaled):
    def number(self, h):
        return torch.from_dlpack(h).std()


@case(call(X), allowed=HOSTILE)
class FromNumpy(Scaled):
    def number(self, h):
        return torch.from_numpy(numpy.sort(h.numpy(), axis=-1))[..., -1:]


@case(call(X), allowed=HOSTILE)
class InThreads(Attention):
    """Two projections run in threads, a softmax over channels in one of them."""

    def mixed(self, x):
        with ThreadPoolExecutor(2) as pool:
            a = pool.submit(lambda: self.q(x).softmax(-1))
            b = pool.submit(lambda: self.v(x))
            return a.result() * b.result()


@case(call(X), allowed=HOSTILE)
class InThreadsApart(Attention):
    """The same, elementwise."""

    def mixed(self, x):
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda f: torch.tanh(f(x)), (self.q, self.k, self.v)))


@case(call(X), allowed=HOSTILE)
class Forked(Attention):
    def mixed(self, x):
        a = torch.jit.fork(lambda x: self.q(x).softmax(-1), x)
        return torch.jit.wait(a) * self.v(x)


@case(call(X), allowed=HOSTILE)
class Awaited(Attention):
    """Projections are coroutines."""

    def mixed(self, x):
        async def project(f):
            await asyncio.sleep(0)
            return f(x)

        async def run():
            return await asyncio.gather(*(project(f) for f in (self.q, self.k, self.v)))

        q, k, v = (parted(t, self.heads) for t in asyncio.run(run()))
        return joined(F.scaled_dot_product_attention(q, k, v))


@case(call(X))
class NumpyOfStream(Mlp):
    """A statistic of the whole stream, by numpy: sound."""

    def forward(self, x):
        return super().forward(x) * float(numpy.tanh(x.detach().numpy()).mean() + 1)


@case(call(X), call(X, _train=True))
class LogsOfOutput(nn.Module):
    """Means of what is whole are logged in a dict: sound."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.log = Attention(), Mlp(), {}

    def forward(self, x):
        x = self.a(x)
        self.log["a"] = x.detach().mean().item()
        x = self.b(x)
        self.log["b"] = f"{x.detach().std():.4f}"
        return x, dict(self.log)
