"""Laws of the records of ops: each question is answered in one place, and nowhere else are lists of op names kept."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from autoplan.ops import CALLS, OPS, call_record, op_record
from autoplan.ops.experts import BOX
from autoplan.ops.records.on_shards import as_written, recorded
from autoplan.ops.records.record import Drawn, Linear, OpRecord, Random, Reduction, kept_whole, nothing
from autoplan.ops.records.sizes import Groups, NoSizes, Sizes
from autoplan.values.reasons import NotPlaced

PACKAGE = Path(__file__).parents[2] / "autoplan"
ANSWERED = {"dims", "sizes", "reduces", "linear", "random", "runs"}

# Words of other vocabularies that are names of ops, too: reductions, boxes of pictures, what hooks do, arithmetic.
OTHER_WORDS = {*Reduction, *Drawn, "copy", "sub", "neg"}


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


# ------------------------------------------------------------------------------------------------ one place


@pytest.mark.parametrize("room", ["analyse", "check", "execute"])
def test_no_list_of_ops_stands_outside_of_ops(room: str) -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": names
        for path in sorted((PACKAGE / room).rglob("*.py"))
        for line, names in _lists_of_ops(ast.parse(path.read_text()))
    }
    assert not found, "what these ops have in common belongs into their records (autoplan/ops)"


def test_the_check_above_can_fail() -> None:
    assert list(_lists_of_ops(ast.parse('X = ("mm", "addmm", "bmm")')))
    assert list(_lists_of_ops(ast.parse('X = {"view": 1, "reshape": 2, "dropout_": 3}')))
    assert not list(_lists_of_ops(ast.parse('X = ("sum", "mean", "norm", "gather")')))


def _lists_of_ops(tree: ast.AST) -> Iterator[tuple[int, list[str]]]:
    for node in ast.walk(tree):
        items = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else []
        items = [key for key in node.keys if key] if isinstance(node, ast.Dict) else items
        words = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
        known = {*OPS, *CALLS}
        names = [w for w in words if w not in OTHER_WORDS and (w in known or w.removesuffix("_") in known)]
        if len(names) >= 3:
            yield node.lineno, names
