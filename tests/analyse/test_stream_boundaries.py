"""Where a stream begins and what it meets: small models, each with one thing that is not as in a plain stack."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.values import ReduceScatterSequence

WIDTH = 16
IDS = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(3))


class Weigh(nn.Module):
    """Gives every position its own scales; it picks a position, so it runs on the whole sequence."""

    def __init__(self):
        super().__init__()
        self.say = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return torch.sigmoid(self.say(x - x[:, :1])).unflatten(-1, (2, 2))


class Parted(nn.Module):
    """Takes a batch of sequences, laid end to end, apart again."""

    def __init__(self):
        super().__init__()
        self.say = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.stack([self.say(piece).mean(1) for piece in x.split(x.shape[1] // 2, 1)], 1)


class Rib(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.even, self.out, self.back = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.kind, self.taste = kind, nn.Parameter(torch.randn(WIDTH))
        self.weigh = Weigh()

    def forward(self, x):
        x = x + self.back(torch.relu(self.out(self.even(x))))
        if self.kind == "made alike":  # of a parameter, as long as the shard that is there
            x = x * self.taste.expand(x.shape[0], x.shape[1], -1)
        if self.kind == "made of a result":  # whole, and changed by the block's own code before it meets the stream
            mixed = self.weigh(x).transpose(-1, -2)
            x = torch.matmul(mixed, x.unflatten(-1, (2, -1))).flatten(-2)
        return x


class Chest(nn.Module):
    """`kind`: prompts before the text; ribs that run twice; values of two kinds that the ribs meet."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.words, self.prompts = nn.Embedding(30, WIDTH), nn.Embedding(4, WIDTH)
        self.ribs = nn.ModuleList(Rib(kind) for _ in range(2))
        self.between, self.tell = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 30)
        self.after = Parted() if kind == "parted" else nn.Identity()
        self.probe, self.ask = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, ids):
        x = self.words(ids)
        if self.kind == "prompts":
            before = self.prompts(torch.arange(4, device=ids.device)).expand(ids.shape[0], -1, -1)
            x = torch.cat([before, x], 1)
        for _ in range(2 if self.kind == "twice" else 1):
            start = x
            for rib in self.ribs:
                x = rib(x)
            if self.kind == "parted":
                x = self.between(x)
            elif self.kind == "asked":  # one value under two names, and no module before
                x = self.ask(self.probe.expand(x.shape[0], -1, -1), x, x, need_weights=False)[0]
            else:
                x = self.between(x) + start.flip(1)
        return self.tell(self.after(x))


KINDS = ["plain", "prompts", "twice", "made alike", "made of a result", "parted", "asked"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_stream_is_exact(kind):
    torch.manual_seed(1)
    model = Chest(kind).double()
    plan = autoplan.plan(copy.deepcopy(model), 2, sequence_parallel=True, inputs={"ids": IDS}, prove="none")
    assert plan.sequence_parallel, plan.findings
    assert plan.runtime.of(ReduceScatterSequence)
    wanted = model(IDS)
    wanted.square().mean().backward()

    def rank(number):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(models[number], mesh, plan, gather_logits=True)
        found = sharded(IDS)
        found.square().mean().backward()
        return found.detach(), autoplan.full_tensors(sharded, grads=True)

    models = [copy.deepcopy(model) for _ in range(2)]
    for one in models:
        one.zero_grad(set_to_none=True)
    for found, gradients in run_ranks(rank, 2):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-12)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
