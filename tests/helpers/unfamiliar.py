"""Small models in the manner of many code bases: each says only in its code what its forward takes."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["MODELS", "Cannot"]


class Mlp(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Patches(nn.Module):
    """Unpacks four sizes, and asserts the side of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.proj = 24, nn.Conv2d(3, 16, 8, stride=8)
        self.positions = nn.Parameter(torch.randn(1, 10, 16))
        self.first = nn.Parameter(torch.randn(1, 1, 16))
        self.mlp = Mlp(16)

    def forward(self, x):
        b, c, h, w = x.shape
        assert h == self.side and w == self.side, f"picture is {h}x{w}"
        x = self.proj(x).flatten(2).transpose(1, 2)
        return self.mlp(torch.cat([self.first.expand(b, -1, -1), x], 1) + self.positions)


class Film(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.mlp = nn.Conv3d(3, 16, (2, 4, 4), stride=(2, 4, 4)), Mlp(16)

    def forward(self, video):
        b, _, frames, h, w = video.size()
        if frames % 2 or h % 4:
            raise ValueError("frames come in pairs")
        return self.mlp(self.proj(video).flatten(2).transpose(1, 2))


class Waves(nn.Module):
    """Adds the channel itself, and halves the sound three times."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(n, 2 * n, 8, stride=4) for n in (1, 2, 4))
        self.mlp = Mlp(8)

    def forward(self, wav):
        x = wav.unsqueeze(1)
        for one in self.down:
            x = F.relu(one(x))
        return self.mlp(x.transpose(1, 2))


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mlp = nn.Conv1d(20, 16, 3, padding=1), Mlp(16)
        self.register_buffer("positions", torch.randn(12, 16))

    def forward(self, mel):
        x = self.conv(mel).permute(0, 2, 1)
        return self.mlp(x + self.positions)


class Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mlp = nn.Conv1d(3, 16, 1), Mlp(16)

    def forward(self, points):
        x = self.lift(points.transpose(2, 1))
        return self.mlp(x.max(dim=2).values)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mlp = nn.Linear(6, 16), Mlp(16)

    def forward(self, x, edge_index):
        source, target = edge_index
        x = self.lift(x)
        return self.mlp(torch.zeros_like(x).index_add(0, target, x[source]))


class Denoiser(nn.Module):
    """Latents, a time step, and a text that is optional in the signature and needed in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.text, self.mlp = nn.Conv2d(4, 16, 3, padding=1), nn.Linear(12, 16), Mlp(16)
        self.time = nn.Linear(8, 16)

    def forward(self, sample: Tensor, timestep: Tensor | float, text_states: Tensor | None = None) -> Tensor:
        t = self.time(torch.sin(timestep[:, None] * torch.arange(8, device=sample.device)).to(sample.dtype))
        x = self.into(sample).flatten(2).transpose(1, 2) + t[:, None]
        return self.mlp(x + self.text(text_states).mean(1, keepdim=True))


class Needed(nn.Module):
    """What is None fails far from the forward, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Linear(6, 16), Mlp(16)

    def forward(self, x, cond=None):
        return self.mlp(self._mixed(self.into(x), extra=cond))

    def _mixed(self, x: Tensor, extra: Tensor) -> Tensor:
        return x + extra.mean()


class Batch(nn.Module):
    """A dict, whose keys only the code names."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense, self.mlp = nn.Embedding(30, 16), nn.Linear(5, 16), Mlp(16)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.mlp(self.table(batch["item_ids"]).mean(1) + self.dense(batch["dense"]))


class Several(nn.Module):
    """A list of pictures of their own sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.mlp = nn.Conv2d(3, 16, 8, stride=8), Mlp(16)

    def forward(self, images: list[Tensor]) -> Tensor:
        rows = []
        for image in images:
            assert image.ndim == 3, "pictures come one by one"
            rows.append(self.proj(image[None]).flatten(2).mean(2))
        return self.mlp(torch.cat(rows))


class Labelled(nn.Module):
    """Ids of two tables: the smaller one bounds them. A mask that must be boolean."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.kinds, self.mlp = nn.Embedding(40, 16), nn.Embedding(4, 16), Mlp(16)
        self.classes = nn.Embedding(7, 16)

    def forward(self, tokens, kinds, class_labels, mask):
        x = self.words(tokens) + self.kinds(kinds) + self.classes(class_labels)[:, None]
        return self.mlp(x.masked_fill(~mask[..., None], 0.0))


class Series(nn.Module):
    """A fixed window of a fixed number of variables, either way round."""

    def __init__(self) -> None:
        super().__init__()
        self.along, self.mlp = nn.Linear(24, 16), Mlp(16)
        self.variables = 7

    def forward(self, x_enc):
        if x_enc.shape[2] != self.variables:
            raise ValueError(f"expected {self.variables} variables, got {x_enc.shape[2]}")
        return self.mlp(self.along(x_enc.transpose(1, 2)))


class Windows(nn.Module):
    """Another path for pictures larger than its window."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.mlp, self.far = nn.Conv2d(3, 16, 4, stride=4), Mlp(16), Mlp(16)

    def forward(self, x):
        x = self.proj(x).permute(0, 2, 3, 1)
        return self.far(self.mlp(x)) if x.shape[1] > 8 else self.mlp(x)


@dataclasses.dataclass
class Settings:
    d: int = 16


class Configured(nn.Module):
    """`.config` is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Settings()
        self.into, self.mlp = nn.Linear(6, 16), Mlp(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.into(x))


MODELS = {
    one.__name__: one
    for one in (
        Patches, Film, Waves, Spectrum, Points, Graph, Denoiser, Needed, Batch, Several, Labelled, Series, Windows,
        Configured,
    )
}  # fmt: skip


class Cannot(nn.Module):
    """No tensor will do."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 16)

    def forward(self, request):
        return self.into(request.decode("utf-8"))
