"""Token by token: caches of several makings, masks by position, prefixes, sampling and search."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, joined, parted

X = floats(2, 6, 16)
Y = floats(2, 1, 16, seed=3)


class Cache:
    """Keys and values of each layer, as a plain object."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def update(self, layer, k, v):
        if layer in self.keys:
            k = torch.cat([self.keys[layer], k], 2)
            v = torch.cat([self.values[layer], v], 2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.mlp = Mlp()

    def forward(self, x, cache=None):
        for n, layer in enumerate(self.layers):
            q, k, v = (parted(f(x), layer.heads) for f in (layer.q, layer.k, layer.v))
            past = 0
            if cache is not None:
                k, v = cache.update(n, k, v)
                past = k.shape[2] - q.shape[2]
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(past)
            x = x + layer.o(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return self.mlp(x)


def with_object(model, x, y):
    cache = Cache()
    return model(x, cache), model(y, cache), model(y, cache)


CACHED = {"usual": {"x": X}, "prefill": {"x": X, "cache": Cache()}}


@case(call(X), call(X, Y, _do=with_object), call(X, Y, _do=with_object, _grad=False), allowed=HOSTILE)
class CacheObject(Decoder):
    """The plan saw no cache."""


@case(call(X), call(X, Y, _do=with_object, _grad=False), call(X, Y, _do=with_object), inputs=CACHED, allowed=HOSTILE)
class CacheObjectPlanned(Decoder):
    """The plan saw the cache filled; it goes on from what is in it."""


FILLED = Cache()
for _layer in range(2):
    FILLED.update(_layer, floats(2, 4, 6, 4, seed=_layer), floats(2, 4, 6, 4, seed=_layer + 5))
STEPS = CACHED | {"decode": {"x": Y, "cache": FILLED}}


@case(call(X), call(X, Y, _do=with_object, _grad=False), call(X, Y, _do=with_object), inputs=STEPS, allowed=HOSTILE)
class CacheObjectFilled(Decoder):
    """The plan saw an empty cache and a filled one."""


class StaticCache(Attention):
    """A cache in buffers, which is written by position."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, self.heads, 8, 4), persistent=False)
        self.register_buffer("values", torch.zeros(2, self.heads, 8, 4), persistent=False)

    def forward(self, x, start=0):
        b, t, _ = x.shape
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        with torch.no_grad():
            self.keys[:b, :, start : start + t] = k
            self.values[:b, :, start : start + t] = v
        keys, values = self.keys[:b, :, : start + t], self.values[:b, :, : start + t]
        p = torch.softmax(q @ keys.transpose(-1, -2) / 2, -1)
        return x + self.o(joined(p @ values))


def steps(model, x, y):
    return model(x), model(y, start=6), model(y, start=7)


@case(call(X, Y, _do=steps, _grad=False), call(X), allowed=HOSTILE, vary=False)
class StaticCacheInBuffers(StaticCache):
    """Values are written into buffers, and the next call reads them."""


class IndexCopied(StaticCache):
    def forward(self, x, start=0):
        b, t, _ = x.shape
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        places = torch.arange(start, start + t)
        self.keys.index_copy_(2, places, k.detach())
        self.values.index_copy_(2, places, v.detach())
        p = torch.softmax((q @ self.keys.transpose(-1, -2) / 2)[..., : start + t], -1)
        return x + self.o(joined(p @ self.values[:, :, : start + t]))


BOTH_STEPS = {"prefill": {"x": X, "start": 0}, "decode": {"x": Y, "start": 6}}


@case(call(X, Y, _do=steps, _grad=False), inputs=BOTH_STEPS, allowed=HOSTILE, vary=False)
class StaticCachePlanned(StaticCache):
    """The plan has seen a start of 0 and one of 6."""


@case(call(X, Y, _do=steps, _grad=False), allowed=HOSTILE, vary=False)
class IndexCopiedCache(IndexCopied):
    """transformers' StaticCache writes with index_copy_."""


class KeepingCache(Attention):
    """It keeps its cache as an attribute, which a method forgets."""

    cache = None

    def forget(self):
        self.cache = None

    def forward(self, x, use_cache=False):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        if use_cache:
            if self.cache is not None:
                k, v = (torch.cat([old, new], 2) for old, new in zip(self.cache, (k, v), strict=True))
            self.cache = (k, v)
        return x + self.o(joined(F.scaled_dot_product_attention(q, k, v)))


def kept(model, x, y):
    model.forget()
    out = model(x, use_cache=True), model(y, use_cache=True)
    model.forget()
    return out


@case(call(X), call(X, Y, _do=kept, _grad=False), allowed=HOSTILE)
class CacheKeptInModule(KeepingCache):
    pass


@case(
    call(X),
    call(X, Y, _do=kept, _grad=False),
    inputs={"a": {"x": X}, "b": {"x": X, "use_cache": True}},
    allowed=HOSTILE,
)
class CacheKeptPlanned(KeepingCache):
    """The plan has seen the flag."""


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(32, 16), Attention(), nn.Linear(16, 32, bias=False)

    def forward(self, input_ids):
        return self.head(self.block(self.table(input_ids)))

    def greedy(self, input_ids, count):
        for _ in range(count):
            input_ids = torch.cat([input_ids, self(input_ids)[:, -1].argmax(-1, keepdim=True)], 1)
        return input_ids

    def sample(self, input_ids, count, k=5):
        for _ in range(count):
            z = self(input_ids)[:, -1]
            best, which = z.topk(k)
            drawn = torch.multinomial(best.softmax(-1), 1)
            input_ids = torch.cat([input_ids, which.gather(1, drawn)], 1)
        return input_ids

    def beams(self, input_ids, count, width=3):
        b = input_ids.shape[0]
        rows = input_ids.repeat_interleave(width, 0)
        score = torch.zeros(b, width).index_fill(1, torch.arange(1, width), -1e9)
        for _ in range(count):
            step = self(rows)[:, -1].log_softmax(-1)
            whole = (score.view(-1, 1) + step).view(b, -1)
            score, best = whole.topk(width)
            parent = best // 32 + torch.arange(b)[:, None] * width
            rows = torch.cat([rows[parent.view(-1)], (best % 32).view(-1, 1)], 1)
        return rows, score


@case(call(ids(2, 6)), call(ids(2, 6), 4, _do=lambda m, x, n: m.greedy(x, n), _grad=False))
class Greedy(Lm):
    pass


@case(call(ids(2, 6)), call(ids(2, 6), 4, _do=lambda m, x, n: m.sample(x, n), _grad=False))
class SampledTopK(Lm):
    pass


@case(call(ids(2, 6)), call(ids(2, 6), 4, _do=lambda m, x, n: m.beams(x, n), _grad=False))
class BeamSearch(Lm):
    pass


@case(
    call(ids(2, 6)), call(ids(2, 6), _do=lambda m, x: m(x)[:, -1].softmax(-1).cumsum(-1).gt(0.5).float(), _grad=False)
)
class NucleusOutside(Lm):
    """Top-p is made of the logits outside of the model."""


@case(call(X))
class PrefixTuned(Attention):
    """Learned keys and values stand before those of the sequence."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, self.heads, 3, 4))

    def mixed(self, x):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        extra = self.prefix[:, None].expand(-1, x.shape[0], -1, -1, -1)
        return joined(F.scaled_dot_product_attention(q, torch.cat([extra[0], k], 2), torch.cat([extra[1], v], 2)))


@case(call(X), sequence=None)
class AppendedZeroKey(Attention):
    """A key and value of zeros is appended (add_zero_attn), and a learned bias key."""

    def __init__(self):
        super().__init__()
        self.bias_k, self.bias_v = nn.Parameter(torch.randn(1, 1, 16)), nn.Parameter(torch.randn(1, 1, 16))

    def mixed(self, x):
        b = x.shape[0]
        k = torch.cat([self.k(x), self.bias_k.expand(b, -1, -1), x.new_zeros(b, 1, 16)], 1)
        v = torch.cat([self.v(x), self.bias_v.expand(b, -1, -1), x.new_zeros(b, 1, 16)], 1)
        q, k, v = parted(self.q(x), self.heads), parted(k, self.heads), parted(v, self.heads)
        return joined(F.scaled_dot_product_attention(q, k, v))


@case(call(X, torch.arange(6).expand(2, 6)), call(X, torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)))
class PackedByPositions(Attention):
    """Positions that begin again part documents; rotary by position."""

    def forward(self, x, position_ids):
        q, k, v = (parted(f(x), self.heads) for f in (self.q, self.k, self.v))
        angle = position_ids[:, None, :, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        cos, sin = (torch.cat([f, f], -1) for f in (angle.cos(), angle.sin()))
        turn = lambda t: torch.cat([-t[..., 2:], t[..., :2]], -1)  # noqa: E731
        q, k = q * cos + turn(q) * sin, k * cos + turn(k) * sin
        document = (position_ids == 0).cumsum(-1)
        mask = (document[:, :, None] == document[:, None]) & torch.ones(6, 6).bool().tril()
        return x + self.o(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])))


@case(call(X, floats(2, 4, 6, 6)), inputs={"x": X, "bias": floats(2, 4, 6, 6)})
class BiasOfEachHeadGiven(Attention):
    """The caller gives a bias for each head."""

    def forward(self, x, bias):
        p = torch.softmax(self.scores(x) + bias, -1)
        return x + self.o(joined(p @ parted(self.v(x), self.heads)))


@case(
    call(X, torch.ones(4)),
    call(X, torch.tensor([1.0, 0, 1, 1])),
    inputs={"x": X, "head_mask": torch.ones(4)},
    tp=(2, 4),
)
class HeadMaskGiven(Attention):
    def forward(self, x, head_mask):
        p = torch.softmax(self.scores(x), -1) * head_mask.view(1, -1, 1, 1)
        return x + self.o(joined(p @ parted(self.v(x), self.heads)))


@case(call(X), allowed=HOSTILE)
class PrunedHeads(Attention):
    """Heads whose probabilities are flat are zeroed, by a number of the data."""

    def mixed(self, x):
        p = torch.softmax(self.scores(x), -1)
        sharp = p.amax(-1).mean((0, 2))
        p = p * (sharp >= sharp.median())[None, :, None, None]
        return joined(p @ parted(self.v(x), self.heads))
