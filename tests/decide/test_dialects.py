"""Plans that others wrote: every dialect read, every way to be wrong said in one clear error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from releases import since
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

import autoplan
from autoplan.common.files.rule_files import VARIABLE
from autoplan.common.requirements import OWN_SHARDING
from autoplan.decide.written_plans.choices import CUTS, check_style
from autoplan.decide.written_plans.dialects import ALIASES
from autoplan.hf.source import resolve

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of one's own with a plan for llamas."""
    monkeypatch.setenv(VARIABLE, str(Path(__file__).parent / "pinned"))


def llama(**changes: Any) -> transformers.LlamaConfig:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128}
    return transformers.LlamaConfig(**(sizes | changes), architectures=["LlamaForCausalLM"])


def planned(source: Any, config: Any = None, tp: int = 2, **options: Any) -> autoplan.Plan:
    return autoplan.plan(config if config is not None else llama(), tp, source=source, prove="none", **options)


def styles(plan: autoplan.Plan) -> dict[str, str]:
    return {entry.pattern: entry.style for entry in plan.entries}


MLP = {
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


class Unheard(ParallelStyle):
    """A style that is not one of torch's."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return module


class Vocabulary(RowwiseParallel):
    """Frameworks subclass torch's styles."""


# What dotted paths lead to.
PLAN = MLP
NUMBER = 3


class Holder:
    inner: Mapping[str, str] = MLP


def nothing() -> dict[str, str]:
    return MLP


def of_model(model: nn.Module) -> dict[str, str]:
    assert any(name.endswith("up_proj") for name, _ in model.named_modules())
    return MLP


def of_both(model: nn.Module, sequence_parallel: bool) -> dict[str, str]:
    assert sequence_parallel is False
    return of_model(model)


def no_plan() -> int:
    return 3


def raises() -> dict[str, str]:
    raise KeyError("no such cluster")


def wants_more(a: int, b: int, c: int) -> None: ...


# ------------------------------------------------------------------------------------------------ read


OBJECTS = {
    "model.embed_tokens": Vocabulary(input_layouts=Replicate()),
    "model.layers.*.mlp.gate_proj": ColwiseParallel(),
    "model.layers.*.mlp.up_proj": ColwiseParallel(),
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "model.norm": SequenceParallel(),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}
RELATIVE = {key.removeprefix("model."): style for key, style in MLP.items()}
OLD = dict(zip(MLP, ("colwise_rep", "colwise_rep", "rowwise_rep"), strict=True))
LOCAL = dict(zip(MLP, ("local_colwise", "local_colwise", "local_rowwise"), strict=True))
DEEPSPEED = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "layer_specs": [
                {"patterns": [r".*\.(gate|up)_proj\.weight$"], "partition_type": "column"},
                {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"},
            ]
        },
    }
}
HERE = "test_dialects"


@pytest.mark.parametrize(
    "source",
    [
        *(MLP, RELATIVE, OLD, LOCAL, DEEPSPEED),
        *(f"{HERE}.PLAN", f"{HERE}.Holder.inner", f"{HERE}:nothing", f"{HERE}.of_model", f"{HERE}.of_both"),
    ],
    ids=lambda source: source if isinstance(source, str) else next(iter(source)),
)
def test_the_mlp_said_in_every_dialect(source: Any) -> None:
    plan = planned(source)
    assert styles(plan) == MLP
    assert {entry.source for entry in plan.entries} == {"user"} and plan.source == "user"


def test_style_objects() -> None:
    found = styles(planned(OBJECTS))
    assert found["model.embed_tokens"] == "embedding_rowwise" and found["lm_head"] == "colwise"
    assert {key: found[key] for key in MLP} == MLP and "model.layers.*.self_attn.q_proj" not in found


def test_every_transformers_style_is_known() -> None:
    since(OWN_SHARDING, "module of expert parallelism")
    import transformers.distributed.expert_parallel
    import transformers.distributed.tensor_parallel  # noqa: F401  they register them
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    known = set(ALL_PARALLEL_STYLES)
    assert len(known) >= 20 and {"grouped_gemm", "ep_dispatch_experts"} <= known
    for style in sorted(known):
        assert check_style(style, "a.b", "a plan", ALIASES) in CUTS, style


@pytest.fixture(scope="module")
def mixtral() -> Any:
    return resolve("mixtral").tiny(dtype=torch.float64, experts="batched_mm")


