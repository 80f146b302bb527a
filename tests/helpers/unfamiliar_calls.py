"""Small models whose arguments hang together: records, sequences to unpack, positions, borders, masks alike."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from unfamiliar import Mlp

__all__ = ["CALLS"]


class Unpacked(nn.Module):
    """Everything comes in one argument, and Python parts it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mel, self.mlp = nn.Embedding(30, 16), nn.Linear(12, 16), Mlp(16)

    def forward(self, inputs):
        text, text_lengths, mels, max_len = inputs
        hidden = torch.arange(0, max_len).unsqueeze(0) < text_lengths[:, None]
        x = self.words(text) * hidden[..., None]
        return self.mlp(x.mean(1, keepdim=True) + self.mel(mels))


@dataclasses.dataclass
class GraphBatch:
    x: Tensor
    edge_index: Tensor
    weights: Tensor | None = None


class Recorded(nn.Module):
    """A dataclass comes in, and one of its fields may not be left out after all; another goes out."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.mlp = nn.Linear(6, 16), Mlp(16)

    def forward(self, data: GraphBatch) -> GraphBatch:
        (source, target), x = data.edge_index, self.lift(data.x)
        x = torch.zeros_like(x).index_add(0, target, x[source] * data.weights[:, None])
        return GraphBatch(self.mlp(x), data.edge_index)


class Attributes(nn.Module):
    """Something with attributes, of no class that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(30, 16), Mlp(16)

    def forward(self, batch):
        return self.mlp(self.words(batch.input_ids) * batch.scale.reshape(-1, 1, 1))


class Axes(nn.Module):
    """Streams with positions of their own, in several axes: two arguments change together."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in, self.mlp = nn.Linear(8, 16), nn.Linear(12, 16), Mlp(16)

    def forward(self, img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor, guidance: Tensor | None = None):
        if img.ndim != 3 or txt.ndim != 3:
            raise ValueError("img and txt must have 3 dimensions")
        if guidance is None:
            raise ValueError("Didn't get guidance strength")
        ids = torch.cat((txt_ids, img_ids), dim=1)
        at = torch.stack([ids[..., axis].cos() for axis in range(ids.shape[-1])], -1).sum(-1)
        x = torch.cat((self.txt_in(txt), self.img_in(img)), 1) * at[..., None]
        return self.mlp(x * guidance[:, None, None])


class Packed(nn.Module):
    """Sequences in one row, and where each begins."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(30, 16), Mlp(16)

    def forward(self, input_ids, cu_seqlens):
        assert input_ids.dim() == 1, "packed ids have one dim"
        assert cu_seqlens[-1].item() == input_ids.shape[0], "they end at the number of tokens"
        x = self.words(input_ids)
        rows = zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
        return self.mlp(torch.cat([x[a:b].cumsum(0) for a, b in rows]))


class Listed(nn.Module):
    """The same, with their lengths as plain numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(30, 16), Mlp(16)

    def forward(self, input_ids: Tensor, seqlens: list[int]) -> Tensor:
        (tokens,) = input_ids.shape
        assert sum(seqlens) == tokens, (sum(seqlens), tokens)
        return self.mlp(torch.cat([part.cumsum(0) for part in self.words(input_ids).split(seqlens)]))


class Cached(nn.Module):
    """Positions may be left out in the signature; without them the cache has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(30, 16), Mlp(16)
        self.register_buffer("table", torch.randn(24, 16))

    def forward(self, idx: Tensor, input_pos: Tensor | None = None) -> Tensor:
        x = self.words(idx)
        return self.mlp(x + self.table[input_pos].view(1, x.size(1), 16))


class Beside(nn.Module):
    """Patches and words share one table of positions: the side and the length must both be right."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.text, self.mlp = nn.Conv2d(3, 16, 4, stride=4), nn.Linear(12, 16), Mlp(16)
        self.positions = nn.Parameter(torch.randn(1, 16 + 7, 16))

    def forward(self, x, context):
        x = torch.cat([self.text(context), self.proj(x).flatten(2).transpose(1, 2)], 1)
        return self.mlp(x + self.positions)


class Strided(nn.Module):
    """A fixed side, seen through strides only."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(4, 8, 8, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 4, stride=2), nn.Flatten())
        self.into, self.mlp = nn.Linear(8 * 9 * 9, 16), Mlp(16)

    def forward(self, x):
        return self.mlp(self.into(self.convs(x)))


