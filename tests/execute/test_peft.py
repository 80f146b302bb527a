"""A model that peft wrapped is planned as it stands: adapters follow their base, frozen stays frozen, names stay."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch
from mesh_toys import mesh_of
from safetensors.torch import save_file
from slow_cases import marked
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.values import (
    AllGatherSequenceSumGradient,
    AllReduce,
    AllReduceGradient,
    Boundary,
    NoteShard,
    ReduceScatterSequence,
)

if find_spec("peft") is None:
    pytest.skip("NOT TRIED: peft is absent; `make test-hosts` installs it and runs these", allow_module_level=True)

from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

pytestmark = pytest.mark.hosts
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "down_proj")
COLUMN, ROW = PROJECTIONS[:5], PROJECTIONS[5:]

CASES = {
    "lora": {},
    "dora": {"use_dora": True},
    "biases": {"bias": "lora_only", "lora_bias": True},
    "head and table trained": {
        "modules_to_save": ["lm_head", "embed_tokens"],
        "target_modules": ["q_proj", "down_proj"],
    },
    "table adapted": {"target_modules": ["embed_tokens", "o_proj"]},
}


def plain() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=192, max_position_embeddings=64, attention_bias=True, mlp_bias=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def adapted(**options: object) -> nn.Module:
    options = {"target_modules": list(PROJECTIONS), "r": 4, "lora_alpha": 8} | options
    return get_peft_model(plain(), LoraConfig(task_type="CAUSAL_LM", **options))


# `make test` tries each kind of adapter in one of the two ways: plain LoRA whole, the others along the sequence.
@pytest.mark.parametrize(
    ("case", "sequence_parallel"),
    marked(
        product(CASES, (False, True)),
        long=[("dora", False), ("biases", False), ("lora", True)],
        slow=[("head and table trained", False), ("table adapted", False)],
    ),
)
def test_exact_and_nothing_of_the_model_is_touched(case: str, sequence_parallel: bool) -> None:
    model = adapted(**CASES[case])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = list(model.state_dict())
    plan = autoplan.plan(
        model, tp_size=2, sequence_parallel=sequence_parallel, prove="none" if sequence_parallel else "graph"
    )
    assert plan.sequence_parallel == sequence_parallel
    report = autoplan.verify(model, plan, tp_size=2, checks=("parameters", "forward", "state_dict", "optimizer"))
    assert report.ok, report.findings
    assert set(report.gradients) == trained and max(report.gradients.values()) < 1e-9
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
    assert list(model.state_dict()) == names


def test_adapters_follow_their_base() -> None:
    plan = autoplan.plan(adapted(), tp_size=2, prove="none")
    cut = {rule.pattern: rule.dim for rule in plan.runtime.parameters if rule.dim is not None}
    for names, base, a, b in ((COLUMN, 0, None, 0), (ROW, 1, 1, None)):
        for name in names:
            held = {part: next((d for p, d in cut.items() if f".{name}.{part}" in p), None)
                    for part in ("base_layer", "lora_A", "lora_B")}  # fmt: skip
            assert held == {"base_layer": base, "lora_A": a, "lora_B": b}, name
    roles = {entry.role for entry in plan.entries}
    assert {"adapter A", "adapter B"} <= roles


def test_a_normalised_adapter_leaves_the_projections_split() -> None:
    """DoRA measures base and adapter together, feeds the adapter an identity matrix and takes the bias off again."""
    plan = autoplan.plan(adapted(use_dora=True), tp_size=2, prove="none")
    whole = [item.fqn for item in plan.replicated]
    assert whole and not any("base_layer.weight" in name for name in whole), whole
    cut = {rule.pattern: rule.dim for rule in plan.runtime.parameters if rule.dim is not None}
    for name in ROW:
        assert next(d for p, d in cut.items() if f".{name}.lora_A." in p) == 1
    for name in COLUMN:
        assert next(d for p, d in cut.items() if f".{name}.lora_magnitude_vector." in p) == 0


@pytest.mark.parametrize("rank", [4, 16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_adapters_cost_no_sums_of_their_own(sequence_parallel: bool, rank: int) -> None:
    """Two sums a block in each direction, adapters or not; small gradients of whole A and B are summed instead."""
    plan = autoplan.plan(adapted(r=rank), tp_size=2, sequence_parallel=sequence_parallel, prove="none")
    sites = {
        (one.pattern.rpartition(".")[2], one.side, type(one))
        for one in plan.runtime.of(Boundary)
        if "layers.*" in one.pattern and not isinstance(one, NoteShard)  # a mark, no sum
    }
    on_shards = ReduceScatterSequence, AllGatherSequenceSumGradient
    leaving, entering = on_shards if sequence_parallel else (AllReduce, AllReduceGradient)
    assert sites == {
        ("o_proj", "output", leaving),
        ("down_proj", "output", leaving),
        ("input_layernorm", "output", entering),
        ("post_attention_layernorm", "output", entering),
    }
    summed = {rule.pattern for rule in plan.runtime.parameters if rule.gradient == "sum"}
    for names, part in ((COLUMN, "lora_A"), (ROW, "lora_B")):
        assert all(any(f".{name}.{part}." in pattern for pattern in summed) for name in names)


def test_adapters_train_on_fsdp_by_tensor_parallelism_and_the_model_writes_the_same() -> None:
    """LoRA on a 2×2 mesh: gradients of adapters alone, each data-parallel rank with half of the batch; then text."""
    alone = adapted().double()
    for name, parameter in alone.named_parameters():
        if "lora_B" in name:  # zeros at first, with which A gets no gradient
            nn.init.normal_(parameter, std=0.1)
    plan = autoplan.plan(alone, tp_size=2, prove="none")
    ids = torch.randint(1, 190, (4, 7), generator=torch.Generator().manual_seed(1))
    sharded = [copy.deepcopy(alone) for _ in range(4)]
    alone(input_ids=ids, labels=ids).loss.backward()
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    text = alone.generate(input_ids=ids[:2], max_new_tokens=4, do_sample=False, pad_token_id=0)

    def rank_body(rank: int) -> tuple[float, bool]:
        mesh = mesh_of(dp_shard=2, tp=2)
        model = autoplan.parallelize(sharded[rank], mesh, plan)
        mine = ids.chunk(2)[mesh.get_local_rank("dp_shard")]
        model(input_ids=mine, labels=mine).loss.backward()
        found = autoplan.full_tensors(model, grads=True)
        assert found.keys() == wanted.keys()
        with torch.no_grad():
            same = model.generate(input_ids=ids[:2], max_new_tokens=4, do_sample=False, pad_token_id=0).equal(text)
        return max(float((found[name] - value).abs().max()) for name, value in wanted.items()), same

    for far, same in run_ranks(rank_body, 4):
        assert far < 1e-6 and same


def test_adapters_are_merged_taken_off_and_saved_as_those_of_the_unsharded_model(tmp_path: Path) -> None:
    """What is done at a wrapper goes on at the layer that was inside; files are those of the whole model."""
    ids = torch.randint(1, 190, (2, 7), generator=torch.Generator().manual_seed(1))

    def made() -> nn.Module:
        model = adapted(init_lora_weights=False, target_modules=["q_proj", "o_proj", "down_proj"]).double()
        return model.eval()

    plan = autoplan.plan(made(), tp_size=2, prove="none")
    models = [[made() for _ in range(3)] for _ in range(2)]
    with torch.no_grad():
        merged, alone = made()(input_ids=ids).logits, made().unload()(ids).logits

    def rank_body(rank: int) -> None:
        first, second, third = (autoplan.parallelize(model, mesh_of(tp=2), plan) for model in models[rank])
        first.save_pretrained(tmp_path / "adapter")
        whole = first.merge_and_unload()
        whole.save_pretrained(tmp_path / "merged")
        with torch.no_grad():
            torch.testing.assert_close(whole(ids).logits, merged)
            torch.testing.assert_close(second.unload()(ids).logits, alone)
        with pytest.raises(AutoplanError, match="adapter 'other' was not planned"):
            third.add_adapter("other", LoraConfig(target_modules=["q_proj"]))

    run_ranks(rank_body, 2)
    found = PeftModel.from_pretrained(plain().double(), tmp_path / "adapter").eval()
    again = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=ids).logits, merged)
        torch.testing.assert_close(again(ids).logits, merged)


FROM_META = {
    "lora": LoraConfig(task_type="CAUSAL_LM", target_modules=list(PROJECTIONS), r=4),
    "a table and a head that is trained": LoraConfig(
        task_type="CAUSAL_LM", target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"], r=4
    ),
    "scales": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=[]),
}


@pytest.mark.parametrize(("case", "inside"), [*product(FROM_META, [False]), ("lora", True)])
def test_a_base_on_meta_is_loaded_by_its_own_names(case: str, inside: bool, tmp_path: Path) -> None:
    """A folder of the plain model fills the one inside; adapters are new ones of peft's, the same on every rank."""
    alone = plain()
    alone.save_pretrained(tmp_path)

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            model = LlamaForCausalLM(alone.config)
        return get_peft_model(model, copy.deepcopy(FROM_META[case]))

    plan = autoplan.plan(on_meta(), tp_size=2, prove="none")
    ids = torch.arange(12).view(2, 6)

    def loaded(model: nn.Module, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(seed)
        found = autoplan.load_weights(model.get_base_model() if inside else model, tmp_path)
        assert not found.missing_keys and not found.unexpected_keys
        assert torch.initial_seed() == seed
        with torch.no_grad():
            return autoplan.full_tensors(model), model(input_ids=ids).logits

    def rank_body(rank: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return loaded(autoplan.parallelize(on_meta(), mesh_of(tp=2), plan), seed=7 + rank)

    whole, logits = loaded(on_meta(), seed=7)
    with torch.no_grad():
        torch.testing.assert_close(logits, alone(input_ids=ids).logits)
    assert all(value.std() > 0 for name, value in whole.items() if "lora_A" in name)
    for tensors, found in run_ranks(rank_body, 2):
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(value, whole[name]) for name, value in tensors.items())
        torch.testing.assert_close(found, logits)


def test_adapters_with_numbers_stay_and_a_base_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    alone = plain()
    alone.save_pretrained(tmp_path)
    model = adapted(init_lora_weights=False)
    before = {name: value.clone() for name, value in model.state_dict().items() if "lora_" in name}
    autoplan.load_weights(model, tmp_path)
    after = model.state_dict()
    assert before and all(torch.equal(value, after[name]) for name, value in before.items())
    state = {name: value for name, value in alone.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(AutoplanError, match=r"2 missing: model.layers.1.mlp.up_proj.weight"):
        autoplan.load_weights(model, tmp_path)


def test_an_adapter_that_is_computed_from_weights_on_meta_is_refused_by_name(tmp_path: Path) -> None:
    plain().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = LlamaForCausalLM(plain().config)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], use_dora=True))
    with pytest.raises(AutoplanError, match=r"lora_magnitude_vector.*is computed from the model's weights"):
        autoplan.load_weights(model, tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_adapters_that_come_after_sharding_are_refused() -> None:
    models = [plain() for _ in range(2)]
    plan = autoplan.plan(plain(), tp_size=2, prove="none")

    def rank_body(rank: int) -> None:
        model = autoplan.parallelize(models[rank], mesh_of(tp=2), plan)
        with pytest.raises(AutoplanError, match="weights of its own after the model was sharded"):
            get_peft_model(model, LoraConfig(target_modules=list(PROJECTIONS)))

    run_ranks(rank_body, 2)


def test_a_wrapper_that_only_passes_on_is_proven_too() -> None:
    """Without a task, peft's own class takes whatever it is given."""
    model = get_peft_model(plain(), LoraConfig(target_modules=list(PROJECTIONS), r=4))
    assert autoplan.plan(model, tp_size=2).proof.ok


def test_a_large_model_is_proven_on_a_tiny_one_with_the_same_adapters() -> None:
    config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, vocab_size=32000)
    with torch.device("meta"):
        model = get_peft_model(LlamaForCausalLM(config), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    plan = autoplan.plan(model, tp_size=2)
    assert plan.proof.ok and plan.proof.method == "graph"
