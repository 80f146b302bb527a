"""Context parallelism beside tensor parallelism: some of the heads of a rank of tp, on all positions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.analyse.sequence.combined import combined
from autoplan.check.ranks.run import count_collectives, run_ranks
from autoplan.common.errors import IndivisibleError, PlanMismatchError
from autoplan.common.layout import Layout
from autoplan.decide.written_plans.plan_file import load_plan
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.execute.tensor_parallel import apply_plan
from autoplan.values import AllReduce, AttendAcross, ExchangeToPieces, IntegerEdit, ParameterRule, Runtime, SplitLogits

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=64,
)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval().double()


@pytest.fixture(scope="module")
def plan(model: Any) -> autoplan.Plan:
    return autoplan.plan(model, tp_size=2, cp_size=2)


def test_the_plan_is_that_of_both(plan: autoplan.Plan) -> None:
    """Weights are cut over tp; between exchanges a rank has a part of its rank of tp's heads."""
    assert plan.proof.ok
    assert (plan.tp_size, plan.cp_size, plan.ranks, plan.cut_over) == (2, 2, 4, 2)
    rules = {rule.pattern: rule for rule in plan.runtime.parameters}
    assert rules["model.layers.*.self_attn.q_proj.weight"].layout == "4!*16"
    assert {one.layout for one in plan.runtime.of(ExchangeToPieces)} == {"2!*8", "2!*16"}
    assert {one.over for one in plan.runtime.of(ExchangeToPieces)} == {"cp"}
    assert {one.over for one in plan.runtime.of(AllReduce)} == {""}
    assert [head.pattern for head in plan.runtime.of(SplitLogits)] == ["lm_head"]