def test_transformers_expert_plan_is_a_source(mixtral: Any) -> None:
    """Whole experts on different ranks, with or without tp beside them."""
    since(OWN_SHARDING, "plan of mixtral that places whole experts")
    source = mixtral.config.base_model_ep_plan
    assert "grouped_gemm" in source.values() and "ep_dispatch_experts" in source.values()
    for sizes in ({"ep_size": 2}, {"tp_size": 2, "ep_size": 2}):
        plan = autoplan.plan(mixtral, source=source, prove="none", **sizes)
        cut = {e.pattern: e.segments for e in plan.entries if e.style != "replicated_with_grad_allreduce"}
        assert set(cut) == {"model.layers.*.mlp.experts"} and len(cut["model.layers.*.mlp.experts"]) == 2, cut
        assert all(segment.startswith("0:") for segments in cut.values() for segment in segments)


def test_whole_experts_need_ranks_to_go_to(mixtral: Any) -> None:
    since(OWN_SHARDING, "plan of mixtral that places experts")
    with pytest.raises(autoplan.AutoplanError, match="grouped_gemm places experts") as caught:
        autoplan.plan(mixtral, 2, source=mixtral.config.base_model_ep_plan, prove="none")
    assert "ep_size=" in str(caught.value)


def test_transformers_own_plan_says_where_each_key_was() -> None:
    plan = planned("hf")
    assert plan.source == "hf" and {entry.source for entry in plan.entries} == {"hf"}
    said = [f.message for f in plan.findings]
    assert "lm_head: colwise_gather_output comes from LlamaForCausalLM._tp_plan" in said
    assert "model.layers.*.mlp.up_proj: colwise comes from LlamaConfig.base_model_tp_plan" in said


def test_an_instance_beats_its_class() -> None:
    since(OWN_SHARDING, "style replicate")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(llama())
    model.tp_plan = {**model.tp_plan, "lm_head": "replicate"}
    plan = planned("hf", model)
    assert "lm_head" not in styles(plan)
    assert any("lm_head: replicate comes from the LlamaForCausalLM instance" in f.message for f in plan.findings)


def test_overrides_are_laid_over_any_source() -> None:
    plan = planned("auto", overrides={"lm_head": "replicate"})
    assert "lm_head" not in styles(plan) and plan.source == "handwritten"
    plan = planned("inferred", overrides=MLP)
    by_source = {entry.pattern: entry.source for entry in plan.entries}
    assert by_source["model.layers.*.mlp.up_proj"] == "user" and by_source["lm_head"] == "inferred"


def test_overrides_may_tell_blocks_apart() -> None:
    first = {key.replace("*", "0"): "replicate" for key in MLP}
    found = styles(planned("inferred", overrides=first))
    assert "model.layers.1.mlp.up_proj" in found and "model.layers.0.mlp.up_proj" not in found


def test_plan_files_and_plans(tmp_path: Path) -> None:
    plan = planned("inferred")
    plan.save(tmp_path / "plan.yaml")
    assert planned(str(tmp_path / "plan.yaml")) == plan == planned(plan)
    (tmp_path / "deepspeed.json").write_text(json.dumps(DEEPSPEED))
    assert styles(planned(str(tmp_path / "deepspeed.json"))) == MLP


def test_what_analysis_finds_is_not_up_to_the_plan() -> None:
    """A written plan forgets the gradient sums of q_norm and k_norm; analysis does not."""
    config = transformers.Qwen3Config(
        **{k: v for k, v in llama().to_dict().items() if k in ("hidden_size", "intermediate_size", "vocab_size")},
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        architectures=["Qwen3ForCausalLM"],
    )
    attention = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    plan = planned(attention | {"model.layers.*.self_attn.o_proj": "rowwise"}, config)
    assert styles(plan)["model.layers.*.self_attn.q_norm"] == "replicated_with_grad_allreduce"


# ------------------------------------------------------------------------------------------------ refuse


PHI3 = {
    "model.layers.*.self_attn.qkv_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
}


