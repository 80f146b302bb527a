"""Sound, time series and diffusion: spectra, decompositions, steps of time that scale and shift, quantiles."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
W = floats(2, 64)
S = torch.tensor([3, 7])
TS = {"x": X, "step": S}
BOTH = (2, 4)


@case(call(W), tp=BOTH, vary=False)
class Spectrogram(nn.Module):
    """A short-time Fourier transform, a filter bank, logarithms, normed over time, then a block."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.rand(9, 16))
        self.register_buffer("window", torch.hann_window(16, dtype=torch.float64))
        self.block = Attention()

    def forward(self, wave):
        s = torch.stft(wave, 16, 8, window=self.window.to(wave.dtype), return_complex=True).abs().pow(2)
        m = (s.transpose(1, 2) @ self.bank).clamp(min=1e-6).log()
        return self.block((m - m.mean(1, keepdim=True)) / (m.std(1, keepdim=True) + 1e-5))


@case(call(W), tp=BOTH, vary=False)
class BackToWave(nn.Module):
    """A mask on a spectrum, made by an MLP, and the inverse transform."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(9, 32), nn.Linear(32, 9)
        self.register_buffer("window", torch.hann_window(16, dtype=torch.float64))

    def forward(self, wave):
        window = self.window.to(wave.dtype)
        s = torch.stft(wave, 16, 8, window=window, return_complex=True)
        mask = self.down(self.up(s.abs().transpose(1, 2)).relu()).sigmoid().transpose(1, 2)
        return torch.istft(s * mask, 16, 8, window=window)


@case(call(X), tp=BOTH)
class WaveNet(nn.Module):
    """Dilated causal convolutions with tanh and sigmoid halves, skips that are summed."""

    def __init__(self):
        super().__init__()
        self.gates = nn.ModuleList([nn.Conv1d(16, 32, 2, dilation=2**n) for n in range(3)])
        self.outs = nn.ModuleList([nn.Conv1d(16, 32, 1) for _ in range(3)])

    def forward(self, x):
        x, skips = x.transpose(1, 2), 0
        for gate, out in zip(self.gates, self.outs, strict=True):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            more, skip = out(a.tanh() * b.sigmoid()).split([16, 16], 1)
            x, skips = x + more, skips + skip
        return skips.relu().transpose(1, 2)


@case(call(X), call(X, _train=True), tp=BOTH)
class Conformer(nn.Module):
    """Half a step of MLP, attention, GLU with depthwise convolution and BatchNorm, half a step of MLP."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.attention = Mlp(), Mlp(), Attention()
        self.point, self.deep = nn.Conv1d(16, 32, 1), nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.bn, self.out, self.norm = nn.BatchNorm1d(16), nn.Conv1d(16, 16, 1), nn.LayerNorm(16)

    def forward(self, x):
        x = x + 0.5 * (self.a(x) - x)
        x = self.attention(x)
        h = F.glu(self.point(self.norm(x).transpose(1, 2)), 1)
        x = x + self.out(F.silu(self.bn(self.deep(h)))).transpose(1, 2)
        return x + 0.5 * (self.b(x) - x)


