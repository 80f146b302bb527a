"""Hand-written plans: found by qualified name, never worse than inference, exact on ranks."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lookalikes import load
from slow_cases import marked
from torch import nn

import autoplan
from autoplan.common.files.rule_files import VARIABLE
from autoplan.common.patterns import matches
from autoplan.decide.written_plans.dialects import ancestors_of
from autoplan.decide.written_plans.read import find_plan, load_plans, plan_by_id, read_plan
from autoplan.values import SplitLogits

torch.set_num_threads(1)
LOOKALIKES = {"baichuan": "baichuan", "decilm": "decilm", "nemotron-labs-diffusion": "nemotron_labs_diffusion"}
PINNED = Path(__file__).parent / "pinned"  # plans that make the same cuts as analysis, which they hold to it
PLANS = {plan.id: plan for plan in (*load_plans(), *load_plans(PINNED / "plans"))}


@pytest.fixture(autouse=True)
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(PINNED))


QUICK = ("llama", "gemma3", "falcon-h1", "phi3", "baichuan", "qwen3-sequence-classification", "gemma4-multimodal")
LARGE = ("falcon-h1", "gemma4-multimodal")  # seconds each: that they are exact on ranks, `make test` shows
SLOW = [name for name in PLANS if name not in QUICK]


@cache
def model_of(plan_id: str) -> Any:
    """A model that the plan is for: a config of its class, or the look-alike."""
    plan = PLANS[plan_id]
    if plan.id in LOOKALIKES:
        return load(LOOKALIKES[plan.id]).MODEL()
    name = plan.qualnames[0].rpartition(".")[2]
    config = getattr(transformers, name).config_class()
    config.architectures = [name]
    if "Sequence" in name:
        config.pad_token_id = 0
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        _shorten(part)
    return config


def _shorten(config: Any) -> None:
    """Few blocks, of every kind: what is left out says nothing that six blocks do not."""
    for name in ("num_hidden_layers", "depth"):
        if config is not None and getattr(config, name, 0) > 6:
            setattr(config, name, 6)
            if isinstance(vars(config).get("layer_types"), list):
                config.layer_types = config.layer_types[:6]


@cache
def made_of(plan_id: str) -> autoplan.Plan:
    """What autoplan plans for it, by itself."""
    return autoplan.plan(model_of(plan_id), 2, prove="none")


def cuts(plan: autoplan.Plan) -> dict[str, str]:
    return {rule.pattern: f"{rule.dim}:{rule.layout}" for rule in plan.runtime.parameters if rule.dim is not None}


# ------------------------------------------------------------------------------------------------ every file


@pytest.mark.parametrize("name", marked(PLANS, long=LARGE, slow=SLOW))
def test_audit_against_inference(name: str) -> None:
    """Same cuts as inference, or the file says how they differ; every key means something."""
    inferred = autoplan.plan(model_of(name), 2, source="inferred", prove="none")
    made = made_of(name)
    assert made.source == "handwritten"
    same = cuts(made) == cuts(inferred)
    assert same == PLANS[name].gains.startswith("Pins it"), set(cuts(made).items()) ^ set(cuts(inferred).items())
    assert same or PLANS[name].gains.startswith("Differs")
    assert not [f for f in made.findings if "matches nothing" in f.message or "does not shard" in f.message]
    written = {e.pattern for e in made.entries if e.source == "handwritten"}
    for pattern, style in PLANS[name].entries:
        assert style == "replicate" or any(matches(pattern, entry) or pattern == entry for entry in written), pattern


@pytest.mark.parametrize("name", marked(PLANS, slow=SLOW))
def test_exact_on_ranks(name: str) -> None:
    """Each plan runs on two simulated ranks and equals the unsharded model, forward and every gradient."""
    check_on_ranks(model_of(name), made_of(name))


def check_on_ranks(model: Any, plan: autoplan.Plan) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = autoplan.verify(model, plan, tp_size=2, checks=["parameters", "forward", "second_shape"])
    assert report.ok, [f"{f.where}: {f.message}" for f in report.findings]
    assert report.details["capabilities"].sequence == plan.sequence_parallel, "what was promised was left out"
    assert max(report.gradients.values()) < 1e-5


@pytest.mark.parametrize("name", marked(PLANS, long=LARGE, slow=[*SLOW, "gemma3", "phi3"]))
def test_sequence_parallel_variant(name: str) -> None:
    """A variant is what analysis places under sequence parallelism and runs, or the file says why there is none."""
    variant = PLANS[name].sequence_parallel
    if isinstance(variant, str):
        assert len(variant) > 40
        return
    model = model_of(name)
    made = autoplan.plan(model, 2, sequence_parallel=True, prove="none")
    assert made.sequence_parallel and made.source == "handwritten"
    for pattern, style in variant:
        styles = {e.style for e in made.entries if matches(pattern, e.pattern) or e.pattern == pattern}
        expected = "replicated_with_grad_allreduce" if style == "sequence_parallel" else style
        assert styles <= {expected}, (pattern, styles)
    check_on_ranks(model, made)


# ------------------------------------------------------------------------------------------------ found by name


class Mixin:
    """What a training framework mixes in."""


def tiny_llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    return transformers.LlamaForCausalLM, config


def test_a_class_made_anew_keeps_its_plan() -> None:
    """The published failure: identity was looked up, the wrapped class missed, and its head was gathered."""
    cls, config = tiny_llama()
    wrapped = type(cls.__name__, (Mixin, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
    assert wrapped is not cls
    plan = autoplan.plan(wrapped(config), 2, prove="none")
    head = next(e for e in plan.entries if e.pattern == "lm_head")
    assert plan.source == head.source == "handwritten" and head.style == "colwise"  # and not gathered
    assert any(head.pattern == "lm_head" for head in plan.runtime.of(SplitLogits))


def test_a_subclass_is_planned_as_what_it_descends_from() -> None:
    cls, config = tiny_llama()
    mine = type("MyLlama", (cls,), {"__module__": "my.models"})
    plan = autoplan.plan(mine(config), 2, prove="none")
    assert plan.source == "handwritten"
    assert any("my.models.MyLlama inherits from" in f.message for f in plan.findings)


def test_two_classes_of_one_name_do_not_meet() -> None:
    stranger = type("LlamaForCausalLM", (nn.Module,), {"__module__": "other.library"})
    assert find_plan(ancestors_of(stranger)) is None
    remote = type("LlamaForCausalLM", (nn.Module,), {"__module__": "transformers_modules.abc.modeling"})
    assert find_plan(ancestors_of(remote)) is None  # the name of a class that transformers ships proves nothing there


def test_remote_code_is_found_by_bare_name_only_there() -> None:
    remote = type("DeciLMForCausalLM", (nn.Module,), {"__module__": "transformers_modules.a.b0c1.modeling_decilm"})
    found = find_plan(ancestors_of(remote))
    assert found is not None and found[0].id == "decilm" and "bare name" in found[1]
    local = type("DeciLMForCausalLM", (nn.Module,), {"__module__": "my.models"})
    assert find_plan(ancestors_of(local)) is None


def test_plans_have_names_of_their_own() -> None:
    named = plan_by_id("llama_nemotron_super_tp_plan")
    assert named is not None and named.id == "decilm"
    plan = autoplan.plan(load("decilm").MODEL(), 2, source="llama_nemotron_super_tp_plan", prove="none")
    assert {e.source for e in plan.entries} == {"handwritten"}


def test_compiled_and_checkpointed_models_are_looked_through() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    cls, config = tiny_llama()
    inputs = {"input_ids": torch.randint(0, 128, (2, 10))}
    for wrapped in (torch.compile(cls(config)), checkpoint_wrapper(cls(config))):
        plan = autoplan.plan(wrapped, 2, inputs=inputs, prove="none")
        assert plan.source == "handwritten", type(wrapped)
        heads = [e for e in plan.entries if e.pattern.endswith("lm_head")]
        assert [e.source for e in heads] == ["handwritten"], [e.pattern for e in plan.entries]


@pytest.mark.hosts
def test_adapters_are_looked_through() -> None:
    peft = pytest.importorskip("peft", reason="NOT TRIED: peft is absent; `make test-hosts` installs it")
    cls, config = tiny_llama()
    adapted = peft.get_peft_model(cls(config), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    plan = autoplan.plan(adapted, 2, inputs={"input_ids": torch.randint(0, 128, (2, 10))}, prove="none")
    assert plan.source == "handwritten"


# ------------------------------------------------------------------------------------------------ one that does not fit

# Query heads, key/value heads, tp: the query heads are cut within their groups, key and value stay whole.
GROUPED = [(6, 3, 2), (24, 8, 3), (14, 2, 7), (15, 5, 3)]


def grouped_llama(heads: int, groups: int, tp: int) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=8 * heads,
        head_dim=8,
        intermediate_size=16 * tp,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=32 * tp,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("heads", "groups", "tp", "sequence_parallel"),
    [
        pytest.param(*sizes, along, marks=pytest.mark.slow if along != (n % 2 == 0) else ())
        for n, sizes in enumerate(GROUPED)
        for along in (False, True)
    ],
)
def test_analysis_stands_in_for_a_plan_that_does_not_fit(
    heads: int, groups: int, tp: int, sequence_parallel: bool
) -> None:
    model = grouped_llama(heads, groups, tp)
    how: Any = {"sequence_parallel": sequence_parallel, "prove": "none"}
    inferred = autoplan.plan(model, tp, source="inferred", **how)
    plan = autoplan.plan(model, tp, **how)
    assert plan.source == "inferred" and cuts(plan) == cuts(inferred) and plan.entries == inferred.entries
    (warning,) = (f for f in plan.findings if f.level == "warn")
    assert warning.check == "written plan" and "llama.toml" in warning.message
    assert f"{groups}*{tp}!*8" in warning.message  # why it does not fit
    for source in ("handwritten", "llama"):  # asked for by name
        with pytest.raises(autoplan.AutoplanError, match=r"llama.toml.*segments"):
            autoplan.plan(model, tp, source=source, **how)


def test_a_plan_that_stands_in_is_proven_and_exact() -> None:
    model = grouped_llama(6, 3, 2)
    plan = autoplan.plan(model, 2, prove="graph")
    assert plan.proof.ok and plan.source == "inferred"
    check_on_ranks(model, plan)


def test_overrides_stay_where_the_plan_below_them_does_not_fit() -> None:
    plan = autoplan.plan(grouped_llama(6, 3, 2), 2, overrides={"lm_head": "colwise_gather_output"}, prove="none")
    sources = {entry.pattern: entry.source for entry in plan.entries}
    assert plan.source == "inferred" and sources.pop("lm_head") == "user" and set(sources.values()) == {"inferred"}
    assert any(one.pattern == "lm_head" for one in plan.runtime.instructions)
    with pytest.raises(autoplan.AutoplanError, match="overrides"):  # wrong by themselves
        autoplan.plan(grouped_llama(6, 3, 2), 2, overrides={"lm_haed": "colwise"}, prove="none")


# ------------------------------------------------------------------------------------------------ bad files


GOOD = """
id = "x"
qualname = "a.B"
why = "w"
gains = "g"
sequence_parallel = "none, because"
[entries]
"up" = "colwise"
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("colwise", "colwize"), "did you mean 'colwise'"),
        (('why = "w"', ""), "no why"),
        (('id = "x"', 'id = "y"'), "the file is named 'x'"),
        (("[entries]", "[entires]"), "entires"),
        (("id =", "id"), "as TOML"),
    ],
)
def test_a_wrong_file_is_said(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(GOOD)
    assert read_plan(file).entries == (("up", "colwise"),)
    file.write_text(GOOD.replace(*change))
    with pytest.raises(autoplan.AutoplanError, match=said):
        read_plan(file)


def test_two_files_for_one_class_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(GOOD)
    (tmp_path / "y.toml").write_text(GOOD.replace('id = "x"', 'id = "y"'))
    with pytest.raises(autoplan.AutoplanError, match=r"x.toml and y.toml are both for a.B"):
        load_plans(tmp_path)
