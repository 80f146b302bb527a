"""What runs in training only is recorded, planned and tried: heads that only training reads, losses on shards."""

from __future__ import annotations

import copy
from functools import wraps

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import autoplan
from autoplan.capture.called import has_training_paths, in_training
from autoplan.capture.feeding.resize import OtherPaths, with_other_paths
from autoplan.check.ranks.run import run_ranks
from autoplan.hf.source import resolve

X = torch.linspace(-1, 1, 2 * 6 * 16, dtype=torch.float64).view(2, 6, 16)


class Block(nn.Module):
    """In training it has one more head, and a term of its loss made of what is split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.aux, self.drop = nn.Linear(32, 24, bias=False), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        inner = F.gelu(self.up(x))
        found = {"x": x + self.drop(self.down(inner))}
        if self.training:
            heads = inner.view(2, 6, 8, 4).softmax(-1)
            found |= {"aux": self.aux(heads.flatten(-2)), "balance": inner.square().mean((1, 2))}
        return found


class Plain(nn.Module):
    """Asks for the mode, and runs one code."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.rate = nn.Linear(16, 32), nn.Linear(32, 16), 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.dropout(self.up(x), 0.0 if not self.training else self.rate, self.training))


class Noisy(Block):
    """Draws in training what nobody can compare."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(x + torch.rand_like(x) if self.training else x)


class Lent(Block):
    """Has a function that stands for one of C."""

    @wraps(list.append)
    def append(self, item: object) -> None:
        raise NotImplementedError


def test_code_of_training_is_told_from_numbers_of_training() -> None:
    assert has_training_paths(Lent())
    assert has_training_paths(Block()) and not has_training_paths(Plain())
    model = Block().eval()
    with in_training(model):
        assert model.training and not model.drop.training
    assert not model.training


def test_training_is_recorded_where_it_runs_something_else() -> None:
    feeds = {"usual": {"x": X.float()}}
    assert list(with_other_paths(Block(), feeds, {}).feeds) == ["usual", "usual in training"]
    assert with_other_paths(Plain(), feeds, {}) == OtherPaths(feeds)
    kept, notes, draws = with_other_paths(Noisy(), feeds, {})
    assert list(kept) == ["usual", "usual in training"] and not notes and not draws


def test_both_modes_are_exact() -> None:
    torch.manual_seed(0)
    model = Block().double().eval()
    plan = autoplan.plan(model, 2, inputs={"x": X})
    assert plan.proof.ok and {"up", "down", "aux"} == {entry.pattern for entry in plan.entries}
    assert autoplan.verify(model, plan, tp_size=2, inputs={"x": X}).ok

    def rank(_: int) -> list[dict[str, torch.Tensor]]:
        own = copy.deepcopy(model)
        autoplan.parallelize(own, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        own.drop.p = 0.0
        with torch.no_grad():
            return [own.train(mode)(X) for mode in (False, True, False)]

    model.drop.p = 0.0
    with torch.no_grad():
        expected = [model.train(mode)(X) for mode in (False, True, False)]
    for got in run_ranks(rank, 2):
        for mine, wanted in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, wanted)


class TwoHeads(LlamaMLP):
    """In training it reads another matrix of what is split, and a mean over it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.aux = nn.Linear(config.intermediate_size, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        out = self.down_proj(inner)
        if self.training:
            heads = inner.unflatten(-1, (-1, 4)).softmax(-1).flatten(-2)
            out = out + self.aux(heads).mean(-1, keepdim=True) + inner.square().mean(-1, keepdim=True)
        return out


class OwnLlama(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = TwoHeads(config)


def test_a_model_with_a_config_is_recorded_and_tried_in_both_modes() -> None:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    plan = autoplan.plan(OwnLlama(config), 2, source="inferred")
    assert plan.proof.ok and "model.layers.*.mlp.aux" in {entry.pattern for entry in plan.entries}


def test_a_weight_handed_to_an_absent_kernel_changes_nothing() -> None:
    """Mixers of Mamba-2 do that in training: a view of a partly split weight that nothing reads on a CPU."""
    model = resolve("bamba:BambaForCausalLM").tiny(dtype=torch.float32)
    plan = autoplan.plan(model, 2, source="inferred", prove="none")
    styles = {entry.pattern: entry.style for entry in plan.entries}
    assert styles["model.layers.*.mamba.in_proj"] == "packed_colwise"
    assert styles["model.layers.*.mamba.out_proj"] == "rowwise"


class DropsInTraining(nn.Module):
    """Draws where nobody records it: code that asks for the mode itself, of values that ranks hold whole and split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 8)

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5) if self.training else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.dropped(self.down(self.dropped(self.up(x).relu()))))


def test_ranks_draw_alike_what_only_training_draws() -> None:
    inputs = {"x": torch.randn(4, 16)}
    assert len(with_other_paths(DropsInTraining(), {"usual": inputs}, {}).feeds) == 2
    plan = autoplan.plan(DropsInTraining(), tp_size=2, inputs=inputs)
    assert plan.proof is not None and plan.proof.ok and len(plan.entries) == 3, plan
    assert autoplan.verify(DropsInTraining(), plan, tp_size=2, inputs=inputs).ok


class DeepSupervision(nn.Module):
    """In training a loop goes over the first scores, too, which otherwise are only added to the second ones."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        first = self.downs[0](self.ups[0](x).relu())
        second = self.downs[1](self.ups[1](x).relu()) + first
        return [one.tanh() for one in ((first, second) if self.training else (second,))]


def test_a_loop_that_goes_over_more_in_training() -> None:
    torch.manual_seed(0)
    model, x = DeepSupervision(), {"x": torch.randn(2, 4, 16)}
    plan = autoplan.plan(model.eval(), 2, inputs=x)
    assert plan.proof.ok, plan.findings
    assert autoplan.verify(model, plan, inputs=x).ok
    wanted = [one.detach() for one in model.train()(**x)]

    def rank(_: int) -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = [one.detach() for one in autoplan.parallelize(copy.deepcopy(model), mesh, plan)(**x)]
        return [one.full_tensor() if isinstance(one, DTensor) else one for one in found]  # a head's shards

    for found in run_ranks(rank, 2):
        torch.testing.assert_close(found, wanted)
