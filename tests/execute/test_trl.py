"""TRL's trainers train a sharded model as they train one that is whole."""

from __future__ import annotations

from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest

from autoplan.check.ranks.run import run_processes

if find_spec("trl") is None:
    pytest.skip("NOT TRIED: trl is absent; `make test-hosts` installs it and runs these", allow_module_level=True)

from trl_steps import one_step

pytestmark = [pytest.mark.hosts, pytest.mark.gloo]


@pytest.mark.parametrize(
    ("kind", "sizes", "adapters", "sequence_parallel"),
    [
        ("SFT", {"tp": 2}, False, False),
        ("SFT", {"tp": 2}, False, True),
        ("SFT", {"dp_shard": 2, "tp": 2}, False, False),
        ("SFT", {"tp": 2}, True, False),
        ("DPO", {"tp": 2}, False, False),
        ("KTO", {"tp": 2}, False, False),
        ("GRPO", {"tp": 2}, False, False),
        ("RLOO", {"tp": 2}, False, False),
    ],
    ids=str,
)
def test_a_step_is_that_of_one_process(
    kind: str, sizes: dict[str, int], adapters: bool, sequence_parallel: bool, tmp_path: Path
) -> None:
    ((loss, wanted),) = run_processes(one_step, (kind, {}, adapters, False, tmp_path / "alone"), 1)
    ranks = run_processes(
        one_step, (kind, sizes, adapters, sequence_parallel, tmp_path / "ranks"), prod(sizes.values())
    )
    for found, weights in ranks:
        assert found == pytest.approx(loss, rel=1e-5)  # it is logged in float32, rounded
        assert weights.keys() == wanted.keys()
        assert max(float((weights[name] - value).abs().max()) for name, value in wanted.items()) < 1e-7
