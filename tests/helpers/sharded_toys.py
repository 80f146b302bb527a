"""Small modules whose code runs on shards, with the rules that say how; shared by the tests of `execute`.

Each forward uses only sizes that hold on a rank too. Communication is written out here by hand, as hooks do it for real
models: `group` is None in the unsharded model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoplan.execute.collectives import RankGroup, copy_to_ranks, sum_over_ranks
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.execute.parameters.shard import Prepared, Rules, prepare_parameters
from autoplan.values import ParameterRule


def shard_parameters(model: nn.Module, mesh: DeviceMesh, rules: Rules) -> Prepared:
    """Prepare and commit in one step; the result can still `undo`."""
    prepared = prepare_parameters(model, mesh, rules)
    prepared.commit()
    return prepared


class Toy(nn.Module):
    group: RankGroup | None = None

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else copy_to_ranks(x, self.group)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.group is None else sum_over_ranks(x, self.group)


class Mlp(Toy):
    """Split wide inside; the bias of the second linear is added once per rank; the norm is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.leave(self.down(F.gelu(self.up(self.enter(self.norm(x))))))


class InsideNorm(Toy):
    """A whole weight used inside the split region: every rank computes a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8, bias=False), nn.LayerNorm(2), nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.norm(self.up(self.enter(x)).unflatten(-1, (-1, 2)))
        return self.leave(self.down(heads.flatten(-2)))


class PackedAttention(Toy):
    """q (4 heads), k and v (2 heads each) of width 2 in one weight: segments of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(6, 16), nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.qkv(self.enter(x))
        packed = packed.unflatten(-1, (-1, 2)).transpose(1, 2)  # batch, heads, length, width
        q, k, v = packed.split([packed.size(1) // 2, packed.size(1) // 4, packed.size(1) // 4], 1)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.leave(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)))


class SharedKey(Toy):
    """Four query heads and one shared key: the key's rows are held by every rank, each sees part of their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.out = nn.Linear(6, 40), nn.Linear(32, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.qk(self.enter(x)).unflatten(-1, (-1, 8))
        q, k = packed[..., :-1, :], packed[..., -1:, :]
        return self.leave(self.out((q * torch.tanh(k)).flatten(-2)))


class TiedLanguageModel(Toy):
    """Ten tokens, cut unevenly over ranks; the head reads the table by function call; logits are summed into place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.block = Mlp()
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        table = self.embed.weight
        if self.group is None:
            return F.linear(self.block(self.embed(tokens)), table)
        step = -(-10 // self.group.size)
        own = tokens - self.group.rank * step
        absent = (own < 0) | (own >= table.size(0))
        x = F.embedding(own.masked_fill(absent, 0), table) if len(table) else torch.zeros(*tokens.shape, 6).to(table)
        x = sum_over_ranks(x.masked_fill(absent[..., None], 0.0), self.group)
        logits = F.linear(copy_to_ranks(self.block(x), self.group), self.embed.weight)
        before = self.group.rank * step
        return sum_over_ranks(F.pad(logits, (before, 10 - before - logits.size(-1))), self.group)


class SplitBuffer(Toy):
    """One slope per head, in a persistent and in a passing buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)
        self.register_buffer("slopes", torch.arange(1.0, 5.0, dtype=torch.float64))
        self.register_buffer("passing", torch.arange(2.0, 6.0, dtype=torch.float64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.up(self.enter(x)).unflatten(-1, (-1, 2)) * (self.slopes * self.passing)[:, None]
        return self.leave(self.down(heads.flatten(-2)))


class ForeignReaders(Toy):
    """Weights that other code reads: a fused attention function and a list inside a recurrent layer. All whole."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.recurrent = nn.LSTM(6, 6, batch_first=True, num_layers=2)
        self.scales = nn.ParameterList([torch.ones(6), torch.ones(6)])
        self.tables = nn.ParameterDict({"a": torch.ones(6)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.recurrent(self.attention(x, x, x)[0])[0] * self.scales[0] * self.tables["a"]
        for scale in self.scales:
            x = x * scale
        return x


def rule(dim: int | None = None, layout: str | None = None, **more: Any) -> ParameterRule:
    return ParameterRule("", dim, layout, **more)


MLP = {
    "up.weight": rule(0, "8!"),
    "up.bias": rule(0, "8!"),
    "down.weight": rule(1, "8!"),
    "down.bias": rule(divide=True),
}
TOYS: dict[str, tuple[Callable[[], Toy], dict[str, ParameterRule]]] = {
    "mlp": (Mlp, MLP),
    "inside norm": (
        InsideNorm,
        {
            "up.weight": rule(0, "4!*2"),
            "down.weight": rule(1, "4!*2"),
            "norm.weight": rule(gradient="sum"),
            "norm.bias": rule(gradient="sum"),
        },
    ),
    "packed": (
        PackedAttention,
        {
            "qkv.weight": rule(0, "4!*2|2!*2|2!*2"),
            "qkv.bias": rule(0, "4!*2|2!*2|2!*2"),
            "out.weight": rule(1, "4!*2"),
        },
    ),
    "shared key": (
        SharedKey,
        {
            "qk.weight": rule(0, "(4!|1)*8", gradient="shared"),
            "qk.bias": rule(0, "(4!|1)*8", gradient="shared"),
            "out.weight": rule(1, "4!*8"),
        },
    ),
    "tied": (
        TiedLanguageModel,
        {"embed.weight": rule(0, "10!"), **{f"block.{name}": held for name, held in MLP.items()}},
    ),
    "split buffer": (
        SplitBuffer,
        {
            "up.weight": rule(0, "4!*2"),
            "down.weight": rule(1, "4!*2"),
            "slopes": rule(0, "4!"),
            "passing": rule(0, "4!"),
        },
    ),
    "foreign readers": (ForeignReaders, {}),
}


def build(name: str, device: str = "cpu") -> Toy:
    """The toy with random weights that are the same at every call; norms and biases random too."""
    with torch.device(device):
        model = TOYS[name][0]().double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.5 + 0.1)
    return model


def inputs(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if name == "tied":
        return torch.randint(0, 10, (2, 5), generator=generator)
    return torch.randn(2, 3, 6, generator=generator, dtype=torch.float64)


def reference(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients of the unsharded toy, tied names all present."""
    model = build(name)
    output = model(inputs(name))
    output.square().sum().backward()
    named = model.named_parameters(remove_duplicate=False)
    return output.detach(), {fqn: p.grad for fqn, p in named if p.grad is not None}


def tp_mesh(size: int) -> Any:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def set_group(model: nn.Module, group: RankGroup) -> None:
    for module in model.modules():
        if isinstance(module, Toy):
            module.group = group


def compiled_errors(rank: int) -> dict[str, float]:
    """The largest gradient error of compiled toys on two ranks; at top level, where processes find it."""
    errors = {}
    for name in ("shared key", "tied"):
        model, mesh = build(name), tp_mesh(2)
        shard_parameters(model, mesh, TOYS[name][1])
        set_group(model, RankGroup.of(mesh))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(inputs(name)).square().sum().backward()
        gradients = full_tensors(model, grads=True)
        errors[name] = max(float((gradients[k] - g).abs().max()) for k, g in reference(name)[1].items())
    return errors


__all__ = ["compiled_errors", "TOYS", "Toy", "build", "inputs", "reference", "rule", "set_group", "tp_mesh"]
