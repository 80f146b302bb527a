"""How real models pack several projections into one weight: each layout is read off the ops, none is listed."""

from __future__ import annotations

from trace_writer import B, D, S, Writer, clean, events, free, only, rows

from autoplan.axes.events import Event
from autoplan.axes.terms import leaves


def test_gpt2_packing_is_three_blocks_of_heads() -> None:
    w, heads, width = Writer(), 4, 8
    packed, out = w.weight(3 * heads * width, D), w.weight(D, heads * width)
    q, k, v = w.split(w.linear(w.hidden(), packed), [heads * width] * 3)
    w.linear(w.attend(w.heads(q, heads), w.heads(k, heads), w.heads(v, heads)), out)
    axes = clean(w.axes())
    head = leaves(axes.of(out.id)[1])[0]
    assert head.size == heads and free(head) and head.events == {"batch_a", "contract_w"}
    assert rows(axes, packed, head) == "4!*8|4!*8|4!*8" and rows(axes, out, head, 1) == "4!*8"


def test_gpt_neox_packing_is_heads_of_three() -> None:
    w, heads, width = Writer(), 4, 8
    packed, out = w.weight(3 * heads * width, D), w.weight(D, heads * width)
    seen = w.transpose(w.view(w.linear(w.hidden(), packed), B, S, heads, 3 * width), 1, 2)
    w.linear(w.attend(*w.split(seen, [width] * 3)), out)
    axes = clean(w.axes())
    assert rows(axes, packed, leaves(axes.of(out.id)[1])[0]) == "4!*24"


def test_phi3_packing_is_grouped_heads_in_segments() -> None:
    w, kv, group, width = Writer(), 2, 3, 8
    packed, out = w.weight((kv * group + 2 * kv) * width, D), w.weight(D, kv * group * width)
    q, k, v = w.split(w.linear(w.hidden(), packed), [kv * group * width, kv * width, kv * width])
    k, v = (w.shared(w.heads(x, kv), group) for x in (k, v))
    w.linear(w.attend(w.heads(q, kv * group), k, v), out)
    axes = clean(w.axes())
    shared, member = leaves(axes.of(out.id)[1])[:2]
    assert (shared.size, member.size) == (kv, group)
    assert rows(axes, packed, shared) == "2!*24|2!*8|2!*8"
    assert rows(axes, packed, member) == "2*3!*8|16|16"


def test_falcon_packing_is_groups_of_query_heads_and_one_of_each() -> None:
    w, kv, group, width = Writer(), 2, 3, 8
    packed, out = w.weight(kv * (group + 2) * width, D), w.weight(D, kv * group * width)
    seen = w.view(w.linear(w.hidden(), packed), B, S, kv, group + 2, width)
    q, k, v = w.split(seen, [group, 1, 1], dim=3)
    q = w.transpose(w.op("_unsafe_view", q, [B, S, kv * group, width], shape=(B, S, kv * group, width)), 1, 2)
    k, v = (
        w.transpose(w.op("_unsafe_view", w.op("expand", x, [B, S, kv, group, width], shape=(B, S, kv, group, width)),
                         [B, S, kv * group, width], shape=(B, S, kv * group, width)), 1, 2)
        for x in (k, v)
    )  # fmt: skip
    w.linear(w.attend(q, k, v), out)
    axes = clean(w.axes())
    shared, member = leaves(axes.of(out.id)[1])[:2]
    assert rows(axes, packed, shared) == "2!*40"
    assert rows(axes, packed, member) == "2*(3!|1|1)*8"


def test_gpt_oss_experts_interleave_gate_and_up() -> None:
    w, experts, inner, tokens = Writer(), 3, 8, B * S
    packed, bias, down = w.weight(experts, D, 2 * inner), w.weight(experts, 2 * inner), w.weight(experts, inner, D)
    x = w.op("expand", w.view(w.hidden(), 1, tokens, D), [experts, tokens, D], shape=(experts, tokens, D))
    both = w.add(w.op("bmm", x, packed, shape=(experts, tokens, 2 * inner)), w.view(bias, experts, 1, 2 * inner))
    gate, up = (
        w.op("slice", both, 2, start, 2**63 - 1, 2, shape=(experts, tokens, inner)) for start in (0, 1)
    )  # fmt: skip
    w.op("bmm", w.add(gate, up, "mul"), down, shape=(experts, tokens, D))
    axes = clean(w.axes())
    hidden = only(axes, down, 1)
    assert rows(axes, packed, hidden, 2) == "8!*2" and rows(axes, bias, hidden, 1) == "8!*2"
    assert hidden.events == {"contract_w"} and events(axes, packed, 0) == {"batch_w"}
    assert Event.SELECT in leaves(axes.of(packed.id)[2])[1].events


def test_mamba2_projection_is_read_off_with_its_convolution() -> None:
    """z | x | B | C | dt, with G groups of h heads of p channels and N states: B and C are repeated for their heads."""
    w, G, h, p, N = Writer(), 2, 3, 4, 8
    H, inner, states = G * h, G * h * p, G * N
    packed, conv = w.weight(2 * inner + 2 * states + H, D), w.weight(inner + 2 * states, 1, 4)
    skip, out = w.weight(H), w.weight(D, inner)
    z, xbc, dt = w.split(w.linear(w.hidden(), packed), [inner, inner + 2 * states, H])
    channels = inner + 2 * states
    mixed = w.op("convolution", w.transpose(xbc, 1, 2), conv, None, [1], [3], [1], False, [0], channels,
                 shape=(B, channels, S + 3))  # fmt: skip
    mixed = w.transpose(w.op("slice", mixed, 2, 0, S, shape=(B, channels, S)), 1, 2)
    x, b, c = w.split(mixed, [inner, states, states])
    x = w.view(x, B, S, H, p, 1)
    b, c = (
        w.op("_unsafe_view", w.op("expand", w.view(y, B, S, G, 1, N), [B, S, G, h, N], shape=(B, S, G, h, N)),
             [B, S, H, 1, N], shape=(B, S, H, 1, N)) for y in (b, c)
    )  # fmt: skip
    state = w.add(w.add(w.add(x, b, "mul"), w.view(dt, B, S, H, 1, 1), "mul"), c, "mul")
    y = w.op("sum", state, [-1], shape=(B, S, H, p), overload="dim_IntList")
    y = w.add(y, w.add(w.view(x, B, S, H, p), w.view(skip, H, 1), "mul"))
    w.linear(w.add(w.view(y, B, S, inner), z, "mul"), out)
    axes = clean(w.axes())
    group, head, _ = leaves(axes.of(out.id)[1])
    assert free(group)
    assert rows(axes, packed, group) == "2!*12|2!*12|2!*8|2!*8|2!*3"
    assert rows(axes, packed, head) == "2*3!*4|2*3!*4|16|16|2*3!"
    assert rows(axes, conv, group) == "2!*12|2!*8|2!*8" and rows(axes, skip, group) == "2!*3"
    assert {"reduce_lin", "conv_group"} <= events(axes, conv, 0)
    assert "conv_k" in events(axes, conv, 2)
