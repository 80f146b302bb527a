"""Models of pictures, sound and video as their repositories write them: all of them sound."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from ..case import call, case, floats, ids

IMAGE = floats(2, 3, 16, 16)
TOKENS = floats(2, 8, 16)
MEL = floats(2, 16, 24)


def timestep_embedding(t, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float64, device=t.device) / half)
    args = t[:, None].double() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


@case(call(IMAGE, torch.tensor([3, 11])))
class DiffusionUnet(nn.Module):
    """A U-Net of denoising diffusion: residual blocks told the time, attention in the middle, skips joined."""

    class Res(nn.Module):
        def __init__(self, c_in, c_out, emb):
            super().__init__()
            self.in_layers = nn.Sequential(nn.GroupNorm(4, c_in), nn.SiLU(), nn.Conv2d(c_in, c_out, 3, padding=1))
            self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * c_out))
            self.out_norm = nn.GroupNorm(4, c_out)
            self.out_layers = nn.Sequential(nn.SiLU(), nn.Dropout(0.0), nn.Conv2d(c_out, c_out, 3, padding=1))
            self.skip = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)

        def forward(self, x, emb):
            h = self.in_layers(x)
            scale, shift = self.emb_layers(emb)[..., None, None].chunk(2, dim=1)
            h = self.out_norm(h) * (1 + scale) + shift
            return self.skip(x) + self.out_layers(h)

    class Attn(nn.Module):
        def __init__(self, c, heads):
            super().__init__()
            self.heads, self.norm = heads, nn.GroupNorm(4, c)
            self.qkv, self.proj = nn.Conv1d(c, 3 * c, 1), nn.Conv1d(c, c, 1)

        def forward(self, x):
            b, c, *spatial = x.shape
            x = x.reshape(b, c, -1)
            qkv = self.qkv(self.norm(x))
            q, k, v = qkv.reshape(b * self.heads, -1, qkv.shape[-1]).chunk(3, dim=1)
            scale = 1 / math.sqrt(math.sqrt(q.shape[1]))
            w = torch.softmax(torch.einsum("bct,bcs->bts", q * scale, k * scale), dim=-1)
            h = torch.einsum("bts,bcs->bct", w, v).reshape(b, c, -1)
            return (x + self.proj(h)).reshape(b, c, *spatial)

    def __init__(self, ch=16):
        super().__init__()
        self.ch = ch
        self.time = nn.Sequential(nn.Linear(ch, 4 * ch), nn.SiLU(), nn.Linear(4 * ch, 4 * ch))
        self.stem = nn.Conv2d(3, ch, 3, padding=1)
        self.down1, self.pool = self.Res(ch, ch, 4 * ch), nn.Conv2d(ch, ch, 3, stride=2, padding=1)
        self.down2 = self.Res(ch, 2 * ch, 4 * ch)
        self.mid1, self.attn, self.mid2 = (
            self.Res(2 * ch, 2 * ch, 4 * ch),
            self.Attn(2 * ch, 4),
            self.Res(2 * ch, 2 * ch, 4 * ch),
        )
        self.up = self.Res(3 * ch, ch, 4 * ch)
        self.out = nn.Sequential(nn.GroupNorm(4, ch), nn.SiLU(), nn.Conv2d(ch, 3, 3, padding=1))

    def forward(self, x, t):
        emb = self.time(timestep_embedding(t, self.ch).to(x.dtype))
        h1 = self.down1(self.stem(x), emb)
        h = self.down2(self.pool(h1), emb)
        h = self.mid2(self.attn(self.mid1(h, emb)), emb)
        h = F.interpolate(h, size=h1.shape[-2:], mode="nearest")
        return self.out(self.up(torch.cat([h, h1], dim=1), emb))


@case(call(floats(2, 4, 8, 8), torch.tensor([5, 9]), ids(2, below=10)))
class DiffusionTransformer(nn.Module):
    """DiT: adaptive layer norm that starts at nothing, and classes of which some are dropped in training."""

    class Block(nn.Module):
        def __init__(self, d, h):
            super().__init__()
            self.h = h
            self.norm1, self.norm2 = (nn.LayerNorm(d, elementwise_affine=False, eps=1e-6) for _ in range(2))
            self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d))
            self.ada = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))

        def forward(self, x, c):
            b, n, d = x.shape
            s1, g1, a1, s2, g2, a2 = self.ada(c).chunk(6, dim=1)
            y = self.norm1(x) * (1 + g1.unsqueeze(1)) + s1.unsqueeze(1)
            q, k, v = self.qkv(y).reshape(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
            x = x + a1.unsqueeze(1) * self.proj(y)
            y = self.norm2(x) * (1 + g2.unsqueeze(1)) + s2.unsqueeze(1)
            return x + a2.unsqueeze(1) * self.mlp(y)

    def __init__(self, d=16, depth=2, patch=2):
        super().__init__()
        self.d, self.patch, self.classes = d, patch, 10
        self.x_embedder = nn.Conv2d(4, d, patch, patch)
        self.register_buffer("pos", torch.randn(1, 16, d) * 0.1, persistent=False)
        self.t_embedder = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))
        self.y_embedder = nn.Embedding(11, d)
        self.blocks = nn.ModuleList(self.Block(d, 4) for _ in range(depth))
        self.final_norm = nn.LayerNorm(d, elementwise_affine=False)
        self.final_ada, self.final = nn.Sequential(nn.SiLU(), nn.Linear(d, 2 * d)), nn.Linear(d, patch * patch * 4)

    def unpatchify(self, x):
        c, p = 4, self.patch
        h = w = int(x.shape[1] ** 0.5)
        x = x.reshape(x.shape[0], h, w, p, p, c)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(x.shape[0], c, h * p, w * p)

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos
        if self.training:
            drop = torch.rand(y.shape[0], device=y.device) < 0.1
            y = torch.where(drop, self.classes, y)
        c = self.t_embedder(timestep_embedding(t, self.d).to(x.dtype)) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_ada(c).chunk(2, dim=1)
        return self.unpatchify(self.final(self.final_norm(x) * (1 + scale[:, None]) + shift[:, None]))


@case(call(floats(2, 1, 64)))
class ResidualQuantiser(nn.Module):
    """EnCodec: a weight-normed encoder, residual codes in a row, straight through, a mirrored decoder."""

    class Unit(nn.Module):
        def __init__(self, c):
            super().__init__()
            wn = parametrizations.weight_norm
            self.block = nn.Sequential(
                nn.ELU(), wn(nn.Conv1d(c, c // 2, 3, padding=1)), nn.ELU(), wn(nn.Conv1d(c // 2, c, 1))
            )

        def forward(self, x):
            return x + self.block(x)

    def __init__(self, c=16, n_q=3):
        super().__init__()
        wn = parametrizations.weight_norm
        self.encoder = nn.Sequential(
            wn(nn.Conv1d(1, c, 7, padding=3)), self.Unit(c), nn.ELU(), wn(nn.Conv1d(c, 2 * c, 4, 2, 1))
        )
        self.codebooks = nn.ParameterList(nn.Parameter(torch.randn(8, 2 * c) * 0.5) for _ in range(n_q))
        self.decoder = nn.Sequential(
            nn.ELU(),
            wn(nn.ConvTranspose1d(2 * c, c, 4, 2, 1)),
            self.Unit(c),
            nn.ELU(),
            wn(nn.Conv1d(c, 1, 7, padding=3)),
        )

    def quantise(self, z):
        residual, out, codes, loss = z, 0.0, [], 0.0
        for book in self.codebooks:
            d = torch.cdist(residual.transpose(1, 2).flatten(0, 1), book)
            code = d.argmin(-1).view(z.shape[0], z.shape[2])
            q = F.embedding(code, book).transpose(1, 2)
            loss = loss + F.mse_loss(residual.detach(), q) + 0.25 * F.mse_loss(residual, q.detach())
            residual, out = residual - q.detach(), out + q
            codes.append(code)
        return z + (out - z).detach(), torch.stack(codes), loss / len(self.codebooks)

    def forward(self, x):
        z, codes, loss = self.quantise(self.encoder(x))
        return self.decoder(z), codes, loss


@case(call(floats(2, 16, 8, 8)))
class ConvNextSecond(nn.Module):
    """ConvNeXt V2: channels last, and a norm of responses over all channels of the hidden layer."""

    class Grn(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.gamma, self.beta = (
                nn.Parameter(torch.ones(1, 1, 1, dim) * 0.3),
                nn.Parameter(torch.zeros(1, 1, 1, dim)),
            )

        def forward(self, x):
            gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
            nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
            return self.gamma * (x * nx) + self.beta + x

    def __init__(self, dim=16):
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.grn = nn.Linear(dim, 4 * dim), nn.GELU(), self.Grn(4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)

    def forward(self, x):
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.pwconv2(self.grn(self.act(self.pwconv1(y))))
        return x + y.permute(0, 3, 1, 2)


@case(call(TOKENS))
class TalkingHeadsCait(nn.Module):
    """CaiT: heads that talk before and after the softmax, scaled layers, then a token that alone attends."""

    class Talking(nn.Module):
        def __init__(self, d, h):
            super().__init__()
            self.h, self.scale = h, (d // h) ** -0.5
            self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
            self.proj_l, self.proj_w = nn.Linear(h, h), nn.Linear(h, h)

        def forward(self, x):
            b, n, c = x.shape
            q, k, v = self.qkv(x).reshape(b, n, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4).unbind(0)
            attn = q * self.scale @ k.transpose(-2, -1)
            attn = self.proj_l(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).softmax(dim=-1)
            attn = self.proj_w(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))

    class ClassAttn(nn.Module):
        def __init__(self, d, h):
            super().__init__()
            self.h = h
            self.q, self.k, self.v, self.proj = (nn.Linear(d, d) for _ in range(4))

        def forward(self, x):
            b, n, c = x.shape
            q = self.q(x[:, 0]).unsqueeze(1).reshape(b, 1, self.h, -1).permute(0, 2, 1, 3)
            k = self.k(x).reshape(b, n, self.h, -1).permute(0, 2, 1, 3)
            v = self.v(x).reshape(b, n, self.h, -1).permute(0, 2, 1, 3)
            y = F.scaled_dot_product_attention(q, k, v)
            return self.proj(y.transpose(1, 2).reshape(b, 1, c))

    def __init__(self, d=16, h=4):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d) for _ in range(3))
        self.attn, self.cls_attn = self.Talking(d, h), self.ClassAttn(d, h)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
        self.gamma1, self.gamma2 = (nn.Parameter(0.1 * torch.ones(d)) for _ in range(2))
        self.cls = nn.Parameter(torch.randn(1, 1, d) * 0.02)
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        x = x + self.gamma1 * self.attn(self.norm1(x))
        x = x + self.gamma2 * self.mlp(self.norm2(x))
        cls = self.cls.expand(x.shape[0], -1, -1)
        cls = cls + self.cls_attn(self.norm3(torch.cat((cls, x), dim=1)))
        return self.head(cls[:, 0])


class ViTBlock(nn.Module):
    def __init__(self, d=16, h=4):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.n1(x)).reshape(b, n, 3, self.h, c // self.h).permute(2, 0, 3, 1, 4).unbind(0)
        attn = ((q @ k.transpose(-2, -1)) * (c // self.h) ** -0.5).softmax(dim=-1)
        x = x + self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))


@case(call(floats(2, 24, 12)))
class Perceiver(nn.Module):
    """Latents that attend to the inputs, then to themselves, with weights tied between the layers."""

    class Attn(nn.Module):
        def __init__(self, d, ctx, h=4, dh=8):
            super().__init__()
            self.h = h
            self.to_q, self.to_kv = nn.Linear(d, h * dh, bias=False), nn.Linear(ctx, 2 * h * dh, bias=False)
            self.to_out = nn.Sequential(nn.Linear(h * dh, d), nn.Dropout(0.0))
            self.norm, self.norm_ctx = nn.LayerNorm(d), nn.LayerNorm(ctx)

        def forward(self, x, context=None):
            x = self.norm(x)
            context = self.norm_ctx(context) if context is not None else x
            q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
            q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2).flatten(0, 1) for t in (q, k, v))
            sim = torch.einsum("b i d, b j d -> b i j", q, k) * q.shape[-1] ** -0.5
            out = torch.einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
            return self.to_out(out.unflatten(0, (-1, self.h)).transpose(1, 2).flatten(2))

    class Ff(nn.Module):
        def __init__(self, d):
            super().__init__()
            self.norm, self.wi, self.wo = nn.LayerNorm(d), nn.Linear(d, 8 * d), nn.Linear(4 * d, d)

        def forward(self, x):
            x, gates = self.wi(self.norm(x)).chunk(2, dim=-1)
            return self.wo(x * F.gelu(gates))

    def __init__(self, d=16):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(6, d))
        self.cross, self.cross_ff, self.own, self.own_ff = self.Attn(d, 14), self.Ff(d), self.Attn(d, d), self.Ff(d)
        self.logits = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 10))

    def forward(self, data):
        b, n, _ = data.shape
        pos = torch.linspace(-1.0, 1.0, n, device=data.device, dtype=data.dtype)
        enc = torch.stack([pos.sin(), pos.cos()], -1)[None].expand(b, -1, -1)
        data = torch.cat((data, enc), dim=-1)
        x = self.latents[None].repeat(b, 1, 1)
        for _ in range(2):
            x = self.cross(x, context=data) + x
            x = self.cross_ff(x) + x
            x = self.own(x) + x
            x = self.own_ff(x) + x
        return self.logits(x.mean(dim=1))


@case(call(floats(2, 16, 16)))
class MaskedAttentionDecoder(nn.Module):
    """Mask2Former: what a query attends to is what its mask covered so far, all where it covered nothing."""

    def __init__(self, d=16, q=4, h=4):
        super().__init__()
        self.h = h
        self.feat, self.query = nn.Embedding(q, d), nn.Embedding(q, d)
        self.cross = nn.ModuleList(nn.MultiheadAttention(d, h, batch_first=True) for _ in range(2))
        self.ffn = nn.ModuleList(nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, d)) for _ in range(2))
        self.norm, self.mask_embed = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))

    def masks(self, x, memory):
        logits = torch.einsum("bqc,bnc->bqn", self.mask_embed(self.norm(x)), memory)
        attn = (logits.sigmoid() < 0.5).detach()
        attn[torch.where(attn.sum(-1) == attn.shape[-1])] = False
        return logits, attn.unsqueeze(1).repeat(1, self.h, 1, 1).flatten(0, 1)

    def forward(self, memory):
        b = memory.shape[0]
        x, pos = self.feat.weight.repeat(b, 1, 1), self.query.weight.repeat(b, 1, 1)
        outputs = []
        logits, mask = self.masks(x, memory)
        for cross, ffn in zip(self.cross, self.ffn, strict=True):
            x = x + cross(x + pos, memory, memory, attn_mask=mask, need_weights=False)[0]
            x = x + ffn(x)
            logits, mask = self.masks(x, memory)
            outputs.append(logits)
        return torch.stack(outputs)


@case(call(floats(2, 1, 24), floats(2, 8, 24)))
class WaveNet(nn.Module):
    """Gated dilated convolutions with conditions, a sum of skips, causal by cutting what is too much."""

    def __init__(self, res=16, skip=16, layers=3):
        super().__init__()
        self.res, self.start = res, nn.Conv1d(1, res, 1)
        self.dil = nn.ModuleList(nn.Conv1d(res, 2 * res, 2, dilation=2**i, padding=2**i) for i in range(layers))
        self.cond = nn.ModuleList(nn.Conv1d(8, 2 * res, 1, bias=False) for _ in range(layers))
        self.res_skip = nn.ModuleList(nn.Conv1d(res, res + skip if i < layers - 1 else skip, 1) for i in range(layers))
        self.end1, self.end2 = nn.Conv1d(skip, skip, 1), nn.Conv1d(skip, 12, 1)

    def forward(self, x, c):
        x, output = self.start(x), None
        for i, (dil, cond, rs) in enumerate(zip(self.dil, self.cond, self.res_skip, strict=True)):
            a = dil(x)[:, :, : x.shape[2]] + cond(c)
            a = torch.tanh(a[:, : self.res]) * torch.sigmoid(a[:, self.res :])
            y = rs(a)
            if i < len(self.dil) - 1:
                x = x + y[:, : self.res]
                y = y[:, self.res :]
            output = y if output is None else output + y
        return self.end2(F.relu(self.end1(F.relu(output))))


@case(call(floats(2, 1, 80), ids(2, 10, below=2).bool(), ids(2, 10, below=6)))
class HiddenUnits(nn.Module):
    """HuBERT: convolutions of sound, masked frames, cosines to code embeddings at a temperature."""

    def __init__(self, d=16, codes=6):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(1, 16, 4, 4, bias=False), nn.Conv1d(16, 16, 2, 2, bias=False)
        self.norm = nn.GroupNorm(16, 16)
        self.post, self.mask_emb = nn.Linear(16, d), nn.Parameter(torch.randn(d))
        self.pos = parametrizations.weight_norm(nn.Conv1d(d, d, 4, padding=2, groups=4), dim=2)
        self.layer = ViTBlock(d)
        self.final_proj, self.label_embs = nn.Linear(d, 8), nn.Parameter(torch.randn(codes, 8))

    def forward(self, wav, mask, target):
        x = F.gelu(self.norm(self.conv1(wav)))
        x = self.post(F.gelu(self.conv2(x)).transpose(1, 2))
        x = torch.where(mask[..., None], self.mask_emb.to(x.dtype), x)
        x = x + F.gelu(self.pos(x.transpose(1, 2))[:, :, :-1]).transpose(1, 2)
        x = self.layer(x)
        logits = torch.cosine_similarity(self.final_proj(x).unsqueeze(-2), self.label_embs, dim=-1) / 0.1
        ce = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
        return (ce * mask).sum() / mask.sum().clamp(min=1), logits


@case(
    call(floats(4, 6, 3), floats(4, 3), floats(4, 6).sort(-1).values),
    inputs={"pts": floats(4, 6, 3), "dirs": floats(4, 3), "z": floats(4, 6).sort(-1).values},
)
class Radiance(nn.Module):
    """NeRF: encoded places and directions, a skip in the middle, colours summed along the ray."""

    def __init__(self, w=32):
        super().__init__()
        self.pts = nn.ModuleList([nn.Linear(15, w), nn.Linear(w, w), nn.Linear(w + 15, w)])
        self.alpha, self.feature, self.views, self.rgb = (
            nn.Linear(w, 1),
            nn.Linear(w, w),
            nn.Linear(w + 15, w // 2),
            nn.Linear(w // 2, 3),
        )
        self.skips = [1]

    @staticmethod
    def encode(x):
        return torch.cat([x] + [fn(x * 2.0**i) for i in range(2) for fn in (torch.sin, torch.cos)], -1)

    def forward(self, pts, dirs, z):
        h = p = self.encode(pts)
        for i, layer in enumerate(self.pts):
            h = F.relu(layer(h))
            if i in self.skips:
                h = torch.cat([p, h], -1)
        alpha, feature = self.alpha(h).squeeze(-1), self.feature(h)
        d = self.encode(dirs / dirs.norm(dim=-1, keepdim=True))[:, None].expand(-1, pts.shape[1], -1)
        rgb = torch.sigmoid(self.rgb(F.relu(self.views(torch.cat([feature, d], -1)))))
        dists = torch.cat([z[..., 1:] - z[..., :-1], torch.full_like(z[..., :1], 1e10)], -1)
        a = 1.0 - torch.exp(-F.relu(alpha + 0.5) * dists)
        weights = a * torch.cumprod(torch.cat([torch.ones_like(a[:, :1]), 1.0 - a + 1e-10], -1), -1)[:, :-1]
        return (weights[..., None] * rgb).sum(-2), (weights * z).sum(-1)


@case(call(floats(4, 12, 12), ids(4, 6, below=30)))
class Clip(nn.Module):
    """Pictures and texts that are to point the same way, at the end of the text its largest token."""

    def __init__(self, d=16):
        super().__init__()
        self.patch, self.cls, self.vpos = (
            nn.Linear(12, d),
            nn.Parameter(torch.randn(d)),
            nn.Parameter(torch.randn(13, d)),
        )
        self.visual, self.text = ViTBlock(d), ViTBlock(d)
        self.token, self.tpos = nn.Embedding(30, d), nn.Parameter(torch.randn(6, d))
        self.vproj, self.tproj = nn.Parameter(torch.randn(d, 8)), nn.Parameter(torch.randn(d, 8))
        self.ln_v, self.ln_t, self.logit_scale = (
            nn.LayerNorm(d),
            nn.LayerNorm(d),
            nn.Parameter(torch.ones([]) * math.log(1 / 0.07)),
        )

    def encode_image(self, image):
        x = self.patch(image)
        x = torch.cat([self.cls.to(x.dtype) + torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype), x], dim=1)
        return self.ln_v(self.visual(x + self.vpos)[:, 0, :]) @ self.vproj

    def encode_text(self, text):
        x = self.ln_t(self.text(self.token(text) + self.tpos))
        return x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.tproj

    def forward(self, image, text):
        i, t = self.encode_image(image), self.encode_text(text)
        i, t = i / i.norm(dim=1, keepdim=True), t / t.norm(dim=1, keepdim=True)
        logits = self.logit_scale.exp() * i @ t.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2, logits


@case(call(floats(2, 8, 8, 3)))
class FourierOperator(nn.Module):
    """FNO: a few frequencies mixed by complex weights, a 1x1 convolution beside."""

    class Spectral(nn.Module):
        def __init__(self, c, modes):
            super().__init__()
            self.modes = modes
            self.w1, self.w2 = (nn.Parameter(torch.randn(c, c, modes, modes, 2) / c) for _ in range(2))

        def forward(self, x):
            b, c, h, w = x.shape
            m = self.modes
            ft = torch.fft.rfft2(x)
            out = torch.zeros(b, c, h, w // 2 + 1, dtype=ft.dtype, device=x.device)
            out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", ft[:, :, :m, :m], torch.view_as_complex(self.w1))
            out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", ft[:, :, -m:, :m], torch.view_as_complex(self.w2))
            return torch.fft.irfft2(out, s=(h, w))

    def __init__(self, width=16):
        super().__init__()
        self.fc0, self.fc1, self.fc2 = nn.Linear(5, width), nn.Linear(width, 64), nn.Linear(64, 1)
        self.conv, self.w = self.Spectral(width, 3), nn.Conv2d(width, width, 1)

    def forward(self, x):
        b, h, w, _ = x.shape
        gx = torch.linspace(0, 1, h, dtype=x.dtype, device=x.device).reshape(1, h, 1, 1).repeat([b, 1, w, 1])
        gy = torch.linspace(0, 1, w, dtype=x.dtype, device=x.device).reshape(1, 1, w, 1).repeat([b, h, 1, 1])
        x = self.fc0(torch.cat((x, gx, gy), dim=-1)).permute(0, 3, 1, 2)
        x = F.gelu(self.conv(x) + self.w(x)).permute(0, 2, 3, 1)
        return self.fc2(F.gelu(self.fc1(x)))
