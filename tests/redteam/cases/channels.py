"""Convolutions of every make: kernels that are made, channels that are cut, joined, sampled; heads of detectors."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats
from ..parts import Attention, Mlp

M = floats(2, 16, 8, 8)
C = floats(2, 8)
MC = {"x": M, "c": C}
BOTH = (2, 4)


@case(call(M, C), inputs=MC, tp=BOTH)
class ModulatedConvolution(nn.Module):
    """StyleGAN2: kernels are scaled by style and normed, rows of the batch are groups of one convolution."""

    def __init__(self):
        super().__init__()
        self.style, self.weight = nn.Linear(8, 16), nn.Parameter(torch.randn(32, 16, 3, 3) / 12)
        self.out = nn.Conv2d(32, 16, 1)

    def forward(self, x, c):
        b, n, h, w = x.shape
        weight = self.weight[None] * (self.style(c) + 1).view(b, 1, n, 1, 1)
        weight = weight * (weight.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        y = F.conv2d(x.reshape(1, b * n, h, w), weight.view(-1, n, 3, 3), padding=1, groups=b)
        return self.out(F.leaky_relu(y.view(b, -1, h, w), 0.2))


@case(call(M, C), inputs=MC, tp=BOTH)
class AdaptiveInstanceNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.style = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1), nn.Linear(8, 64)

    def forward(self, x, c):
        scale, shift = self.style(c)[..., None, None].chunk(2, 1)
        return self.b(F.relu(F.instance_norm(self.a(x)) * (1 + scale) + shift))


@case(call(M), tp=BOTH)
class StandardisedKernels(nn.Module):
    """Weight-standardised convolutions with GroupNorm (BiT)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 1), nn.GroupNorm(8, 32)

    def conv(self, x, layer):
        var, mean = torch.var_mean(layer.weight, (1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(x, (layer.weight - mean) / (var + 1e-5).sqrt(), layer.bias, layer.stride, layer.padding)

    def forward(self, x):
        return x + self.conv(self.norm(self.conv(x, self.a)).relu(), self.b)


@case(call(M), tp=BOTH)
class MixedKernels(nn.Module):
    """Channels are split between kernels of four sizes, depthwise (MixConv)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.deep = nn.ModuleList([nn.Conv2d(8, 8, k, padding=k // 2, groups=8) for k in (1, 3, 5, 7)])

    def forward(self, x):
        h = self.up(x).chunk(4, 1)
        return x + self.down(torch.cat([f(part) for f, part in zip(self.deep, h, strict=True)], 1).relu())


@case(call(M), tp=BOTH)
class HierarchicalSplit(nn.Module):
    """Res2Net: a part of the channels goes through its convolution with what the part before became."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.convs = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)])

    def forward(self, x):
        parts = self.up(x).relu().split(8, 1)
        out, last = [parts[0]], 0
        for conv, part in zip(self.convs, parts[1:], strict=True):
            last = conv(part + last).relu()
            out.append(last)
        return x + self.down(torch.cat(out, 1))


@case(call(M), tp=BOTH)
class Ghost(nn.Module):
    """Half of the channels are cheap transforms of the other half."""

    def __init__(self):
        super().__init__()
        self.first, self.cheap, self.out = (
            nn.Conv2d(16, 16, 1),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(32, 16, 1),
        )

    def forward(self, x):
        a = self.first(x).relu()
        return x + self.out(torch.cat([a, self.cheap(a).relu()], 1))


@case(call(M), tp=BOTH)
class Dense(nn.Module):
    """DenseNet: all that came before is joined, with norms over the join."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(16 + 8 * n) for n in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(16 + 8 * n, 8, 3, padding=1) for n in range(3)])
        self.out = nn.Conv2d(40, 16, 1)

    def forward(self, x):
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(norm(x).relu())], 1)
        return F.avg_pool2d(self.out(x), 2)


@case(call(M), tp=BOTH)
class ChannelAttentions(nn.Module):
    """ECA's convolution along channels, then CBAM's mean and maximum over them, on hidden channels."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Conv2d(16, 32, 1), nn.Conv2d(32, 16, 1)
        self.along, self.space = nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        h = self.up(x).relu()
        y = self.along(h.mean((2, 3))[:, None]).squeeze(1).sigmoid()
        h = h * y[..., None, None]
        return x + self.down(h * self.space(torch.stack([h.mean(1), h.amax(1)], 1)).sigmoid())


@case(call(M), tp=BOTH)
class Involution(nn.Module):
    """A kernel for each place and group of channels, made from the place; unfold."""

    def __init__(self):
        super().__init__()
        self.reduce, self.span, self.v, self.o = (
            nn.Conv2d(16, 8, 1),
            nn.Conv2d(8, 36, 1),
            nn.Conv2d(16, 16, 1),
            nn.Conv2d(16, 16, 1),
        )

    def forward(self, x):
        b, c, h, w = x.shape
        k = self.span(self.reduce(x).relu()).view(b, 4, 1, 9, h, w)
        u = F.unfold(self.v(x), 3, padding=1).view(b, 4, 4, 9, h, w)
        return self.o((k * u).sum(3).view(b, c, h, w))


@case(call(M), tp=BOTH)
class Deformed(nn.Module):
    """Sampled at learned offsets by grid_sample, for each group of channels."""

    def __init__(self):
        super().__init__()
        self.offset, self.v, self.o = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        axis = torch.linspace(-1, 1, h, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
        off = self.offset(x).tanh().view(b, 4, 2, h, w).permute(0, 1, 3, 4, 2).flatten(0, 1)
        v = self.v(x).view(b * 4, c // 4, h, w)
        y = F.grid_sample(v, grid + 0.2 * off, align_corners=True, padding_mode="border")
        return x + self.o(y.view(b, c, h, w))


@case(call(M), tp=BOTH)
class NonLocal(nn.Module):
    """Attention between pixels with one head of hidden channels, divided by the number of pixels."""

    def __init__(self):
        super().__init__()
        self.theta, self.phi, self.g = (nn.Conv2d(16, 8, 1) for _ in range(3))
        self.o = nn.Conv2d(8, 16, 1)

    def forward(self, x):
        a, b, g = (
            self.theta(x).flatten(2),
            F.max_pool2d(self.phi(x), 2).flatten(2),
            F.max_pool2d(self.g(x), 2).flatten(2),
        )
        y = (a.mT @ b) / b.shape[-1] @ g.mT
        return x + self.o(y.mT.unflatten(-1, x.shape[2:]))


@case(call(M), tp=BOTH)
class HeadsInConvolutions(nn.Module):
    """Attention whose projections are convolutions, with a positional convolution on the values (EfficientViT's)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.place, self.o = (
            nn.Conv2d(16, 48, 1),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(16, 16, 1),
        )

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(x).chunk(3, 1)
        q, k, u = (t.view(b, 4, 4, h * w) for t in (q, k, v))
        y = (u @ (q.mT @ k / 2).softmax(-1).mT).view(b, c, h, w)
        return x + self.o(y + self.place(v))


@case(call(M), tp=BOTH)
class Atrous(nn.Module):
    """ASPP with pooling over the picture, and a pyramid of pools."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(16, 8, 3, padding=d, dilation=d) for d in (1, 2, 3)])
        self.pool, self.out, self.last = nn.Conv2d(16, 8, 1), nn.Conv2d(32, 16, 1), nn.Conv2d(16 * 4, 16, 1)

    def forward(self, x):
        far = F.interpolate(self.pool(x.mean((2, 3), keepdim=True)), x.shape[2:], mode="bilinear")
        y = self.out(torch.cat([*[f(x).relu() for f in self.convs], far], 1))
        pools = [F.interpolate(F.adaptive_avg_pool2d(y, n), x.shape[2:], mode="nearest") for n in (1, 2, 4)]
        return self.last(torch.cat([y, *pools], 1))


@case(call(M), tp=BOTH)
class Anchors(nn.Module):
    """YOLO's head: anchors in channels, boxes from a grid, classes beside them, joined over two scales."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.heads = (
            nn.Conv2d(16, 32, 3, padding=1),
            nn.Conv2d(32, 32, 3, 2, 1),
            nn.ModuleList([nn.Conv2d(32, 3 * 9, 1), nn.Conv2d(32, 3 * 9, 1)]),
        )
        self.register_buffer("anchors", torch.rand(2, 3, 2) + 0.5)

    def forward(self, x):
        a = self.up(x).relu()
        out = []
        for n, h in enumerate((a, self.down(a).relu())):
            y = self.heads[n](h)
            b, _, height, width = y.shape
            y = y.view(b, 3, 9, height, width).permute(0, 1, 3, 4, 2).contiguous()
            grid = torch.stack(torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy"), -1).to(y.dtype)
            place = (y[..., :2].sigmoid() * 2 - 0.5 + grid) * (8 / width)
            size = (y[..., 2:4].sigmoid() * 2) ** 2 * self.anchors[n].view(1, 3, 1, 1, 2)
            out.append(torch.cat([place, size, y[..., 4:].sigmoid()], -1).view(b, -1, 9))
        return torch.cat(out, 1)


@case(call(M, floats(2, 3, 4)), inputs={"x": M, "boxes": floats(2, 3, 4)}, tp=BOTH, vary=False)
class SetPrediction(nn.Module):
    """DETR: queries, heads for classes and boxes, matched by scipy without gradient."""

    def __init__(self):
        super().__init__()
        self.queries, self.block, self.mlp = (
            nn.Parameter(torch.randn(5, 16)),
            nn.MultiheadAttention(16, 4, batch_first=True),
            Mlp(),
        )
        self.kind, self.box = nn.Linear(16, 4), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x, boxes):
        from scipy.optimize import linear_sum_assignment

        m = x.flatten(2).mT
        h = self.mlp(self.block(self.queries.expand(len(x), -1, -1), m, m)[0])
        box, loss = self.box(h), 0
        for n in range(len(x)):
            cost = torch.cdist(box[n].detach(), boxes[n], p=1)
            i, j = linear_sum_assignment(cost.numpy())
            loss = loss + F.l1_loss(box[n][torch.as_tensor(i)], boxes[n][torch.as_tensor(j)])
        return loss, self.kind(h), box


@case(call(M), tp=BOTH)
class SoftArgmax(nn.Module):
    """Keypoints: a softmax over all pixels of each map, expected places; maps times features are pooled."""

    def __init__(self):
        super().__init__()
        self.a, self.maps, self.mlp = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 8, 1), nn.Linear(32, 16)

    def forward(self, x):
        h = self.a(x).relu()
        p = self.maps(h).flatten(2).softmax(-1)
        at = torch.linspace(-1, 1, 8, dtype=x.dtype)
        grid = torch.cartesian_prod(at, at)
        return p @ grid, self.mlp(p @ h.flatten(2).mT)


@case(call(M, floats(2, 16, 8, 8, seed=2)), inputs={"a": M, "b": floats(2, 16, 8, 8, seed=2)}, tp=BOTH)
class CorrelationVolume(nn.Module):
    """RAFT: all pairs of two pictures, a pyramid of pools, lookups round expected places."""

    def __init__(self):
        super().__init__()
        self.net, self.head = (
            nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 1)),
            nn.Conv2d(18, 2, 1),
        )

    def forward(self, a, b):
        a, b = self.net(a), self.net(b)
        n, c, h, w = a.shape
        volume = (a.flatten(2).mT @ b.flatten(2) / c**0.5).view(n * h * w, 1, h, w)
        near = torch.stack(torch.meshgrid(*[torch.linspace(-0.3, 0.3, 3, dtype=a.dtype)] * 2, indexing="xy"), -1)
        at = volume.flatten(1).softmax(-1) @ torch.cartesian_prod(*[torch.linspace(-1, 1, h, dtype=a.dtype)] * 2)
        found = []
        for level in range(2):
            found.append(F.grid_sample(volume, at.view(-1, 1, 1, 2) + near, align_corners=True).view(n, h, w, 9))
            volume = F.avg_pool2d(volume, 2) if level == 0 else volume
        return self.head(torch.cat(found, -1).permute(0, 3, 1, 2))


@case(call(floats(2, 8, 4, 6, 6)), tp=BOTH)
class ThreeDimensional(nn.Module):
    """A video block: factorised convolutions in space and in time, transposed up."""

    def __init__(self):
        super().__init__()
        self.space, self.time = (
            nn.Conv3d(8, 32, (1, 3, 3), padding=(0, 1, 1)),
            nn.Conv3d(32, 16, (3, 1, 1), padding=(1, 0, 0)),
        )
        self.norm, self.up = nn.GroupNorm(4, 32), nn.ConvTranspose3d(16, 8, (1, 2, 2), (1, 2, 2))

    def forward(self, x):
        return self.up(self.time(self.norm(self.space(x)).relu()).relu())


@case(call(M), tp=BOTH)
class GroupedTransposed(nn.Module):
    """A transposed convolution in groups between two pointwise ones."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(16, 32, 1), nn.ConvTranspose2d(32, 32, 2, 2, groups=4), nn.Conv2d(32, 8, 1)

    def forward(self, x):
        return self.c(F.silu(self.b(self.a(x).relu())))


@case(call(M), tp=BOTH)
class Prototypes(nn.Module):
    """Masks are coefficients times prototypes (YOLACT), fixed blur kernels on hidden channels."""

    def __init__(self):
        super().__init__()
        self.a, self.coefficients, self.proto = nn.Conv2d(16, 32, 1), nn.Linear(32, 5 * 8), nn.Conv2d(32, 8, 1)
        kernel = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("blur", (kernel[:, None] * kernel / 16)[None, None])

    def forward(self, x):
        h = self.a(x).relu()
        h = F.conv2d(h, self.blur.repeat(h.shape[1], 1, 1, 1), padding=1, groups=h.shape[1])
        k = self.coefficients(h.amax((2, 3))).view(-1, 5, 8).tanh()
        return torch.einsum("bnk,bkhw->bnhw", k, self.proto(h).relu())


@case(call(M), inputs={"x": M}, tp=BOTH, allowed=HOSTILE)
class Snake(Attention):
    """Visual state space: four orders of pixels, a scan along each, folded into the batch."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.randn(4, 16))

    def forward(self, x):
        b, c, h, w = x.shape
        u = self.v(x.permute(0, 2, 3, 1))
        rows, columns = u.flatten(1, 2), u.transpose(1, 2).flatten(1, 2)
        s = torch.stack([rows, columns, rows.flip(1), columns.flip(1)], 1)
        a, state, out = self.decay.sigmoid(), torch.zeros_like(s[:, :, 0]), []
        for t in range(s.shape[2]):
            state = a * state + (1 - a) * s[:, :, t]
            out.append(state)
        y = torch.stack(out, 2)
        y = y[:, 0] + y[:, 2].flip(1) + (y[:, 1] + y[:, 3].flip(1)).view(b, w, h, -1).transpose(1, 2).flatten(1, 2)
        return x + self.o(y).mT.reshape(b, c, h, w)


@case(call(M), tp=BOTH)
class WindowsByUnfold(nn.Module):
    """Outlook attention: scores come from the middle pixel alone, values are unfolded, sums folded back."""

    def __init__(self):
        super().__init__()
        self.v, self.a, self.o = nn.Linear(16, 16), nn.Linear(16, 4 * 81), nn.Linear(16, 16)

    def forward(self, x):
        b, c, h, w = x.shape
        y = x.permute(0, 2, 3, 1)
        v = F.unfold(self.v(y).permute(0, 3, 1, 2), 3, padding=1).view(b, 4, 4, 9, h * w).permute(0, 1, 4, 3, 2)
        a = (self.a(y).view(b, h * w, 4, 9, 9).transpose(1, 2) / 2).softmax(-1)
        y = (a @ v).permute(0, 1, 4, 3, 2).reshape(b, c * 9, h * w)
        return x + self.o(F.fold(y, (h, w), 3, padding=1).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@case(call(floats(2, 6, 16)), tp=BOTH)
class LinearChain(nn.Module):
    """A conditional random field over tags: forward algorithm and Viterbi path."""

    def __init__(self):
        super().__init__()
        self.block, self.out, self.moves = Mlp(), nn.Linear(16, 5), nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        z = self.out(self.block(x))
        alpha, best, back = z[:, 0], z[:, 0], []
        for t in range(1, z.shape[1]):
            alpha = (alpha[:, :, None] + self.moves).logsumexp(1) + z[:, t]
            best, at = (best[:, :, None] + self.moves).max(1)
            best = best + z[:, t]
            back.append(at)
        path = [best.argmax(-1)]
        for at in reversed(back):
            path.append(at.gather(1, path[-1][:, None]).squeeze(1))
        return alpha.logsumexp(-1), torch.stack(path[::-1], 1)
