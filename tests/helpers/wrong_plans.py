"""Right plans and what people get wrong in them: each mutation knows the rows that are its cause.

A mutation makes a wrong plan out of a right one, in style names; `dialects` write them as each library takes them. A
mutation may be of no use in a dialect that cannot say it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from corpus.toys import ATTENTION, GOOD, MLP, TABLES, Attention, FusedAttention, decoder
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

Plan = dict[str, Any]
LAYERS = "layers.*."


@dataclass(frozen=True)
class Mutation:
    """`spoil` changes a plan; `causes` are the keys or modules that the first findings must be about."""

    name: str
    spoil: Callable[[Plan], Plan]
    causes: tuple[str, ...]
    model: Callable[[], Any] = partial(decoder, layers=4)
    right: Mapping[str, str] = None  # type: ignore[assignment]
    tp_size: int = 2
    dialects: tuple[str, ...] = ("torch", "transformers", "deepspeed")


def without(*keys: str) -> Callable[[Plan], Plan]:
    return lambda plan: {key: style for key, style in plan.items() if key not in keys}


def having(changes: Mapping[str, str]) -> Callable[[Plan], Plan]:
    return lambda plan: {**plan, **changes}


def moved(old: str, new: str) -> Callable[[Plan], Plan]:
    return lambda plan: {new if key == old else key: style for key, style in plan.items()}


def by_layer(plan: Mapping[str, str], layers: int = 4) -> dict[str, str]:
    """The same plan with a row for each layer."""
    return {
        key.replace("*", str(layer)): style
        for key, style in plan.items()
        for layer in (range(layers) if "*" in key else (0,))
    }


A, M = f"{LAYERS}attn.", f"{LAYERS}mlp."
_ROWS = (*ATTENTION, *MLP)
_FUSED = {**TABLES, **MLP, f"{A}qkv_proj": "colwise", f"{A}o_proj": "rowwise"}
_KV = partial(decoder, partial(Attention, heads=4, kv_heads=2), layers=2)
_NORMED = partial(decoder, partial(Attention, norm="head"), layers=2)
_FULL = partial(decoder, partial(Attention, norm="full"), layers=2)
_SEPARATE = by_layer(GOOD)

MUTATIONS = (
    *(Mutation(f"{row.rpartition('.')[2]} missing", without(row), (row,)) for row in _ROWS),
    *(
        Mutation(f"{row.rpartition('.')[2]} the other way",
                 having({row: "rowwise" if style == "colwise" else "colwise"}), (row,))
        for row, style in {**ATTENTION, **MLP}.items()
    ),
    Mutation("wrong path of gate", moved(f"{M}w3", f"{LAYERS}ffn.w3"), (f"{LAYERS}ffn.w3", f"{M}w3")),
    Mutation("wrong name of o", moved(f"{A}o_proj", f"{A}out_proj"), (f"{A}out_proj", f"{A}o_proj")),
    Mutation("prefix", lambda plan: {f"model.{key}": style for key, style in plan.items()},
             ("model.embed", f"model.{A}q_proj")),
    Mutation("one of four missing", without("layers.2.attn.k_proj"), ("layers.2.attn.k_proj",), right=_SEPARATE,
             dialects=("torch", "deepspeed")),
    Mutation("one of four other", having({"layers.1.mlp.w2": "colwise"}), ("layers.1.mlp.w2",), right=_SEPARATE,
             dialects=("torch", "deepspeed")),
    Mutation("keys by number", lambda plan: plan, tuple(key for key in _SEPARATE if "layers" in key), right=_SEPARATE,
             dialects=("transformers",)),
    Mutation("head without gather", having({"head": "colwise"}), ("head",), dialects=("torch", "transformers")),
    Mutation("head by rows", having({"head": "rowwise"}), ("head",), dialects=("torch", "transformers")),
    Mutation("table without inputs", having({"embed": "rowwise"}), ("embed",), dialects=("torch",)),
    Mutation("q gathered", having({f"{A}q_proj": "colwise_gather_output"}), (f"{A}q_proj",)),
    Mutation("down takes whole", having({f"{M}w2": "rowwise_split_input"}), (f"{M}w2",),
             dialects=("torch", "transformers")),
    Mutation("two mistakes", having({f"{A}o_proj": "colwise", f"{M}w1": "rowwise"}), (f"{A}o_proj", f"{M}w1")),
    Mutation("two in one part", having({f"{A}o_proj": "colwise", f"{A}v_proj": "rowwise"}),
             (f"{A}o_proj", f"{A}v_proj")),
    Mutation("a row missing and one wrong",
             lambda plan: having({f"{M}w2": "colwise"})(without(f"{A}k_proj")(plan)), (f"{A}k_proj", f"{M}w2")),
    Mutation("fused", lambda plan: dict(_FUSED), (f"{A}qkv_proj",), model=partial(decoder, FusedAttention)),
    Mutation("heads by 4 of 2", lambda plan: plan, (f"{A}k_proj", f"{A}v_proj"), model=_KV, tp_size=4),
    Mutation("gradient of head norms", lambda plan: plan, (f"{A}q_norm", f"{A}k_norm"), model=_NORMED),
    Mutation("full norms", lambda plan: plan, (f"{A}q_norm", f"{A}k_norm", f"{A}q_proj", f"{A}k_proj"), model=_FULL),
    Mutation("norm cut", having({"norm": "colwise"}), ("norm",), dialects=("transformers",)),
    Mutation("wildcard too wide", having({f"{A}*": "colwise"}), (f"{A}*", f"{A}o_proj"), dialects=("torch",)),
    Mutation("wildcard among others", moved(f"{A}v_proj", f"{A}*"), (f"{A}*",), dialects=("torch",)),
    Mutation("tied", lambda plan: plan, ("embed", "head"), model=partial(decoder, tied=True), dialects=("torch",)),
    Mutation("unknown word", having({f"{M}w1": "columnwise"}), (f"{M}w1",), dialects=("transformers",)),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------ sequence parallelism


class GatheringNorm(SequenceParallel):
    """A norm on a part of the sequence that hands on the whole of it, as NeMo Automodel has one."""

    @staticmethod
    def _prepare_output_fn(use_local_output: bool, mod: Any, outputs: Any, device_mesh: Any) -> Any:
        return outputs.redistribute(device_mesh, [Replicate()]).to_local()


def sequence_plan(how: str) -> Plan:
    """A right plan with the stream cut along the sequence: in Automodel's words, or in torchtitan's."""
    whole, part = Replicate(), Shard(1)
    norm = GatheringNorm if how == "automodel" else SequenceParallel
    gathered = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))
    inputs = {} if how == "automodel" else {f"{LAYERS}attn": gathered, f"{LAYERS}mlp": gathered}
    return {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=part),
        f"{LAYERS}input_norm": norm(),
        f"{LAYERS}post_norm": norm(),
        **inputs,
        **{key: ColwiseParallel() for key, style in {**ATTENTION, **MLP}.items() if style == "colwise"},
        f"{A}o_proj": RowwiseParallel(output_layouts=part),
        f"{M}w2": RowwiseParallel(output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }


SEQUENCE_MUTATIONS: dict[str, tuple[Callable[[Plan], Plan], tuple[str, ...]]] = {
    "norm missing": (without(f"{LAYERS}post_norm"), (f"{LAYERS}post_norm",)),
    "last norm missing": (without("norm"), ("norm",)),
    "o whole": (lambda plan: {**plan, f"{A}o_proj": RowwiseParallel()}, (f"{A}o_proj",)),
    "table whole": (lambda plan: {**plan, "embed": RowwiseParallel(input_layouts=Replicate())}, ("embed",)),
    "head takes whole": (lambda plan: {**plan, "head": ColwiseParallel(output_layouts=Replicate())}, ("head",)),
    "gate missing": (without(f"{M}w3"), (f"{M}w3",)),
    "o by columns": (lambda plan: {**plan, f"{A}o_proj": ColwiseParallel()}, (f"{A}o_proj",)),
}


# ------------------------------------------------------------------------------------------------ dialects


def as_torch(plan: Plan) -> Plan:
    made = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    return {key: made[style]() for key, style in plan.items()}


def as_deepspeed(plan: Plan) -> Plan:
    kinds = {
        "colwise": {"partition_type": "column"},
        "rowwise": {"partition_type": "row"},
        "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    }
    specs = [
        {"patterns": [rf".*{key.replace('.', chr(92) + '.').replace('*', '[0-9]+')}\.weight$"], **kinds[style]}
        for key, style in plan.items()
        if key.rpartition(".")[2] not in ("embed", "head")
    ]
    return {"tensor_parallel": {"partition_config": {"layer_specs": specs}}}


DIALECTS: dict[str, Callable[[Plan], Plan]] = {
    "transformers": copy.copy,
    "torch": as_torch,
    "deepspeed": as_deepspeed,
}


def wrong_plan(mutation: Mutation, dialect: str) -> Plan:
    return DIALECTS[dialect](mutation.spoil(dict(mutation.right or GOOD)))
