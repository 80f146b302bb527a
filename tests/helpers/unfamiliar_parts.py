"""Modules whose forward takes containers, or sizes that only a whole chain of ops tells. Beside unfamiliar_calls.py,
which holds calls of several arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unfamiliar import Mlp

__all__ = ["PARTS"]


class Rays(nn.Module):
    """Two arguments of one width, told by a view of what both make."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Linear(9 + 3, 16), Mlp(16)

    def forward(self, rays_o, rays_d, samples=4):
        at = torch.linspace(1, 2, samples)
        points = rays_o[..., None, :] + rays_d[..., None, :] * at[:, None]
        seen = (rays_d / rays_d.norm(dim=-1, keepdim=True))[:, None].expand(points.shape)
        flat = points.reshape(-1, points.shape[-1])
        around = torch.cat([flat, flat.sin(), flat.cos()], -1)
        encoded = torch.cat([around, seen.reshape(-1, 3)], -1)
        return self.mlp(self.into(encoded))


class Asserted(nn.Module):
    """A dict of dicts; the outer keys are asserted, the inner ones read."""

    needed = ["left", "right"]

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Linear(6, 16), Mlp(16)

    def forward(self, data: dict) -> Tensor:
        for key in self.needed:
            assert key in data, f"missing {key}"
        left, right = data["left"], data["right"]
        tokens = torch.cat([left["features"], right["features"]], 1)
        return self.mlp(self.into(tokens)) * left["weights"].mean()


class InATuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.y, self.mlp = nn.Linear(6, 16), nn.Linear(1, 16), Mlp(16)

    def forward(self, src):
        assert isinstance(src, tuple), "give (x, y)"
        x, y = src
        return self.mlp(self.x(x) + self.y(y.unsqueeze(-1) if y.dim() < x.dim() else y))


class Variables(nn.Module):
    """A list of names, looked up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.places = {"wind": 0, "heat": 1, "rain": 2}
        self.table, self.into, self.mlp = nn.Parameter(torch.randn(3, 16)), nn.Linear(1, 16), Mlp(16)

    def forward(self, x, variables):
        rows = torch.tensor([self.places[name] for name in variables])
        return self.mlp(self.into(x[:, :, None]).mean(1, keepdim=True) + self.table[rows])


class Squares(nn.Module):
    """So many positions that each with each fill a table; more would take memory by the square."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.words, self.mlp = nn.Parameter(torch.randn(33)), nn.Embedding(50, 16), Mlp(16)

    def forward(self, ids, timestamps):
        apart = (timestamps[:, 1:, None] - timestamps[:, None, :-1]).abs().clamp(0, 32).long()
        bias = self.bias.index_select(0, apart.view(-1)).view(ids.shape[0], 20, 20)
        return self.mlp(bias.softmax(-1) @ self.words(ids[:, :20]))


class WithTargets(nn.Module):
    """It returns logits, or the loss: the head is a call of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(40, 16), Mlp(16)

    def forward(self, ids, labels=None):
        logits = F.linear(self.mlp(self.words(ids)), self.words.weight)
        if labels is None:
            return logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, 40), labels[:, 1:].reshape(-1))


class Chosen(nn.Module):
    """As many choices as there are examples in a batch: only another batch tells what the labels are."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp, self.choose = nn.Linear(12, 16), Mlp(16), nn.Linear(16, 2)

    def forward(self, x, label=None):
        likely = self.choose(self.mlp(self.into(x)).mean(1)).log_softmax(-1)
        return likely if label is None else -(likely * label).mean()


