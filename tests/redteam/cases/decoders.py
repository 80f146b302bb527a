"""Models whose code around the blocks differs, as repositories write them, over context parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids

IDS = ids(2, 12, below=30)
LABELS = IDS.clone()
LABELS[0, :3] = -100
PAD = torch.ones(2, 12, dtype=torch.bool)
PAD[1, 9:] = False
D, H = 16, 4
LONG = {"tp": (), "cp": 2}


def heads(x, n=H):
    return x.view(*x.shape[:2], n, -1).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x, mask=None, rope=None):
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        if rope is not None:
            cos, sin = rope
            q, k = (t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, 32), nn.Linear(32, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2, self.attn, self.mlp = nn.LayerNorm(D), nn.LayerNorm(D), Attention(), Mlp()

    def forward(self, x, **kw):
        x = x + self.attn(self.n1(x), **kw)
        return x + self.mlp(self.n2(x))


class Base(nn.Module):
    block = Block
    depth = 2

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(30, D), nn.Embedding(64, D)
        self.layers = nn.ModuleList(self.block() for _ in range(self.depth))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 30, bias=False)

    def start(self, input_ids):
        return self.embed(input_ids) + self.place(torch.arange(input_ids.shape[1], device=input_ids.device))

    def run(self, x, **kw):
        for layer in self.layers:
            x = layer(x, **kw)
        return x

    def forward(self, input_ids):
        return self.head(self.norm(self.run(self.start(input_ids))))


@case(call(IDS), **LONG)
class OneBlockLooped(Base):
    """A universal transformer: the same blocks several times, with a step embedding."""

    def __init__(self):
        super().__init__()
        self.step = nn.Embedding(3, D)

    def forward(self, input_ids):
        x = self.start(input_ids)
        for n in range(3):
            x = self.run(x + self.step.weight[n])
        return self.head(self.norm(x))


@case(call(IDS), **LONG)
class HyperConnections(Base):
    """Two residual streams, read and written by learned weights."""

    class block(nn.Module):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.n, self.attn, self.n2, self.mlp = nn.LayerNorm(D), Attention(), nn.LayerNorm(D), Mlp()
            self.read, self.write = nn.Parameter(torch.rand(2, 2)), nn.Parameter(torch.rand(2, 2))

        def forward(self, s):
            y = self.attn(self.n(torch.einsum("n,nbtd->btd", self.read[0], s)))
            s = s + self.write[0][:, None, None, None] * y
            y = self.mlp(self.n2(torch.einsum("n,nbtd->btd", self.read[1], s)))
            return s + self.write[1][:, None, None, None] * y

    def forward(self, input_ids):
        s = torch.stack([self.start(input_ids)] * 2)
        return self.head(self.norm(self.run(s).sum(0)))


class Experts(nn.Module):
    capacity = None

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(D, 4), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x):
        flat = x.reshape(-1, D)
        w, pick = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            at = torch.nonzero(pick == number).flatten()
            at = at[: self.capacity] if self.capacity else at
            out = out.index_add(0, at, expert(flat[at]) * w[at, None])
        return out.view_as(x)


class Dropping(Experts):
    capacity = 4


class ExpertBlock(Block):
    kind = Experts

    def __init__(self):
        super().__init__()
        self.mlp = self.kind()


class DroppingBlock(ExpertBlock):
    kind = Dropping


@case(call(IDS), **LONG)
class CapacityDecoder(Base):
    """Tokens beyond an expert's capacity are dropped, in the order of the sequence."""

    block = DroppingBlock


@case(call(IDS), call(IDS, LABELS, _train=True), **LONG)
class BalancedExperts(Base):
    """A load-balancing loss over all tokens is added to the other."""

    class block(ExpertBlock):  # noqa: N801
        def forward(self, x):
            x = x + self.attn(self.n1(x))
            h = self.n2(x)
            p = self.mlp.router(h).softmax(-1)
            share = F.one_hot(p.argmax(-1), 4).to(p.dtype).mean((0, 1))
            return x + self.mlp(h), 4 * (share * p.mean((0, 1))).sum()

    def forward(self, input_ids, labels=None):
        x, aux = self.start(input_ids), 0.0
        for layer in self.layers:
            x, more = layer(x)
            aux = aux + more
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, 30), labels[:, 1:].reshape(-1)) + 0.01 * aux


@case(call(IDS), call(IDS, LABELS, _train=True), **LONG)
class TwoTokensAhead(Base):
    """A second head reads the next token's embedding beside the state."""

    def __init__(self):
        super().__init__()
        self.join, self.more = nn.Linear(2 * D, D), Block()

    def forward(self, input_ids, labels=None):
        x = self.run(self.start(input_ids))
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        h = self.more(self.join(torch.cat([x[:, :-1], self.embed(input_ids[:, 1:])], -1)))
        second = self.head(self.norm(h))
        one = F.cross_entropy(logits[:, :-1].reshape(-1, 30), labels[:, 1:].reshape(-1))
        return one + 0.3 * F.cross_entropy(second[:, :-1].reshape(-1, 30), labels[:, 2:].reshape(-1))


@case(call(IDS), **LONG)
class SoftPrompt(Base):
    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(3, D))

    def forward(self, input_ids):
        x = torch.cat([self.prompt.expand(input_ids.shape[0], -1, -1), self.start(input_ids)], 1)
        return self.head(self.norm(self.run(x)))[:, 3:]


