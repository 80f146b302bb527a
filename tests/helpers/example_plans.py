"""Plans written by hand, as realistic as a page allows, for tests of what prints, saves and compares plans."""

from __future__ import annotations

from autoplan.values import (
    AllReduce,
    AllReduceGradient,
    CallSite,
    Cost,
    Cut,
    Entry,
    Finding,
    IntegerEdit,
    LiteralArgument,
    NormCall,
    ParameterRule,
    Plan,
    Proof,
    Replicated,
    Runtime,
    ScaleGradient,
    ScatterSequence,
    SequenceName,
    SplitLogits,
    Stack,
    VocabularyTable,
    replace,
)

BLOCK = "model.layers.*"
READ_ONCE = "gate and up read one whole activation and meet in a product, so splitting both splits the product"
NORM = "a norm over the whole residual: every rank needs all of it"


def _entry(module: str, style: str, role: str, rule: str, cut: str, units: str, reason: str, *reduces: Cost) -> Entry:
    return Entry(
        pattern=module,
        parameters=("weight",),
        style=style,
        role=role,
        rule=rule,
        source="inferred",
        reason=reason,
        units=units,
        segments=(cut,),
        reduces=reduces,
        proof="graph",
    )


def _up_to_attention() -> tuple[Entry, ...]:
    """The table and the attention of a block."""
    q, kv, vocabulary = "0:32!*128", "0:8!*128", "0:128256!"
    heads, groups, rows = "32 heads × 128", "8 heads × 128", "128256 rows"
    attention = f"{BLOCK}.self_attn"
    scores = "each rank computes the scores of its own heads; no head reads another"
    entry_sum, output_sum = Cost("sum", "input-gradient"), Cost("sum")
    return (
        _entry(
            "model.embed_tokens",
            "embedding_rowwise",
            "token embedding",
            "vocabulary-embedding",
            vocabulary,
            rows,
            "each rank looks up the ids it owns; the sum over ranks is the row",
            output_sum,
        ),
        _entry(
            f"{attention}.q_proj",
            "colwise",
            "query",
            "separate-qkv",
            q,
            heads,
            scores,
            replace(entry_sum, shared_with=("k_proj", "v_proj")),
        ),
        _entry(
            f"{attention}.k_proj",
            "colwise",
            "key",
            "separate-qkv",
            kv,
            groups,
            scores,
            replace(entry_sum, shared_with=("q_proj", "v_proj")),
        ),
        _entry(
            f"{attention}.v_proj",
            "colwise",
            "value",
            "separate-qkv",
            kv,
            groups,
            scores,
            replace(entry_sum, shared_with=("q_proj", "k_proj")),
        ),
        _entry(
            f"{attention}.o_proj",
            "rowwise",
            "attention output",
            "attention-output",
            "1:32!*128",
            heads,
            "contracts over the heads that its rank holds: one sum",
            output_sum,
        ),
    )


def _mlp_and_head() -> tuple[Entry, ...]:
    """The MLP of a block, and the head."""
    gate, vocabulary = "0:14336!", "0:128256!"
    features, rows = "14336 features", "128256 rows"
    mlp = f"{BLOCK}.mlp"
    entry_sum, output_sum = Cost("sum", "input-gradient"), Cost("sum")
    return (
        _entry(
            f"{mlp}.gate_proj",
            "colwise",
            "gate",
            "gated-mlp",
            gate,
            features,
            READ_ONCE,
            replace(entry_sum, shared_with=("up_proj",)),
        ),
        _entry(
            f"{mlp}.up_proj",
            "colwise",
            "up",
            "gated-mlp",
            gate,
            features,
            READ_ONCE,
            replace(entry_sum, shared_with=("gate_proj",)),
        ),
        _entry(
            f"{mlp}.down_proj",
            "rowwise",
            "down",
            "gated-mlp",
            "1:14336!",
            features,
            "contracts over the split features: one sum",
            output_sum,
        ),
        _entry(
            "lm_head",
            "colwise",
            "vocabulary head",
            "vocabulary-head",
            vocabulary,
            rows,
            "logits leave the model split by vocabulary",
            entry_sum,
        ),
    )