class Acts(nn.Module):
    """A recurrent actor: a pair of states as annotated, and the actions of which it says how likely they are."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.lstm, self.actor = nn.Linear(12, 16), nn.LSTM(16, 16), nn.Linear(16, 6)
        self.mlp = Mlp(16)

    def forward(self, x, lstm_state: tuple[torch.Tensor, torch.Tensor], action):
        now = self.into(x.view(len(x), 12)).unsqueeze(0)
        hidden = self.mlp(self.lstm(now, lstm_state)[0].squeeze(0))
        return torch.distributions.Categorical(logits=self.actor(hidden), validate_args=True).log_prob(action)


class InRange(nn.Module):
    """A picture whose numbers are looked at before anything else is; each channel comes twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.mlp = nn.BatchNorm2d(3), nn.Conv2d(6, 16, 3, padding=1), Mlp(16)

    def forward(self, x):
        if x.min() < 0 or x.max() > 1:
            raise ValueError(f"x is to be in [0, 1], not between {x.min()} and {x.max()}")
        x = self.norm((x * 255 + 0.5) / 256)
        return self.mlp(self.into(torch.cat([x, -x], 1)).permute(0, 2, 3, 1)).mean(x.dim() - 2)


class Forecast(nn.Module):
    """Five series that are joined: none of them alone tells that all are sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp, self.at = nn.Linear(40, 16), Mlp(16), nn.Parameter(torch.randn(12, 16))

    def forward(self, speed, heading, height, wind, heat):
        return self.mlp(self.into(torch.cat([speed, heading, height, wind, heat], -1)) + self.at)


class Depth(nn.Module):
    """A number above 0, asked for in one line."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.layers = nn.Linear(6, 16), nn.ModuleList(Mlp(16) for _ in range(3))

    def forward(self, x, depth: int):
        if not 0 < depth <= len(self.layers): raise ValueError("no such depth")  # noqa: E701  # fmt: skip
        x = self.into(x)
        for layer in self.layers[:depth]:
            x = layer(x)
        return x


class Besides(nn.Module):
    """Two lists iterated beside a list of modules, as DLRM is given its tables' offsets and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 16, mode="sum") for rows in (50, 40, 30))
        self.bottom, self.top = nn.Linear(13, 16), nn.Linear(64, 1)

    def forward(self, dense_x, offsets, indices):
        bags = [table(ids, at) for table, ids, at in zip(self.tables, indices, offsets, strict=False)]
        return self.top(torch.cat([self.bottom(dense_x), *bags], 1))


class Rows(nn.Module):
    """A row of ids for each of a list of modules, asked for by its number."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(50, 16) for _ in range(4))
        self.bottom, self.top = nn.Linear(13, 16), nn.Linear(80, 1)

    def forward(self, dense, sparse):
        looked_up = [table(sparse[i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat([self.bottom(dense), *looked_up], 1))


class Pictures(nn.Module):
    """Pictures in a list, each without a batch: three maps without channels would pass for one picture."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Conv2d(3, 16, 4, 4), Mlp(16)

    def forward(self, images: list[Tensor]):
        return self.mlp(self.into(torch.stack(images)).flatten(2).transpose(1, 2))


class Cells(nn.Module):
    """A cell's pair of states, and masks that reset them."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.out = nn.Linear(12, 64), nn.LSTMCell(64, 64), nn.Linear(64, 4)

    def forward(self, obs, state, masks):
        h, c = state
        h, c = self.cell(torch.tanh(self.into(obs)), (h * masks, c * masks))
        return self.out(h), (h, c)


class Skips(nn.Module):
    """The second half of a U-Net: each skip has its own channels and side."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.convs = nn.ModuleList([nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)])

    def forward(self, x, skips):
        for up, conv, skip in zip(self.ups, self.convs, skips, strict=False):
            x = F.relu(conv(torch.cat([up(x), skip], 1)))
        return x


class Levels(nn.Module):
    """As many maps as it has convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(channels, 16, 1) for channels in (8, 16, 24))

    def forward(self, inputs):
        assert len(inputs) == len(self.convs)
        return [conv(x) for conv, x in zip(self.convs, inputs, strict=True)]


PARTS = {
    one.__name__: one
    for one in (
        Rays, Asserted, InATuple, Variables, Squares, WithTargets, Chosen, Acts, InRange, Forecast, Depth, Besides,
        Rows, Pictures, Cells, Skips, Levels,
    )
}  # fmt: skip