@case(call(IDS), call(IDS, LABELS, _train=True), **LONG)
class SoftCapped(Base):
    def forward(self, input_ids, labels=None):
        logits = 5 * torch.tanh(super().forward(input_ids) / 5)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
        return loss + 1e-2 * logits.logsumexp(-1).pow(2).mean()


@case(call(IDS), call(IDS, LABELS, _train=True), **LONG)
class ChunkedLoss(Base):
    """Logits are made and forgotten for a few positions at a time."""

    def forward(self, input_ids, labels=None):
        h = self.norm(self.run(self.start(input_ids)))
        if labels is None:
            return self.head(h)
        h, labels, total = h[:, :-1].reshape(-1, D), labels[:, 1:].reshape(-1), 0.0
        for part, wanted in zip(h.split(8), labels.split(8), strict=True):
            total = total + F.cross_entropy(self.head(part), wanted, reduction="sum")
        return total / (labels != -100).sum()


@case(call(IDS), **LONG)
class AllStates(Base):
    @dataclass
    class Output:
        logits: Any = None
        states: Any = None

    def forward(self, input_ids):
        x = self.start(input_ids)
        states = [x]
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return self.Output(self.head(self.norm(x)), tuple(states))


@case(call(IDS, PAD), inputs={"input_ids": IDS, "attention_mask": PAD}, **LONG)
class LastToken(Base):
    """A reward from the last token that is not padding."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(D, 1)

    def forward(self, input_ids, attention_mask):
        h = self.norm(self.run(self.start(input_ids)))
        last = attention_mask.sum(-1) - 1
        return self.score(h[torch.arange(h.shape[0], device=h.device), last])


@case(call(IDS, PAD), inputs={"input_ids": IDS, "attention_mask": PAD}, **LONG)
class MeanPooled(Base):
    """An embedding: states are averaged over tokens, and normalised."""

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[:, None, None, :].expand(-1, 1, input_ids.shape[1], -1)
        h = self.norm(self.run(self.start(input_ids), mask=mask))
        m = attention_mask[..., None].to(h.dtype)
        return F.normalize((h * m).sum(1) / m.sum(1), dim=-1)


@case(call(IDS, ids(2, 7, below=30, seed=3)), **LONG)
class CrossAttending(Base):
    """An encoder and a decoder of their own lengths."""

    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.n3, self.q, self.kv, self.o = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

        def forward(self, x, other):
            x = x + self.attn(self.n1(x))
            k, v = (heads(part) for part in self.kv(other).chunk(2, -1))
            y = F.scaled_dot_product_attention(heads(self.q(self.n3(x))), k, v)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            return x + self.mlp(self.n2(x))

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(2))

    def forward(self, input_ids, decoder_ids):
        other = self.start(input_ids)
        mask = torch.ones(other.shape[1], other.shape[1], dtype=torch.bool, device=other.device)
        for layer in self.encoder:
            other = layer(other, mask=mask)
        x = self.start(decoder_ids)
        for layer in self.layers:
            x = layer(x, other)
        return self.head(self.norm(x))


@case(call(floats(2, 12, 4), floats(2, seed=2)), **LONG)
class Denoiser(Base):
    """Diffusion over a sequence: each block is modulated by the time."""

    class block(Block):  # noqa: N801
        def __init__(self):
            super().__init__()
            self.ada = nn.Linear(D, 4 * D)

        def forward(self, x, c, mask):
            a, b, g, h = self.ada(F.silu(c))[:, None].chunk(4, -1)
            x = x + g * self.attn(self.n1(x) * (1 + a) + b, mask=mask)
            return x + h * self.mlp(self.n2(x))

    def __init__(self):
        super().__init__()
        self.inp, self.out, self.time = nn.Linear(4, D), nn.Linear(D, 4), nn.Linear(8, D)

    def forward(self, x, t):
        f = t[:, None] * torch.arange(1, 5, dtype=t.dtype, device=t.device)
        c = self.time(torch.cat([f.cos(), f.sin()], -1))
        h = self.inp(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        for layer in self.layers:
            h = layer(h, c, mask)
        return self.out(self.norm(h))


class Before(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(D), inner

    def forward(self, x):
        return self.inner(self.norm(x))


@case(call(IDS), **LONG)
class PairsInLists(nn.Module):
    """Residuals are added by the module around the pairs of layers, which are a list each."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleList([Before(Attention()), Before(Mlp())]) for _ in range(2))

        def forward(self, x):
            for attention, mlp in self.layers:
                x = attention(x) + x
                x = mlp(x) + x
            return x

    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(30, D), self.Layers(), nn.Linear(D, 30)

    def forward(self, input_ids):
        return self.head(self.layers(self.embed(input_ids)))


@case(call(IDS), **LONG)
class ListsSideBySide(nn.Module):
    """The model itself adds the residuals, of layers in two lists."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(30, D), nn.Linear(D, 30)
        self.attentions = nn.ModuleList(Before(Attention()) for _ in range(2))
        self.mlps = nn.ModuleList(Before(Mlp()) for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for attention, mlp in zip(self.attentions, self.mlps, strict=True):
            x = x + attention(x)
            x = x + mlp(x)
        return self.head(x)
