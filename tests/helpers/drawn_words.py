"""Wrong plans as users write them in the words of transformers and DeepSpeed, parts that are wrong as a whole, and all.

Every second one was for fixing; the others are held: their audits were only measured (`halves`).
"""

from __future__ import annotations

from collections.abc import Iterator

from drawn_plans import (
    BLOOM,
    BLOOM_PLAN,
    ENDS,
    EXPERTS,
    FALCON_PLAN,
    HEAD_NORMS,
    LLAMA,
    MIXER,
    NEMOTRON,
    NEOX,
    NEOX_A,
    NEOX_PLAN,
    NORMS,
    QWEN,
    T5_MLP,
    T5D,
    T5E,
    TABLE,
    WHISPER,
    WHISPER_MLP,
    A,
    Drawn,
    L,
    M,
    W,
    attention,
    automodel_draws,
    draw,
    gated,
    latent,
    partial_sum,
    plain,
    renamed,
    sequence,
    torch_draws,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel


def drawn() -> Iterator[Drawn]:
    yield from torch_draws()
    yield from automodel_draws()
    yield from transformers_draws()
    yield from deepspeed_draws()
    yield from harder_draws()


def halves() -> tuple[list[Drawn], list[Drawn]]:
    """Those for fixing, and those that are held."""
    all_of = list(drawn())
    return all_of[::2], all_of[1::2]


# fmt: off
def transformers_draws() -> Iterator[Drawn]:
    h = "hf"
    qkv, gate_up = f"{A}.qkv_proj", f"{M}.gate_up_proj"
    phi = {qkv: "colwise_gather_output", f"{A}.o_proj": "rowwise_split_input", gate_up: "colwise_gather_output",
           f"{M}.down_proj": "rowwise_split_input"}  # fmt: skip
    yield draw("phi3", h, "fused cut plainly", phi, {qkv: "colwise", f"{A}.o_proj": "rowwise"}, (qkv, f"{A}.o_proj"))
    yield draw("phi3", h, "down takes a part", phi, {f"{M}.down_proj": "rowwise"}, f"{M}.down_proj")
    yield draw("phi3", h, "packed cut plainly", phi, {gate_up: "colwise", f"{M}.down_proj": "rowwise"}, (gate_up,
               f"{M}.down_proj"))
    yield draw("mixtral", h, "experts unsummed", {**attention(), **EXPERTS}, {f"{M}.experts": None}, (f"{M}.experts",))
    yield draw("mixtral", h, "experts cut plainly", {**attention(), **EXPERTS},
               {f"{M}.experts.gate_up_proj": "colwise"}, f"{M}.experts.gate_up_proj")
    yield draw("mixtral", h, "experts by the other dim", {**attention(), **EXPERTS},
               {f"{M}.experts.down_proj": "colwise"}, f"{M}.experts.down_proj")
    yield draw("mixtral", h, "router split", {**attention(), **EXPERTS}, {f"{M}.gate": "colwise"}, f"{M}.gate")
    yield draw("mixtral", h, "experts' down missing", {**attention(), **EXPERTS}, {f"{M}.experts.down_proj": None},
               (f"{M}.experts.down_proj", f"{M}.experts"))
    yield draw("qwen3_moe", h, "head norms' gradients", {**attention(), **EXPERTS, **ENDS}, {}, (f"{A}.q_norm",
               f"{A}.k_norm"))
    yield draw("qwen3_moe", h, "head norms cut", {**attention(), **EXPERTS}, dict.fromkeys(HEAD_NORMS, "colwise"),
               tuple(HEAD_NORMS))
    yield draw("qwen3_moe", h, "two mistakes", {**attention(), **HEAD_NORMS, **EXPERTS}, {f"{A}.k_proj": None,
               f"{M}.experts.gate_up_proj": "colwise"}, f"{A}.k_proj", f"{M}.experts.gate_up_proj")
    sinks = (f"{A}.sinks", *attention())  # no style cuts them in their place: without them, all of it is gathered
    oss = {**{key: "colwise_gather_output" for key in attention()}, f"{A}.o_proj": "rowwise_split_input"}
    yield draw("gpt_oss", h, "sinks whole", {**attention(), **ENDS}, {}, sinks)
    yield draw("gpt_oss", h, "sinks by rows", attention(), {f"{A}.sinks": "rowwise"}, sinks)
    yield draw("gpt_oss", h, "experts as Mixtral's", oss, EXPERTS, (f"{M}.experts.gate_up_proj",
               f"{M}.experts.down_proj", f"{M}.experts", f"{M}.experts.gate_up_proj_bias",
               f"{M}.experts.down_proj_bias"))
    yield draw("gpt_oss", h, "o_proj by columns", oss, {f"{A}.o_proj": "colwise"}, f"{A}.o_proj")
    deep = {
        **latent(),
        f"{A}.kv_a_proj_with_mqa": "mla_kv_a_proj",
        **gated(),
        **EXPERTS,
        **gated(f"{M}.shared_experts"),
    }
    yield draw("deepseek_v3", h, "latent unsummed", deep, {f"{A}.kv_a_proj_with_mqa": None},
               (f"{A}.kv_a_proj_with_mqa",))
    yield draw("deepseek_v3", h, "latent cut", deep, {f"{A}.kv_a_proj_with_mqa": "colwise"}, f"{A}.kv_a_proj_with_mqa")
    yield draw("deepseek_v3", h, "q_a cut", deep, {f"{A}.q_a_proj": "colwise"}, f"{A}.q_a_proj")
    yield draw("deepseek_v3", h, "shared down by columns", deep, {f"{M}.shared_experts.down_proj": "colwise"},
               f"{M}.shared_experts.down_proj")
    mamba = {f"{MIXER}.in_proj": "colwise_gather_output", f"{MIXER}.out_proj": "rowwise_split_input"}
    yield draw("mamba2", h, "in_proj cut plainly", mamba, {f"{MIXER}.in_proj": "colwise"}, f"{MIXER}.in_proj")
    yield draw("mamba2", h, "A_log cut", mamba, {f"{MIXER}.A_log": "colwise"}, f"{MIXER}.A_log")
    yield draw("mamba2", h, "convolution cut", mamba, {f"{MIXER}.conv1d": "colwise"}, f"{MIXER}.conv1d")
    nemotron = {f"{NEMOTRON}.in_proj": "colwise_gather_output", f"{NEMOTRON}.out_proj": "rowwise_split_input"}
    yield draw("nemotron_h", h, "out_proj takes a part", nemotron, {f"{NEMOTRON}.out_proj": "rowwise"},
               f"{NEMOTRON}.out_proj")
    yield draw("nemotron_h", h, "shared up missing", nemotron, {f"{NEMOTRON}.shared_experts.down_proj": "rowwise"},
               (f"{NEMOTRON}.shared_experts.up_proj", f"{NEMOTRON}.shared_experts.down_proj"))
    yield draw("bloom", h, "fused heads", {**BLOOM_PLAN, **plain(f"{BLOOM}.self_attention", "query_key_value",
               "dense")}, {}, (f"{BLOOM}.self_attention.query_key_value", f"{BLOOM}.self_attention.dense"))
    yield draw("bloom", h, "tied head by rows", BLOOM_PLAN, {"transformer.word_embeddings": "embedding_rowwise",
               "lm_head": "rowwise"}, ("lm_head", "transformer.word_embeddings"))
    yield draw("gpt_neox", h, "dense the other way", NEOX_PLAN, {f"{NEOX_A}.dense": "colwise"}, f"{NEOX_A}.dense")
    yield draw("gpt_neox", h, "a word of the past", NEOX_PLAN, {f"{NEOX}.mlp.dense_h_to_4h": "local_colwise"},
               f"{NEOX}.mlp.dense_h_to_4h")
    yield draw("gpt_neox", h, "without its prefix", {**NEOX_PLAN, "lm_head": "colwise_gather_output"},
               {f"{NEOX_A}.dense": None, "layers.*.attention.dense": "rowwise"}, (f"{NEOX_A}.dense",
               "layers.*.attention.dense"))
    yield draw(WHISPER, h, "q_proj gathered", WHISPER_MLP, {f"{W}.self_attn.q_proj": "colwise"},
               f"{W}.self_attn.q_proj")
    yield draw(WHISPER, h, "fc1 missing in one half", WHISPER_MLP, {f"{W}.fc1": None}, (f"{W}.fc1", f"{W}.fc2"))
    qwen = renamed(LLAMA, model__layers=f"{QWEN[:-2]}")
    yield draw("qwen2_vl", h, "gathered in the middle", qwen, {f"{QWEN}.mlp.gate_proj": "colwise_rep"},
               f"{QWEN}.mlp.gate_proj")
    yield draw("qwen2_vl", h, "old path", {**qwen, "model.layers.*.mlp.down_proj": "rowwise"},
               {f"{QWEN}.mlp.down_proj": None}, (f"{QWEN}.mlp.down_proj", "model.layers.*.mlp.down_proj"))
    shared = f"{L}.feed_forward.shared_expert"
    yield draw("llama4_text", h, "shared gate by rows", {**attention(), **gated(shared)},
               {f"{shared}.gate_proj": "rowwise"}, (f"{shared}.gate_proj", f"{shared}.down_proj"))
    yield draw("gemma3_text", h, "head norms' gradients", LLAMA, {}, tuple(HEAD_NORMS))
    yield draw("gemma3_text", h, "replicated by word", {**LLAMA, **HEAD_NORMS}, {f"{M}.down_proj": "replicate"},
               f"{M}.down_proj")
    yield draw("olmo2", h, "norms of all heads", {**LLAMA, **ENDS}, {}, (f"{A}.q_norm", f"{A}.k_norm", *attention()))
    yield draw("olmo2", h, "norms of all heads cut", {**LLAMA, **ENDS}, {f"{A}.q_norm": "colwise",
               f"{A}.k_norm": "colwise"}, (f"{A}.q_norm", f"{A}.k_norm", *attention()))
    yield draw("falcon", h, "dense by columns", FALCON_PLAN, {f"{BLOOM}.mlp.dense_4h_to_h": "colwise"},
               f"{BLOOM}.mlp.dense_4h_to_h")
    yield draw("t5", h, "wi by rows", T5_MLP, {f"{T5E}.1.DenseReluDense.wi": "rowwise"}, f"{T5E}.1.DenseReluDense.wi")
    yield draw("llama", h, "keys of 2 over 4", {**LLAMA, **ENDS}, {}, (f"{A}.k_proj", f"{A}.v_proj"), tp=4)
    yield draw("mistral", h, "expression for a pattern", LLAMA, {f"{A}.[qkv]_proj": "colwise", f"{A}.q_proj": None,
               f"{A}.k_proj": None, f"{A}.v_proj": None}, (*attention(), f"{A}.[qkv]_proj"))


def deepspeed_draws() -> Iterator[Drawn]:
    d = "deepspeed"
    for model in ("mistral", "qwen2"):
        yield draw(model, d, "o_proj by columns", LLAMA, {f"{A}.o_proj": "colwise"}, f"{A}.o_proj")
        yield draw(model, d, "gate forgotten", LLAMA, {f"{M}.gate_proj": None}, f"{M}.gate_proj")
        yield draw(model, d, "two mistakes", LLAMA, {f"{M}.down_proj": "colwise", f"{A}.k_proj": "rowwise"},
                   f"{M}.down_proj", f"{A}.k_proj")
    yield draw("mixtral", d, "router split", attention(), {f"{M}.gate": "colwise"}, f"{M}.gate")
    yield draw("qwen3_moe", d, "head norms' gradients", attention(), {}, tuple(HEAD_NORMS))
    yield draw("gpt_oss", d, "sinks whole", attention(), {}, (f"{A}.sinks", *attention()))
    yield draw("deepseek_v3", d, "latent cut", latent(), {f"{A}.kv_a_proj_with_mqa": "colwise"},
               f"{A}.kv_a_proj_with_mqa")
    yield draw("mamba2", d, "in_proj cut plainly", plain(MIXER, "in_proj", "out_proj"), {}, (f"{MIXER}.in_proj",
               f"{MIXER}.out_proj"))
    yield draw("nemotron_h", d, "down by columns", {f"{NEMOTRON}.shared_experts.up_proj": "colwise"},
               {f"{NEMOTRON}.shared_experts.down_proj": "colwise"}, f"{NEMOTRON}.shared_experts.down_proj")
    yield draw("bloom", d, "dense by columns", plain(f"{BLOOM}.self_attention", "query_key_value", "dense"),
               {f"{BLOOM}.self_attention.dense": "colwise"}, f"{BLOOM}.self_attention.dense")
    yield draw("gpt_neox", d, "dense forgotten", NEOX_PLAN, {f"{NEOX_A}.dense": None}, (f"{NEOX_A}.dense",))
    yield draw("gpt_neox", d, "typo", NEOX_PLAN, {f"{NEOX}.mlp.dense_4h_to_h": None,
               f"{NEOX}.mlp.dense_4h_h": "rowwise"}, (f"{NEOX}.mlp.dense_4h_to_h", f"{NEOX}.mlp.dense_4h_h"))
    yield draw("gemma3_text", d, "up by rows", {**gated()}, {f"{M}.up_proj": "rowwise"}, f"{M}.up_proj")
    yield draw("falcon", d, "h_to_4h forgotten", FALCON_PLAN, {f"{BLOOM}.mlp.dense_h_to_4h": None},
               f"{BLOOM}.mlp.dense_h_to_4h")
    yield draw("t5", d, "wo by columns", T5_MLP, {f"{T5D}.2.DenseReluDense.wo": "colwise"},
               f"{T5D}.2.DenseReluDense.wo")
    yield draw("olmo2", d, "norms of all heads", LLAMA, {}, (f"{A}.q_norm", f"{A}.k_norm", *attention()))


def harder_draws() -> Iterator[Drawn]:
    """Whole parts that are wrong, patterns that reach too much or too little, words at the wrong place."""
    whole, part, t, h, d = Replicate(), Shard(1), "torch", "hf", "deepspeed"
    mlp = tuple(gated())
    upside = {f"{M}.gate_proj": "rowwise", f"{M}.up_proj": "rowwise", f"{M}.down_proj": "colwise"}
    for dialect in (t, h, d):
        yield draw("mistral", dialect, "MLP the other way round", attention(), upside, mlp)
        yield draw("qwen2", dialect, "all by columns", {}, dict.fromkeys(LLAMA, "colwise"), f"{A}.o_proj",
                   f"{M}.down_proj")
        yield draw("mistral", dialect, "all by rows", {}, dict.fromkeys(LLAMA, "rowwise"), tuple(attention()), mlp)
        yield draw("qwen2", dialect, "three mistakes", LLAMA, {f"{A}.o_proj": None, f"{M}.gate_proj": "rowwise",
                   f"{A}.k_proj": None}, f"{A}.o_proj", f"{A}.k_proj", f"{M}.gate_proj")
        yield draw("gpt_neox", dialect, "MLP the other way round", {}, {f"{NEOX}.mlp.dense_h_to_4h": "rowwise",
                   f"{NEOX}.mlp.dense_4h_to_h": "colwise"}, (f"{NEOX}.mlp.dense_h_to_4h", f"{NEOX}.mlp.dense_4h_to_h"))
    for dialect in (t, h):
        yield draw("gemma3_text", dialect, "tied head by rows", {**gated()}, {"lm_head": "rowwise"}, ("lm_head",
                   "model.embed_tokens"))
        yield draw("mistral", dialect, "head without gather, o_proj gathered", {**LLAMA, **TABLE},
                   {"lm_head": "colwise", f"{A}.v_proj": "colwise_gather_output"}, "lm_head", f"{A}.v_proj")
        yield draw("olmo2", dialect, "down takes whole", {**gated(), **ENDS}, {f"{M}.down_proj": "rowwise_split_input"},
                   f"{M}.down_proj")
        yield draw("mistral", dialect, "every line without its prefix", {}, {key.removeprefix("model."): style for key,
                   style in {**LLAMA, f"{M}.down_proj": "colwise", "lm_head": "colwise"}.items()}, ("lm_head",
                   f"{M}.down_proj", "layers.*.mlp.down_proj"))
    yield draw("qwen3_moe", h, "everything a dense Qwen has", {**LLAMA, **HEAD_NORMS}, {f"{A}.o_proj": "colwise"},
               f"{A}.o_proj")
    yield draw("mixtral", h, "experts gathered in place of summed", attention(),
               {f"{M}.experts.gate_up_proj": "packed_colwise", f"{M}.experts.down_proj": "rowwise",
               f"{M}.experts": "gather"}, (f"{M}.experts",))
    yield draw("mixtral", h, "packed the other way", {**attention(), **EXPERTS},
               {f"{M}.experts.gate_up_proj": "packed_rowwise", f"{M}.experts.down_proj": "colwise"},
               (f"{M}.experts.gate_up_proj", f"{M}.experts.down_proj"))
    yield draw("deepseek_v3", h, "kv_b missing", latent(), {f"{A}.kv_b_proj": None,
               f"{A}.kv_a_proj_with_mqa": "mla_kv_a_proj"}, (f"{A}.kv_b_proj",))
    yield draw("llama", h, "table by rows", LLAMA, {"model.embed_tokens": "rowwise", "lm_head": "colwise_rep"},
               "model.embed_tokens")
    yield draw("llama", h, "norm takes a part", LLAMA, {"model.norm": "sequence_parallel"}, "model.norm")
    yield draw("llama", h, "keys with numbers", gated(), {f"model.layers.{n}.self_attn.o_proj": "rowwise" for n in (0,
               1)} | {key: style for key, style in attention().items() if style == "colwise"}, (f"{A}.o_proj",))
    yield draw("llama", t, "o_proj takes whole", LLAMA, {f"{A}.o_proj": RowwiseParallel(input_layouts=whole)},
               f"{A}.o_proj")
    yield draw("llama", t, "keys stay DTensors", LLAMA, {f"{A}.k_proj": ColwiseParallel(use_local_output=False)},
               f"{A}.k_proj")
    yield draw("llama", t, "sum left for later", LLAMA,
               {f"{M}.down_proj": RowwiseParallel(output_layouts=partial_sum())}, f"{M}.down_proj")
    yield draw("llama", t, "columns of a part of the sequence", LLAMA,
               {f"{M}.gate_proj": ColwiseParallel(input_layouts=part)}, f"{M}.gate_proj")
    yield draw("qwen2_vl", t, "reduce-scattered in the language model", renamed(LLAMA, model__layers=QWEN[:-2]),
               {f"{QWEN}.self_attn.o_proj": RowwiseParallel(output_layouts=part)}, f"{QWEN}.self_attn.o_proj")
    yield draw("nemotron_h", t, "down on another dim", {f"{NEMOTRON}.shared_experts.up_proj": "colwise"},
               {f"{NEMOTRON}.shared_experts.down_proj": RowwiseParallel(input_layouts=part)},
               f"{NEMOTRON}.shared_experts.down_proj")
    yield draw("gpt_oss", t, "loss-parallel head", {"model.embed_tokens": "embedding_rowwise"},
               {"lm_head": ColwiseParallel(input_layouts=part, output_layouts=Shard(-1), use_local_output=False)},
               "lm_head")
    yield draw("mixtral", t, "norm of a sequence, rows of none", attention(), {NORMS[1]: SequenceParallel()}, NORMS[1])
    yield draw("mistral", t, "inputs prepared, rows not scattered", LLAMA, {M: PrepareModuleInput(input_layouts=(part,),
               desired_input_layouts=(whole,))}, M)
    right = sequence(LLAMA, NORMS)
    titan = sequence(LLAMA, NORMS, how="torchtitan")
    scatter = RowwiseParallel(output_layouts=part, use_local_output=False)
    yield draw("mistral", "automodel", "rows into whole", right, {f"{M}.down_proj": RowwiseParallel(),
               f"{A}.o_proj": RowwiseParallel()}, (f"{M}.down_proj", f"{A}.o_proj", *NORMS))
    yield draw("mistral", "automodel", "norms alone", LLAMA, dict.fromkeys(NORMS, SequenceParallel()), NORMS)
    yield draw("mistral", "automodel", "table on its width", right,
               {"model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=Shard(-1),
               use_local_output=False)}, "model.embed_tokens")
    yield draw("mistral", "automodel", "gate missing", titan, {f"{M}.gate_proj": None}, f"{M}.gate_proj")
    yield draw("mistral", "automodel", "down by columns", titan, {f"{M}.down_proj": ColwiseParallel()},
               f"{M}.down_proj")
    yield draw("mistral", "automodel", "queries by rows", titan, {f"{A}.q_proj": scatter}, f"{A}.q_proj")
    yield draw("mistral", "automodel", "input's name", titan, {A: PrepareModuleInput(input_kwarg_layouts={"x": part},
               desired_input_kwarg_layouts={"x": whole})}, A)
    yield draw("gemma3_text", "automodel", "llama's sequence plan", {key: style for key, style in right.items()}, {},
               (f"{L}.pre_feedforward_layernorm", f"{L}.post_feedforward_layernorm", NORMS[1], f"{A}.q_norm",
               f"{A}.k_norm", "lm_head", "model.embed_tokens"))
    yield draw("phi3", "automodel", "llama's sequence plan", right, {}, (f"{M}.gate_up_proj", f"{A}.qkv_proj",
               f"{A}.q_proj", f"{A}.k_proj", f"{M}.gate_proj", f"{M}.up_proj", f"{A}.o_proj", f"{M}.down_proj"))
    # Expressions for DeepSpeed, as written
    yield draw("llama", d, "matches from the start", LLAMA, {f"{A}.o_proj": None, r"=o_proj\.weight$": "rowwise"},
               (f"{A}.o_proj", r"o_proj\.weight$"))
    yield draw("llama", d, "all projections", {r"=.*proj\.weight$": "colwise"}, {}, (f"{A}.o_proj", r".*proj\.weight$"),
               (f"{M}.down_proj", r".*proj\.weight$"))
    yield draw("qwen2", d, "first layer alone", LLAMA, {f"{M}.up_proj": None,
               r"=.*layers\.0\.mlp\.up_proj\.weight$": "colwise"}, (f"{M}.up_proj",
               r".*layers\.0\.mlp\.up_proj\.weight$", *(f"model.layers.{n}.mlp.up_proj" for n in range(4))))
    yield draw("qwen2", d, "a wide expression first", {r"=.*self_attn\..*\.weight$": "colwise"}, LLAMA, (f"{A}.o_proj",
               r".*self_attn\..*\.weight$"))
