"""What the analysis reads off small traces written by hand, and what it refuses to read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from trace_writer import B, D, S, Writer, clean, events, free, only, rows

from autoplan.analyse.infer import Axes
from autoplan.axes.events import Event
from autoplan.axes.terms import is_data, layout, leaves, show
from autoplan.ops import OPS, op_record
from autoplan.ops.records.record import unknown
from autoplan.values import Ref

# ------------------------------------------------------------------------------------------------ attention and co.


def test_gated_mlp_is_one_class_and_the_residual_another() -> None:
    w = Writer()
    gate, up, down = w.weight(16, D), w.weight(16, D), w.weight(D, 16)
    norm, other = w.weight(D), w.weight(D, D)
    x = w.linear(w.hidden(), other)
    normed, _ = w.many("_fused_rms_norm", x, [D], norm, 1e-6, shapes=[(B, S, D), (B, S, 1)])
    y = w.linear(w.add(w.op("silu", w.linear(normed, gate), shape=(B, S, 16)), w.linear(normed, up), "mul"), down)
    w.add(x, y)
    axes = clean(w.axes())
    assert only(axes, gate, 0) is only(axes, up, 0) is only(axes, down, 1)
    assert only(axes, gate, 0).events == {"contract_w"} and not only(axes, gate, 0).data
    residual = only(axes, norm, 0)
    assert residual is only(axes, gate, 1) is only(axes, down, 0) and residual.events == {"norm", "contract_w"}


def test_fused_attention_groups_heads_by_itself() -> None:
    w, kv, group, width = Writer(), 2, 3, 8
    wq, wk, wv = w.weight(kv * group * width, D), w.weight(kv * width, D), w.weight(kv * width, D)
    x = w.hidden()
    q, k, v = w.heads(w.linear(x, wq), kv * group), w.heads(w.linear(x, wk), kv), w.heads(w.linear(x, wv), kv)
    w.attend(q, k, v)
    axes = clean(w.axes())
    shared = leaves(axes.of(wk.id)[0])[0]
    assert rows(axes, wq, shared) == "2!*24" and shared.events == {"batch_a"}
    assert {"contract_a"} == events(axes, k, 3) and events(axes, v, 3) == {"free_a"}


def test_complex_rotary_keeps_heads_and_marks_pairs() -> None:
    w, heads, width = Writer(), 4, 8
    wq = w.weight(heads * width, D)
    q = w.view(w.heads(w.linear(w.hidden(), wq), heads), B, heads, S, width // 2, 2)
    turned = w.op("view_as_complex", q, shape=(B, heads, S, width // 2))
    angle = w.op("arange", S, shape=(S,))
    turned = w.add(turned, w.view(angle, S, 1), "mul")
    w.view(w.op("view_as_real", turned, shape=(B, heads, S, width // 2, 2)), B, heads, S, width)
    axes = clean(w.axes())
    head, half, pair = leaves(axes.of(wq.id)[0])
    assert (head.size, half.size, pair.size) == (4, 4, 2) and free(head) and free(half)
    assert pair.events == {"select"}
    assert "stack" in leaves(axes.of(len(w.tensors) - 1)[3])[1].events


def test_grouped_pointwise_convolution_links_groups() -> None:
    w, groups = Writer(), 2
    first, second = w.weight(groups * 6, 4, 1), w.weight(D, groups * 6)
    before = w.weight(groups * 4, D)
    x = w.transpose(w.linear(w.hidden(), before), 1, 2)
    y = w.op("convolution", x, first, None, [1], [0], [1], False, [0], groups, shape=(B, groups * 6, S))
    w.linear(w.transpose(y, 1, 2), second)
    axes = clean(w.axes())
    group = leaves(axes.of(second.id)[1])[0]
    assert rows(axes, first, group) == "2!*6" and rows(axes, before, group) == "2!*4"
    assert only(axes, first, 1) is leaves(axes.of(before.id)[0])[1]
    assert "contract_w" in only(axes, first, 1).events


def test_transposed_convolution_swaps_its_weight() -> None:
    w = Writer()
    kernel, bias = w.weight(D, 6, 3), w.weight(6)
    x = w.transpose(w.hidden(), 1, 2)
    y = w.op("convolution", x, kernel, bias, [1], [0], [1], True, [0], 1, shape=(B, 6, S + 2))
    axes = clean(w.axes())
    assert axes.of(y.id)[1] is axes.of(kernel.id)[1] is axes.of(bias.id)[0]
    assert "contract_w" in events(axes, kernel, 0) and is_data(axes.of(y.id)[2])


def test_relative_shift_keeps_the_dims_around_it() -> None:
    w, heads = Writer(), 4
    wq = w.weight(heads * 6, D)
    keys = w.op("arange", S + 2, shape=(S + 2,))
    scores = w.add(w.op("sum", w.heads(w.linear(w.hidden(), wq), heads), [3], True, shape=(B, heads, S, 1)), keys)
    shifted = w.view(scores, B, heads, S + 2, S)
    w.op("_softmax", shifted, -1, False, shape=(B, heads, S + 2, S))
    axes = w.axes()
    assert not axes.conflicts and [c.why for c in axes.harmless] == ["view"]
    assert axes.of(shifted.id)[1] is leaves(axes.of(wq.id)[0])[0] and free(leaves(axes.of(wq.id)[0])[0])
    assert events(axes, shifted, 3) == {"badview", "softmax"} and "badview" in events(axes, keys, 0)


def test_grouped_experts() -> None:
    w, experts, tokens = Writer(), 4, 9
    up, down = w.weight(experts, D, 8), w.weight(experts, 8, D)
    where = w.tensor((tokens,), "input", dtype="int64")
    chosen = w.op("index", w.view(w.hidden(), B * S, D), [where], shape=(tokens, D))
    offsets = w.op("cumsum", w.tensor((experts,), "input", dtype="int32"), 0, shape=(experts,))
    inner = w.op("_grouped_mm", chosen, up, offsets, shape=(tokens, 8))
    w.op("_grouped_mm", inner, down, offsets, shape=(tokens, D))
    axes = clean(w.axes())
    assert only(axes, up, 2) is only(axes, down, 1) and only(axes, up, 2).events == {"contract_w"}
    assert events(axes, up, 0) == {"expert_batch", "cumsum"}


def test_batched_experts_picked_by_index() -> None:
    w, experts, tokens = Writer(), 4, 9
    up = w.weight(experts, 8, D)
    picked = w.op("index", up, [w.tensor((tokens,), "input", dtype="int64")], shape=(tokens, 8, D))
    x = w.tensor((tokens, D, 1), "input")
    y = w.op("bmm", picked, x, shape=(tokens, 8, 1))
    axes = clean(w.axes())
    assert picked.id in axes.weights and axes.sources[picked.id] == up.id
    assert events(axes, up, 0) == {"index_w"} and axes.of(y.id)[1] is axes.of(up.id)[1]
    assert "contract_w" in events(axes, up, 2)


# ------------------------------------------------------------------------------------------------ what is not free


def test_partly_carried_concatenation_is_marked_where_it_is_summed() -> None:
    w = Writer()
    one, two, out = w.weight(8, D), w.weight(4, D), w.weight(D, 12)
    x = w.hidden()
    both = w.op("cat", [w.linear(x, one), w.linear(x, two)], -1, shape=(B, S, 12))
    w.linear(both, out)
    axes = clean(w.axes())
    assert events(axes, one, 0) == events(axes, two, 0) == {"contract_w", "contract_mixed"}
    assert show(axes.of(out.id)[1]).count("|") == 1


def test_partly_carried_concatenation_inside_a_product_is_found() -> None:
    w, heads = Writer(), 2
    one, two, out = w.weight(heads * 3, D), w.weight(heads * 5, D), w.weight(D, heads * 8)
    x = w.hidden()
    parts = [w.view(w.linear(x, weight), B, S, heads, n) for weight, n in ((one, 3), (two, 5))]
    w.linear(w.view(w.op("cat", parts, -1, shape=(B, S, heads, 8)), B, S, heads * 8), out)
    axes = clean(w.axes())
    head, narrow = leaves(axes.of(one.id)[0])
    assert rows(axes, out, head, 1) == "2!*8" and free(head)
    assert "contract_mixed" in narrow.events and rows(axes, out, narrow, 1) == "2*(3!|5)"


def test_an_axis_summed_over_whole_segments_is_not_mixed() -> None:
    w = Writer()
    gate, out = w.weight(8, D), w.weight(D, 16)
    y = w.linear(w.hidden(), gate)
    w.linear(w.op("cat", [y, y], -1, shape=(B, S, 16)), out)
    axes = clean(w.axes())
    assert rows(axes, out, only(axes, gate, 0), 1) == "8!|8!" and free(only(axes, gate, 0))


def test_unknown_ops_are_opaque_on_both_sides() -> None:
    w = Writer()
    up, down = w.weight(8, D), w.weight(D, 9)
    y = w.op("as_strided", w.linear(w.hidden(), up), [B, S, 9], [1, 1, 1], shape=(B, S, 9))
    w.linear(y, down)
    axes = w.axes()
    assert axes.unknown == {"as_strided": 1}
    assert "opaque" in events(axes, up, 0) and "opaque" in events(axes, down, 1)


def test_known_op_in_a_form_its_rule_does_not_know_is_opaque() -> None:
    w = Writer()
    weight = w.weight(6, D)
    w.op("add", w.linear(w.hidden(), weight), w.tensor((4,)), shape=(B, S, 6))  # does not broadcast
    axes = w.axes()
    assert axes.unknown == {"add": 1} and "opaque" in events(axes, weight, 0)


def test_clash_reaches_the_weights_and_says_where() -> None:
    w = Writer()
    one, two = w.weight(24, D), w.weight(24, D)
    x = w.hidden()
    a = w.view(w.linear(x, one), B, S, 6, 4)
    b = w.view(w.linear(x, two), B, S, 4, 6)
    w.add(w.view(a, B, S, 24), w.view(b, B, S, 24))
    axes = w.axes()
    assert [(c.why, c.name) for c in axes.conflicts] == [("structures differ", "add")]
    assert "clash" in events(axes, one, 0) and "clash" in events(axes, two, 0)


@pytest.mark.parametrize(
    ("name", "args", "event"),
    [
        ("_softmax", (-1, False), Event.SOFTMAX),
        ("cumsum", (-1,), Event.CUMSUM),
        ("flip", ([-1],), Event.FLIP),
        ("roll", ([1], [-1]), Event.ROLL),
        ("sort", (-1,), Event.SORT),
        ("tril", (), Event.TRIANGLE),
        ("_fft_c2c", ([2], 0, True), Event.OPAQUE),
    ],
)
def test_ops_along_an_axis_leave_their_event(name: str, args: tuple[Any, ...], event: Event) -> None:
    w = Writer()
    weight = w.weight(8, D)
    w.op(name, w.linear(w.hidden(), weight), *args, shape=(B, S, 8))
    assert events(w.axes(), weight, 0) == {event}


@pytest.mark.parametrize(
    ("name", "overload", "args", "event"),
    [
        ("sum", "dim_IntList", ([-1], True), Event.REDUCE_LIN),
        ("mean", "dim", ([-1], True), Event.REDUCE_LIN),
        ("amax", "", ([-1], True), Event.REDUCE_MAX),
        ("argmax", "", (-1, True), Event.REDUCE_ARG),
        ("linalg_vector_norm", "", (2, [-1], True), Event.LENGTH),
        ("linalg_vector_norm", "", (1, [-1], True), Event.REDUCE_NORM),
    ],
)
def test_reductions_name_themselves(name: str, overload: str, args: tuple[Any, ...], event: Event) -> None:
    w = Writer()
    weight = w.weight(8, D)
    w.op(name, w.linear(w.hidden(), weight), *args, shape=(B, S, 1), overload=overload)
    assert events(w.axes(), weight, 0) == {event}


@pytest.mark.parametrize("name", ["kthvalue", "topk"])
def test_the_largest_of_a_number_is_itself(name: str) -> None:
    w = Writer()
    w.op(name, w.tensor(()), 1, shape=())
    assert not w.axes().unknown


def test_masks_and_index_assignment() -> None:
    w = Writer()
    weight = w.weight(8, D)
    y = w.linear(w.hidden(), weight)
    mask, flags = w.tensor((B, S), "constant", dtype="bool"), w.weight(S)
    w.add(w.view(mask, B, S), flags)
    kept = w.op("index", y, [mask], shape=(7, 8))
    target = w.op("zeros", [B, S, 8], shape=(B, S, 8))
    w.in_place("index_put_", target, [mask], kept)
    axes = clean(w.axes())
    assert axes.of(kept.id)[1] is axes.of(target.id)[2] is axes.of(weight.id)[0]
    assert is_data(axes.of(kept.id)[0]) and target.id not in axes.static
    assert not events(axes, weight, 0) and is_data(axes.of(flags.id)[0])


@pytest.mark.parametrize(("name", "named"), [("scatter_add", False), ("index_add", False), ("index_put", True)])
def test_what_is_put_at_places_is_summed_over_all_of_them(name: str, named: bool) -> None:
    """A rank that holds some of the sources knows its own part of each place only."""
    w = Writer()
    source = w.linear(w.hidden(), w.weight(8, D))
    table = w.op("zeros", [B, S, 3], shape=(B, S, 3))
    places = w.tensor((B, S, 8) if name == "scatter_add" else (8,), "constant", dtype="int64")
    given = ((None, None, places), source) if named else (-1, places, source)
    w.op(name, table, *given, shape=(B, S, 3))
    assert Event.SCATTER in w.axes().of(source.id)[-1].events


def test_what_is_written_in_place_becomes_equal() -> None:
    w = Writer()
    weight, other = w.weight(8, D), w.weight(8)
    buffer = w.op("empty", [B, S, 8], shape=(B, S, 8))
    w.in_place("copy_", buffer, w.linear(w.hidden(), weight))
    w.in_place("mul_", w.op("alias", buffer, shape=(B, S, 8)), other)
    axes = clean(w.axes())
    assert only(axes, weight, 0) is only(axes, other, 0)


def test_concatenation_along_one_dim_links_the_others() -> None:
    w = Writer()
    one, two = w.weight(8, D), w.weight(8, D)
    x = w.hidden()
    w.op("cat", [w.linear(x, one), w.linear(x, two)], 1, shape=(B, 2 * S, 8))
    axes = clean(w.axes())
    assert only(axes, one, 0) is only(axes, two, 0)


def test_constant_index_of_consecutive_positions_is_a_slice() -> None:
    w = Writer()
    table = w.weight(10, D)
    where = w.tensor((3,), "constant", dtype="int64", values=(2, 3, 4))
    w.op("index", table, [where], shape=(3, D))
    assert layout(clean(w.axes()).of(table.id)[0], lambda axis: "!" if axis.size == 3 else None) == "2|3!|5"


def test_made_in_forward_fills_say_nothing_and_ramps_do() -> None:
    w = Writer()
    weight, other = w.weight(8, D), w.weight(8, D)
    x = w.hidden()
    w.add(w.linear(x, weight), w.op("zeros", [8], shape=(8,)))
    ramp = w.op("exp", w.op("arange", 8, shape=(8,)), shape=(8,))
    w.add(w.linear(x, other), ramp, "mul")
    axes = clean(w.axes())
    assert events(axes, weight, 0) == set() and events(axes, other, 0) == {"created"}
    assert ramp.id in axes.static and x.id not in axes.static


def test_padding_is_a_concatenation_that_can_be_cut_off_again() -> None:
    w, heads = Writer(), 4
    weight = w.weight(heads * 6, D)
    v = w.view(w.linear(w.hidden(), weight), B, S, heads, 6)
    padded = w.op("constant_pad_nd", v, [0, 2], shape=(B, S, heads, 8))
    back = w.op("slice", padded, 3, 0, 6, shape=(B, S, heads, 6))
    axes = clean(w.axes())
    assert axes.of(back.id)[3] is leaves(axes.of(weight.id)[0])[1]
    assert "pad" in events(axes, back, 3) and "pad" in events(axes, padded, 3)


def test_learned_tokens_before_the_input_are_tied_to_it() -> None:
    w = Writer()
    tokens = w.weight(1, 3, D)
    both = w.op("cat", [w.op("expand", tokens, [B, 3, D], shape=(B, 3, D)), w.hidden()], 1, shape=(B, S + 3, D))
    axes = clean(w.axes())
    assert is_data(axes.of(both.id)[1]) and events(axes, tokens, 1) == {"joins_data"}


# ------------------------------------------------------------------------------------------------ gathered products


def test_gathered_products_start_their_output_anew() -> None:
    w = Writer()
    up, down, table = w.weight(8, D), w.weight(D, 8), w.weight(20, D)
    ids = w.tensor((B, S), "input", dtype="int64")
    w.op("embedding", table, ids, shape=(B, S, D))
    y = w.linear(Ref(len(w.tensors) - 1), up)
    w.linear(y, down)
    products = [index for index, op in enumerate(w.ops) if op.name == "mm"]
    plain, cut = clean(w.axes()), clean(w.axes(frozenset([products[0]])))
    assert only(plain, up, 0) is only(plain, down, 1)
    assert only(cut, up, 0) is not only(cut, down, 1) and not events(cut, up, 0)
    assert is_data(cut.of(y.id)[0]) and only(cut, up, 1) is only(cut, table, 1)
    apart = clean(w.axes(frozenset([0])))
    assert only(apart, up, 1) is not only(apart, table, 1) and events(apart, table, 0) == {"embed_index"}


# ------------------------------------------------------------------------------------------------ scale and house


def deep(layers: int) -> Writer:
    """A residual stack of attention and gated MLP."""
    w, heads = Writer(), 4
    x = w.hidden()
    for _ in range(layers):
        q, k, v = (w.heads(w.linear(x, w.weight(heads * 8, D)), heads) for _ in range(3))
        x = w.add(x, w.linear(w.attend(q, k, v), w.weight(D, heads * 8)))
        gate, up = (w.linear(x, w.weight(16, D)) for _ in range(2))
        x = w.add(x, w.linear(w.add(gate, up, "mul"), w.weight(D, 16)))
    return w


def test_depth_costs_neither_recursion_nor_precision() -> None:
    w = deep(200)
    axes = clean(w.axes())
    weights = [i for i, info in enumerate(w.tensors) if info.kind == "parameter"]
    last = axes.of(weights[-1])
    assert [axis.size for axis in leaves(last[1])] == [16] and leaves(last[1])[0].events == {"contract_w"}
    assert len({leaves(axes.of(i)[1])[0].id for i in weights if w.tensors[i].shape[1] == D}) == 1


def test_the_analysis_is_the_same_every_time() -> None:
    def picture(axes: Axes) -> list[Any]:
        numbers: dict[int, int] = {}
        terms = [term for tensor in sorted(axes.dims) for term in axes.of(tensor)]
        return [
            [(numbers.setdefault(axis.id, len(numbers)), axis.size, sorted(axis.events)) for axis in leaves(term)]
            for term in terms
        ]

    w = deep(2)
    assert picture(w.axes()) == picture(w.axes())


def test_in_place_forms_follow_their_plain_rule() -> None:
    assert op_record("add_") is OPS["add"] and op_record("index_put_") is OPS["index_put"]
    assert "_no_such_op" not in OPS and op_record("_no_such_op_").dims is unknown


def test_analysis_loads_no_torch() -> None:
    code = "import sys, autoplan.analyse.infer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
