"""DeepSpeed#3844, vllm#36242: a fused weight cut contiguously pairs gate with gate: wrong results, no warning."""

from corpus.case import Case, Setting
from corpus.toys import ATTENTION, FusedMlp, decoder, inferred, torch_styles


def model():
    return decoder(mlp=FusedMlp)


BAD = {**ATTENTION, "layers.*.mlp.gate_up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
CASE = Case(
    9, "DeepSpeed#3844, vllm#36242", "gate and up in one weight, cut as one", "packed",
    bad=Setting(model, torch_styles(BAD)),
    good=Setting(model, inferred),
)  # fmt: skip
