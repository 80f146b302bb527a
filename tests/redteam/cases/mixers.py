"""Recurrent layers, convolutions, state-space models: mixers of the sequence."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Mlp

X = floats(2, 6, 16)
PICTURE = floats(2, 3, 16, 16)


class Around(nn.Module):
    def __init__(self, hidden=32, out=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, hidden), nn.Linear(out, 16)

    def forward(self, x):
        return x + self.down(self.mix(self.up(x)))


@case(call(X), allowed=HOSTILE)
class Lstm(Around):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(32, 32, batch_first=True)

    def mix(self, h):
        return self.rnn(h)[0]


@case(call(X), allowed=HOSTILE)
class TwoWayGru(Around):
    def __init__(self):
        super().__init__(32, 48)
        self.rnn = nn.GRU(32, 24, num_layers=2, bidirectional=True, batch_first=True)

    def mix(self, h):
        return self.rnn(h)[0]


@case(call(X), allowed=HOSTILE)
class CellInLoop(Around):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(32, 32)

    def mix(self, h):
        state, out = torch.zeros_like(h[:, 0]), []
        for t in range(h.shape[1]):
            state = self.cell(h[:, t], state)
            out.append(state)
        return torch.stack(out, 1)


@case(call(X), allowed=HOSTILE)
class DiagonalScan(Around):
    """A diagonal recurrence over the sequence, a decay for each unit."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.randn(32))

    def mix(self, h):
        a, state, out = self.decay.sigmoid(), torch.zeros_like(h[:, 0]), []
        for part in h.unbind(1):
            state = a * state + (1 - a) * part
            out.append(state)
        return torch.stack(out, 1)


@case(call(X), allowed=HOSTILE)
class SelectiveScan(Around):
    """Mamba: decay, input and output matrices come from the data."""

    def __init__(self):
        super().__init__()
        self.log_a = nn.Parameter(torch.randn(32, 4))
        self.project, self.step = nn.Linear(32, 10), nn.Linear(2, 32)

    def mix(self, h):
        low, b, c = self.project(h).split([2, 4, 4], -1)
        step, a = F.softplus(self.step(low)), -self.log_a.exp()
        state, out = h.new_zeros(h.shape[0], 32, 4), []
        for t in range(h.shape[1]):
            state = (step[:, t, :, None] * a).exp() * state + step[:, t, :, None] * b[:, t, None] * h[:, t, :, None]
            out.append((state * c[:, t, None]).sum(-1))
        return torch.stack(out, 1)


@case(call(X))
class DepthwiseCausal(Around):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3, groups=32, padding=2)

    def mix(self, h):
        return F.silu(self.conv(h.transpose(1, 2))[..., : h.shape[1]]).transpose(1, 2)


@case(call(X), allowed=HOSTILE)
class FullConvolution(Around):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3, padding=1)

    def mix(self, h):
        return self.conv(h.transpose(1, 2)).relu().transpose(1, 2)


@case(call(X), allowed=HOSTILE)
class TokenMixing(nn.Module):
    """MLP-Mixer: a layer over the sequence."""

    def __init__(self):
        super().__init__()
        self.over, self.back, self.block = nn.Linear(6, 12), nn.Linear(12, 6), Mlp()

    def forward(self, x):
        x = x + self.back(self.over(x.transpose(1, 2)).relu()).transpose(1, 2)
        return self.block(x)


@case(call(X), allowed=HOSTILE)
class FourierMixing(nn.Module):
    """FNet: a Fourier transform over length and width."""

    def __init__(self):
        super().__init__()
        self.block = Mlp()

    def forward(self, x):
        return self.block(x + torch.fft.fft2(x, dim=(1, 2)).real)


@case(call(X), allowed=HOSTILE)
class FourierOfHidden(Around):
    def mix(self, h):
        return torch.fft.irfft(torch.fft.rfft(h, dim=-1) * 0.5, n=h.shape[-1], dim=-1)


@case(call(X), allowed=HOSTILE)
class LongConvolution(Around):
    """Hyena: a long filter for each unit, through the Fourier transform over the length."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(32, 64) / 8)

    def mix(self, h):
        n = h.shape[1]
        spectrum = torch.fft.rfft(h.transpose(1, 2), n=2 * n) * torch.fft.rfft(self.filter[:, :n], n=2 * n)
        return torch.fft.irfft(spectrum, n=2 * n)[..., :n].transpose(1, 2)


@case(call(X), allowed=HOSTILE)
class TokenShift(nn.Module):
    """RWKV: a mix with the token before, then squared relu."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(16))
        self.key, self.gate, self.value = nn.Linear(16, 32), nn.Linear(16, 16), nn.Linear(32, 16)

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        mixed = x * self.mix + before * (1 - self.mix)
        return x + self.gate(mixed).sigmoid() * self.value(self.key(mixed).relu() ** 2)


@case(call(PICTURE), allowed=HOSTILE)
class ResidualPicture(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.a, self.b = (
            nn.Conv2d(3, 16, 3, padding=1),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.Conv2d(32, 16, 1),
        )
        self.norm, self.head = nn.BatchNorm2d(32), nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.b(self.norm(self.a(x)).relu())
        return self.head(x.mean((2, 3)))


@case(call(PICTURE), allowed=HOSTILE)
class UpAndDown(nn.Module):
    """A small U-Net with a skip."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 2, stride=2)
        self.up, self.last = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 3, 1)

    def forward(self, x):
        a = self.first(x).relu()
        return self.last(torch.cat([a, self.up(self.down(a).relu())], 1))


@case(call(PICTURE), allowed=HOSTILE)
class PatchesWithPooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.block, self.pool = nn.Conv2d(3, 16, 4, stride=4), Mlp(), nn.AdaptiveAvgPool1d(4)

    def forward(self, x):
        y = self.block(self.patch(x).flatten(2).transpose(1, 2))
        return self.pool(y.transpose(1, 2)), F.max_pool1d(y, 2)


@case(call(X), allowed=HOSTILE)
class DeltaRule(nn.Module):
    """A fast weight matrix for each head, corrected by what it predicts."""

    def __init__(self):
        super().__init__()
        self.qkv, self.beta, self.o = nn.Linear(16, 48), nn.Linear(16, 4), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 4)) for part in self.qkv(x).chunk(3, -1))
        k, beta, out = F.normalize(k, dim=-1), self.beta(x).sigmoid(), []
        state = x.new_zeros(x.shape[0], 4, 4, 4)
        for t in range(x.shape[1]):
            wrong = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t] * beta[:, t, :, None], wrong)
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
        return x + self.o(torch.stack(out, 1).flatten(2))
