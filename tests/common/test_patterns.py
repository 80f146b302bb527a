"""Patterns mean exactly the modules they should, and helpful names come first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan.common.patterns import best_match, fold_names, is_under, matches, nearest
from autoplan.values import ParameterRule


@pytest.mark.parametrize(
    ("pattern", "fqn", "expected"),
    [
        ("model.layers.*.mlp", "model.layers.3.mlp", True),
        ("model.layers.*.mlp", "model.layers.12.mlp", True),
        ("model.layers.*.mlp", "model.layers.3.mlp.up", False),
        ("model.layers.*.mlp", "model.layers.a.b.mlp", False),
        ("model.*", "model.layers.3", False),
        ("h.*.w*", "h.0.w1", True),
        ("h.*.w*", "h.0.w", False),
        ("*", "lm_head", True),
        ("", "", True),
        ("", "lm_head", False),
        ("a.b", "axb", False),
        ("a+b.*", "a+b.0", True),
        ("a.*", "a.*", True),
    ],
)
def test_matches(pattern: str, fqn: str, expected: bool) -> None:
    assert matches(pattern, fqn) is expected


@pytest.mark.parametrize(
    ("pattern", "fqn", "expected"),
    [
        ("model.layers.*", "model.layers.3.mlp.up", True),
        ("model.layers.*", "model.layers", False),
        ("model.lay", "model.layers.3", False),
        ("", "anything.at.all", True),
        ("lm_head", "lm_head", True),
    ],
)
def test_is_under(pattern: str, fqn: str, expected: bool) -> None:
    assert is_under(pattern, fqn) is expected


def test_fold_keeps_what_one_pattern_would_overclaim() -> None:
    sparse = [f"layers.{i}.experts.{j}.w" for i in (1, 3) for j in range(4)]
    assert fold_names(sparse) == ("layers.*.experts.*.w",)
    universe = [f"layers.{i}.experts.{j}.w" for i in range(4) for j in range(4)]
    assert fold_names(sparse, universe) == ("layers.1.experts.*.w", "layers.3.experts.*.w")


def test_blocks_that_are_numbered_inside_their_names_fold_and_two_parts_do_not() -> None:
    experts = [f"mlp.experts.expert_{n}.fc{k}" for n in range(12) for k in (1, 2)]
    universe = [*experts, "ln_1", "ln_2", "w1", "w2", "w3"]
    assert fold_names([name for name in experts if name.endswith("fc1")], universe) == ("mlp.experts.expert_*.fc1",)
    assert fold_names(["ln_1", "ln_2"], universe) == ("ln_1", "ln_2")
    assert fold_names(["w1", "w3"], universe) == ("w1", "w3")  # `w*` would mean w2, too


def test_fold_leaves_a_lone_number_alone() -> None:
    assert fold_names(["net.0.weight", "net.2.bias", "head"]) == ("net.0.weight", "net.2.bias", "head")
    assert fold_names([]) == ()


names = st.lists(
    st.builds(lambda i, j, leaf: f"l.{i}.e.{j}.{leaf}", st.integers(0, 4), st.integers(0, 3), st.sampled_from("wb")),
    unique=True,
)


@given(universe=names, data=st.data())
def test_fold_means_the_given_names_and_no_others(universe: list[str], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from(universe), unique=True)) if universe else []
    patterns = fold_names(wanted, universe)
    for name in universe:
        assert (name in wanted) == any(matches(pattern, name) for pattern in patterns), (name, patterns)
    assert len(patterns) <= len(wanted)


def test_best_match_prefers_the_name_to_the_pattern() -> None:
    rules = (ParameterRule("*.*"), ParameterRule("h.*"), ParameterRule("h.0"))
    assert best_match(rules, "h.0") is rules[2]
    assert best_match(rules, "h.1") is rules[1]
    assert best_match(rules, "g.1") is rules[0]
    assert best_match(rules, "lm_head") is None


def test_nearest() -> None:
    known = ["model.layers.*.mlp.up_proj", "model.layers.*.mlp.down_proj", "model.embed_tokens", "lm_head"]
    assert nearest("model.layer.3.mlp.up_prj", known)[0] == "model.layers.*.mlp.up_proj"
    assert nearest("layers.3.mlp.down_proj", known)[0] == "model.layers.*.mlp.down_proj"
    assert nearest("lmhead", known)[0] == "lm_head"
    assert nearest("qqqqqq", known) == ()
    assert len(nearest("model.layers.3.mlp", known, count=2)) == 2
