"""A quantised weight and its scales are one unit: cut together, between blocks only, and exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantised_toys import BlockLinear, GroupLinear, Quantised, RepeatedBlockLinear
from safetensors.torch import save_file
from slow_cases import slow_but
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import IndivisibleError
from autoplan.common.layout import Layout

LINEARS = [BlockLinear, RepeatedBlockLinear, GroupLinear]
COMPANIONS = {"weight": ("weight_scale_inv",), "packed": ("scales", "zeros")}


def model(linear: type, **sizes: int) -> Quantised:
    torch.manual_seed(0)
    return Quantised(linear, **sizes)


@pytest.mark.parametrize("linear", slow_but(LINEARS, LINEARS[0]))
def test_exact(linear: type) -> None:
    whole = model(linear)
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    plan = autoplan.plan(whole, tp_size=2)
    assert plan.proof.ok and not [f for f in plan.findings if f.level != "note"]
    report = autoplan.verify(whole, plan, tp_size=2)
    assert report.ok, report.findings
    assert "state_dict" in report.details["checked"]
    for name, tensor in whole.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor.float(), before[name].float())


@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("tp", [2, 4])
def test_scales_are_cut_with_their_weight(linear: type, tp: int) -> None:
    """Every rank holds exactly the scales of the numbers that it holds."""
    whole = model(linear, width=512, hidden=1024, heads=4)
    plan = autoplan.plan(whole, tp_size=tp, prove="none")
    cut = {rule.pattern: rule for rule in plan.runtime.parameters if rule.dim is not None}
    shapes = {name: tensor.shape for name, tensor in whole.state_dict().items()}
    pairs = [
        (rule, cut[pattern.replace(f".{stored}", f".{companion}")])
        for stored, others in COMPANIONS.items()
        for pattern, rule in cut.items()
        if pattern.endswith(f".{stored}") and pattern.startswith("blocks")
        for companion in others
    ]
    assert len(pairs) == 7 * (1 if linear is not GroupLinear else 2)
    for weight, scale in pairs:
        assert weight.dim == scale.dim
        sizes = [shapes[rule.pattern.replace("*", "0")][rule.dim] for rule in (weight, scale)]
        for rank in range(tp):
            numbers, scales = (Layout.parse(rule.layout).rows(rank, tp) for rule in (weight, scale))
            assert sorted({number * sizes[1] // sizes[0] for number in numbers}) == sorted(scales)


@pytest.mark.parametrize("linear", LINEARS)
def test_weights_are_read_with_their_scales(linear: type, tmp_path: Path) -> None:
    """A planned meta model reads each rank's numbers and scales, keeps dtypes, computes what the whole does."""
    whole = model(linear)
    plan = autoplan.plan(whole, tp_size=2, prove="none")
    state = {name: tensor.contiguous() for name, tensor in whole.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    ids = torch.arange(12).view(2, 6)
    expected = whole(ids).detach()

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        found = autoplan.parallelize(model(linear).to("meta"), mesh, plan, gather_logits=True)
        result = autoplan.load_weights(found, tmp_path)
        assert not result.missing_keys and not result.unexpected_keys
        torch.testing.assert_close(found(ids).detach(), expected, rtol=1e-4, atol=1e-4)
        for name, tensor in autoplan.full_tensors(found).items():
            assert tensor.dtype == state[name].dtype and torch.equal(tensor.float(), state[name].float()), name
        held = found.state_dict()
        assert {name: held[name].dtype for name in state} == {name: tensor.dtype for name, tensor in state.items()}

    run_ranks(rank_body, 2)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("linear", LINEARS)
def test_exact_on_ranks_that_are_processes(linear: type) -> None:
    report = autoplan.verify(model(linear), tp_size=2, engine="gloo", checks=("parameters", "forward", "state_dict"))
    assert report.ok and "state_dict" in report.details["checked"], report.findings


def test_blocks_are_never_cut() -> None:
    """Five blocks of 128 are not divisible by two, though 640 does."""
    plan = autoplan.plan(model(BlockLinear, hidden=640), tp_size=2, prove="none")
    whole = {fqn: reason for fqn, _, reason in plan.replicated}
    for name in ("gate", "up", "down"):
        reason = whole[f"blocks.*.{name}.weight"]
        assert "5 is not divisible by tp=2" in reason and "inside a block" in reason
        assert f"blocks.*.{name}.weight_scale_inv" in whole
    assert 2 not in plan.legal_tp and any(entry.pattern == "blocks.*.q" for entry in plan.entries)


def test_refused_by_name() -> None:
    with pytest.raises(IndivisibleError, match=r"5 units in blocks\.0\.gate\.weight is not divisible by tp=2"):
        autoplan.plan(model(BlockLinear, hidden=640), tp_size=2, prove="none", strict=True)


def test_four_bits_split_by_group_where_the_input_is_cut() -> None:
    """1024 inputs in 32 groups: tp may be 32, not 64; bytes of one group stay together."""
    plan = autoplan.plan(model(GroupLinear, hidden=1024), tp_size=2, prove="none")
    down = next(rule for rule in plan.runtime.parameters if rule.pattern.endswith("down.packed"))
    assert (down.dim, down.layout) == (1, "32!*16")


def test_roles_are_seen_through_dequantisation() -> None:
    entries = {entry.pattern: entry for entry in autoplan.plan(model(BlockLinear), 2, prove="none").entries}
    roles = {name: entries[f"blocks.*.{name}"].role for name in ("q", "k", "v", "o", "gate", "up", "down")}
    assert roles == {"q": "query", "k": "key", "v": "value", "o": "attention output",
                     "gate": "gate", "up": "up", "down": "down"}  # fmt: skip
    assert entries["blocks.*.down"].style == "rowwise" and entries["blocks.*.down"].segments == ("1:4!*128", "1:4!")
