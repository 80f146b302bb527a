"""Models of tagging, memory, geometry, retrieval and speech as their repositories write them: all of them sound."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..case import call, case, floats, ids

WORDS = ids(2, 6)


@case(call(ids(2, 5, 7, below=30)))
class HighwayCharacters(nn.Module):
    """Characters of words through kernels of several widths, pooled over the word, then highway layers."""

    class Highway(nn.Module):
        def __init__(self, dim, layers):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(dim, dim * 2) for _ in range(layers)])
            for layer in self.layers:
                layer.bias.data[dim:].fill_(1)

        def forward(self, x):
            for layer in self.layers:
                proj, gate = layer(x).chunk(2, dim=-1)
                gate = torch.sigmoid(gate)
                x = gate * x + (1 - gate) * F.relu(proj)
            return x

    def __init__(self, chars=30, dim=8, filters=((1, 8), (2, 8), (3, 16)), out=16):
        super().__init__()
        self.embed = nn.Embedding(chars, dim, padding_idx=0)
        self.convs = nn.ModuleList([nn.Conv1d(dim, n, width) for width, n in filters])
        total = sum(n for _, n in filters)
        self.highway, self.proj = self.Highway(total, 2), nn.Linear(total, out)

    def forward(self, chars):
        b, t, c = chars.shape
        x = self.embed(chars.view(-1, c)).transpose(1, 2)
        pooled = [F.relu(conv(x).max(dim=-1)[0]) for conv in self.convs]
        x = self.highway(torch.cat(pooled, dim=-1))
        return self.proj(x).view(b, t, -1)


@case(call(ids(2, 5, 4), ids(2, 4, seed=2)), inputs={"story": ids(2, 5, 4), "query": ids(2, 4, seed=2)})
class EndToEndMemory(nn.Module):
    """Several hops over sentences, with adjacent weight tying and temporal tables."""

    def __init__(self, vocab=32, dim=16, hops=3, sentences=8):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(vocab, dim) for _ in range(hops + 1)])
        self.times = nn.ParameterList([nn.Parameter(torch.randn(1, sentences, dim) * 0.1) for _ in range(hops + 1)])
        self.hops = hops

    def forward(self, story, query):
        u = self.tables[0](query).sum(1)
        for hop in range(self.hops):
            m = self.tables[hop](story).sum(2) + self.times[hop][:, : story.shape[1]]
            c = self.tables[hop + 1](story).sum(2) + self.times[hop + 1][:, : story.shape[1]]
            p = torch.softmax((m * u.unsqueeze(1)).sum(-1), dim=-1)
            u = u + (p.unsqueeze(-1) * c).sum(1)
        return u @ self.tables[-1].weight.t()


@case(call(floats(2, 3, 12, 12)))
class NetVlad(nn.Module):
    """Residuals to centroids, weighted by soft assignment, normalised within clusters and as a whole."""

    def __init__(self, clusters=8, dim=16):
        super().__init__()
        self.base = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, dim, 3, padding=1))
        self.assign = nn.Conv2d(dim, clusters, 1)
        self.centroids = nn.Parameter(torch.rand(clusters, dim))
        self.reduce = nn.Linear(clusters * dim, 16)

    def forward(self, x):
        x = F.normalize(self.base(x), p=2, dim=1)
        n, c = x.shape[:2]
        soft = F.softmax(self.assign(x).view(n, self.centroids.shape[0], -1), dim=1)
        flat = x.view(n, c, -1)
        vlad = (flat.unsqueeze(1) - self.centroids[None, :, :, None]) * soft.unsqueeze(2)
        vlad = F.normalize(vlad.sum(-1), p=2, dim=2).view(n, -1)
        return self.reduce(F.normalize(vlad, p=2, dim=1))


@case(
    call(ids(2, 6, below=10), ids(2, 6, 6, below=4, seed=1), ids(2, 6, below=5, seed=2)),
    inputs={
        "atoms": ids(2, 6, below=10),
        "distance": ids(2, 6, 6, below=4, seed=1),
        "degree": ids(2, 6, below=5, seed=2),
    },
)
class Graphormer(nn.Module):
    """A transformer over nodes: biases of heads by shortest paths, tables of degrees, a virtual node."""

    class Layer(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
            self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

        def forward(self, x, bias):
            y = self.norm1(x)
            b, n, d = y.shape
            q, k, v = (layer(y).view(b, n, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
            a = q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5 + bias
            x = x + self.o((a.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d))
            return x + self.ffn(self.norm2(x))

    def __init__(self, dim=16, heads=4, layers=2):
        super().__init__()
        self.atom, self.degree, self.spatial = nn.Embedding(10, dim), nn.Embedding(5, dim), nn.Embedding(4, heads)
        self.virtual, self.virtual_bias = nn.Embedding(1, dim), nn.Embedding(1, heads)
        self.layers, self.out = nn.ModuleList([self.Layer(dim, heads) for _ in range(layers)]), nn.Linear(dim, 1)

    def forward(self, atoms, distance, degree):
        b, n = atoms.shape
        x = self.atom(atoms) + self.degree(degree)
        x = torch.cat([self.virtual.weight.unsqueeze(0).expand(b, -1, -1), x], dim=1)
        bias = x.new_zeros(b, self.spatial.embedding_dim, n + 1, n + 1)
        bias[:, :, 1:, 1:] = self.spatial(distance).permute(0, 3, 1, 2)
        t = self.virtual_bias.weight.view(1, -1, 1)
        bias[:, :, 1:, 0] = bias[:, :, 1:, 0] + t
        bias[:, :, 0, :] = bias[:, :, 0, :] + t
        for layer in self.layers:
            x = layer(x, bias)
        return self.out(x[:, 0])


@case(call(floats(6, 2, 16)))
class LightConvolution(nn.Module):
    """Depthwise kernels shared by heads, and normalised over their width; time comes first."""

    def __init__(self, dim=16, heads=4, width=3):
        super().__init__()
        self.heads, self.width = heads, width
        self.inner, self.outer = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.weight = nn.Parameter(torch.randn(heads, 1, width))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        t, b, c = x.shape
        x = F.glu(self.inner(x), dim=-1)
        weight = F.softmax(self.weight, dim=-1)
        y = x.permute(1, 2, 0).contiguous().view(-1, self.heads, t)
        y = F.conv1d(y, weight, padding=self.width // 2, groups=self.heads).view(b, c, t)
        return self.outer((y + self.bias.view(1, -1, 1)).permute(2, 0, 1))


@case(call(floats(2, 3, 16, 16)))
class CentreHeads(nn.Module):
    """Heatmaps of centres; sizes and offsets are gathered at the highest peaks."""

    def __init__(self, c=16, classes=3, k=4):
        super().__init__()
        self.k = k
        self.body = nn.Sequential(
            nn.Conv2d(3, c, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, stride=2, padding=1), nn.ReLU()
        )
        self.heads = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Conv2d(c, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, n, 1))
                for name, n in {"hm": classes, "wh": 2, "reg": 2}.items()
            }
        )

    def forward(self, image):
        x = self.body(image)
        z = {name: head(x) for name, head in self.heads.items()}
        heat = z["hm"].sigmoid()
        heat = heat * (F.max_pool2d(heat, 3, stride=1, padding=1) == heat).to(heat.dtype)
        b, c, h, w = heat.shape
        scores, index = heat.view(b, -1).topk(self.k)
        place = index % (h * w)

        def picked(feature):
            flat = feature.permute(0, 2, 3, 1).reshape(b, h * w, -1)
            return flat.gather(1, place.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))

        return {
            "scores": scores,
            "classes": index // (h * w),
            "wh": picked(z["wh"]),
            "reg": picked(z["reg"]),
            "hm": z["hm"],
        }


@case(
    call(floats(2, 7, 3), floats(2, 7, 16)), inputs={"xyz": floats(2, 7, 3), "features": floats(2, 7, 16)}, vary=False
)
class VectorAttention(nn.Module):
    """Point transformer: weights of each channel over the nearest points."""

    def __init__(self, dim=16, hidden=32, k=4):
        super().__init__()
        self.k, self.hidden = k, hidden
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.delta = nn.Sequential(nn.Linear(3, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.gamma = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.wq, self.wk, self.wv = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))

    def forward(self, xyz, features):
        dists = ((xyz[:, :, None] - xyz[:, None]) ** 2).sum(-1)
        index = dists.argsort()[:, :, : self.k]

        def near(points):
            rows = torch.arange(points.shape[0]).view(-1, 1, 1)
            return points[rows, index]

        x = self.fc1(features)
        q, k, v = self.wq(x), near(self.wk(x)), near(self.wv(x))
        pos = self.delta(xyz[:, :, None] - near(xyz))
        attn = F.softmax(self.gamma(q[:, :, None] - k + pos) / math.sqrt(self.hidden), dim=-2)
        return self.fc2(torch.einsum("bmnf,bmnf->bmf", attn, v + pos)) + features, attn


@case(call(floats(5, 16), _train=True), call(floats(5, 16)))
class GaussianProcessHead(nn.Module):
    """Random features of a residual net; the precision is summed in training and inverted in evaluation."""

    def __init__(self, dim=16, features=32, classes=3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))
        self.norm = nn.LayerNorm(dim)
        self.register_buffer("w", torch.randn(features, dim))
        self.register_buffer("b", torch.rand(features) * 2 * math.pi)
        self.register_buffer("precision", torch.eye(features))
        self.beta = nn.Linear(features, classes, bias=False)

    def forward(self, x):
        h = self.norm(x + self.net(x))
        phi = math.sqrt(2 / self.w.shape[0]) * torch.cos(F.linear(h, self.w, self.b))
        logits = self.beta(phi)
        if self.training:
            with torch.no_grad():
                self.precision.mul_(0.9).add_(phi.t() @ phi, alpha=0.1)
            return logits
        variance = (phi @ torch.linalg.inv(self.precision) * phi).sum(-1)
        return logits / torch.sqrt(1 + variance * math.pi / 8).unsqueeze(-1)


@case(
    call(floats(4, 8), torch.tensor([0, 2, 1, 2])), inputs={"obs": floats(4, 8), "option": torch.tensor([0, 2, 1, 2])}
)
class OptionCritic(nn.Module):
    """Each option has a policy of its own, picked by an index; terminations and values of options."""

    def __init__(self, options=3, actions=4):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.ReLU())
        self.q, self.terminations = nn.Linear(64, options), nn.Linear(64, options)
        self.w, self.b = (
            nn.Parameter(torch.randn(options, 64, actions) * 0.1),
            nn.Parameter(torch.zeros(options, actions)),
        )

    def forward(self, obs, option):
        state = self.features(obs)
        logits = torch.einsum("bf,bfa->ba", state, self.w[option]) + self.b[option]
        dist = torch.distributions.Categorical((logits / 0.7).softmax(-1))
        q = self.q(state)
        beta = self.terminations(state).sigmoid().gather(1, option[:, None]).squeeze(1)
        value = (1 - beta) * q.gather(1, option[:, None]).squeeze(1) + beta * q.max(-1)[0]
        return dist.logits, dist.entropy(), value


@case(call(ids(5, 4, below=10)))
class BilinearFields(nn.Module):
    """FiBiNET: fields are weighted by squeeze and excitation, and meet in pairs through bilinear maps."""

    def __init__(self, fields=4, dim=8, rows=10):
        super().__init__()
        self.embed = nn.Embedding(fields * rows, dim)
        self.register_buffer("offsets", torch.arange(fields) * rows)
        self.excite = nn.Sequential(
            nn.Linear(fields, 2, bias=False), nn.ReLU(), nn.Linear(2, fields, bias=False), nn.ReLU()
        )
        self.bilinear = nn.ModuleList([nn.Linear(dim, dim, bias=False) for _ in range(fields - 1)])
        pairs = fields * (fields - 1) // 2
        self.mlp = nn.Sequential(nn.Linear(2 * pairs * dim, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        e = self.embed(x + self.offsets)
        v = e * self.excite(e.mean(-1)).unsqueeze(-1)
        out = [self.meet(e), self.meet(v)]
        return torch.sigmoid(self.mlp(torch.cat(out, -1).flatten(1))).squeeze(-1)

    def meet(self, e):
        n = e.shape[1]
        return torch.cat([self.bilinear[i](e[:, i]) * e[:, j] for i in range(n) for j in range(i + 1, n)], -1)


@case(call(floats(3, 1, 64)))
class PredictiveCoding(nn.Module):
    """CPC: strided convolutions, a GRU, and predictions of later steps among those of the batch."""

    def __init__(self, dim=16, context=32, steps=2):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(1, dim, 8, 4, 2, bias=False),
            nn.BatchNorm1d(dim),
            nn.ReLU(),
            nn.Conv1d(dim, dim, 4, 2, 1, bias=False),
            nn.BatchNorm1d(dim),
            nn.ReLU(),
        )
        self.gru = nn.GRU(dim, context, batch_first=True)
        self.predictors = nn.ModuleList([nn.Linear(context, dim) for _ in range(steps)])

    def forward(self, wave):
        z = self.encoder(wave).transpose(1, 2)
        t = z.shape[1] - len(self.predictors) - 1
        c, _ = self.gru(z[:, : t + 1])
        nce, correct = 0, 0
        for k, predict in enumerate(self.predictors, 1):
            total = z[:, t + k] @ predict(c[:, -1]).t()
            nce = nce - F.log_softmax(total, dim=1).diag().mean()
            correct = correct + (total.softmax(0).argmax(0) == torch.arange(len(z))).sum()
        return nce / len(self.predictors), correct


@case(
    call(WORDS, torch.tensor([[3, 1, 0, 5, 2, 4], [0, 1, 2, 3, 4, 5]])),
    inputs={"words": WORDS, "order": torch.tensor([[3, 1, 0, 5, 2, 4], [0, 1, 2, 3, 4, 5]])},
    vary=False,
)
class TwoStreamQueries(nn.Module):
    """XLNet: a content stream and a query stream share weights, and see what an order of factors allows."""

    class Layer(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
            self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.ff = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))

        def attend(self, x, h, seen):
            b, n, d = x.shape
            q, k, v = (
                f(t).view(b, n, self.heads, -1).transpose(1, 2) for f, t in ((self.q, x), (self.k, h), (self.v, h))
            )
            a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
            x = self.norm(x + self.o(a.transpose(1, 2).reshape(b, n, d)))
            return self.norm2(x + self.ff(x))

        def forward(self, h, g, content, query):
            return self.attend(h, h, content), self.attend(g, h, query)

    def __init__(self, vocab=32, dim=16, heads=4):
        super().__init__()
        self.embed, self.pos, self.mask = (
            nn.Embedding(vocab, dim),
            nn.Embedding(8, dim),
            nn.Parameter(torch.randn(1, 1, dim)),
        )
        self.layers = nn.ModuleList([self.Layer(dim, heads) for _ in range(2)])
        self.bias = nn.Parameter(torch.zeros(vocab))

    def forward(self, words, order):
        b, n = words.shape
        p = self.pos(torch.arange(n))
        h, g = self.embed(words) + p, self.mask.expand(b, n, -1) + p
        content = order[:, :, None] >= order[:, None, :]
        query = (order[:, :, None] > order[:, None, :]) | torch.eye(n, dtype=torch.bool)
        for layer in self.layers:
            h, g = layer(h, g, content, query)
        return F.linear(g, self.embed.weight, self.bias)


@case(call(WORDS), call(WORDS, 0.5))
class NeighboursOfStore(nn.Module):
    """A language model interpolated with the nearest keys of a store in buffers."""

    def __init__(self, vocab=32, dim=16, entries=20, k=4):
        super().__init__()
        self.vocab, self.k = vocab, k
        self.embed, self.rnn = nn.Embedding(vocab, dim), nn.GRU(dim, 32, batch_first=True)
        self.key, self.head = nn.Linear(32, dim), nn.Linear(dim, vocab)
        self.register_buffer("keys", torch.randn(entries, dim))
        self.register_buffer("values", torch.arange(entries) % vocab)

    def forward(self, words, mix: float = 0.25):
        h = self.key(self.rnn(self.embed(words))[0])
        lm = F.log_softmax(self.head(h), -1)
        distance, index = torch.cdist(h.flatten(0, 1), self.keys).topk(self.k, largest=False)
        weights = F.softmax(-distance, -1)
        near = torch.zeros(weights.shape[0], self.vocab, dtype=h.dtype).scatter_add(1, self.values[index], weights)
        near = near.view(*words.shape, -1)
        return torch.logaddexp(lm + math.log(1 - mix), (near + 1e-10).log() + math.log(mix))


@case(call(floats(6, 16)), call(floats(6, 16), _train=True))
class SparseDictionary(nn.Module):
    """A sparse autoencoder: the largest latents of a row are kept; those long dead get a loss of their own."""

    def __init__(self, dim=16, latents=64, k=8):
        super().__init__()
        self.k = k
        self.pre_bias, self.latent_bias = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(latents))
        self.encoder, self.decoder = nn.Linear(dim, latents, bias=False), nn.Linear(latents, dim, bias=False)
        self.decoder.weight.data = self.encoder.weight.data.T.clone()
        self.register_buffer("idle", torch.zeros(latents, dtype=torch.long))

    def forward(self, x):
        pre = self.encoder(x - self.pre_bias) + self.latent_bias
        top = torch.topk(pre, self.k, dim=-1)
        z = torch.zeros_like(pre).scatter_(-1, top.indices, F.relu(top.values))
        out = self.decoder(z) + self.pre_bias
        if self.training:
            with torch.no_grad():
                self.idle.mul_((z == 0).all(0).long()).add_(1)
        dead = pre.masked_fill(self.idle < 2, 0.0)
        aux = F.mse_loss(self.decoder(dead.relu()), (x - out).detach())
        return out, z, F.mse_loss(out, x) + aux / 32


def _decoded(model, words):
    cache, handles = {}, []

    def save(module, _, output):
        cache[module] = output if module not in cache else torch.cat([cache[module], output], dim=1)
        return cache[module]

    for block in model.blocks:
        handles += [block.key.register_forward_hook(save), block.value.register_forward_hook(save)]
    try:
        with torch.no_grad():
            return torch.cat([model(words[:, i : i + 1], i) for i in range(words.shape[1])], dim=1)
    finally:
        for handle in handles:
            handle.remove()


@case(
    call(WORDS),
    call(WORDS, _do=_decoded, _grad=False),
    inputs={"usual": {"words": WORDS}, "later": {"words": WORDS[:, :1], "offset": 3}},
    allowed=("exact", "refused"),
    vary=False,
)
class CacheByHooks(nn.Module):
    """Whisper's decoder: keys and values are kept by hooks, in a dict of modules."""

    class Block(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.query, self.key, self.value, self.out = (
                nn.Linear(dim, dim),
                nn.Linear(dim, dim, bias=False),
                nn.Linear(dim, dim),
                nn.Linear(dim, dim),
            )
            self.ln, self.mlp_ln = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

        def forward(self, x, mask):
            y = self.ln(x)
            q, k, v = self.query(y), self.key(y), self.value(y)
            q, k, v = (t.view(*t.shape[:2], self.heads, -1).permute(0, 2, 1, 3) for t in (q, k, v))
            qk = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            if mask is not None and q.shape[2] > 1:
                qk = qk + mask[: q.shape[2], : q.shape[2]]
            x = x + self.out((qk.softmax(-1) @ v).permute(0, 2, 1, 3).flatten(2))
            return x + self.mlp(self.mlp_ln(x))

    def __init__(self, vocab=32, dim=16, heads=4, context=8):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, dim), nn.Parameter(torch.randn(context, dim))
        self.blocks, self.ln = nn.ModuleList([self.Block(dim, heads) for _ in range(2)]), nn.LayerNorm(dim)
        self.register_buffer("mask", torch.full((context, context), -1e9).triu_(1), persistent=False)

    def forward(self, words, offset: int = 0):
        x = self.embed(words) + self.pos[offset : offset + words.shape[-1]]
        for block in self.blocks:
            x = block(x, self.mask)
        return self.ln(x) @ self.embed.weight.T


@case(call(floats(9, 2)))
class PhysicsInformed(nn.Module):
    """The residual of a heat equation, by derivatives of the net in its inputs."""

    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )
        self.log_alpha = nn.Parameter(torch.tensor(-1.0))

    def forward(self, points):
        with torch.enable_grad():
            xt = points.detach().clone().requires_grad_(True)
            u = self.net(xt)
            du = torch.autograd.grad(u.sum(), xt, create_graph=True)[0]
            dxx = torch.autograd.grad(du[:, 0].sum(), xt, create_graph=True)[0][:, 0]
            return (du[:, 1] - self.log_alpha.exp() * dxx).pow(2).mean(), u
