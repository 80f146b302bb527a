"""Modules whose failing expression says what is wrong: columns as members, parts as split, levels as asked for."""

from __future__ import annotations

import torch
from torch import nn
from unfamiliar import Mlp

__all__ = ["EXACT"]


class Wrapped(nn.Module):
    """A forward that hands on whatever it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, return_all=False, **kwargs):
        found = self.inner(*args, **kwargs)
        return (found, found) if return_all else found


class Passes(nn.Module):
    """To a method of its own, with one argument of its choice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp = nn.Embedding(30, 16), Mlp(16)

    def run(self, tokens, scale, bias=None):
        return self.mlp(self.table(tokens)) * scale

    def forward(self, **rest):
        return self.run(scale=2.0, **rest)


class Categories(nn.Module):
    """A table for each column of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 16) for rows in (11, 5, 7))
        self.mlp = Mlp(16)

    def forward(self, graph):
        made = 0
        for i in range(graph.shape[1]):
            made = made + self.tables[i](graph[:, i])
        return self.mlp(made)


class Halves(nn.Module):
    """Queries and what is added to them lie in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Linear(24, 16), Mlp(16)

    def forward(self, memory, queries):
        memory = self.into(memory)
        position, target = torch.split(queries, memory.shape[-1], dim=1)
        return self.mlp(memory.mean((0, 1)) + position + target)


class Pyramid(nn.Module):
    """Three levels, a mask and positions of each, gone through together."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.mlp, self.points = nn.Parameter(torch.randn(3, 16)), Mlp(16), nn.Linear(16, 3)

    def forward(self, srcs, masks, pos_embeds):
        rows, ratios = [], []
        for number, (src, mask, pos) in enumerate(zip(srcs, masks, pos_embeds, strict=False)):
            batch, channels, height, width = src.shape
            src = (src + pos).flatten(2).transpose(1, 2) + self.level[number]
            _, high, wide = mask.shape
            ratios.append(mask.float().sum((1, 2)) / (high * wide))
            rows.append(src.masked_fill(~mask.flatten(1)[..., None], 0.0))
        made = self.mlp(torch.cat(rows, 1))
        return (self.points(made) * torch.stack(ratios, 1)[:, None]).sum(-1)


class Chunks(nn.Module):
    """A plain number that it divides by."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp = nn.Embedding(30, 16), Mlp(16)

    def forward(self, ids: torch.Tensor, chunk_size: int):
        made = self.table(ids)
        pieces = made.shape[1] // chunk_size + (made.shape[1] % chunk_size != 0)
        return torch.cat([self.mlp(piece) for piece in made.chunk(pieces, 1)], 1)


class Spectrum(nn.Module):
    """The width is what two strided convolutions leave of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
        self.out, self.mlp = nn.Linear(8 * 9, 16), Mlp(16)

    def forward(self, xs, ilens, prev_states=None, ctc=None):
        x = self.conv(xs.unsqueeze(1))
        batch, channels, time, bins = x.shape
        return self.mlp(self.out(x.transpose(1, 2).reshape(batch, time, channels * bins)))


class Freezes(nn.Module):
    """Freezes its own weights by what it is given; most of them read pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.see, self.mlp = nn.Embedding(30, 16), nn.Conv2d(3, 16, 8, 8), Mlp(16)

    def forward(self, text, *, images=None):
        for parameter in self.parameters():
            parameter.requires_grad = images is None
        made = self.table(text)
        return made if images is None else made + self.mlp(self.see(images).flatten(2).mean(2))[:, None]


class Coupling(nn.Module):
    """A mask that is spread over numbers of channels, and a condition that it was built without."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.mid, self.post = nn.Conv1d(8, 32, 1), nn.Conv1d(32, 32, 1), nn.Conv1d(32, 8, 1)

    def forward(self, x, x_mask, g=None):
        kept, changed = torch.split(x, [8, 8], 1)
        h = self.pre(kept) * x_mask
        if g is not None:
            h = h + self.cond_layer(g)
        return torch.cat([kept, changed + self.post(self.mid(h)) * x_mask], 1)


class Detector(nn.Module):
    """A picture whose channels are the width, with its mask and the embedding of its places, all flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.cross = nn.MultiheadAttention(24, 4), nn.MultiheadAttention(24, 4)
        self.norm, self.mlp = nn.LayerNorm(24), Mlp(24)

    def forward(self, src, mask, query_embed, pos_embed):
        batch, channels, height, width = src.shape
        src, pos, mask = src.flatten(2).permute(2, 0, 1), pos_embed.flatten(2).permute(2, 0, 1), mask.flatten(1)
        query = query_embed.unsqueeze(1).repeat(1, batch, 1)
        src = self.norm(src + self.attend(src + pos, src + pos, value=src, key_padding_mask=mask)[0])
        found = self.cross(query, src + pos, value=src, key_padding_mask=mask)[0]
        return self.mlp(found), src.permute(1, 2, 0).view(batch, channels, height, width)


class Pairs(nn.Module):
    """Edges as one value for each pair of nodes; a value for each node runs where sizes happen to be equal."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.of_edges, self.out = (nn.Linear(*s) for s in ((16, 32), (16, 64), (8, 32), (32, 16)))

    def forward(self, nodes, edges=None):
        q, k, v, e = (
            t.unflatten(-1, (4, 8)).movedim(-2, 1).flatten(0, 1)
            for t in (self.q(nodes), *self.kv(nodes).chunk(2, -1), self.of_edges(edges))
        )
        k, v = k[:, None] + e, v[:, None] + e
        scores = torch.einsum("bid,bijd->bij", q, k).softmax(-1)
        made = torch.einsum("bij,bijd->bid", scores, v).unflatten(0, (-1, 4)).movedim(1, 2).flatten(2)
        return nodes + self.out(made)


class WrappedCategories(Wrapped):
    def __init__(self) -> None:
        super().__init__(Categories())


EXACT = {
    one.__name__: one
    for one in (
        WrappedCategories,
        Passes,
        Categories,
        Halves,
        Pyramid,
        Chunks,
        Spectrum,
        Freezes,
        Coupling,
        Detector,
        Pairs,
    )
}
