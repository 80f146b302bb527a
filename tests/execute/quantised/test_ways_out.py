"""The published sizes that part blocks: each way out named there runs on ranks and gives the whole model's numbers.

The models are shrunken so that the arithmetic stays: sizes and blocks are an eighth, heads and ranks as published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import built, checkpoint
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import IndivisibleError

SHAPES = Path(__file__).parents[3] / "examples" / "shapes" / "quantised"
BLOCK = 16
SMALL = {"num_hidden_layers": 2, "hidden_size": 128, "vocab_size": 256, "max_position_embeddings": 64}
OF = {  # model: tp, what a rank would hold there, sizes
    "qwen3-30b-a3b-fp8": (
        4,
        "24 of 96, 1.5 quantised blocks of 16",
        {"moe_intermediate_size": 96, "head_dim": 16, "num_experts": 8},
    ),
    "minimax-m2.5-fp8": (
        8,
        "24 of 192, 1.5 quantised blocks of 16",
        {"intermediate_size": 192, "head_dim": 16, "num_local_experts": 8, "rotary_dim": 8},
    ),
    "qwen3-coder-480b-a35b-fp8": (
        8,
        "40 of 320, 2.5 quantised blocks of 16",
        {"moe_intermediate_size": 320, "head_dim": 16, "num_experts": 8},
    ),
    "deepseek-r1-fp8": (
        32,
        "72 of 2304, 4.5 quantised blocks of 16",
        {"hidden_size": 64, "intermediate_size": 2304, "moe_intermediate_size": 256, "n_routed_experts": 32}
        | {"first_k_dense_replace": 1, "q_lora_rank": 192, "kv_lora_rank": 64, "qk_nope_head_dim": 16}
        | {"qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 16},
    ),
    "qwen3.6-35b-a3b-fp8": (
        8,
        "8 of 64, 0.5 quantised blocks of 16",
        {"num_hidden_layers": 1, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "head_dim": 32}
        | {"num_experts": 8, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    ),
    "qwen2.5-vl-72b-awq": (
        2,
        "1848 of 3696, 115.5 quantised blocks of 16",
        {"intermediate_size": 3696, "hidden_size": 1024, "num_hidden_layers": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
    ),
}
CASES = [
    *((name, {"tp_size": OF[name][0], "uneven": "blocks"}) for name in OF),
    *((name, {"tp_size": tp}) for name, (tp, _, _) in OF.items()),  # that one whole
    *((name, {"tp_size": tp, "ep_size": tp}) for name, (tp, _, _) in list(OF.items())[:5]),
    ("qwen3-30b-a3b-fp8", {"tp_size": 2}),
    ("minimax-m2.5-fp8", {"tp_size": 4}),
    ("qwen3-coder-480b-a35b-fp8", {"tp_size": 4}),
    ("deepseek-r1-fp8", {"tp_size": 16}),
    ("qwen3.6-35b-a3b-fp8", {"tp_size": 4}),
]
QUICK, LONG = (0, 2, 13), (5,)


def shrunken(name: str) -> Any:
    config = AutoConfig.from_pretrained(SHAPES / name)
    text = config.get_text_config()
    for key, value in (SMALL | OF[name][2]).items():
        setattr(text, key, value)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[-text.num_hidden_layers :]
    data = dict(config.quantization_config)
    data["group_size" if "group_size" in data else "weight_block_size"] = (
        BLOCK if "group_size" in data else [BLOCK, BLOCK]
    )
    config.quantization_config = data
    config._experts_implementation = text._experts_implementation = "eager"
    vision = getattr(config, "vision_config", None)
    if vision is not None:
        vision.depth = 1
        vision.out_hidden_size = text.hidden_size
    return config


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "3.6" in n else n for n in OF])
def test_the_arithmetic_is_as_published(name: str) -> None:
    tp, numbers, _ = OF[name]
    with pytest.raises(IndivisibleError, match="Options, in order") as refused:
        autoplan.plan(shrunken(name), tp_size=tp, prove="none", strict=True)
    assert numbers in str(refused.value)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(*case, marks=() if n in QUICK else pytest.mark.long if n in LONG else pytest.mark.slow)
        for n, case in enumerate(CASES)
    ],
)
def test_a_way_out_runs(name: str, how: dict[str, Any], tmp_path: Path) -> None:
    """Packed and plain, on as many simulated ranks as published: logits, stored tensors and dequantised weights."""
    config = shrunken(name)
    made = autoplan.plan(config, prove="none", **how)
    checkpoint(config, made, tmp_path, listed=False)
    whole = autoplan.packed_model(built(config, "meta"), made)
    autoplan.load_weights(whole, tmp_path)
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = whole(ids).logits
    stored = {key: value.detach() for key, value in whole.state_dict().items()}

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (made.ranks,), mesh_dim_names=("tp",))
        model = autoplan.packed_model(built(config, "meta"), made)
        model = autoplan.parallelize(model, mesh, made, gather_logits=True)
        autoplan.load_weights(model, tmp_path)
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
        for key, value in autoplan.full_tensors(model).items():
            assert value.dtype == stored[key].dtype and torch.equal(value.float(), stored[key].float()), key

    run_ranks(rank_body, made.ranks)
    assert torch.isfinite(expected).all() and expected.abs().max() > 0.1