class Halves(nn.Module):
    """One argument is the join of two."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.views, self.mlp = nn.Linear(20, 16), nn.Linear(7, 16), Mlp(16)

    def forward(self, x):
        points, views = torch.split(x, [20, 7], dim=-1)
        return self.mlp(self.points(points) + self.views(views))


class Neighbours(nn.Module):
    """Points get a dim on the way to the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mlp = nn.Conv2d(6, 16, 1), Mlp(16)

    def forward(self, x):
        at = x.transpose(2, 1).unsqueeze(2) - x.transpose(2, 1).unsqueeze(1)
        near = torch.cat([at, x.transpose(2, 1).unsqueeze(2).expand_as(at)], -1)
        return self.mlp(self.conv(near.permute(0, 3, 1, 2)).max(-1)[0].transpose(1, 2))


class Masked(nn.Module):
    """Masks are numbers, for all of them or none."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(30, 16), Mlp(16)

    def forward(self, src, tgt, src_mask, tgt_mask):
        scores = self.words(src) @ self.words(tgt).transpose(1, 2) + 1e4 * (src_mask - 1)[..., None]
        scores = scores + 1e4 * (tgt_mask - 1)[:, None]
        return self.mlp(scores.softmax(-1) @ self.words(tgt))


class Modalities(nn.Module):
    """A dict that is gone through."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ModuleDict({"audio": nn.Linear(12, 16), "text": nn.Embedding(30, 16)})
        self.mlp = Mlp(16)

    def forward(self, inputs):
        return {key: F.normalize(self.mlp(self.into[key](value).mean(1)), dim=-1) for key, value in inputs.items()}


class Continued(nn.Module):
    """A recurrent layer that is given where it stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm, self.mlp = nn.Embedding(30, 16), nn.LSTM(16, 16, 2), Mlp(16)

    def forward(self, idx, hidden, cell):
        x, (hidden, cell) = self.lstm(self.words(idx), (hidden, cell))
        return self.mlp(x), hidden, cell


class Keywords(nn.Module):
    """Only its own code says what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp = nn.Embedding(30, 16), Mlp(16)

    def forward(self, **kwargs):
        x = self.words(kwargs["input_ids"])
        if kwargs.get("attention_mask") is not None:
            x = x * kwargs["attention_mask"][..., None]
        out = {"logits": self.mlp(x)}
        if "labels" in kwargs:
            out["loss"] = F.cross_entropy(out["logits"].flatten(0, 1), kwargs["labels"].flatten())
        return out


class Joined(nn.Module):
    """Two widths of which only the sum is known, and pairs of positions beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.pairs, self.mlp = nn.LayerNorm(52), nn.Linear(52, 16), nn.Linear(12, 4), Mlp(16)

    def forward(self, s_inputs, s_trunk, z_trunk, feats):
        x = self.into(self.norm(torch.cat((s_trunk, s_inputs), dim=-1)))
        scores = torch.einsum("bihd,bjhd->bhij", x.unflatten(-1, (4, 4)), x.unflatten(-1, (4, 4)))
        scores = scores + self.pairs(z_trunk).permute(0, 3, 1, 2) - 1e6 * (1 - feats["pad_mask"][:, None, None].float())
        return self.mlp(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), x.unflatten(-1, (4, 4))).flatten(2))


class Added(nn.Module):
    """What comes in is added to what the model makes of something else, channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Conv1d(3, 16, 1), Mlp(16)

    def forward(self, data):
        points = torch.cat([data["keypoints"].transpose(1, 2), data["scores"].unsqueeze(1)], dim=1)
        return self.mlp((data["given"] + self.into(points)).transpose(1, 2))


class Targets(nn.Module):
    """One row of tokens, and a target for each."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mlp, self.head = nn.Embedding(30, 16), Mlp(16), nn.Linear(16, 32)

    def forward(self, input_seq, target_seq):
        assert input_seq.ndim == 1
        return F.cross_entropy(self.head(self.mlp(self.words(input_seq))), target_seq)


class Cameras(nn.Module):
    """A list of pictures, and what goes with each."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Conv2d(3, 16, 8, 8), Mlp(16)

    def forward(self, images, img_masks, state):
        parts = []
        for image, mask in zip(images, img_masks, strict=True):
            x = self.into(image).flatten(2).transpose(1, 2)
            parts.append(x * mask[:, None].expand(x.shape[:2])[..., None])
        return self.mlp(torch.cat([*parts, state[:, None]], 1))


