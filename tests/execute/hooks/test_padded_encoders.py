"""torch's encoder stack with padding gives what one device gives, in eval mode without gradients too."""

from __future__ import annotations

import copy

import pytest
import torch
from mesh_toys import mesh_of
from torch import nn

import autoplan
from autoplan.check.ranks.run import run_ranks


class Encoder(nn.Module):
    def __init__(self, final_norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16) if final_norm else None)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        encoded: torch.Tensor = self.stack(x, src_key_padding_mask=padding)
        return encoded


@pytest.mark.parametrize("final_norm", [False, True])
def test_padding_is_zero_in_eval_mode_without_gradients(final_norm: bool) -> None:
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    behind = torch.arange(6).expand(2, 6) >= torch.tensor([[4], [6]])
    given = {"behind": behind, "in front": behind.flip(1)}
    model = Encoder(final_norm).eval()
    with torch.no_grad():
        wanted = {name: model(x, padding) for name, padding in given.items()}
    trained = model(x, behind)
    assert not torch.allclose(trained, wanted["behind"])  # else nothing is tested
    plan = autoplan.plan(model, tp_size=2, inputs={"x": x, "padding": behind})

    def rank(_: int) -> None:
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh_of(tp=2), plan)
        for each in (sharded, copy.deepcopy(sharded)):
            for name, padding in given.items():
                with torch.no_grad():
                    torch.testing.assert_close(each(x, padding), wanted[name])
            torch.testing.assert_close(each(x, behind), trained)
            assert each.stack.use_nested_tensor

    run_ranks(rank, 2)
