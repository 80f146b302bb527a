"""transformers#44668: OLMo2's query and key norms run over all heads; each rank takes the mean square of its own."""

from functools import partial

from corpus.case import Case, Setting
from corpus.toys import GOOD, Attention, decoder, said


def model():
    return decoder(partial(Attention, norm="full"))


GATHERED = {f"layers.*.attn.{name}_proj": "colwise_gather_output" for name in "qkv"}
NORMS = {f"layers.*.attn.{name}_norm.weight": "colwise" for name in "qk"}
CASE = Case(
    12, "transformers#44668", "a norm over all heads, cut by heads", "norms",
    bad=Setting(model, said({**GOOD, **NORMS})),
    good=Setting(model, said({**GOOD, **GATHERED, "layers.*.attn.o_proj": "rowwise_split_input"})),
)  # fmt: skip