def without(name: str) -> dict[str, str]:
    return {key: style for key, style in MLP.items() if name not in key}


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({}, "is an empty plan"),
        ({"model.layers.*.mlp.upproj": "colwise"}, "nearest paths: model.layers.\\*.mlp.up_proj"),
        (MLP | {"lm_head": "colwize"}, "did you mean 'colwise'"),
        (MLP | {"lm_head": Unheard()}, f"{HERE}.Unheard, which is not a style"),
        (MLP | {3: "colwise"}, "the key 3"),
        (without("down"), "half of a column/row pair.*\n.*'model.layers.\\*.mlp.down_proj': 'rowwise'"),
        (without("gate"), "'model.layers.\\*.mlp.gate_proj': 'colwise'"),
        (MLP | {"model.layers.*.mlp.down_proj": "colwise"}, "down_proj.weight along dim 0.*half of a column/row pair"),
        ({"model.layers.*.mlp.down_proj": "colwise"}, "residual stream"),
        (MLP | {"model.layers.0.mlp.up_proj": "rowwise"}, "two keys with different styles match"),
        ("nowhere.at.all", "no module named 'nowhere'"),
        (f"{HERE}.MISSING", "has no 'MISSING'"),
        (f"{HERE}.NUMBER", "is a int, which is not a plan"),
        (f"{HERE}.no_plan", r"\(\) returned a int, which is not a plan"),
        (f"{HERE}.wants_more", r"requires \(a, b, c\)"),
        (f"{HERE}.raises", "raises when it is called: KeyError: 'no such cluster'"),
        ("plans/that/are/not.yaml", "an existing plan file"),
        ("nonsense", "Plan ids: .*llama"),
        (__file__, "is Python code, not a plan file.*test_dialects:plan"),
        ({"layer_specs": [{"patterns": ["upproj"], "partition_type": "column"}]}, "match no parameter"),
        ({"layer_specs": [{"patterns": ["up_proj"], "partition_type": "diagonal"}]}, "partition_type is 'diagonal'"),
        ({"layer_specs": [{"patterns": ["("], "partition_type": "row"}]}, "is not a regular expression"),
    ],
)
def test_what_is_wrong_is_said(source: Any, said: str) -> None:
    with pytest.raises(autoplan.AutoplanError, match=f"(?s){said}") as caught:
        planned(source)
    assert "→" in str(caught.value)


def test_a_packed_weight_as_a_plain_one() -> None:
    with pytest.raises(autoplan.AutoplanError, match=r"(?s)several segments.*'packed_colwise'"):
        planned(PHI3, "phi3")
    assert styles(planned(PHI3 | {"model.layers.*.self_attn.qkv_proj": "packed_colwise"}, "phi3"))


def test_a_tied_parameter_said_twice() -> None:
    tied = {"model.embed_tokens": "replicate", "lm_head": "colwise"}
    with pytest.raises(autoplan.AutoplanError, match="are one tied parameter"):
        planned(tied, llama(tie_word_embeddings=True))


def test_heads_that_do_not_divide() -> None:
    attention = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    attention["model.layers.*.self_attn.o_proj"] = "rowwise"
    with pytest.raises(autoplan.AutoplanError, match="is not divisible by tp=3"):
        planned(attention, tp=3)
    plan = planned("auto", tp=3)  # a hand-written plan is for every size: what does not divide stays whole
    assert plan.source == "handwritten" and any("not divisible" in whole.reason for whole in plan.replicated)
    assert not [f for f in plan.findings if f.check == "written plan"]  # nothing that is not said there


def test_listing_instead_of_refusing() -> None:
    plan = planned(MLP | {"model.nothing": "colwise", "lm_head": "colwize"}, unmatched="list")
    said = " ".join(f.message for f in plan.findings)
    assert styles(plan) == MLP and "'model.nothing' matches nothing" in said and "colwize" in said


def test_a_plan_of_another_size(tmp_path: Path) -> None:
    planned("inferred").save(tmp_path / "plan.json")
    with pytest.raises(autoplan.AutoplanError, match="is a plan for tp=2, not tp=4"):
        planned(str(tmp_path / "plan.json"), tp=4)


def test_sources_without_a_plan_name_the_next_options() -> None:
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    for source in ("handwritten", "hf"):
        with pytest.raises(autoplan.AutoplanError, match="(?s)no .*plan.*source='auto'"):
            planned(source, module)
    assert planned("auto", module).source == "inferred"


def test_style_objects_are_for_one_model() -> None:
    styles = planned("inferred").to_torch()
    with torch.device("meta"):
        models = [transformers.LlamaForCausalLM(llama()) for _ in range(2)]
    last = styles[""]
    last._used = True  # as after parallelize_module on a first model
    with pytest.raises(autoplan.AutoplanError, match="already applied to a model.*\n.*once per model"):
        last._apply(models[1], None)
    assert planned("inferred").to_torch()[""] is not last


def test_a_path_that_raises_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('no such cluster')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(autoplan.AutoplanError, match=r"raises on import: RuntimeError: no such cluster"):
        planned("breaks_on_import.PLAN")
