"""Paths to tensors in nested arguments and results; an argument that a call may fill is the call's own."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.common.nested import (
    Noted,
    change_at,
    flatten_tensors,
    is_other_form,
    left_out_of,
    other_forms,
    own_argument,
    put_back,
)


class Kind(Enum):
    PAPER = "paper"
    AUTHOR = "author"


KEYS: dict[str, Any] = {
    "Kind.PAPER": Kind.PAPER,
    "('author', 'writes', 'paper')": ("author", "writes", "paper"),
    "x": "x",
}


@pytest.mark.parametrize("step", KEYS)
def test_a_key_stands_in_a_path_as_text(step: str) -> None:
    value = {"other": torch.zeros(1), KEYS[step]: [torch.ones(2)]}
    assert [path for path, _ in flatten_tensors(value)] == [("other",), (step, 0)]
    changed = change_at(value, (step, 0), lambda x: x + 1, "here")
    assert torch.equal(changed[KEYS[step]][0], torch.full((2,), 2.0)) and set(changed) == {"other", KEYS[step]}


def test_what_was_changed_in_a_dict_is_put_back() -> None:
    """But for what the module itself has put there."""
    one, other = torch.zeros(1), torch.zeros(1)
    value, noted = {"one": one, "other": other}, Noted()
    for key in value:
        change_at(value, (key,), lambda x: x + 1, "here", noted)
    value["other"] = new = torch.ones(3)
    put_back(noted)
    assert value["one"] is one and value["other"] is new and not noted


def test_an_output_has_one_of_the_forms_that_lead_through_each_other() -> None:
    """A path without a value is skipped only where another of these has one: `()` of `x`, `(0,)` of `(x, …)`."""
    paths, x = [(), (0,), (1, "keys")], torch.zeros(1)
    assert other_forms((0,), paths) == ((),) and other_forms((), paths) == ((0,), (1, "keys"))
    plain, several = (
        [is_other_form(output, path, other_forms(path, paths)) for path in paths] for output in (x, (x, {"keys": x}))
    )
    assert plain == [False, True, True] and several == [True, False, False]
    assert not is_other_form((None,), (0,), other_forms((0,), paths)), "what no form has is an error, as before"


def test_what_a_call_leaves_out_is_told_from_what_is_missing() -> None:
    """A list may end earlier and a dict lack a key; a value of another kind is an error, as before."""
    x = torch.zeros(1)
    short: list[torch.Tensor] = [x]
    assert left_out_of((x, short), (1, 1)) is short and left_out_of({"a": x}, ("b", 0)) == {"a": x}
    assert left_out_of((x, short), (1, 0)) is None and left_out_of((x, None), (1, 0)) is None


class Layer(nn.Module):
    """Its weights are no modules' of their own, so what is done to its input stands in the dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 16, 32) / 4)
        self.down = nn.Parameter(torch.randn(2, 32, 16) / 4)

    def forward(self, nodes: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        return {key: torch.relu(nodes[key] @ self.up[i]) @ self.down[i] for i, key in enumerate(nodes)}


class Graph(nn.Module):
    """The caller reads the same dict behind the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, nodes: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        for layer in self.layers:
            made = layer(nodes)
            nodes = {key: nodes[key] + made[key] for key in nodes}
        return nodes


@pytest.mark.parametrize("keys", (("a", "b"), tuple(Kind)), ids=("text", "enum"))
def test_a_dict_of_the_caller_is_as_it_was(keys: tuple[Any, ...], tmp_path: Any) -> None:
    plan = autoplan.plan(Graph(), 2, inputs={"nodes": {key: torch.randn(5, 16) for key in keys}})
    assert plan.proof.ok, plan.findings
    assert any(len(boundary.path) == 2 for boundary in plan.runtime.of(autoplan.values.AllReduceGradient))
    plan.save(tmp_path / "plan.yaml")
    assert autoplan.load_plan(tmp_path / "plan.yaml") == plan


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(16, 32) / 4), nn.Parameter(torch.randn(32, 16) / 4)

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return torch.relu(given[0] @ self.up) @ self.down


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wrapped() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_an_argument_without_a_name_has_a_path() -> None:
    plan = autoplan.plan(Residual(), 2, inputs={"x": torch.randn(5, 16)})
    assert plan.proof.ok, plan.findings
    assert (("args", 0),) in [boundary.path for boundary in plan.runtime.of(autoplan.values.AllReduceGradient)]


class Cache:
    def __init__(self) -> None:
        self.rows: dict[int, list[torch.Tensor]] = {0: [torch.zeros(2)]}


class Stubborn(Cache):
    def __deepcopy__(self, memo: object) -> None:
        raise TypeError


def test_a_cache_is_copied_with_its_tensors_changed() -> None:
    cache = Cache()
    made = own_argument(cache, lambda value: value + 1)
    made.rows[0].append(torch.ones(2))
    assert len(cache.rows[0]) == 1 and not cache.rows[0][0].any()
    assert made.rows[0][0].eq(1).all()


def test_what_is_no_state_or_cannot_be_copied_stays_itself() -> None:
    for value in (torch.relu, Cache, "word", None, Stubborn()):
        assert own_argument(value, lambda one: one) is value
