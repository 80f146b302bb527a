"""FSDP2 over discovered blocks: what becomes a unit, what is refused, and that training equals one device's."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from mesh_toys import WIDTH, Block, Deep, clone, deep, ids, layers_only, mesh_of, model_of, plan_of
from slow_cases import marked
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify.clone import parse_mesh
from autoplan.check.verify.mesh_training import check_training
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.execute.data_parallel.mesh_dims import read_mesh
from autoplan.execute.data_parallel.units import choose_units

FAMILIES = ("llama", "gpt2")
SLOW_FAMILIES = ("falcon", "mixtral", "nemotron_h", "deepseek_v3", "t5", "llava")


def assert_trains_exactly(kind: str, mesh: str, **how: Any) -> None:
    sizes = parse_mesh(mesh)
    made = clone(kind)
    findings, done = check_training(made.model, made.feeds, made.others, plan_of(kind, sizes.size("tp")), sizes, **how)
    assert not findings, findings
    assert done == ("training", "training with checkpointing")


@pytest.mark.parametrize("kind", marked((*FAMILIES, *SLOW_FAMILIES), long=["gpt2"], slow=SLOW_FAMILIES))
def test_training_on_a_2x2_mesh_equals_one_device(kind: str) -> None:
    assert_trains_exactly(kind, "dp=2,tp=2")


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("dp=2", marks=pytest.mark.slow),
        "dp_replicate=2,dp_shard=2",
        pytest.param("tp=2", marks=pytest.mark.slow),
    ],
)
def test_training_on_other_meshes_equals_one_device(mesh: str) -> None:
    assert_trains_exactly("gpt2", mesh)


@pytest.mark.gloo
@pytest.mark.slow
def test_training_over_gloo_equals_one_device() -> None:
    assert_trains_exactly("gpt2", "dp=2,tp=2", engine="gloo")


def test_a_missing_average_over_data_parallel_ranks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has another batch, so the check above can fail."""
    from autoplan.execute.data_parallel import fsdp

    wrap = fsdp._wrap

    def without_average(model: Any, *rest: Any) -> None:
        wrap(model, *rest)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)

    monkeypatch.setattr(fsdp, "_wrap", without_average)
    made = clone("gpt2")
    findings, _ = check_training(made.model, made.feeds, made.others, plan_of("gpt2", 1), parse_mesh("dp=2"))
    assert {finding.level for finding in findings} == {"error"}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="NOT TRIED: with an accelerator memory can be pinned")
def test_pinned_memory_without_an_accelerator_is_refused_before_anything_is_done() -> None:
    def rank_body(rank: int) -> bool:
        model = deep()
        with pytest.raises(AutoplanError, match="pins memory for an accelerator, but torch finds none") as caught:
            autoplan.parallelize(model, mesh_of(dp_shard=2), layers_only(model), offload_policy=CPUOffloadPolicy())
        assert "pin_memory=False" in str(caught.value)
        return any(isinstance(module, FSDPModule) for module in model.modules())

    assert run_ranks(rank_body, 2) == [False, False]


# ------------------------------------------------------------------------------------------------ units


def names(model: nn.Module, **options: Any) -> list[tuple[str, ...]]:
    return [unit.names for unit in choose_units(model, autoplan.layers(model), **options).units]


def test_units_are_blocks_table_and_head() -> None:
    assert names(deep()) == [("blocks.0",), ("blocks.1",), ("blocks.2",)]
    llama = model_of("llama")
    assert names(llama)[-2:] == [("model.embed_tokens",), ("lm_head",)]
    llama.lm_head.weight = llama.model.embed_tokens.weight
    assert names(llama) == [(f"model.layers.{i}",) for i in range(len(llama.model.layers))]


def test_a_module_of_several_blocks_is_one_unit() -> None:
    model = deep()
    model.blocks[0].second = model.blocks[2].second
    assert names(model)[0] == ("blocks.0.second",)


def test_parameters_tied_across_blocks_are_one_unit() -> None:
    model = deep()
    model.blocks[0].first.up.weight = model.blocks[1].first.up.weight
    assert names(model)[0] == ("blocks.0.first.up", "blocks.1.first.up")
    for name in ("up", "down"):
        for kind in ("weight", "bias"):
            setattr(getattr(model.blocks[0].first, name), kind, getattr(getattr(model.blocks[1].first, name), kind))
    assert names(model)[0] == ("blocks.0.first", "blocks.1.first")


def test_parts_of_another_dtype_are_units_that_are_not_cast() -> None:
    model = deep().bfloat16()
    for block in model.blocks:
        block.norm.float()
    chosen = choose_units(model, autoplan.layers(model))
    assert [u.names for u in chosen.units if u.kept_dtype] == [(f"blocks.{i}.norm",) for i in range(3)]
    assert len(chosen.units) == 6


