"""No name takes part in a decision: what autoplan finds in a model it finds in any copy and in any code.

Copies of transformers' modeling code in which every class and submodule has a meaningless name are split exactly as
the originals are, and models written in the styles of other code bases are split as far as they can be, and exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from outside import einops_style, litgpt_style, nanogpt_style, torchtune_style, x_transformers_style
from renamer import renamed_copy
from slow_cases import slow_but
from torch import nn

import autoplan
from autoplan.check.scoreboard.score import How, score, score_clone
from autoplan.check.verify.clone import clone_of
from autoplan.hf.shrink import tiny_config
from autoplan.hf.source import resolve
from autoplan.values import Score

RENAMED = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "falcon": "FalconForCausalLM",
    "bloom": "BloomForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "t5": "T5ForConditionalGeneration",
}


# Functions that both models share with many others, in a file that is not renamed, run the experts by these names.
RUN_ELSEWHERE = (
    "gate_up_proj",
    "down_proj",
    "act_fn",
    "num_experts",
    "has_bias",
    "has_gate",
    "is_transposed",
    "is_concatenated",
)


def scored(model: nn.Module, tp_size: int) -> Score:
    return score_clone(clone_of(resolve(model)), Score("", "", "cannot run"), How(tp_size))


def renamed(model_type: str) -> nn.Module:
    """A tiny model of the renamed class, whose names say nothing."""
    class_name = RENAMED[model_type]
    kept = RUN_ELSEWHERE if model_type in ("mixtral", "deepseek_v3") else ()
    module, names = renamed_copy(getattr(transformers, class_name).__module__, kept)
    config = tiny_config(transformers.AutoConfig.for_model(model_type))
    model: nn.Module = getattr(module, names[class_name])._from_config(config, experts_implementation="batched_mm")
    parts = {part for name, _ in model.named_parameters() for part in name.split(".")[:-1] if not part.isdigit()}
    assert all(re.fullmatch(r"attribute\d+", part) for part in parts - {*kept}), parts
    return model


@pytest.mark.parametrize("model_type", slow_but(RENAMED, "mixtral", "gpt2"))
def test_a_renamed_copy_is_split_like_the_original(model_type: str) -> None:
    original = score(model_type, RENAMED[model_type], How(2))
    copy = scored(renamed(model_type), 2)
    assert (original.verdict, copy.verdict) == ("exact", "exact"), copy.reason
    assert (copy.split, copy.counted) == (original.split, original.counted)
    assert (copy.forward, copy.backward, copy.scoped) == (original.forward, original.backward, original.scoped)


OUTSIDE: dict[str, Callable[[], nn.Module]] = {
    "nanoGPT": nanogpt_style.build,
    "litgpt": litgpt_style.build,
    "litgpt, parallel residual": lambda: litgpt_style.build(parallel_residual=True),
    "torchtune": torchtune_style.build,
    "x-transformers": x_transformers_style.build,
    **{f"einops ({order})": lambda order=order: einops_style.build(order, True) for order in einops_style.ORDERS},
    **{f"as einops ({order})": lambda order=order: einops_style.build(order) for order in einops_style.ORDERS},
}


@pytest.mark.parametrize("tp_size", slow_but([2, 4], 2))
@pytest.mark.parametrize("style", OUTSIDE)
def test_models_from_elsewhere_are_split_whole_and_exact(style: str, tp_size: int) -> None:
    if style.startswith("einops"):
        pytest.importorskip("einops")
    found = scored(OUTSIDE[style](), tp_size)
    assert (found.verdict, found.share, found.whole, found.unused) == ("exact", 1.0, (), ()), found.reason
    if style != "x-transformers":  # its norm inside the MLP has sums of its own
        each = 1 if "parallel" in style else 2  # branches side by side share one
        assert found.collectives["forward"]["all_reduce"] == 2 * each + 1, "in each block, and one in the embedding"


def test_no_table_of_names() -> None:
    """Names of model types or of usual submodules occur in autoplan only where they are printed as examples."""
    types = set(transformers.models.auto.configuration_auto.CONFIG_MAPPING) - {"git", "plan", "opt", "mt5", "radio"}
    suspects = types | {"q_proj", "o_proj", "gate_proj", "down_proj", "lm_head", "embed_tokens", "self_attn", "c_attn"}
    for path in Path(autoplan.__file__).parent.rglob("*.py"):
        if "written_plans" in path.parts or ("hf" in path.parts and "quantised" in path.parts):
            continue  # other tools' plans speak in names, and so do what quantisers leave out and how they pack
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text(encoding="utf-8"))
        quoted = {word for text in re.findall(r'"([^"\n]*)"', code) for word in re.split(r"[.*]", text)}
        if path.parts[-2:] == ("hf", "own_sharding.py"):
            quoted -= {"embed_tokens"}  # transformers' pipelines know three modules by their names
        assert not quoted & suspects, f"{path.name} knows {sorted(quoted & suspects)}"
