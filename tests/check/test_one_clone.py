"""A plan needs one tiny clone: it is built and fed once, for the trial, the proof on its graph and verify."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import autoplan
from autoplan.check.verify import clone as clones
from autoplan.hf.source import Source

torch.set_num_threads(1)

CONFIG = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}


class Counted:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls: dict[str, int] = {}
        for owner, name in ((Source, "tiny"), (clones, "feeds_at")):
            patch.setattr(owner, name, self._counting(name, getattr(owner, name)))

    def _counting(self, name: str, function: Any) -> Any:
        def counting(*args: Any, **keywords: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return function(*args, **keywords)

        return counting


# at tp 8 each rank holds a single head: the clone is fitted to that, and tried on four ranks
@pytest.mark.parametrize(("prove", "tp_size"), [("graph", 2), ("graph", 8), ("ranks", 2)])
def test_one_clone_is_tried_recorded_and_verified(monkeypatch: pytest.MonkeyPatch, prove: Any, tp_size: int) -> None:
    counted = Counted(monkeypatch)
    plan = autoplan.plan(LlamaConfig(**CONFIG), tp_size, prove=prove)
    assert plan.proof.ok and plan.proof.method == prove, plan.proof
    assert counted.calls == {"tiny": 1, "feeds_at": 2}  # calls of two sizes
