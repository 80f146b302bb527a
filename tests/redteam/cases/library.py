"""Idioms of research libraries: packed projections, times, incremental state, relative shifts, scatters."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids
from ..parts import Attention, Mlp

X = floats(2, 6, 16)
IMAGE = floats(2, 3, 8, 8)
T = torch.tensor([3.0, 7.0])


class Scale(nn.Module):
    def __init__(self, d, value=0.5):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((d,), value))

    def forward(self, x):
        return x * self.gamma


@case(call(X))
class PackedWithNorms(nn.Module):
    """timm's attention: one projection, unbound; norms of queries and keys; scale of the residual."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.q_norm, self.k_norm, self.scale = nn.LayerNorm(4), nn.LayerNorm(4), Scale(16)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.scale(
            self.proj(
                F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v).transpose(1, 2).reshape(b, n, c)
            )
        )
        return x


class TimeBlock(nn.Module):
    def __init__(self, c, o):
        super().__init__()
        self.n1, self.c1, self.t = nn.GroupNorm(4, c), nn.Conv2d(c, o, 3, padding=1), nn.Linear(32, 2 * o)
        self.n2, self.c2 = nn.GroupNorm(4, o), nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Conv2d(c, o, 1) if c != o else nn.Identity()

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x)))
        scale, shift = self.t(F.silu(t))[:, :, None, None].chunk(2, 1)
        return self.skip(x) + self.c2(F.silu(self.n2(h) * (1 + scale) + shift))


@case(call(IMAGE, T), inputs={"x": IMAGE, "t": T})
class TimedResidual(nn.Module):
    """diffusers: sinusoids of a time, a scale and shift of group-normed channels, down, up, concatenated skips."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first, self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), TimeBlock(16, 16), TimeBlock(16, 32)
        self.c, self.last = TimeBlock(48, 16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x, t):
        f = torch.exp(-math.log(1e4) * torch.arange(8, dtype=x.dtype) / 8)
        e = self.time(torch.cat([(t[:, None] * f).sin(), (t[:, None] * f).cos()], -1))
        h = self.a(self.first(x), e)
        low = self.b(F.avg_pool2d(h, 2), e)
        return self.last(self.c(torch.cat([F.interpolate(low, scale_factor=2.0), h], 1), e))


class Processor:
    """An object that is no module, and works with the module that it is given."""

    def __call__(self, attention, x, context=None):
        context = x if context is None else context
        q, k, v = (attention.split(f(y)) for f, y in ((attention.q, x), (attention.k, context), (attention.v, context)))
        return attention.o(attention.join(F.scaled_dot_product_attention(q, k, v)))


@case(call(X))
class ByProcessor(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.processor = Processor()

    def split(self, x):
        return x.unflatten(-1, (4, -1)).transpose(1, 2)

    def join(self, x):
        return x.transpose(1, 2).flatten(-2)

    def forward(self, x):
        return x + self.processor(self, x)


@case(call(ids(2, 6)))
class IncrementalState(nn.Module):
    """fairseq: keys and values of a step go into a dict under a name of the instance; the loop is in the forward."""

    def __init__(self):
        super().__init__()
        self.table, self.attention, self.mlp = nn.Embedding(32, 16), Attention(), Mlp()
        self.head = nn.Linear(16, 32, bias=False)

    def step(self, x, state):
        a, name = self.attention, f"{id(self)}.attn_state"
        q, k, v = (f(x).view(x.shape[0], 1, a.heads, -1).transpose(1, 2) for f in (a.q, a.k, a.v))
        if name in state:
            k, v = torch.cat([state[name]["k"], k], 2), torch.cat([state[name]["v"], v], 2)
        state[name] = {"k": k, "v": v}
        return x + a.o((torch.softmax(q @ k.mT / 2, -1) @ v).transpose(1, 2).flatten(2))

    def forward(self, input_ids):
        state, outs = {}, []
        for t in range(input_ids.shape[1]):
            outs.append(self.head(self.mlp(self.step(self.table(input_ids[:, t : t + 1]), state))))
        return torch.cat(outs, 1)


@case(call(X))
class ShiftedRelative(nn.Module):
    """ESPnet: relative scores are shifted by a view of padded ones; two learned biases of each head."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.p, self.o = (nn.Linear(16, 16, bias=n < 3) for n in range(5))
        self.u, self.w = nn.Parameter(torch.randn(4, 4) / 4), nn.Parameter(torch.randn(4, 4) / 4)

    def shift(self, s):
        b, h, t, n = s.shape
        padded = torch.cat([s.new_zeros(b, h, t, 1), s], -1).view(b, h, n + 1, t)
        return padded[:, :, 1:].view_as(s)[..., : n // 2 + 1]

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, 4, 4) for f in (self.q, self.k, self.v))
        places = torch.arange(t - 1, -t, -1, dtype=x.dtype)[:, None] * torch.arange(1, 17, dtype=x.dtype) / 16
        p = self.p(places.sin()).view(-1, 4, 4).transpose(0, 1)
        ac = (q + self.u).transpose(1, 2) @ k.permute(0, 2, 3, 1)
        bd = self.shift((q + self.w).transpose(1, 2) @ p.transpose(-1, -2))
        w = torch.softmax((ac + bd) / 2, -1) @ v.transpose(1, 2)
        return x + self.o(w.transpose(1, 2).reshape(b, t, -1))


