"""A hand-written sharding of a tiny model, and the ways to get it wrong: what tests of the machinery itself use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from autoplan.check.verify.on_ranks import Sharding


class Toy(nn.Module):
    """embedding -> norm -> gated MLP with a replicated scale -> residual -> tied or untied head -> logits."""

    def __init__(self, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.norm = nn.LayerNorm(6)
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(6, 12, bias=False)
        self.dropout = dropout
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        x = F.dropout(self.embedding(ids), self.dropout, self.training)
        hidden = self.copy(self.norm(x))
        inner = torch.tanh(self.gate(hidden)) * self.up(hidden) * self.copy(self.scale)
        out = self.reduce(F.linear(inner, self.down.weight)) + self.down.bias
        logits = self.head(x + out)
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return found

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient


class SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Split(Toy):
    """What a sharded `Toy` is: local shards in plain parameters, whole ones in the state dict."""

    fault = ""

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "no gradient sum" or (self.fault == "scale without sum" and x is self.scale):
            return x
        if self.fault == "double gradient sum":
            x = SumBackward.apply(x)
        return SumBackward.apply(x)

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.fault == "no forward sum":
            return x
        if self.fault == "a rank raises" and dist.get_rank() == 1:
            raise RuntimeError("planted")
        return SumForward.apply(x)


CUTS = {"up.weight": 0, "up.bias": 0, "gate.weight": 0, "gate.bias": 0, "down.weight": 1}


@dataclass(frozen=True)
class Cut:
    fault: str = ""

    def __call__(self, model: Toy, mesh) -> Toy:
        model.__class__ = Split
        model.fault, model.mesh = self.fault, mesh
        rank, size = mesh.get_local_rank("tp"), mesh.size()
        cuts = {**CUTS, "gate.weight": 1} if self.fault == "wrong dim" else CUTS
        for name, dim in cuts.items():
            owner = model.get_submodule(name.rpartition(".")[0])
            whole = getattr(owner, name.rpartition(".")[2])
            piece = (size - 1 - rank) if self.fault == "wrong piece" and name == "gate.weight" else rank
            local = whole.detach().chunk(size, dim)[piece].clone()
            setattr(owner, name.rpartition(".")[2], nn.Parameter(local))
        if self.fault == "untied":
            model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        if self.fault == "rank's own norm":
            with torch.no_grad():
                model.norm.weight.add_(0.1 * rank)
        model.register_state_dict_post_hook(save(self.fault))
        model.register_load_state_dict_pre_hook(load)
        if self.fault != "unseeded dropout":
            model.register_forward_pre_hook(same_draw)
        return model


def same_draw(model: Toy, _: object) -> None:
    from autoplan.execute import random_streams

    if model.training:
        seed = torch.randint(2**31, (1,))
        dist.broadcast(seed, 0)
        random_streams.manual_seed(int(seed))


def save(fault: str):
    def hook(model: Toy, state, prefix, metadata) -> None:
        for name, dim in CUTS.items():
            state[name] = whole(state[name], dim, model.mesh)
        if fault == "renamed":
            state["normalisation.weight"] = state.pop("norm.weight")

    return hook


def load(model: Toy, state, prefix, *_) -> None:
    rank, size = model.mesh.get_local_rank("tp"), model.mesh.size()
    for name, dim in CUTS.items():
        state[name] = state[name].chunk(size, dim)[rank]


def whole(local: torch.Tensor, dim: int, mesh) -> torch.Tensor:
    return DTensor.from_local(local.contiguous(), mesh, [Shard(dim)]).full_tensor()


def gather(model: Toy, gradients: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None:
            found[name] = whole(tensor, CUTS[name], model.mesh) if name in CUTS else tensor
    if gradients and model.fault == "ranks wait for each other" and dist.get_rank() == 1:
        dist.barrier()
    return found


def sharding(fault: str = "") -> Sharding:
    return Sharding(Cut(fault), gather)