def _llama_runtime() -> Runtime:
    attention, mlp = f"{BLOCK}.self_attn", f"{BLOCK}.mlp"
    return Runtime(
        parameters=(
            ParameterRule("model.embed_tokens.weight", 0, "128256!"),
            ParameterRule(f"{attention}.q_proj.weight", 0, "32!*128"),
            ParameterRule(f"{attention}.k_proj.weight", 0, "8!*128"),
            ParameterRule(f"{attention}.v_proj.weight", 0, "8!*128"),
            ParameterRule(f"{attention}.o_proj.weight", 1, "32!*128"),
            ParameterRule(f"{mlp}.gate_proj.weight", 0, "14336!"),
            ParameterRule(f"{mlp}.up_proj.weight", 0, "14336!"),
            ParameterRule(f"{mlp}.down_proj.weight", 1, "14336!"),
            ParameterRule("lm_head.weight", 0, "128256!"),
        ),
        instructions=(
            AllReduceGradient(attention, "input", ("hidden_states",)),
            AllReduce(f"{attention}.o_proj", "output", (0,)),
            AllReduceGradient(mlp, "input", ("x",)),
            AllReduce(f"{mlp}.down_proj", "output", (0,)),
            VocabularyTable("model.embed_tokens", 128256, ("input",)),
            SplitLogits("lm_head", 128256, outputs=(("logits",),)),
        ),
    )


def llama_plan(tp_size: int = 8, layers: int = 4) -> Plan:
    """Llama-3.1-8B's shape with fewer layers."""
    return Plan(
        model="LlamaForCausalLM",
        tp_size=tp_size,
        entries=(*_up_to_attention(), *_mlp_and_head()),
        replicated=tuple(
            Replicated(f"model.layers.{i}.{norm}.weight", 8192, NORM)
            for i in range(layers)
            for norm in ("input_layernorm", "post_attention_layernorm")
        )
        + (Replicated("model.norm.weight", 8192, NORM),),
        layers=(Stack("model.layers", "decoder", tuple(f"model.layers.{i}" for i in range(layers))),),
        legal_tp=(1, 2, 4, 8),
        findings=(Finding("tied-weights", "note", "lm_head", "the head is not tied to the embedding"),),
        proof=Proof(
            "graph", 2, True, ("permutation law", "graph replay"), "27 of 27 axes pass; 402 of 402 values replayed"
        ),
        runtime=_llama_runtime(),
    )


def odd_plan() -> Plan:
    """Every field of every type used at least once, with awkward text: for exact round trips."""
    return Plan(
        model="Odd — “model”: 1e-5 #x",
        tp_size=4,
        sequence_parallel=True,
        source="plans/odd.yaml",
        entries=(
            Entry(
                pattern="h.*.attn.c_attn",
                parameters=("weight", "bias"),
                style="packed_colwise",
                role="fused query, key, value",
                rule="fused-qkv",
                source="handwritten",
                reason="yes: 'quoted', \"double\", and\na second line",
                units="12 heads × 64",
                segments=("1:12!*64|12!*64|12!*64", "0:12!*64|12!*64|12!*64"),
                reduces=(Cost("sum", "input-gradient", shared_with=("k",)), Cost("mean", at="mlp")),
                proof="ranks",
            ),
            Entry("h.*.mlp.fc", ("weight",), "colwise", "up", "generic", "user", "", "1:30", ("0:(16!|1)*64",)),
        ),
        replicated=(Replicated("wpe.weight", 3145728, "no"), Replicated("on", 0, "")),
        layers=(Stack("h", "other", ("h.0", "h.1"), "assumed"), Stack("empty", "vision", ())),
        legal_tp=(1, 2, 4),
        findings=(
            Finding("coverage", "warn", "wpe", "stays whole", "choose --tp 2", 3145728, "graph"),
            Finding("units", "error", "h.*.attn", "~"),
        ),
        proof=Proof("ranks", 2, False, ("forward",), "gradient of wpe.weight off by 0.3"),
        runtime=Runtime(
            parameters=(
                ParameterRule("h.*.attn.c_attn.weight", 1, "12!*64|12!*64|12!*64", "shared"),
                ParameterRule("h.*.attn.c_proj.bias", divide=True, gradient="sum"),
            ),
            instructions=(
                IntegerEdit("h.*.attn", "split_size", None, 768, 192),
                IntegerEdit("h.*.attn", "sizes", 1, 7, 2, (2, 2, 2, 1), "config"),
                ScaleGradient("h.*.attn", "input", ("x", 0, "k"), -1, "(16!|1)*64"),
                ScatterSequence("h.0", "input", (None, "*"), 1, SequenceName("s0", flattened=True)),
                SplitLogits("wte", 50257, 0, (("logits",), (1, "a"))),
                NormCall(
                    "h.*.attn",
                    CallSite("view", "forward:12:8>split_heads:3:20", time=2, dims=-1, width=64),
                    1,
                    64,
                    2,
                    arguments=(LiteralArgument(("args", 1, 2), (1, 1, 1, 1), (4, 4, 4, 3)),),
                    copies=(("args", 0),),
                    cuts=(Cut(0, -1, "12!*64"),),
                    sometimes=True,
                ),
            ),
            random=("h.*.attn.dropout",),
        ),
    )
