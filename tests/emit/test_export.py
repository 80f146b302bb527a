"""What leaves the house: each export runs exactly in the system it is for, or is refused with the bytes lost."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from host_rules import deepspeed_kinds, vllm_styles
from host_runs import Job, Outcome, run_jobs
from slow_cases import marked

import autoplan
from autoplan.common.patterns import matches, starred
from autoplan.conveniences import surroundings
from autoplan.emit.exports.export import TARGETS, export, needs_autoplan, vllm_finds
from autoplan.emit.exports.expressible import ExportError, parts_of
from autoplan.emit.exports.hf import to_hf
from autoplan.hf.source import resolve

torch.set_num_threads(1)

# With what each of them shows.
HF_MODELS = {
    "llama": "column and row layers, split head",
    "qwen3": "summed gradients of per-head norms",
    "gemma2": "a tied table",
    "gpt_neox": "biases, interleaved query, key, value",
    "opt": "head counts that transformers does not edit: its attention is gathered",
    "phi3": "packed weights: halves are split, query, key, value are gathered",
    "mixtral": "stacked experts",
    "gpt2": "Conv1D layers, which transformers cannot split",
    "falcon": "an output that is changed in place",
    "big_bird": "query, key, value in one module and the output layer in another",
    "mamba": "a weight that another module reads",
    "gemma3n_text": "layers of which some stay whole",
    "prophetnet": "a table with a third name",
}
TORCH_MODELS = ("llama", "gemma2", "gpt_neox", "phi3", "qwen3", "mixtral")
AUTOMODEL = ("llama", "qwen3", "phi3")


@cache
def clone(model_type: str) -> Any:
    return resolve(model_type).tiny(dtype=torch.float64, experts="batched_mm")


@cache
def plan_of(model_type: str) -> autoplan.Plan:
    return autoplan.plan(clone(model_type), 2, source="inferred", prove="none")


def exported(model_type: str, target: str) -> Any:
    return plan_of(model_type).export(target, clone(model_type), drop=target in ("hf", "vllm", "deepspeed"))


# ------------------------------------------------------------------------------------------------ run by the hosts


def outcomes(host: str, target: str, models: tuple[str, ...]) -> dict[str, Outcome]:
    texts = {model: exported(model, target) for model in models}
    found = run_jobs([Job(m, host, json.loads(t) if target == "hf" else t) for m, t in texts.items()])
    return {outcome.model: outcome for outcome in found}


@pytest.mark.slow
@pytest.mark.gloo
def test_transformers_runs_our_dicts_exactly() -> None:
    found = outcomes("transformers", "hf", tuple(HF_MODELS))
    assert {model: o for model, o in found.items() if not o.exact} == {} and found.keys() == HF_MODELS.keys()
    assert all(outcome.split for outcome in found.values())


@pytest.mark.slow
@pytest.mark.gloo
def test_torch_runs_the_generated_modules_exactly() -> None:
    found = outcomes("torch", "torch", TORCH_MODELS)
    assert {model: o for model, o in found.items() if not o.exact} == {} and len(found) == len(TORCH_MODELS)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.hosts
@pytest.mark.skipif(
    importlib.util.find_spec("nemo_automodel") is None,
    reason="NOT TRIED: nemo-automodel is absent; `make test-hosts` installs it and runs our plans through it",
)
def test_automodel_runs_the_generated_modules_exactly() -> None:
    found = outcomes("automodel", "automodel", AUTOMODEL)
    assert {model: o for model, o in found.items() if not o.exact} == {} and len(found) == len(AUTOMODEL)


@pytest.mark.slow
@pytest.mark.gloo
def test_the_runner_notices_a_wrong_dict() -> None:
    """Half of a pair, and a gradient that nobody sums: a runner that passed these would prove nothing."""
    good = to_hf(plan_of("qwen3"))
    unsummed = {k: "replicate" if s == "replicated_with_grad_allreduce" else s for k, s in good.items()}
    half = good | {"model.layers.*.mlp.down_proj": "replicate"}
    found = run_jobs([Job("qwen3", "transformers", unsummed), Job("qwen3", "transformers", half)])
    assert len(found) == 2 and not any(outcome.exact for outcome in found)


# ------------------------------------------------------------------------------------------------ what is written


@pytest.mark.parametrize("model", marked(HF_MODELS, long=["gemma3n_text"]))
def test_no_half_pair_is_written(model: str) -> None:
    """A layer that counts on a partner is written with all of its part; one that gathers counts on nobody."""
    written = to_hf(plan_of(model), drop=True)
    alone = ("colwise_gather_output", "rowwise_split_input")
    for part in parts_of(plan_of(model)):
        styles = [written.get(starred(e.pattern)) for e in part.entries if e.style != "replicated_with_grad_allreduce"]
        if any(style is not None and style not in alone for style in styles):
            assert all(style is not None for style in styles), part


def test_shipped_keys_that_we_do_not_use_are_switched_off() -> None:
    plan = autoplan.plan(clone("llama"), 2, overrides={"lm_head": "replicate"}, prove="none")
    assert "lm_head" not in plan.to_hf() and plan.to_hf(clone("llama"))["lm_head"] == "replicate"


def test_reading_back_what_was_written() -> None:
    plan = plan_of("llama")
    again = autoplan.plan(clone("llama"), 2, source=plan.to_hf(), prove="none")
    assert again.runtime == plan.runtime
    for model in ("llama", "mixtral"):
        stated = autoplan.plan(clone(model), 2, source=plan_of(model).to_torch(), prove="none")
        assert stated.runtime == plan_of(model).runtime
    deepspeed = json.loads(exported("llama", "deepspeed"))
    assert {e.pattern for e in autoplan.plan(clone("llama"), 2, source=deepspeed, prove="none").entries} == {
        e.pattern for e in plan.entries if e.rule in ("attention", "gated-mlp")
    }


def test_what_a_dialect_cannot_say_is_named_with_its_bytes() -> None:
    with pytest.raises(
        ExportError, match=r"(?s)transformers cannot express 4 entries.*transformer\.h\.\*\.attn\.c_attn: "
    ) as e:
        to_hf(plan_of("gpt2"))
    assert "MiB" in str(e.value) and "--drop" in str(e.value)
    with pytest.raises(ExportError, match="DeepSpeed cannot express 2 entries.*"):
        export(plan_of("llama"), "deepspeed")
    with pytest.raises(ExportError, match="old spelling"):
        to_hf(plan_of("mixtral"), old=True)
    assert to_hf(plan_of("gpt2"), old=True, drop=True) == {}  # nor the head alone, which is tied to the table


def test_packed_segments_for_deepspeed() -> None:
    specs = json.loads(exported("phi3", "deepspeed"))["tensor_parallel"]["partition_config"]["layer_specs"]
    shapes = {spec["patterns"][0].split("\\.")[-2]: spec.get("shape") for spec in specs}
    assert shapes["gate_up_proj"] == [2, -1] and shapes["down_proj"] is None


def test_classes_of_blocks() -> None:
    config = yaml.safe_load(exported("llama", "accelerate"))
    assert config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "LlamaDecoderLayer"
    units = json.loads(exported("llama", "megatron-fsdp"))["fsdp_unit_modules"]
    assert units == ["transformers.models.llama.modeling_llama.LlamaDecoderLayer"]


def test_vllm_gets_no_table_and_no_head() -> None:
    written = json.loads(exported("phi3", "vllm"))
    assert written["layers.*.mlp.gate_up_proj"] == "colwise_rep" and "lm_head" not in written
    assert surroundings(plan_of("phi3"), clone("phi3")).shipped


@pytest.mark.parametrize("model", ["llama", "gemma2", "phi3", "qwen3", "opt", "gpt_neox", "llava"])
def test_vllm_finds_what_it_is_meant_to(model: str) -> None:
    """It builds the model without its head: what we count, and what its own rule finds there, is the same."""
    text = exported(model, "vllm")
    base = surroundings(plan_of(model), clone(model)).base
    styles = vllm_styles(clone(model).config, json.loads(text))
    cut = {f"{base}.{name}".removeprefix(".") for name, style in styles.items() if style != "replicate"}
    linears = {name for name, module in clone(model).named_modules() if isinstance(module, torch.nn.Linear)}
    assert cut and cut <= linears and text.reached == len(cut) and text.linears == len(linears)
    assert not any(matches(pattern, name) for pattern in text.whole for name in cut)


def test_vllm_reads_keys_as_expressions() -> None:
    """`layers.*.up` begins every name that `layers.*.up_gate` means: the longer key must come first, or be refused."""
    names = ("model.layers.0.up", "model.layers.0.up_gate")
    meant = {"layers.*.up_gate": "rowwise", "layers.*.up": "colwise"}
    finds = vllm_finds(meant, names, "model")
    assert all(map(finds, names)) and not finds("lm_head")
    with pytest.raises(ExportError, match="regular expressions, and would match layers.0.up_gate to colwise"):
        vllm_finds({"layers.*.up": "colwise"}, names, "model")
    with pytest.raises(ExportError, match="none of the 2 linear layers"):
        vllm_finds({"model.layers.*.up": "colwise"}, names, "model")


@pytest.mark.parametrize("model", ["llama", "phi3", "qwen3", "gpt_neox"])
def test_deepspeed_parses_what_it_gets(model: str) -> None:
    text = exported(model, "deepspeed")
    config = json.loads(text)["tensor_parallel"]
    kinds = deepspeed_kinds(config, [name for name, _ in clone(model).named_parameters()])
    cut = {name.removesuffix(".weight") for name, kind in kinds.items() if kind in ("column", "row")}
    linears = {name for name, module in clone(model).named_modules() if isinstance(module, torch.nn.Linear)}
    assert cut and cut <= linears and text.reached == len(cut)
    sides = {e.pattern: "row" if e.style == "rowwise" else "column" for e in plan_of(model).entries}
    assert all(kinds[f"{name}.weight"] == best for name in cut for p, best in sides.items() if matches(p, name))


@pytest.mark.hosts
@pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="NOT TRIED: deepspeed is absent; `make test-hosts` installs it and has it parse what we export",
)
@pytest.mark.parametrize("model", ["llama", "phi3", "qwen3", "gpt_neox"])
def test_deepspeeds_own_config_parses_ours_and_finds_the_same(model: str) -> None:
    """As DeepSpeed's engine reads it; what it finds is what the reading in helpers/host_rules.py says."""
    from deepspeed.runtime.tensor_parallel.config import get_tensor_parallel_config

    written = json.loads(exported(model, "deepspeed"))
    parsed = get_tensor_parallel_config(written).get_partition_config_object()
    assert parsed.tp_size == 2 and not parsed.use_default_specs
    kinds = deepspeed_kinds(written["tensor_parallel"], [name for name, _ in clone(model).named_parameters()])
    for name, kind in kinds.items():
        spec = parsed.find_matching_spec(name, clone(model).config.model_type)
        assert ("none" if spec is None else spec.partition_type.value) == kind, name
    assert {"column", "row"} <= set(kinds.values())