class Padded(nn.Module):
    """Sequences are filled up to lengths that the model and the caller say."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.text, self.mlp = nn.Conv2d(4, 16, 4, 4), nn.Linear(12, 16), Mlp(16)

    def forward(self, x, context, seq_len):
        x = [self.into(one.unsqueeze(0)).flatten(2).transpose(1, 2) for one in x]
        lengths = torch.tensor([one.size(1) for one in x])
        assert lengths.max() <= seq_len
        x = torch.cat([torch.cat([u, u.new_zeros(1, seq_len - u.size(1), 16)], 1) for u in x])
        context = torch.stack([torch.cat([u, u.new_zeros(9 - u.size(0), u.size(1))]) for u in context])
        return self.mlp(torch.cat([x, self.text(context)], 1))


class Rotated(nn.Module):
    """Several arguments that may be left out in the signature, and are needed: one is a table, one a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.text, self.pooled, self.mlp = nn.Linear(8, 16), nn.Linear(20, 16), nn.Linear(12, 16), Mlp(16)

    def forward(self, x, t, text_states=None, text_states_2=None, cos=None, sin=None, guidance=None):
        vector = t[:, None].cos() * torch.ones(16) + self.pooled(text_states_2)
        x, text = self.into(x).unflatten(-1, (4, 4)), self.text(text_states)
        table, other = (f.view(1, f.shape[0], 1, f.shape[1]) for f in (cos, sin))
        x = (x * table + x.flip(-1) * other).flatten(2)
        return self.mlp(torch.cat([x, text], 1) * vector[:, None])


class Atoms(nn.Module):
    """A dict of a graph: what comes after the edges is of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.radial, self.mlp = nn.Linear(5, 16), nn.Linear(1, 16), Mlp(16)
        self.register_buffer("energies", torch.randn(5))

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        base = torch.matmul(data["node_attrs"], self.energies)
        sender, receiver = data["edge_index"]
        edges = data["positions"][receiver] - data["positions"][sender] + data["shifts"]
        x = self.into(data["node_attrs"])
        messages = torch.einsum("ec,ec->ec", x[sender], self.radial(edges.norm(dim=-1, keepdim=True)))
        x = torch.zeros_like(x).index_add(0, receiver, messages)
        return {"energy": self.mlp(x) + base[:, None]}


class Codebook(nn.Module):
    """A number, named like a tensor of integers, that chooses how many codes of another argument are read."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.table, self.mlp = 4, nn.Embedding(30, 16), Mlp(16)

    def forward(self, codes_idx, idx):
        batch, length, codes = idx.size()
        assert codes_idx > 0, "nothing comes before it"
        assert codes == self.codes, (batch, length, codes)
        parts = torch.stack([self.table(idx[:, :, n]) for n in range(codes)], -1)
        return self.mlp(parts[..., : codes_idx + 1].sum(-1))


class Backbone(nn.Module):
    """Four atoms of three coordinates each: the number of atoms is the largest index."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mlp = nn.Linear(12, 16), Mlp(16)

    def forward(self, X, residue_idx, mask):
        b, c = X[:, :, 1, :] - X[:, :, 0, :], X[:, :, 2, :] - X[:, :, 1, :]
        normal, oxygen = torch.cross(b, c, dim=-1), X[:, :, 3, :]
        apart = (residue_idx[:, :, None] - residue_idx[:, None]).sum(-1)[..., None]
        return self.mlp(self.into(torch.cat([b, c, normal, oxygen], -1)) * mask[..., None] + apart)


CALLS = {
    one.__name__: one
    for one in (
        Unpacked, Recorded, Attributes, Axes, Packed, Listed, Cached, Beside, Strided, Halves, Neighbours, Masked,
        Modalities, Continued, Keywords, Joined, Added, Targets, Cameras, Padded, Rotated, Atoms,
        Codebook, Backbone,
    )
}  # fmt: skip