@case(call(X.transpose(1, 2).contiguous()))
class SpeakerNet(nn.Module):
    """speechbrain: pieces of channels in turn, squeeze and excitation, pooling by attention over statistics."""

    def __init__(self):
        super().__init__()
        self.inward, self.out = nn.Conv1d(16, 32, 1), nn.Conv1d(32, 16, 1)
        self.steps = nn.ModuleList(nn.Conv1d(8, 8, 3, padding=1) for _ in range(3))
        self.s1, self.s2 = nn.Conv1d(16, 8, 1), nn.Conv1d(8, 16, 1)
        self.a1, self.a2, self.last = nn.Conv1d(48, 16, 1), nn.Conv1d(16, 16, 1), nn.Linear(32, 8)

    def forward(self, x):
        pieces, y = [], None
        for n, piece in enumerate(self.inward(x).relu().chunk(4, 1)):
            y = piece if n == 0 else self.steps[n - 1](piece if n == 1 else piece + y).relu()
            pieces.append(y)
        h = self.out(torch.cat(pieces, 1))
        h = x + h * self.s2(self.s1(h.mean(-1, keepdim=True)).relu()).sigmoid()
        mean, std = h.mean(-1, keepdim=True), h.var(-1, keepdim=True).clamp_min(1e-6).sqrt()
        a = self.a2(self.a1(torch.cat([h, mean.expand_as(h), std.expand_as(h)], 1)).tanh()).softmax(-1)
        m = (a * h).sum(-1)
        return self.last(torch.cat([m, ((a * h * h).sum(-1) - m * m).clamp_min(1e-6).sqrt()], -1))


@case(call(X))
class GatedConvolutionModule(nn.Module):
    """Conformer's: pointwise to twice the width, gated, depthwise, normed over channels, swish, pointwise."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(16), nn.Conv1d(16, 64, 1), nn.Conv1d(32, 16, 1)
        self.depth, self.channels = nn.Conv1d(32, 32, 3, padding=1, groups=32), nn.LayerNorm(32)

    def forward(self, x):
        h = F.glu(self.a(self.norm(x).transpose(1, 2)), 1)
        h = self.channels(self.depth(h).transpose(1, 2)).transpose(1, 2)
        return x + self.b(F.silu(h)).transpose(1, 2)


EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 3, 1]])


@case(call(floats(5, 16), EDGES), inputs={"x": floats(5, 16), "edge_index": EDGES}, vary=False)
class MessagePassing(nn.Module):
    """torch_geometric: messages of pairs, softmax over those of a node, summed by index, a gate."""

    def __init__(self):
        super().__init__()
        self.lin, self.att_s, self.att_d = (
            nn.Linear(16, 32, bias=False),
            *(nn.Parameter(torch.randn(1, 4, 8) / 3) for _ in range(2)),
        )
        self.gate, self.out = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, edge_index):
        s, d = edge_index
        h = self.lin(x).view(-1, 4, 8)
        e = F.leaky_relu((h * self.att_s).sum(-1)[s] + (h * self.att_d).sum(-1)[d], 0.2)
        e = (e - e.max()).exp()
        total = e.new_zeros(x.shape[0], 4).index_add_(0, d, e)
        m = h[s] * (e / total[d])[..., None]
        out = torch.zeros_like(h).scatter_add_(0, d[:, None, None].expand_as(m), m).flatten(1)
        return x + self.out(out * self.gate(x).sigmoid())


@case(call(ids(2, 6)))
class LayersDroppedAndTied(nn.Module):
    """fairseq: the output projection is made of the table's weight; scaled embeddings; layers in a custom list."""

    class Layers(nn.ModuleList):
        def __iter__(self):
            for n, layer in enumerate(super().__iter__()):
                if n != 1 or not self.training:
                    yield layer

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16, padding_idx=0)
        self.layers = self.Layers(Mlp() for _ in range(3))
        self.output = nn.Linear(16, 32, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, input_ids):
        x = math.sqrt(16) * self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


@case(call(floats(2, 9, 9, 16)))
class PartitionedWindows(nn.Module):
    """timm: windows of a padded map are put in the batch, attend, and are put back."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(16), Attention(), Mlp()

    def forward(self, x):
        b, h, w, c = x.shape
        p = F.pad(self.norm(x), (0, 0, 0, -w % 4, 0, -h % 4))
        hh, ww = p.shape[1:3]
        p = p.view(b, hh // 4, 4, ww // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
        p = self.attention(p).view(b, hh // 4, ww // 4, 4, 4, c).transpose(2, 3).reshape(b, hh, ww, c)
        return self.mlp(x + p[:, :h, :w])


@case(call(X))
class ExpandedByFunction(nn.Module):
    """A chain of functions in a list, with partials and methods of other modules."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.steps = [lambda x: (self.up(x), self.gate(x)), lambda pair: pair[0] * F.gelu(pair[1], approximate="tanh")]

    def forward(self, x):
        h = x
        for step in (*self.steps, self.down.forward):
            h = step(h)
        return x + h


@case(call(X), call(X, _train=True))
class MeanTeacherOfTokens(nn.Module):
    """data2vec: a teacher in eval mode, without gradients, whose layers' means are the targets."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = (nn.ModuleList((Mlp(), Mlp())) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.head = nn.Linear(16, 16)

    def forward(self, x):
        with torch.no_grad():
            self.teacher.eval()
            y, kept = x, []
            for layer in self.teacher:
                y = layer(y)
                kept.append(F.instance_norm(y.transpose(1, 2)).transpose(1, 2))
            target = torch.stack(kept).mean(0)
        for layer in self.student:
            x = layer(x)
        return F.smooth_l1_loss(self.head(x), target, reduction="none").sum(-1)
