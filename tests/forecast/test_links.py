"""Seconds of messages: which links a group has, and what compute hides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoplan.forecast.devices import load_device
from autoplan.forecast.steptime import Load, step_time
from autoplan.values.estimate import Sent

QUIET = replace(load_device("h100"), latency_inside=0.0, latency_between=0.0)
GB = 10**9


def _seconds(sent: Sent, mesh: tuple[tuple[str, int], ...]) -> float:
    return step_time(Load((), 0, (sent,)), QUIET, mesh).total


def _gather(dim: str, kind: str = "all-gather") -> Sent:
    return Sent(dim, kind, 1, 8 * GB)


@pytest.mark.parametrize(
    ("dim", "mesh", "link"),
    [
        ("tp", (("dp_shard", 4), ("tp", 8)), 450e9),  # in a node
        ("dp_shard", (("dp_shard", 64),), 8 * 50e9),  # eight ranks of the group in a node: a port each
        ("dp_shard", (("dp_shard", 8), ("tp", 8)), 50e9),  # one rank of it in a node
        ("dp_shard", (("dp_shard", 16), ("tp", 2)), 4 * 50e9),
        ("dp_shard", (("dp_replicate", 4), ("fsdp", 8)), 450e9),  # by another name of that dim
    ],
)
def test_a_group_has_as_many_ports_as_ranks_in_a_node(dim: str, mesh: tuple[tuple[str, int], ...], link: float) -> None:
    ranks = dict(mesh).get(dim, 8)
    assert _seconds(_gather(dim), mesh) == pytest.approx(8 * GB * (ranks - 1) / ranks / link)


def test_groups_of_a_node_share_its_ports_however_a_model_is_cut() -> None:
    """The same weights go into each node: as 8 groups of one port each, or as 2 of four."""
    cut = Sent("dp_shard", "all-gather", 1, GB)
    less = Sent("dp_shard", "all-gather", 1, 4 * GB)
    many = _seconds(cut, (("dp_shard", 32), ("tp", 8))) / (31 / 32)
    few = _seconds(less, (("dp_shard", 128), ("tp", 2))) / (127 / 128)
    assert many == pytest.approx(few)
    slow = replace(QUIET, latency_between=1.0)
    for mesh in ((("dp_shard", 32), ("tp", 8)), (("dp_shard", 128), ("tp", 2))):
        assert step_time(Load((), 0, (replace(cut, bytes=0),)), slow, mesh).total == pytest.approx(31)


def test_a_sum_that_goes_back_passes_twice_and_an_exchange_has_one_port() -> None:
    mesh = (("tp", 16),)
    assert _seconds(_gather("tp", "all-reduce"), mesh) == pytest.approx(2 * _seconds(_gather("tp"), mesh))
    assert _seconds(_gather("tp", "all-to-all"), mesh) == pytest.approx(8 * _seconds(_gather("tp"), mesh))


def test_each_further_node_costs_a_gather_a_step_and_a_sum_a_level() -> None:
    slow = replace(QUIET, latency_between=1.0)
    one = Sent("dp_shard", "all-gather", 1, 0)
    sums = replace(one, kind="all-reduce")
    assert step_time(Load((), 0, (one,)), slow, (("dp_shard", 64),)).total == pytest.approx(7)
    assert step_time(Load((), 0, (sums,)), slow, (("dp_shard", 64),)).total == pytest.approx(2 * 3)


def test_compute_hides_data_parallelism_of_its_phase_but_for_the_ends() -> None:
    mesh, rate = (("dp_shard", 8),), QUIET.flops["bfloat16"] * QUIET.efficiency
    sent = (Sent("dp_shard", "all-gather", 10, 10 * GB), Sent("dp_shard", "reduce-scatter", 5, 10 * GB))
    one = 10 * GB * 7 / 8 / QUIET.inside  # seconds of either
    busy = step_time(Load((("bfloat16", int(100 * one * rate)),), 0, sent, sent_forward=sent[:1]), QUIET, mesh)
    assert dict(busy.exposed)["dp_shard"] == pytest.approx(one / 10 + one / 5)
    idle = step_time(Load((("bfloat16", int(one * rate)),), 0, sent, 0, 0.5, sent[:1]), QUIET, mesh)
    assert dict(idle.exposed)["dp_shard"] == pytest.approx(2 * (one - one / 2))
    twice = step_time(Load((("bfloat16", int(one * rate)),), 0, sent, 0, 0.5, sent[:1]), QUIET, mesh, accumulate=2)
    assert twice.total == pytest.approx(2 * idle.total)
