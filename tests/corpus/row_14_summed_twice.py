"""AReno#496: a latent's gradient has one owner (the projection that reads it) and was summed by a second one."""

import torch
from torch import nn

from corpus.case import Case, Setting
from corpus.toys import GOOD, HEAD, WIDTH, Attention, decoder, said


class LatentAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj = nn.Linear(WIDTH, 16, bias=False)
        self.q_a_norm = nn.RMSNorm(16)
        self.q_proj = nn.Linear(16, 4 * HEAD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.q_proj(self.q_a_norm(self.q_a_proj(x))), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.view(batch, length, -1, HEAD).transpose(1, 2) for t in parts)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def model():
    return decoder(LatentAttention)


CASE = Case(
    14, "AReno#496", "two owners of one reduction", "gradients",
    bad=Setting(model, said({**GOOD, "layers.*.attn.q_a_norm": "replicated_with_grad_allreduce"})),
    good=Setting(model, said(GOOD)),
)  # fmt: skip