@pytest.mark.parametrize("length", (8, 11))
@pytest.mark.parametrize("names", (("cp", "tp"), ("tp", "cp")))
@pytest.mark.parametrize("whose", ("model", "caller"))
def test_a_step_is_that_of_one_device(
    model: Any, plan: autoplan.Plan, names: tuple[str, str], length: int, whose: str
) -> None:
    """Neither positions nor columns of logits are gathered. The model's own loss is computed in float32."""
    near = {"rtol": 1e-9, "atol": 1e-12} if whose == "caller" else {"rtol": 1e-4, "atol": 1e-7}
    ids = torch.randint(3, CONFIG.vocab_size, (2, length))
    labels = ids.clone()
    labels[0, : length // 2 + 1] = -100  # ranks have different numbers of labels

    def loss_of(of: Any) -> torch.Tensor:
        if whose == "model":
            return of(ids, labels=labels).loss  # type: ignore[no-any-return]
        logits = of(ids).logits
        return F.cross_entropy(logits[:, :-1].reshape(-1, CONFIG.vocab_size), labels[:, 1:].reshape(-1))

    whole = copy.deepcopy(model)
    expected = loss_of(whole)
    expected.backward()
    copies = [copy.deepcopy(model) for _ in range(4)]

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        split = autoplan.parallelize(copies[number], mesh, plan)
        local = split.get_parameter("model.layers.0.self_attn.q_proj.weight").to_local().shape
        with count_collectives() as counts:
            loss = loss_of(split)
        assert not any("gather" in kind for kind in counts), counts
        loss.backward()
        return loss.detach(), full_tensors(split, True), local, autoplan.clip_gradients(split, 0.1)

    norm = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
    for loss, gradients, local, clipped in run_ranks(rank, 4):
        assert local == (32, 64)
        assert torch.allclose(loss, expected.detach(), **near)
        assert torch.allclose(clipped, norm)
        for name, parameter in whole.named_parameters():
            assert torch.allclose(gradients[name], parameter.grad, **near), name  # type: ignore[arg-type]


def test_a_block_with_biases_is_run_again_as_it_ran() -> None:
    """Ranks divide biases of sums between them; what is saved for that is saved inside of the block both times."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG.to_dict() | {"attention_bias": True, "mlp_bias": True})).double()
    plan = autoplan.plan(model, tp_size=2, cp_size=2, prove="none")
    copies, ids = [copy.deepcopy(model) for _ in range(4)], torch.randint(3, CONFIG.vocab_size, (2, 9))

    def step(of: Any) -> Any:
        F.cross_entropy(of(ids).logits.flatten(0, 1), ids.flatten()).backward()
        return of

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
        return full_tensors(step(autoplan.parallelize(copies[number], mesh, plan, activation_checkpointing=True)), True)

    wanted = {name: parameter.grad for name, parameter in step(model).named_parameters()}
    for gradients in run_ranks(rank, 4):
        for name, gradient in wanted.items():
            assert torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-12), name  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "tp", "cp"), [(2, 2, 2), (4, 1, 3)])
def test_where_heads_are_fewer_than_ranks_those_of_cp_have_own_queries(heads: int, tp: int, cp: int) -> None:
    """Ranks of tp split the heads, and those of cp attend to all. Other code of attention is refused, and beside tp a
    cache is."""
    sizes = CONFIG.to_dict() | {"num_attention_heads": heads, "num_key_value_heads": heads, "hidden_size": 16 * heads}
    found = autoplan.plan(LlamaConfig(**sizes), tp_size=tp, cp_size=cp, prove="ranks")
    assert found.proof.ok and "dropout" in found.proof.checked, found.findings
    assert not found.runtime.of(ExchangeToPieces)
    assert found.runtime.of(AttendAcross)
    warnings = {finding.check: finding.message for finding in found.findings if finding.level == "warn"}
    refused = {"attention", "cache"} if tp > 1 else {"attention"}
    assert warnings.keys() == refused and all("PlanMismatchError" in text for text in warnings.values())
    split = {rule.pattern for rule in found.runtime.parameters if rule.dim is not None}
    assert ("model.layers.*.self_attn.q_proj.weight" in split) == (tp > 1)


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize("kind", ("llama", "mamba2"))
def test_processes_agree_with_one_device(kind: str) -> None:
    checks = ["parameters", "state_dict", "forward", "second_shape", "loss", "dropout", "optimizer"]
    report = autoplan.verify(kind, tp_size=2, cp_size=2, engine="gloo", checks=checks)
    assert report.ok, report.findings


def test_a_plan_file_keeps_both(plan: autoplan.Plan, tmp_path: Any) -> None:
    plan.save(tmp_path / "plan.yaml")
    loaded = load_plan(tmp_path / "plan.yaml")
    assert loaded == plan
    assert (loaded.tp_size, loaded.cp_size) == (2, 2)


def test_a_mesh_with_one_of_them_is_refused(model: Any, plan: autoplan.Plan) -> None:
    def run(number: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlanMismatchError, match="'cp'"):
            autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        with pytest.raises(PlanMismatchError, match="cp=2"):
            apply_plan(copy.deepcopy(model), mesh, plan)

    run_ranks(run, 2)


def test_a_block_sends_over_both(plan: autoplan.Plan) -> None:
    """Over tp what own positions need, over cp what the heads of a rank of tp need."""
    (moved,) = plan.communication
    queries, keys, values, given_back = 64, 32, 32, 64  # numbers of eight bytes for each token
    exchanged = 8 * (queries + keys + values + given_back) // 4
    sums = 2 * 2 * 8 * 64 // 2
    assert moved.forward == {"all_reduce over tp": (2, sums), "all_to_all over cp": (4, exchanged)} == moved.backward


LAYOUTS = {  # over tp=2 and cp=2: what a rank of tp holds, and how that lies on its ranks of cp
    ("8!*64", "8!*64"): "4!*64",
    ("(16!|1)*64", "(16!|1)*64"): "(8!|1)*64",
    ("2!*64", "2!2@2*64"): None,  # a key head of each rank of tp, whole on its ranks of cp
    ("2!*4*16", "2!2@2*4!2@1*16"): "1*4!*16",
    ("8!|8!", "8!|8!"): "4!|4!",
}


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_what_ranks_of_cp_read_of_what_is_held(layouts: tuple[str, str]) -> None:
    own, both = layouts
    rules = tuple(Runtime(parameters=(ParameterRule("w", 0, layout),)) for layout in layouts)
    (found,) = combined(*rules, 2, 2).parameters
    assert found.layout == own and found.read is not None and found.read.layout == LAYOUTS[layouts]
    for number in range(4):
        held = Layout.parse(own).rows(number // 2, 2)
        rows = Layout.parse(found.read.layout).rows(number % 2, 2) if found.read.layout else range(len(held))
        assert tuple(held[row] for row in rows) == Layout.parse(both).rows(number, 4)


@pytest.mark.parametrize(("own", "both"), [("2!*8", "2*8!"), ("8", "8!"), ("6!", "6!")])
def test_parts_that_do_not_lie_within_each_other_are_refused(own: str, both: str) -> None:
    rules = (Runtime(parameters=(ParameterRule("w", 0, layout),)) for layout in (own, both))
    with pytest.raises(IndivisibleError, match="w: "):
        combined(*rules, 2, 2)


def test_numbers_of_both_replace_those_of_one() -> None:
    edits = (IntegerEdit("m", "heads", None, 8, new) for new in (4, 2))
    found = combined(*(Runtime(instructions=(one,)) for one in edits), 2, 2).instructions
    assert [(one.new, one.over) for one in found if isinstance(one, IntegerEdit)] == [(2, "all")]
