"""Calls that say little about their inputs: `*views`, dicts and lists that are gone through, records, points in groups,
dims that fit by chance."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Literal, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..case import call, case, floats, ids


class Batch(NamedTuple):
    dense: Tensor
    sparse: Tensor


@case(call(floats(3, 12), floats(3, 12, seed=1), floats(3, 12, seed=2)))
class LateFusion(nn.Module):
    def __init__(self, views=3):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(views))
        self.head = nn.Linear(16, 4)

    def forward(self, *views):
        assert len(views) == len(self.nets)
        return self.head(torch.stack([net(x) for net, x in zip(self.nets, views, strict=False)]).mean(0))


@case(call(floats(3, 8), floats(3, 12)))
class ConcatInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, *inputs):
        return self.net(torch.cat(inputs, dim=-1))


@case(call({"input_ids": ids(2, 8), "token_type_ids": ids(2, 8, below=2)}))
class PairDict(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.word, self.kind, self.pos = nn.Embedding(32, d), nn.Embedding(2, d), nn.Embedding(16, d)
        self.norm = nn.LayerNorm(d)
        self.layer = nn.TransformerEncoderLayer(d, 4, 32, 0.0, batch_first=True)
        self.pool, self.cls = nn.Linear(d, d), nn.Linear(d, 2)

    def forward(self, batch):
        x = self.word(batch["input_ids"]) + self.pos.weight[: batch["input_ids"].shape[1]]
        if "token_type_ids" in batch:
            x = x + self.kind(batch["token_type_ids"])
        return self.cls(self.pool(self.layer(self.norm(x))[:, 0]).tanh())


@case(call({"rgb": floats(2, 5, 12), "audio": floats(2, 5, 6)}))
class ModalityDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.ModuleDict({"rgb": nn.Linear(12, 16), "audio": nn.Linear(6, 16)})
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, inputs: dict[str, Tensor]):
        tokens = torch.cat([self.proj[k](v) for k, v in inputs.items()], dim=1)
        return self.head(self.enc(tokens).mean(1))


@case(call([floats(2, 8, 16, 16), floats(2, 16, 8, 8), floats(2, 32, 4, 4)]))
class FeaturePyramid(nn.Module):
    def __init__(self, channels=(8, 16, 32), d=16):
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(c, d, 1) for c in channels)
        self.smooth = nn.ModuleList(
            nn.Sequential(nn.Conv2d(d, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, d, 3, padding=1)) for _ in channels
        )

    def forward(self, feats: list[Tensor]):
        xs = [layer(f) for layer, f in zip(self.lateral, feats, strict=False)]
        for i in range(len(xs) - 1, 0, -1):
            xs[i - 1] = xs[i - 1] + F.interpolate(xs[i], size=xs[i - 1].shape[-2:], mode="nearest")
        return [s(x) for s, x in zip(self.smooth, xs, strict=False)]


@case(call([floats(2, 5, 8), floats(2, 3, 8, seed=1)]))
class SetOfSets(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.phi = nn.ModuleList(nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.rho = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, sets: list[Tensor]):
        pooled = [f(s).sum(1) for f, s in zip(self.phi, sets, strict=False)]
        return self.rho(torch.cat(pooled, -1))


@case(call(floats(3, 20), floats(7, 2)))
class DeepONet(nn.Module):
    def __init__(self, m=20, p=16):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(m, 32), nn.Tanh(), nn.Linear(32, p))
        self.trunk = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, p), nn.Tanh())
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, u, y):
        return self.branch(u) @ self.trunk(y).T + self.b


@case(call(floats(5, 8)))
class SoftTrees(nn.Module):
    def __init__(self, d=8, trees=16, depth=2):
        super().__init__()
        self.depth = depth
        self.split = nn.Linear(d, trees * depth)
        self.leaf = nn.Parameter(torch.randn(trees, 2**depth, 3))

    def forward(self, x):
        p = self.split(x).view(len(x), -1, self.depth).sigmoid()
        left = torch.ones_like(p[..., :1])
        for i in range(self.depth):
            left = torch.cat([left * p[..., i : i + 1], left * (1 - p[..., i : i + 1])], -1)
        return torch.einsum("btl,tlo->bo", left, self.leaf)


@case(call(Batch(floats(4, 6), ids(4, 3, below=10))))
class WideDeepBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(10, 8) for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(6 + 24, 32), nn.ReLU(), nn.Linear(32, 1))
        self.wide = nn.Linear(6, 1)

    def forward(self, batch: Batch):
        e = [t(batch.sparse[:, i]) for i, t in enumerate(self.tables)]
        return (self.deep(torch.cat([batch.dense, *e], -1)) + self.wide(batch.dense)).squeeze(-1)


@case(call(floats(2, 16, 3), floats(2, 4, 3)))
class PointNetPP(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.ReLU())
        self.glob = nn.Sequential(nn.Linear(35, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, pts, centers):
        idx = torch.cdist(centers, pts).topk(5, largest=False).indices
        g = (
            pts.unsqueeze(1).expand(-1, centers.shape[1], -1, -1).gather(2, idx[..., None].expand(-1, -1, -1, 3))
            - centers[:, :, None]
        )
        f = self.local(g.permute(0, 3, 1, 2)).amax(-1).mT
        return self.glob(torch.cat([centers, f], -1)).amax(1)


@case(call(floats(3, 12)))
class MMoETasks(nn.Module):
    def __init__(self, e=4, tasks=2):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()) for _ in range(e)
        )
        self.gates = nn.ModuleList(nn.Linear(12, e) for _ in range(tasks))
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(tasks))

    def forward(self, x):
        h = torch.stack([e(x) for e in self.experts], dim=1)
        return [
            t((g(x).softmax(-1).unsqueeze(-1) * h).sum(1)).sigmoid()
            for g, t in zip(self.gates, self.towers, strict=False)
        ]


@case(call(floats(4, 16), floats(4, 16, seed=1), floats(4, 16, seed=2)))
class TripletSiamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, *views):
        a, p, n = map(self.net, views)
        return F.triplet_margin_loss(a, p, n, margin=0.5), F.pairwise_distance(a, p)


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.GELU(), nn.Linear(h, o))


class Observation(NamedTuple):
    position: Tensor
    velocity: Tensor


@case(call(Observation(floats(4, 3), floats(4, 3))))
class PolicyOnNamedTuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(6, 32, 4)

    def forward(self, obs: Observation):
        return self.net(torch.cat([obs.position, obs.velocity], -1))


class Sensor(enum.Enum):
    LIDAR = "lidar"
    RADAR = "radar"


@case(call({Sensor.LIDAR: floats(3, 16), Sensor.RADAR: floats(3, 8)}))
class SensorFusion(nn.Module):
    def __init__(self):
        super().__init__()
        self.lidar, self.radar, self.head = mlp(16, 32, 12), mlp(8, 32, 12), nn.Linear(24, 4)

    def forward(self, readings: dict[Sensor, Tensor]):
        return self.head(torch.cat([self.lidar(readings[Sensor.LIDAR]), self.radar(readings[Sensor.RADAR])], -1))


@case(call(floats(2, 8, 16), "mean"))
class PoolingByMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.head = mlp(16, 32, 16), nn.Linear(16, 3)

    def forward(self, x, mode):
        h = self.net(x)
        if mode == "mean":
            h = h.mean(1)
        elif mode == "max":
            h = h.amax(1)
        else:
            raise ValueError(f"unknown mode {mode}")
        return self.head(h)


@case(call(floats(2, 9, 16), F.relu))
class ActivationGiven(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, activation: Callable[[Tensor], Tensor]):
        return self.down(activation(self.up(x)))


@case(call([floats(5, 12), floats(7, 12), floats(3, 12)]))
class RaggedScenes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.out = mlp(12, 32, 16), nn.Linear(16, 2)

    def forward(self, scenes: list[Tensor]):
        return torch.stack([self.out(self.encode(scene).amax(0)) for scene in scenes])


class Stats(TypedDict):
    mean: Tensor
    std: Tensor


@case(call(floats(4, 10), {"mean": floats(10), "std": floats(10)}))
class NormalisedRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(10, 32, 1)

    def forward(self, x: Tensor, stats: Stats):
        return self.net((x - stats["mean"]) / (stats["std"].abs() + 1)).squeeze(-1)


@case(call(floats(2, 10, 16), "train"))
class LiteralStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.aux = mlp(16, 32, 16), mlp(16, 32, 16)

    def forward(self, x: Tensor, stage: Literal["train", "test"]):
        y = self.net(x)
        return y + self.aux(x) if stage == "train" else y


@case(call(floats(2, 8, 16)), call(floats(2, 8, 16), torch.arange(8).ge(5).expand(2, 8)))
class OptionalPadding(nn.Module):
    """Given or not: both paths are planned."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, words: Tensor, padding_mask: Tensor | None = None):
        q, k, v = (m(words).unflatten(-1, (4, 4)).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / 2
        if padding_mask is not None:
            scores = scores.masked_fill(padding_mask[:, None, None], -1e4)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