def test_two_dtypes_in_one_module_are_refused_by_name() -> None:
    model = deep()
    model.blocks[1].first.up.bias.data = model.blocks[1].first.up.bias.data.float()
    with pytest.raises(AutoplanError, match="blocks.1.first.up.bias.*float32.*float64"):
        choose_units(model, autoplan.layers(model))
    model.blocks[1].first.up.bias.requires_grad_(False)  # FSDP2 minds trainable ones only
    choose_units(model, autoplan.layers(model))


@pytest.mark.parametrize(("frozen", "blocks"), [("units", 3), ("root", 0), ("ignore", 0)])
def test_frozen_stacks(frozen: str, blocks: int) -> None:
    model = deep()
    model.blocks.requires_grad_(False)
    chosen = choose_units(model, autoplan.layers(model), frozen=frozen)
    assert len(chosen.units) == blocks and bool(chosen.notes) == (blocks == 0)
    assert len(chosen.ignored) == (len(list(model.blocks.parameters())) if frozen == "ignore" else 0)


# ------------------------------------------------------------------------------------------------ options


class Scaled(Deep):
    """A parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, ids: torch.Tensor, use_cache: bool | None = False) -> torch.Tensor:
        return super().forward(ids, use_cache) * self.scale


def on_two_ranks(build: Any, check: Any, **options: Any) -> list[Any]:
    models = [build() for _ in range(2)]

    def rank_body(rank: int) -> Any:
        model = models[rank]
        autoplan.parallelize(model, mesh_of(dp=2), layers_only(model), **options)
        return check(model, rank)

    return run_ranks(rank_body, 2)


def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled().double()


def test_single_numbers_stay_whole_and_are_averaged() -> None:
    def check(model: Any, rank: int) -> Any:
        model(ids(2 + rank)).sum().backward()
        return model.scale.grad, autoplan.applied(model).notes

    expected = []
    for rank in range(2):
        model = scaled()
        model(ids(2 + rank)).sum().backward()
        expected.append(model.scale.grad)
    for gradient, notes in on_two_ranks(scaled, check):
        torch.testing.assert_close(gradient, (expected[0] + expected[1]) / 2)
        assert notes == ("scale: scalar parameters are replicated",)


@pytest.mark.parametrize(("option", "kept"), [(None, [False, False, True]), (True, [False] * 3), (False, [True] * 3)])
def test_the_last_block_is_kept_after_forward(option: bool | None, kept: list[bool]) -> None:
    def check(model: Any, rank: int) -> list[bool]:
        model(ids())
        return [not isinstance(block.norm.weight, DTensor) for block in model.blocks]

    assert on_two_ranks(deep, check, reshard_after_forward=option) == [kept, kept]


@pytest.mark.parametrize("prefetch", [1, (2, 1), (0, 2)])
def test_prefetching_changes_no_number(prefetch: Any) -> None:
    expected = deep()
    expected(ids()).square().sum().backward()

    def check(model: Any, rank: int) -> None:
        model(ids()).square().sum().backward()
        for name, gradient in autoplan.full_tensors(model, grads=True).items():
            torch.testing.assert_close(gradient, expected.get_parameter(name).grad)

    on_two_ranks(deep, check, prefetch=prefetch)


def test_mixed_precision_computes_in_bfloat16_and_keeps_float32() -> None:
    def check(model: Any, rank: int) -> Any:
        seen: list[torch.dtype] = []
        model.blocks[0].first.up.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
        out = model(ids())
        out.sum().backward()
        return seen[0], out.dtype, model.head.weight.grad.dtype

    for seen in on_two_ranks(lambda: deep().float(), check, mp_policy="bf16"):
        assert seen == (torch.bfloat16, torch.float32, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    assert on_two_ranks(lambda: deep().float(), check, mp_policy=policy)[0][0] == torch.float16


def test_cpu_offload_trains() -> None:
    def check(model: Any, rank: int) -> bool:
        model(ids()).sum().backward()
        return model.head.weight.grad.device.type == "cpu"

    assert all(on_two_ranks(deep, check, cpu_offload=True))


# ------------------------------------------------------------------------------------------------ meshes and refusals


@pytest.mark.parametrize(
    ("sizes", "mesh_dims", "tp", "data"),
    [
        ({"tp": 4}, {}, 4, None),
        ({"dp": 2, "tp": 2}, {}, 2, (2,)),
        ({"fsdp": 4}, {}, 1, (4,)),
        ({"dp_replicate": 2, "dp_shard": 2}, {}, 1, (2, 2)),
        ({"dp_shard_cp": 2, "tp": 2}, {}, 2, (2,)),
        ({"data": 2, "model": 2}, {"tp": "model", "dp_shard": "data"}, 2, (2,)),
        ({"pp": 1, "dp": 2, "cp": 1, "tp": 2}, {}, 2, (2,)),
        ({"odd": 1, "tp": 4}, {}, 4, None),
    ],
)
def test_mesh_dims_by_name(sizes: Any, mesh_dims: Any, tp: int, data: Any) -> None:
    def rank_body(rank: int) -> Any:
        dims = read_mesh(mesh_of(**sizes), mesh_dims)
        return dims.tp_size, None if dims.data is None else tuple(dims.data.mesh.shape), len(dims.notes)

    left_alone = len({"cp", "pp"} & set(sizes))
    assert run_ranks(rank_body, 4) == [(tp, data, left_alone)] * 4


@pytest.mark.parametrize(
    ("sizes", "options", "said"),
    [
        ({"ranks": 2}, {}, "'ranks' of 2 ranks has no known purpose"),
        ({"dp_replicate": 2}, {}, "no dim to shard over"),
        ({"dp": 1, "fsdp": 2}, {}, "could all be 'dp_shard'"),
        ({"dp": 2}, {"mesh_dims": {"ep": "dp"}}, "mesh_dims names 'ep'"),
        ({"dp": 2}, {"mesh_dims": {"tp": "model"}}, "no dim named 'model'"),
        ({"tp": 2}, {"mp_policy": "bf16", "cpu_offload": True}, "mp_policy, cpu_offload was requested, but the mesh"),
        ({"dp": 2}, {"mp_policy": "fp8"}, "mp_policy='fp8'"),
        ({"dp": 2}, {"prefetch": -1}, "prefetch=-1"),
        ({"dp": 2}, {"frozen": "melt"}, "frozen='melt'"),
        ({"dp": 2}, {"activation_checkpointing": "all"}, "activation_checkpointing='all'"),
        ({"dp": 2}, {"reshard_after_forward": 3}, "cannot form groups of 3"),
    ],
)
def test_what_cannot_be_done_is_refused_and_nothing_is_touched(sizes: Any, options: Any, said: str) -> None:
    models = [deep() for _ in range(2)]
    before = [state_of(model) for model in models]

    def rank_body(rank: int) -> None:
        plan = replace(layers_only(models[rank]), tp_size=sizes.get("tp", 1))
        with pytest.raises(ValueError, match=said):
            autoplan.parallelize(models[rank], mesh_of(**sizes), plan, **options)

    run_ranks(rank_body, 2)
    assert [state_of(model) for model in models] == before


def state_of(model: nn.Module) -> list[Any]:
    """Everything that sharding would change."""
    found: list[Any] = []
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks)
        found.append((name, type(module), sorted(module.__dict__), [list(h) for h in hooks]))
        found.append({key: id(parameter) for key, parameter in module._parameters.items()})
    return found


def test_a_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.execute.data_parallel import fsdp

    real, calls = fsdp.fully_shard, Counter[int]()

    def failing(module: Any, **options: Any) -> Any:
        calls[threading.get_ident()] += 1  # of this rank
        if calls[threading.get_ident()] > 1:
            raise RuntimeError("planted")
        return real(module, **options)

    models = [model_of("gpt2") for _ in range(4)]
    before = [state_of(model) for model in models]
    expected = models[0].state_dict().keys()

    def rank_body(rank: int) -> None:
        with pytest.raises(RuntimeError, match="planted"):
            autoplan.parallelize(models[rank], mesh_of(dp=2, tp=2), plan_of("gpt2", 2), activation_checkpointing=True)
        again = autoplan.applied(models[rank])
        assert again is None

    monkeypatch.setattr(fsdp, "fully_shard", failing)
    run_ranks(rank_body, 4)
    assert [state_of(model) for model in models] == before
    assert models[0].state_dict().keys() == expected


def test_a_plan_for_more_ranks_than_the_mesh_has_is_refused() -> None:
    def rank_body(rank: int) -> None:
        with pytest.raises(PlanMismatchError, match="tp=4"):
            autoplan.parallelize(deep(), mesh_of(dp=2), replace(layers_only(deep()), tp_size=4))

    run_ranks(rank_body, 2)


def test_blocks_of_the_record_are_the_discovered_ones() -> None:
    class Nested(nn.Module):
        """Blocks in lists in a dict, with a hole, as pipeline stages keep them."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, WIDTH)
            self.parts = nn.ModuleDict({"0": nn.ModuleList([Block(), Block()]), "3": nn.ModuleList([Block(), Block()])})

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.table(ids)
            for part in self.parts.values():
                for block in part:
                    x = block(x)
            return x

    def check(model: Any, rank: int) -> Any:
        model(ids()).sum().backward()
        return autoplan.applied(model).units

    wanted = tuple((f"parts.{part}.{i}",) for part in ("0", "3") for i in range(2))
    for units in on_two_ranks(lambda: copy.deepcopy(Nested()).double(), check):
        assert units == (*wanted, ("",))