def test_transformers_finds_what_is_counted() -> None:
    """Held against transformers' own look-up."""
    from transformers.distributed.parallel_utils import _get_parameter_plan

    for model in ("llama", "opt", "mixtral"):
        text = exported(model, "hf")
        written = json.loads(text)
        linears = [name for name, module in clone(model).named_modules() if isinstance(module, torch.nn.Linear)]
        found = [_get_parameter_plan(f"{name}.weight", written) for name in linears]
        assert text.reached == sum(style not in (None, "replicate") for style in found) > 0
        assert text.linears == len(linears)


def test_an_export_says_how_many_layers_it_reaches() -> None:
    text = exported("llama", "vllm")
    assert text.note == f"shards {text.reached} of {text.linears} linear layers; replicated: lm_head"
    assert exported("llama", "torch").note.endswith("linear layers") and not exported("llama", "accelerate").note
    assert plan_of("llama").export("hf").linears is None  # without a model nobody knows


@pytest.mark.parametrize("model", TORCH_MODELS)
def test_the_generated_module_says_what_it_needs(model: str, tmp_path: Path) -> None:
    text = exported(model, "torch")
    stock = not needs_autoplan(plan_of(model))
    assert stock == (model in ("llama", "gemma2", "gpt_neox"))
    assert stock != ("import autoplan" in text or "from autoplan" in text)
    file = tmp_path / "plan.py"
    file.write_text(text)
    check = [sys.executable, "-m", "ruff", "format", "--check", "--line-length", "120", "-q", str(file)]
    assert subprocess.run(check).returncode == 0 or not stock
    compile(text, "plan.py", "exec")


def test_targets_are_all_reachable() -> None:
    for target in TARGETS:
        assert export(plan_of("llama"), target, surroundings(plan_of("llama"), clone("llama")), drop=True)
    with pytest.raises(ExportError, match="no export to 'jax'"):
        export(plan_of("llama"), "jax")
