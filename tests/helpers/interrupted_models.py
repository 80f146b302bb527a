"""Models that are sharded while something interrupts it: a dense one, experts, a hybrid, one of several modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from mesh_toys import WIDTH, Part, deep, ids
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoplan
from autoplan.common.options import Wish
from autoplan.hf.source import resolve
from autoplan.planning import draft_plan
from autoplan.values import Plan

__all__ = ["HOW", "KINDS", "apply_to", "build_of", "mesh_for", "plan_for", "whole"]

KINDS = ("small", "toy", "mixtral", "bamba", "llava")
HOW = ("tp", "tp, dp", "tp, checkpointing", "tp, dp, checkpointing")


class Small(nn.Module):
    """Few modules, so that every line can be tried."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Part(), Part()])
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x + self.shift


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_local_experts=2, **_SIZES))


def _bamba() -> nn.Module:
    """One mixer and one attention."""
    from transformers import BambaConfig, BambaForCausalLM

    mixer = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 4, "mamba_chunk_size": 4}
    return BambaForCausalLM(BambaConfig(**{**_SIZES, **mixer, "num_hidden_layers": 2, "attn_layer_indices": [1]}))


def _llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    seen = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    eyes = CLIPVisionConfig(image_size=8, patch_size=4, projection_dim=16, **seen)
    config = LlavaConfig(vision_config=eyes, text_config=LlamaConfig(**_SIZES), image_token_index=31)
    config.vision_feature_layer = -1
    return LlavaForConditionalGeneration(config)


_SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
                          "num_key_value_heads": 2, "vocab_size": 32}  # fmt: skip
MADE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any] | None]] = {
    "small": (Small, {"x": torch.linspace(-1, 1, 30 * WIDTH).view(6, 5, WIDTH)}),
    "toy": (lambda: deep(depth=1), {"ids": ids(), "use_cache": False}),
    "mixtral": (_mixtral, None),
    "bamba": (_bamba, None),
    "llava": (_llava, None),
}


@cache
def plan_for(kind: str) -> Plan:
    build, inputs = MADE[kind]
    torch.manual_seed(0)
    return draft_plan(resolve(build(), inputs=inputs), Wish(2)).plan


def build_of(kind: str) -> Callable[[], nn.Module]:
    return MADE[kind][0]


def mesh_for(how: str) -> DeviceMesh:
    """Of four ranks; two where there is only tp."""
    sizes = [(name, 2) for name in ("dp", "tp") if name in how]
    names = tuple(name for name, _ in sizes)
    return init_device_mesh("cpu", tuple(size for _, size in sizes), mesh_dim_names=names)


def apply_to(kind: str, how: str) -> Callable[[nn.Module], Any]:
    mesh, plan, checkpointing = mesh_for(how), plan_for(kind), "checkpointing" in how
    return lambda model: autoplan.parallelize(model, mesh, plan, activation_checkpointing=checkpointing)


def whole(how: str) -> Callable[[nn.Module], bool]:
    """Was everything done that was asked for?"""

    def done(model: nn.Module) -> bool:
        known = autoplan.applied(model)
        if known is None or known.running is None or not known.hooked:
            return False
        return bool(known.units) == ("dp" in how) and bool(known.checkpointed) == ("checkpointing" in how)

    return done
