"""accelerate#3897: each child of a decoder layer was wrapped, not the layer: checkpointing saved far too little."""

from corpus.case import Case, Setting
from corpus.toys import decoder, inferred

CASE = Case(
    5, "accelerate#3897", "parts of blocks are checkpointed", "layers",
    bad=Setting(decoder, inferred, options={"layers": {"checkpointing": ["RMSNorm", "Attention", "Mlp"]}}),
    good=Setting(decoder, inferred, options={"layers": {"checkpointing": "Block"}}),
)  # fmt: skip
