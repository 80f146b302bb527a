"""Wrong plans as users write them, by hand: what is done in one family carried over to another, rows mistyped or
forgotten, layouts that do not meet. Each knows the rows that are its cause.

Here are those of style objects; `drawn_words.py` has the others, and all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mistakes import Mistake
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from wrong_plans import GatheringNorm, as_torch

Rows = dict[str, Any]
L = "model.layers.*"
A, M = f"{L}.self_attn", f"{L}.mlp"


def attention(home: str = A, out: str = "o_proj") -> Rows:
    return {**{f"{home}.{name}_proj": "colwise" for name in "qkv"}, f"{home}.{out}": "rowwise"}


def gated(home: str = M) -> Rows:
    return {f"{home}.gate_proj": "colwise", f"{home}.up_proj": "colwise", f"{home}.down_proj": "rowwise"}


def plain(home: str, one: str, two: str) -> Rows:
    return {f"{home}.{one}": "colwise", f"{home}.{two}": "rowwise"}


def latent() -> Rows:
    return {f"{A}.q_b_proj": "colwise", f"{A}.kv_b_proj": "colwise", f"{A}.o_proj": "rowwise"}


TABLE = {"model.embed_tokens": "embedding_rowwise"}
ENDS = {**TABLE, "lm_head": "colwise_gather_output"}
EXPERTS = {f"{M}.experts.gate_up_proj": "packed_colwise", f"{M}.experts.down_proj": "rowwise",
           f"{M}.experts": "moe_tp_experts"}  # fmt: skip
LLAMA = {**attention(), **gated()}
HEAD_NORMS = {f"{A}.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
QWEN = f"{L.replace('model.', 'model.language_model.')}"
NEOX, NEOX_A = "gpt_neox.layers.*", "gpt_neox.layers.*.attention"
NEOX_PLAN = {**plain(NEOX_A, "query_key_value", "dense"), **plain(f"{NEOX}.mlp", "dense_h_to_4h", "dense_4h_to_h")}
BLOOM = "transformer.h.*"
BLOOM_PLAN = plain(f"{BLOOM}.mlp", "dense_h_to_4h", "dense_4h_to_h")
FALCON_PLAN = plain(f"{BLOOM}.mlp", "dense_h_to_4h", "dense_4h_to_h")
MIXER = "backbone.layers.*.mixer"
NEMOTRON = f"{L}.mixer"
T5E, T5D = "encoder.block.*.layer", "decoder.block.*.layer"
T5_MLP = {**plain(f"{T5E}.1.DenseReluDense", "wi", "wo"), **plain(f"{T5D}.2.DenseReluDense", "wi", "wo")}
W = "model.decoder.layers.*"
WHISPER_MLP = {**plain(W, "fc1", "fc2"), **plain("model.encoder.layers.*", "fc1", "fc2")}
WHISPER = "whisper:WhisperForConditionalGeneration"


@dataclass(frozen=True)
class Drawn:
    """`rows`: style names by key, or style objects; `causes`: for each mistake, keys one of which must be named."""

    model: str
    dialect: str
    kind: str
    rows: Rows
    causes: tuple[tuple[str, ...], ...]
    tp_size: int = 2


def draw(
    model: str, dialect: str, kind: str, base: Rows, changes: Mapping[str, Any], *causes: Any, tp: int = 2
) -> Drawn:
    """A right or a usual plan with these changes (None: no row). `causes` that are a string have one key."""
    rows = {key: style for key, style in {**base, **changes}.items() if style is not None}
    named = tuple((cause,) if isinstance(cause, str) else tuple(cause) for cause in causes)
    return Drawn(model, dialect, kind, rows, named, tp)


def renamed(base: Rows, **names: str) -> Rows:
    """The same rows; in their keys one word stands for another."""
    rows = base
    for old, new in names.items():
        rows = {key.replace(old.replace("__", "."), new): style for key, style in rows.items()}
    return rows


def sequence(base: Rows, norms: tuple[str, ...], last: str = "model.norm", *, how: str = "automodel") -> Rows:
    """A plan with the stream cut along the sequence, in Automodel's words or in torchtitan's."""
    part, whole = Shard(1), Replicate()
    inputs = PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))
    named = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": part}, desired_input_kwarg_layouts={"hidden_states": whole}
    )
    homes = {A: named, M: inputs} if how == "torchtitan" else {}
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=part, use_local_output=False),
        **{norm: GatheringNorm() if how == "automodel" else SequenceParallel() for norm in norms},
        **homes,
        **{
            key: RowwiseParallel(output_layouts=part, use_local_output=False)
            if style == "rowwise"
            else ColwiseParallel()
            for key, style in base.items()
            if "*" in key
        },
        last: SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=part, output_layouts=whole),
    }


NORMS = (f"{L}.input_layernorm", f"{L}.post_attention_layernorm")


# fmt: off
def torch_draws() -> Iterator[Drawn]:
    whole, part = Replicate(), Shard(1)
    t = "torch"
    qkv, gate_up = f"{A}.qkv_proj", f"{M}.gate_up_proj"
    phi = {qkv: "colwise", f"{A}.o_proj": "rowwise", gate_up: "colwise", f"{M}.down_proj": "rowwise"}
    yield draw("phi3", t, "fused cut plainly", phi, ENDS, (qkv, f"{A}.o_proj"), (gate_up, f"{M}.down_proj"))
    yield draw("phi3", t, "llama's rows", {**LLAMA, **ENDS}, {}, (f"{A}.o_proj", f"{A}.q_proj", qkv), (f"{M}.down_proj",
               f"{M}.gate_proj", gate_up))
    yield draw("mixtral", t, "router split", attention(), {f"{M}.gate": "colwise"}, f"{M}.gate")
    yield draw("mixtral", t, "experts' old names", attention(), {f"{M}.experts.*.w1": "colwise", f"{A}.o_proj": None},
               (f"{A}.o_proj",))
    yield draw("qwen3_moe", t, "head norms' gradients", {**attention(), **ENDS}, {}, (f"{A}.q_norm", f"{A}.k_norm"))
    yield draw("qwen3_moe", t, "head norms cut", {**attention(), **ENDS}, {f"{A}.q_norm": ColwiseParallel(),
               f"{A}.k_norm": ColwiseParallel()}, (f"{A}.q_norm", f"{A}.k_norm"))
    yield draw("gpt_oss", t, "sinks whole", {**attention(), **ENDS}, {}, (f"{A}.sinks", *attention()))
    yield draw("gpt_oss", t, "o_proj by columns", attention(), {f"{A}.o_proj": "colwise"}, tuple(attention()))
    yield draw("deepseek_v3", t, "latent unsummed", {**latent(), **gated(f"{M}.shared_experts")}, ENDS,
               (f"{A}.kv_a_proj_with_mqa", f"{A}.kv_b_proj", *latent()))
    yield draw("deepseek_v3", t, "down missing", {**gated(), **ENDS}, {f"{M}.down_proj": None}, (f"{M}.down_proj",))
    yield draw("mamba2", t, "in_proj cut plainly", plain(MIXER, "in_proj", "out_proj"), {}, (f"{MIXER}.in_proj",
               f"{MIXER}.out_proj"))
    yield draw("mamba2", t, "head without gather", {"backbone.embeddings": "embedding_rowwise"}, {"lm_head": "colwise"},
               "lm_head")
    yield draw("nemotron_h", t, "mixers as an MLP", {f"{NEMOTRON}.up_proj": "colwise",
               f"{NEMOTRON}.down_proj": "rowwise"}, {f"{NEMOTRON}.shared_experts.up_proj": "rowwise",
               f"{NEMOTRON}.shared_experts.down_proj": "rowwise"}, f"{NEMOTRON}.shared_experts.up_proj")
    yield draw("nemotron_h", t, "o_proj missing", {f"{NEMOTRON}.{n}_proj": "colwise" for n in "qkv"}, {},
               (f"{NEMOTRON}.o_proj",))
    yield draw("bloom", t, "fused heads", {**BLOOM_PLAN, **plain(f"{BLOOM}.self_attention", "query_key_value",
               "dense")}, {}, (f"{BLOOM}.self_attention.query_key_value", f"{BLOOM}.self_attention.dense"))
    yield draw("bloom", t, "tied table alone", {**BLOOM_PLAN}, {"transformer.word_embeddings": "embedding_rowwise"},
               ("transformer.word_embeddings", "lm_head"))
    yield draw("gpt_neox", t, "two mistakes", NEOX_PLAN, {f"{NEOX_A}.dense": "colwise",
               f"{NEOX}.mlp.dense_h_to_4h": None}, f"{NEOX_A}.dense", f"{NEOX}.mlp.dense_h_to_4h")
    yield draw("gpt_neox", t, "table takes cut ids", NEOX_PLAN, {"gpt_neox.embed_in": RowwiseParallel()},
               "gpt_neox.embed_in")
    yield draw("gpt_neox", t, "output left as DTensor", NEOX_PLAN,
               {f"{NEOX_A}.query_key_value": ColwiseParallel(use_local_output=False)}, f"{NEOX_A}.query_key_value")
    yield draw("gpt_neox", t, "old head's name", NEOX_PLAN, {"embed_out": "colwise",
               f"{NEOX_A}.dense": "rowwise_split_input"}, f"{NEOX_A}.dense")
    whisper_heads = attention(f"{W}.self_attn", "out_proj")
    yield draw(WHISPER, t, "cross attention by half", {**WHISPER_MLP, **attention(f"{W}.encoder_attn", "out_proj")},
               {f"{W}.encoder_attn.k_proj": None, f"{W}.encoder_attn.v_proj": None},
               tuple(attention(f"{W}.encoder_attn", "out_proj")))
    yield draw(WHISPER, t, "o_proj for out_proj", {**WHISPER_MLP, **renamed(whisper_heads, out_proj="o_proj")}, {},
               (*whisper_heads, f"{W}.self_attn.o_proj"))
    yield draw(WHISPER, t, "fc2 by columns", WHISPER_MLP, {f"{W}.fc2": "colwise"}, f"{W}.fc2")
    visual = "model.visual.blocks.*"
    yield draw("qwen2_vl", t, "visual heads", {**plain(f"{visual}.attn", "qkv", "proj"), **plain(f"{visual}.mlp", "fc1",
               "fc2")}, {}, (f"{visual}.attn.qkv", f"{visual}.attn.proj"))
    yield draw("qwen2_vl", t, "path without the language model", LLAMA, {"lm_head": "colwise"}, "lm_head")
    yield draw("qwen2_vl", t, "first layers alone", renamed(LLAMA, model__layers=f"{QWEN[:-2]}"),
               {f"{QWEN}.mlp.up_proj": None, f"{QWEN[:-1]}0.mlp.up_proj": "colwise"}, (f"{QWEN}.mlp.up_proj",
               f"{QWEN[:-1]}0.mlp.up_proj"))
    shared = f"{L}.feed_forward.shared_expert"
    yield draw("llama4_text", t, "shared expert gathered half", {**attention(), **gated(shared)},
               {f"{shared}.up_proj": "colwise_gather_output"}, (f"{shared}.up_proj", f"{shared}.down_proj"))
    yield draw("llama4_text", t, "router split", attention(), {f"{L}.feed_forward.router": "colwise"},
               f"{L}.feed_forward.router")
    yield draw("gemma3_text", t, "head norms' gradients", LLAMA, {}, (f"{A}.q_norm", f"{A}.k_norm"))
    yield draw("gemma3_text", t, "pattern for all layers", gated(), {f"{M}.*_proj": "colwise", f"{M}.gate_proj": None,
               f"{M}.up_proj": None}, (f"{M}.*_proj", f"{M}.down_proj"))
    yield draw("olmo2", t, "norms of all heads", {**LLAMA, **ENDS}, {}, (f"{A}.q_norm", f"{A}.k_norm", *attention()))
    yield draw("olmo2", t, "lone sequence norm", {**gated(), **ENDS},
               {f"{L}.post_feedforward_layernorm": SequenceParallel()}, f"{L}.post_feedforward_layernorm")
    yield draw("falcon", t, "fused query key value", {**FALCON_PLAN, **plain(f"{BLOOM}.self_attention",
               "query_key_value", "dense")}, {}, (f"{BLOOM}.self_attention.query_key_value",
               f"{BLOOM}.self_attention.dense"))
    yield draw("falcon", t, "reduce-scattered", FALCON_PLAN,
               {f"{BLOOM}.mlp.dense_4h_to_h": RowwiseParallel(output_layouts=part)}, f"{BLOOM}.mlp.dense_4h_to_h")
    yield draw("t5", t, "relative bias whole", T5_MLP, {**{f"{T5E}.0.SelfAttention.{n}": "colwise" for n in "qkv"},
               f"{T5E}.0.SelfAttention.o": "rowwise"}, tuple(f"{T5E}.0.SelfAttention.{n}" for n in "qkvo"))
    yield draw("t5", t, "wo missing", T5_MLP, {f"{T5D}.2.DenseReluDense.wo": None}, (f"{T5D}.2.DenseReluDense.wo",
               f"{T5D}.2.DenseReluDense.wi"))
    yield draw("llama", t, "summed twice", LLAMA, {M: PrepareModuleOutput(output_layouts=(partial_sum(),),
               desired_output_layouts=(whole,))}, M)
    yield draw("llama", t, "loss-parallel head without a loss of its kind", {**LLAMA, **ENDS},
               {"lm_head": ColwiseParallel(output_layouts=part)}, "lm_head")
    yield draw("llama", t, "keys of 2 over 4", {**LLAMA, **ENDS}, {}, (f"{A}.k_proj", f"{A}.v_proj"), tp=4)
    yield draw("mistral", t, "regex for a pattern", LLAMA, {r"model.layers.\d+.mlp.up_proj": "colwise",
               f"{M}.up_proj": None}, (f"{M}.up_proj", r"model.layers.\d+.mlp.up_proj"))
    yield draw("qwen2", t, "weight in the key", LLAMA, {f"{A}.o_proj.weight": "rowwise", f"{A}.o_proj": None},
               (f"{A}.o_proj", f"{A}.o_proj.weight"))


def automodel_draws() -> Iterator[Drawn]:
    whole, part = Replicate(), Shard(1)
    row = RowwiseParallel(output_layouts=part, use_local_output=False)
    moe = sequence({**attention(), **gated(f"{M}.shared_experts")}, NORMS)
    for model in ("llama", "qwen2"):
        right = sequence(LLAMA, NORMS)
        titan = sequence(LLAMA, NORMS, how="torchtitan")
        yield draw(model, "automodel", "norm forgotten", right, {NORMS[1]: None}, NORMS[1])
        yield draw(model, "automodel", "norm hands on a part", right, {NORMS[0]: SequenceParallel()}, NORMS[0])
        yield draw(model, "automodel", "last norm forgotten", right, {"model.norm": None}, "model.norm")
        yield draw(model, "automodel", "table whole", right,
                   {"model.embed_tokens": RowwiseParallel(input_layouts=whole)}, "model.embed_tokens")
        yield draw(model, "automodel", "down whole", right, {f"{M}.down_proj": RowwiseParallel()}, f"{M}.down_proj")
        yield draw(model, "automodel", "o_proj on its width", right,
                   {f"{A}.o_proj": RowwiseParallel(output_layouts=Shard(-1), use_local_output=False)}, f"{A}.o_proj")
        yield draw(model, "automodel", "up by rows", right, {f"{M}.up_proj": row}, f"{M}.up_proj")
        yield draw(model, "automodel", "head takes all for cut", right,
                   {"lm_head": ColwiseParallel(input_layouts=part)}, "lm_head")
        yield draw(model, "automodel", "inputs not gathered", titan, {f"{L}.mlp": None}, (f"{L}.mlp", *gated()))
        yield draw(model, "automodel", "inputs by position", titan, {A: PrepareModuleInput(input_layouts=(part,),
                   desired_input_layouts=(whole,))}, A)
        yield draw(model, "automodel", "typo in a norm", right, {NORMS[1]: None,
                   f"{L}.post_attn_layernorm": GatheringNorm()}, (NORMS[1], f"{L}.post_attn_layernorm"))
        yield draw(model, "automodel", "two mistakes", right, {f"{A}.v_proj": None,
                   f"{M}.down_proj": RowwiseParallel()}, f"{A}.v_proj", f"{M}.down_proj")
    yield draw("deepseek_v3", "automodel", "experts' sum whole", moe, {}, (M, f"{M}.experts", *attention(),
               f"{A}.q_b_proj", f"{M}.shared_experts.down_proj"))


# fmt: on
def mistake_of(one: Drawn) -> Mistake:
    """The plan as its library takes it."""
    return Mistake(one.kind, written(one), one.causes, one.tp_size)


def written(one: Drawn) -> Any:
    if one.dialect == "hf":
        return dict(one.rows)
    if one.dialect == "deepspeed":
        kinds = {"colwise": "column", "rowwise": "row"}
        specs = [
            {
                "patterns": [
                    key[1:] if key[0] == "=" else ".*" + key.rpartition("*")[2].replace(".", r"\.") + r"\.weight$"
                ],
                "partition_type": kinds[style],
            }
            for key, style in one.rows.items()
        ]
        return {"tensor_parallel": {"partition_config": {"use_default_specs": False, "layer_specs": specs}}}
    plain_rows = as_torch({key: style for key, style in one.rows.items() if isinstance(style, str)})
    return {key: plain_rows.get(key, style) for key, style in one.rows.items()}


def partial_sum() -> Any:
    from torch.distributed.tensor import Partial

    return Partial()
