"""Laws of the records of ops: each question has one answer, of every op."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest
import torch

from autoplan.ops import CALLS, OPS, call_record, op_record
from autoplan.ops.attention import BOX
from autoplan.ops.records.answers import Drawn, Extent, Linear, Random, Reduction
from autoplan.ops.records.on_shards import Groups, NoSizes, Sizes, as_written, recorded
from autoplan.ops.records.record import OpRecord, kept_whole, nothing
from autoplan.values import Op
from autoplan.values.reasons import NotPlaced

ANSWERED = {"dims", "sizes", "reduces", "linear", "random", "runs"}


def test_what_decides_about_numbers_has_no_default() -> None:
    assert {f.name for f in fields(OpRecord) if f.default is MISSING} == {"name"} | ANSWERED


@pytest.mark.parametrize("name", OPS)
def test_every_record_answers(name: str) -> None:
    record = OPS[name]
    assert record.name == name and callable(record.dims) and callable(record.reduces) and callable(record.runs)
    assert isinstance(record.sizes, Sizes) and isinstance(record.linear, Linear) and isinstance(record.random, Random)
    if record.random.when == "always":
        assert record.linear is Linear.NO, "each rank would draw for its part of a sum"
        assert record.runs is recorded or record.reduces is kept_whole, "a rank cannot draw what was drawn"
    if record.reduces not in (nothing, kept_whole) and name != BOX:
        may_stay = record.reduces.__name__ == "averaged"  # refused before it could run
        assert record.runs is not as_written or may_stay, "where ranks sum, running as written would not"
    if record.product is not None:
        assert record.linear is Linear.NO and record.drawn in (Drawn.CONTRACTION, Drawn.CONVOLUTION)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_answers(name: str) -> None:
    call = CALLS[name]
    assert call.name == name and (call.becomes in OPS or not call.becomes)
    assert isinstance(call.sizes, Sizes) and isinstance(call.linear, Linear) and isinstance(call.random, Random)
    assert call.pays is None or isinstance(call.pays, (Reduction, NotPlaced))


def test_in_place_forms_share_the_record_of_the_plain_form() -> None:
    for name in (name for name in OPS if not name.endswith("__")):
        assert op_record(f"{name}_") is OPS[name]
    assert call_record("mul_").linear is Linear.EACH and call_record("dropout_").random == call_record("dropout").random


def test_of_an_unknown_op_nothing_is_known() -> None:
    record, call = op_record("no_such_op"), call_record("no_such_call")
    assert record.runs is as_written and record.linear is Linear.NO and isinstance(call.sizes, NoSizes)


# How each of the views that keep dims whole is called on two dims, or on three.
MOVED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("t", "mT", "adjoint", "matrix_H", "numpy_T"), ()),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "transpose_copy"), (0, -1)),
    **dict.fromkeys(("permute", "permute_copy"), ([1, -3, 2],)),
    **dict.fromkeys(("unsqueeze", "unsqueeze_copy"), (-2,)),
    **dict.fromkeys(("select", "select_copy"), (-2, 0)),
    **dict.fromkeys(("unbind", "unbind_copy"), (1,)),
    **dict.fromkeys(("expand", "expand_copy", "broadcast_to"), ([1, 1, 2, 3, 5],)),
    "expand_as": (torch.empty(1, 1, 2, 3, 5),),
}


def test_dims_go_where_torch_puts_them() -> None:
    assert set(MOVED) == {name for name in OPS if OPS[name].moves is not None}
    for name, args in MOVED.items():
        x = torch.empty((2, 3, 5) if args else (2, 3))
        made = getattr(torch.ops.aten, name)(x, *args)
        made = made[0] if isinstance(made, list | tuple) else made
        moves = OPS[name].moves
        assert moves is not None
        call = Op(name, "", (None, *args), {}, (), "")
        assert tuple(moves(call, list(x.shape), 1, made.dim())) == tuple(made.shape), name


# Ops that make each result of the same few positions of a dim: how they are called on (2, 4, 12), and the dim's result.
READ: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("convolution", (torch.ones(4, 1, 3), None, [1], [2], [1], False, [0], 4)),
    ("convolution", (torch.ones(6, 4, 2), None, [1], [0], [3], False, [0], 1)),
    ("constant_pad_nd", ([2, -1],)),
    ("constant_pad_nd", ([0, 0, 1, 1],)),
    ("slice", (2, 3)),
    ("slice", (2, 1, -2)),
    ("slice", (1, 1)),
)
READ_OTHERWISE: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("convolution", (torch.ones(4, 1, 3), None, [2], [2], [1], False, [0], 4)),
    ("convolution", (torch.ones(4, 1, 3), None, [1], [0], [1], True, [0], 4)),
    ("reflection_pad1d", ([2, 1],)),
    ("slice", (2, -3)),
    ("slice", (2, 0, 5)),
    ("slice", (2, 0, -1, 2)),
)


@pytest.mark.parametrize(("name", "args"), (*READ, *READ_OTHERWISE))
def test_positions_are_read_from_where_a_record_says(name: str, args: tuple[object, ...]) -> None:
    run, reads = getattr(torch.ops.aten, name), OPS[name].reads
    x = torch.zeros(2, 4, 12)
    made = run(x, *args)
    assert reads is not None
    window = reads(Op(name, "", (None, *args), {}, (), ""), Extent(2, 3, 12, made.shape[2], frozenset()))
    assert (window is None) == any(args is other for _, other in READ_OTHERWISE)
    for position in range(4, 8) if window is not None else ():
        x[..., position] = 1
        seen = (run(x, *args) != 0).any(0).any(0).nonzero().flatten().tolist()
        x[..., position] = 0
        window_at = [j for j in range(made.shape[2]) if j + window[0] <= position <= j + window[1]]
        assert min(seen, default=0) == min(window_at, default=0) and max(seen, default=0) == max(window_at, default=0)


# ------------------------------------------------------------------------------------------------ drift of the past


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["conv{}d", "conv_transpose{}d"])
def test_every_convolution_is_told_its_groups(kind: str, dims: int) -> None:
    call = call_record(kind.format(dims))
    assert isinstance(call.sizes, Groups) and call.sizes.at == 6 and call.becomes == "convolution"
    assert call.product is not None and call.product.bias == 2


# What four lists held, each some of it.
SOURCES = ("rand", "randn", "randint", "randperm", "multinomial", "bernoulli", "normal_", "rand_like", "gumbel_softmax")
RATES = ("dropout", "dropout_", "dropout1d", "alpha_dropout", "feature_dropout", "native_dropout", "rrelu", "lstm")


def test_everybody_knows_the_same_random_ops() -> None:
    for name in SOURCES:
        assert call_record(name).random.when == "always" and call_record(name).random.may_draw((), {})
    for name in RATES:
        assert call_record(name).random.when == "rate"
    dropout = call_record("dropout").random
    assert dropout.may_draw((None,), {}) and dropout.may_draw((None, 0.1), {}) and dropout.may_draw((), {"p": 0.1})
    assert not dropout.may_draw((None, 0.0), {}) and not dropout.may_draw((None,), {"p": 0.0})
    attention = call_record("scaled_dot_product_attention").random
    assert not attention.may_draw((), {}) and not attention.has_rate((), {})
    assert attention.has_rate((), {"dropout_p": 0.0}), "in training it is told another rate"
    assert dropout.has_rate((), {}) and call_record("rand").random.has_rate((), {})
    assert not call_record("add").random.has_rate((None, None), {})
