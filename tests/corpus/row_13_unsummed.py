"""NeMo-RL#3716: query and key norms are whole on every rank, see only its heads, and nobody sums their gradients."""

from functools import partial

from corpus.case import Case, Setting
from corpus.toys import GOOD, Attention, decoder, said


def model():
    return decoder(partial(Attention, norm="head"))


PAID = {f"layers.*.attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
CASE = Case(
    13, "NeMo-RL#3716", "q/k-norm gradients not summed over ranks", "gradients",
    bad=Setting(model, said(GOOD)),
    good=Setting(model, said({**GOOD, **PAID})),
)  # fmt: skip