def steps(step, width):
    rate = torch.exp(-math.log(1e4) * torch.arange(width // 2, dtype=torch.float64) / (width // 2))
    angle = step[:, None].double() * rate
    return torch.cat([angle.cos(), angle.sin()], -1)


@case(call(X, S), inputs=TS, tp=BOTH, vary=False)
class DiffusionTransformer(nn.Module):
    """DiT: six vectors of the step scale, shift and gate attention and MLP."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU())
        self.six, self.norm = nn.Linear(16, 96), nn.LayerNorm(16, elementwise_affine=False)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x, step):
        c = self.time(steps(step, 8).to(x.dtype))
        a, b, g, d, e, h = self.six(c)[:, None].chunk(6, -1)
        x = x + g * self.attention.o(self.attention.mixed(self.norm(x) * (1 + a) + b))
        return x + h * self.mlp.down(self.mlp.inner(self.norm(x) * (1 + d) + e))


@case(call(floats(2, 16, 8, 8), S), inputs={"x": floats(2, 16, 8, 8), "step": S}, tp=BOTH, vary=False)
class DiffusionBlock(nn.Module):
    """Convolutions with GroupNorm; the step is added to hidden channels, or scales them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.first, self.second, self.time = nn.GroupNorm(4, 16), nn.GroupNorm(8, 32), nn.Linear(8, 64)

    def forward(self, x, step):
        h = self.a(F.silu(self.first(x)))
        scale, shift = self.time(steps(step, 8).to(x.dtype))[:, :, None, None].chunk(2, 1)
        return x + self.b(F.silu(self.second(h) * (1 + scale) + shift))


@case(call(X, S), inputs=TS, tp=BOTH, vary=False)
class Guided(nn.Module):
    """Classifier-free guidance: both halves in one batch, extrapolated."""

    def __init__(self):
        super().__init__()
        self.label, self.block = nn.Embedding(11, 16), Mlp()

    def forward(self, x, step):
        label = torch.cat([step, torch.full_like(step, 10)])
        y = self.block(torch.cat([x, x]) + self.label(label)[:, None])
        given, free = y.chunk(2)
        return free + 4.0 * (given - free)


@case(call(X, S), inputs=TS, tp=BOTH, vary=False)
class VelocityLoss(nn.Module):
    """The loss of a diffusion model: noise from the arguments, weights by signal to noise."""

    def __init__(self):
        super().__init__()
        self.block, self.time = Attention(), nn.Linear(8, 16)
        self.register_buffer("bars", torch.linspace(0.99, 0.1, 10).cumprod(0), persistent=False)

    def forward(self, x, step):
        bar = self.bars[step][:, None, None]
        noise = x.flip(1)
        noisy = bar.sqrt() * x + (1 - bar).sqrt() * noise
        guess = self.block(noisy + self.time(steps(step, 8).to(x.dtype))[:, None])
        target = bar.sqrt() * noise - (1 - bar).sqrt() * x
        weight = torch.minimum(bar / (1 - bar), torch.full_like(bar, 5.0)) / (bar / (1 - bar) + 1)
        return (weight * F.mse_loss(guess, target, reduction="none")).mean((1, 2)).mean()


@case(call(X), tp=BOTH)
class ReversibleInstanceNorm(nn.Module):
    """RevIN: statistics over time are taken off first, and put back in the end."""

    def __init__(self):
        super().__init__()
        self.gain, self.bias, self.block = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16)), Mlp()

    def forward(self, x):
        mean, std = x.mean(1, keepdim=True).detach(), (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
        y = self.block((x - mean) / std * self.gain + self.bias)
        return (y - self.bias) / (self.gain + 1e-10) * std + mean


@case(call(floats(2, 12)), tp=BOTH)
class DoublyResidual(nn.Module):
    """N-BEATS: each block takes off what it explains, and adds to the forecast, on a basis of polynomials."""

    def __init__(self):
        super().__init__()
        self.ups = nn.ModuleList([nn.Linear(12, 32) for _ in range(2)])
        self.downs = nn.ModuleList([nn.Linear(32, 6) for _ in range(2)])
        t = torch.arange(16.0) / 16
        self.register_buffer("basis", torch.stack([t**p for p in range(3)]))

    def forward(self, x):
        forecast = 0
        for up, down in zip(self.ups, self.downs, strict=True):
            back, ahead = down(up(x).relu()).split([3, 3], -1)
            x = x - back @ self.basis[:, :12]
            forecast = forecast + ahead @ self.basis[:, 12:]
        return forecast, x


@case(call(X), tp=BOTH)
class SeriesDecomposed(nn.Module):
    """Autoformer: moving averages are the trend, delays are chosen by correlation through the Fourier transform."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.mlp = Mlp()

    def parts(self, x):
        padded = torch.cat([x[:, :1].repeat(1, 1, 1), x, x[:, -1:].repeat(1, 1, 1)], 1)
        trend = F.avg_pool1d(padded.transpose(1, 2), 3, 1).transpose(1, 2)
        return x - trend, trend

    def forward(self, x):
        q, k, v = (parted(f(x), 4) for f in (self.q, self.k, self.v))
        n = x.shape[1]
        r = torch.fft.irfft(torch.fft.rfft(q, dim=2) * torch.fft.rfft(k, dim=2).conj(), n=n, dim=2)
        weight, delay = r.mean(-1).topk(2, -1)
        place = (torch.arange(n) + delay[..., None]) % n
        rolled = v[:, :, None].expand(-1, -1, 2, -1, -1).gather(3, place[..., None].expand(-1, -1, -1, -1, v.shape[-1]))
        y = self.o(joined((weight.softmax(-1)[..., None, None] * rolled).sum(2)))
        x, one = self.parts(x + y)
        x, two = self.parts(self.mlp(x))
        return x, one + two


@case(call(floats(2, 12, 5)), tp=BOTH, vary=False)
class VariatesAsTokens(nn.Module):
    """iTransformer: a token is the whole series of a variate."""

    def __init__(self):
        super().__init__()
        self.embed, self.block, self.mlp, self.out = nn.Linear(12, 16), Attention(), Mlp(), nn.Linear(16, 4)

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        y = self.out(self.mlp(self.block(self.embed((x - mean).transpose(1, 2)))))
        return y.transpose(1, 2) + mean


@case(call(floats(2, 12, 3)), call(floats(2, 12, 3), _train=True), tp=BOTH, vary=False)
class PatchesOfChannels(nn.Module):
    """PatchTST: patches by unfold, channels in the batch, BatchNorm after attention, a flat head."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Linear(4, 16), nn.Parameter(torch.randn(5, 16) / 4)
        self.block, self.mlp, self.bn = Attention(), Mlp(), nn.BatchNorm1d(16)
        self.head = nn.Linear(80, 4)

    def forward(self, x):
        b, _, c = x.shape
        p = x.transpose(1, 2).unfold(-1, 4, 2).reshape(b * c, -1, 4)
        y = self.block(self.embed(p) + self.places)
        y = self.mlp(self.bn(y.transpose(1, 2)).transpose(1, 2))
        return self.head(y.flatten(1)).view(b, c, 4).transpose(1, 2)


@case(call(X, floats(2, 6)), inputs={"x": X, "target": floats(2, 6)}, tp=BOTH)
class Quantiles(nn.Module):
    """Gated residual network and the pinball loss of three quantiles, kept in order by sums of softplus."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.gate, self.norm = (
            nn.Linear(16, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.LayerNorm(16),
        )
        self.out = nn.Linear(16, 3)

    def forward(self, x, target):
        h = self.down(F.elu(self.up(x)))
        x = self.norm(x + F.glu(self.gate(h), -1))
        q = self.out(x)
        q = torch.cat([q[..., :1], q[..., :1] + F.softplus(q[..., 1:]).cumsum(-1)], -1)
        off = target[..., None] - q
        rank = torch.tensor([0.1, 0.5, 0.9], dtype=x.dtype)
        return torch.maximum(rank * off, (rank - 1) * off).sum(-1).mean(), q


@case(call(X, floats(2, 6)), inputs={"x": X, "target": floats(2, 6)}, tp=BOTH)
class StudentForecast(nn.Module):
    """Parameters of a Student's t from a block, negative log likelihood by torch.distributions."""

    def __init__(self):
        super().__init__()
        self.block, self.out = Mlp(), nn.Linear(16, 3)

    def forward(self, x, target):
        df, loc, scale = self.out(self.block(x)).unbind(-1)
        law = torch.distributions.StudentT(2 + F.softplus(df), loc, F.softplus(scale) + 1e-3, validate_args=False)
        return -law.log_prob(target).mean(), law.mean


@case(call(X), tp=BOTH)
class NeuralOde(nn.Module):
    """Four Runge-Kutta steps of one block."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(17, 32), nn.Linear(32, 16)

    def slope(self, t, x):
        return self.down(self.up(torch.cat([x, torch.full_like(x[..., :1], t)], -1)).tanh())

    def forward(self, x):
        h = 0.25
        for n in range(4):
            t = n * h
            a = self.slope(t, x)
            b = self.slope(t + h / 2, x + h / 2 * a)
            c = self.slope(t + h / 2, x + h / 2 * b)
            d = self.slope(t + h, x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x


@case(call(floats(2, 6, 2)), tp=BOTH)
class FourierNeuralOperator(nn.Module):
    """Complex weights on the lowest modes, of real pairs, beside a pointwise path."""

    def __init__(self):
        super().__init__()
        self.lift, self.skip, self.out = nn.Linear(2, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.modes = nn.Parameter(torch.randn(16, 16, 3, 2) / 16)

    def forward(self, x):
        h = self.lift(x)
        f = torch.fft.rfft(h, dim=1)[:, :3]
        f = torch.einsum("bki,iok->bko", f, torch.view_as_complex(self.modes))
        return self.out(F.gelu(torch.fft.irfft(f, n=h.shape[1], dim=1) + self.skip(h)))
