"""Unfamiliar forwards are fed without help, in two sizes; where that fails, one message says all that is known."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from unfamiliar import MODELS, Cannot
from unfamiliar_calls import CALLS
from unfamiliar_exact import EXACT
from unfamiliar_joined import JOINED
from unfamiliar_parts import PARTS

import autoplan
from autoplan.capture.derive_inputs import recipe_for
from autoplan.capture.feeding.arguments import Arguments
from autoplan.capture.feeding.conditions import value_of
from autoplan.capture.feeding.failure import Failure, Place
from autoplan.capture.feeding.names import read_names, usual_names
from autoplan.capture.feeding.resize import multiples, resized
from autoplan.capture.feeding.wants import SIZES, Mark, State, Want
from autoplan.capture.feeding.watch import Watch, demand_of
from autoplan.common.errors import AutoplanError, CaptureError
from autoplan.common.files.rule_files import rules_folder

FIXED = {"Needed"}


WITHOUT_A_BATCH = {
    *("Graph", "Several", "Recorded", "Packed", "Listed", "Targets", "Atoms", "InATuple", "Rays", "Mesh", "Pictures"),
}


@pytest.mark.parametrize("name", [*MODELS, *CALLS, *PARTS, *JOINED, *EXACT])
def test_a_call_is_found_and_another_size(name: str) -> None:
    torch.manual_seed(0)
    model = (MODELS | CALLS | PARTS | JOINED | EXACT)[name]().eval()
    recipe = recipe_for(model)
    for other in (False, True):
        model(**recipe.draw(model, 0, other=other)["forward"])
    assert recipe.other is not None and recipe.other.sizes["batch"] == 3 or name in WITHOUT_A_BATCH, recipe.fed()


def test_what_may_be_left_out_and_changes_nothing_is_left_out() -> None:
    torch.manual_seed(0)
    recipe = recipe_for(EXACT["Spectrum"]().eval())
    assert [one.argument for one in recipe.fed()] == ["xs", "ilens"]


def test_what_a_forward_freezes_is_not_read_by_that() -> None:
    recipe = recipe_for(EXACT["Freezes"]().eval())
    assert [one.argument for one in recipe.fed()] == ["text", "images"]


def test_paths_that_depend_on_size_show() -> None:
    model = MODELS["Windows"]()
    recipe = recipe_for(model)
    sides = {recipe.draw(model, 0, other=other)["forward"]["x"].shape[-1] > 32 for other in (False, True)}
    assert sides == {False, True}


def test_a_forward_that_takes_targets_is_planned_with_and_without() -> None:
    torch.manual_seed(0)
    model = PARTS["WithTargets"]().eval()
    plan = autoplan.plan(model, 2)
    assert [one.argument for one in plan.fed] == ["ids", "labels"] and plan.proof.ok
    ids = torch.randint(0, 40, (2, 7))
    for inputs in ({"ids": ids}, {"ids": ids, "labels": ids}):
        report = autoplan.verify(model, plan, inputs=inputs)
        assert report.ok, report.findings


def test_targets_fit_in_another_batch_too() -> None:
    model = PARTS["Chosen"]().eval()
    recipe = recipe_for(model)
    calls = [recipe.draw(model, 0, other=other)["forward with targets"] for other in (False, True)]
    assert [tuple(call["label"].shape) for call in calls] == [(2, 2), (3, 2)]


def test_the_same_numbers_again_and_no_others_touched() -> None:
    model = MODELS["Denoiser"]().eval()
    before = torch.get_rng_state()
    first, second = (recipe_for(model).draw(model, 0)["forward"] for _ in range(2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["Patches", "Denoiser", "Batch"])
def test_the_plan_keeps_and_prints_what_it_rests_on(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    plan = autoplan.plan(model, 2)
    assert plan.entries and plan.proof.ok, plan
    assert [one.argument for one in plan.fed] and "Example inputs (inferred" in str(plan)
    plan.save(tmp_path / "plan.yaml")
    assert autoplan.load_plan(tmp_path / "plan.yaml").fed == plan.fed
    assert autoplan.verify(model, plan, tp_size=2, checks=("forward", "second_shape")).ok


@pytest.mark.parametrize("name", ["Unpacked", "Recorded", "Packed", "Modalities"])
def test_what_comes_in_one_argument_is_planned_and_exact(name: str) -> None:
    torch.manual_seed(0)
    model = CALLS[name]().eval()
    plan = autoplan.plan(model, 2)
    assert plan.entries and plan.proof.ok, plan
    assert autoplan.verify(model, plan, tp_size=2, checks=("forward", "second_shape")).ok


def test_what_is_given_is_not_derived() -> None:
    model = MODELS["Configured"]().eval()
    assert not autoplan.plan(model, 2, inputs={"x": torch.randn(2, 4, 6)}).fed


def test_an_argument_that_is_a_dict_is_no_name_of_a_feed() -> None:
    model = CALLS["Modalities"]().eval()
    given = {"inputs": {"audio": torch.randn(2, 5, 12), "text": torch.randint(0, 30, (2, 5))}}
    assert autoplan.plan(model, 2, inputs=given).proof.ok


def test_one_message_where_nothing_will_do() -> None:
    with pytest.raises(CaptureError) as caught:
        autoplan.plan(Cannot(), 2)
    text = str(caught.value)
    assert "Cannot.forward(request)" in text
    assert "unfamiliar.py" in text and 'request.decode("utf-8")' in text
    assert "inputs={'request': torch." in caught.value.hint


@pytest.mark.parametrize(
    ("want", "code"),
    [
        (Want("size", value="length"), "10"),
        (Want("ids", ("batch",), 9, Mark(3, True)), "torch.randint(0, 9, (2,))"),
        (Want("list", value=tuple, items=((0, Want("float", ("batch", 5))),)), "(torch.randn(2, 5),)"),
        (Want("list", value=NamedTuple("Two", [("x", int)]), items=((0, Want("size", value="length")),)), "Two(10)"),
        (Want("list", items=((0, Want("value", value="mean")),)), "['mean']"),
    ],
)
def test_a_guess_of_any_kind_is_shown_as_code(want: Want, code: str) -> None:
    assert want.code(SIZES) == code


class Padded(nn.Module):
    """Where nothing is padding, there is no mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(40, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, tokens):
        mask = tokens.eq(1)
        if not mask.any():
            mask = None
        x = self.words(tokens)
        x = self.down(self.up(x).relu())
        return x if mask is None else x * (1 - mask.unsqueeze(-1).type_as(x))


def test_calls_with_padding_and_without_are_planned() -> None:
    torch.manual_seed(0)
    model = Padded().eval()
    plan = autoplan.plan(model, 2)
    assert plan.proof.ok and plan.fed[0].given == "ids below 40 but 1 [2, 10]", plan.fed
    assert plan.fed[0].also == "ids below 40 that end in 1 [3, 13]"
    plain = torch.randint(2, 40, (2, 7))
    for tokens in (plain, plain.index_fill(1, torch.tensor([6]), 1)):
        report = autoplan.verify(model, plan, inputs={"tokens": tokens})
        assert report.ok, report.findings


# What torch says when it fails, from the installed torch: each must still tell.


@pytest.mark.parametrize(
    ("layer", "given", "asked"),
    [
        (lambda: F.linear, Want("float", ("batch", 5)), Want("float", ("batch", 7))),
        (lambda: F.embedding, Want("float", ("batch", "length")), Want("ids", ("batch", "length"), 7)),
    ],
)
def test_a_consumer_says_what_it_wants(layer, given: Want, asked: Want) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 7))

        def forward(self, x):
            return layer()(x, self.weight)

    failure = _failure(One(), State((("x", given),)))
    demand = demand_of(failure.watch.failed)
    assert demand is not None and demand.kind == asked.kind
    recipe = recipe_for(One())
    assert recipe.state.at(("x",)) is not None


@pytest.mark.parametrize(
    "forward",
    [
        pytest.param(lambda m, x: m.lift(x.permute(0, 2, 3, 1)), id="permute"),
        pytest.param(lambda m, x: m.lift(torch.einsum("bchw->bhwc", x)), id="einsum"),
        pytest.param(lambda m, x: m.lift(x.size(3) * x[:, :, 0, 0]), id="index"),
        pytest.param(lambda m, x: m.lift(F.interpolate(x, scale_factor=2, mode="bilinear").mean((2, 3))), id="scaled"),
        pytest.param(lambda m, x: m.lift(x.view(x.shape[0], 5, -1).mean(2)), id="view"),
        pytest.param(lambda m, x: m.lift(torch.cat([x, x], 1)[..., :5] + torch.ones(8, 5)), id="broadcast"),
    ],
)
def test_failures_tell(forward) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(5, 4)

        def forward(self, x):
            return forward(self, x)

    recipe_for(One())


@pytest.mark.parametrize("stored", [True, False])
def test_a_condition_is_read_where_its_numbers_have_no_value(stored: bool) -> None:
    def forward(ids: torch.Tensor) -> None:
        largest = ids.max()
        found.append(value_of(Place(sys._getframe(), 0, (None,) * 4), asked) if largest.dim() == 0 else None)

    asked, found = ast.parse("largest", mode="eval").body, []
    with contextlib.nullcontext() if stored else FakeTensorMode():
        forward(torch.tensor([1, 3]))
    assert (found == [3]) == stored


def test_sizes_are_found_by_their_number() -> None:
    state = State((("x", Want("float", ("batch", 3, "side", "side"))),))
    sides = [one.sizes["side"] for one in resized(state, [("x",)], 16, 9) if one.sizes["side"] != 32]
    assert 24 in sides  # sixteen patches are four by four: nine are three by three


def test_a_range_that_was_asked_for_is_tried_first() -> None:
    recipe = recipe_for(PARTS["InRange"]().eval())
    assert [step.state.at(("x",)).kind for step in recipe.trail[:2]] == ["float", "unit"]


def test_it_stops() -> None:
    class Never(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(5, 4)

        def forward(self, x):
            raise RuntimeError(f"never {tuple(x.shape)}")

    with pytest.raises(CaptureError, match="tries"):
        recipe_for(Never())


def _failure(model: nn.Module, state: State) -> Failure:
    watch = Watch(model)
    values = state.draw(0, torch.float32)
    with pytest.raises(Exception) as caught, watch.over(values):  # noqa: B017, PT011 - which one is the layer's business
        model(**values)
    return Failure(state, caught.value, watch, Arguments.of(model))


class Typed(nn.Module):
    """It works on what is of a kind, and no kind is one that is tried."""

    def __init__(self) -> None:
        super().__init__()
        self.adapt, self.up, self.down = nn.Linear(24, 16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, features, node_type):
        x = torch.zeros(features.shape[0], 16)
        chosen = node_type == 70
        if chosen.any():
            x[chosen] = self.adapt(features[chosen]).tanh()
        return x + self.down(self.up(x).relu())


def test_what_no_derived_call_runs_is_said() -> None:
    torch.manual_seed(0)
    plan = autoplan.plan(Typed().eval(), 2)
    (said,) = [found for found in plan.findings if found.check == "inputs"]
    assert plan.runtime.idle == ("adapt",) and "adapt" in said.message and said.level == "warn"


class OptionalText(nn.Module):
    """Its projection of texts is uninitialised, as a checkpoint would fill it: NaN here, any numbers elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(16, 32), nn.Embedding(50, 32)
        self.projection = nn.Parameter(torch.full((32, 32), float("nan")))

    def forward(self, image: torch.Tensor, text: torch.Tensor | None = None) -> torch.Tensor:
        features = self.image(image)
        return features if text is None else features + (self.text(text) @ self.projection).mean(1)


def test_an_optional_argument_is_fed_though_weights_are_uninitialised() -> None:
    assert {name for name, _ in recipe_for(OptionalText()).state.wants} == {"image", "text"}


class _FeaturesAndIds(nn.Module):
    """As recommenders are fed: a float matrix with a feature, and an id for each of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.shop, self.age = nn.Embedding(20, 4), nn.Embedding(12, 4), nn.Linear(1, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros((x.shape[0], 4))
        total += (self.user(x[:, 0:1].long()) + self.shop(x[:, 1:2].long())).sum(1)
        return total + self.age(x[:, 2:3])


def test_ids_in_a_float_matrix_are_whole_numbers() -> None:
    model = _FeaturesAndIds().eval()
    ids = recipe_for(model).draw(model, 0)["forward"]["x"]
    assert ids.is_floating_point() and torch.equal(ids, ids.floor()) and ids.max() < 12 and len(ids.unique()) > 2


def test_large_inputs_are_tried_smaller_too() -> None:
    model = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    calls = (recipe_for(model).draw(model, 0, other=other)["forward"]["input"] for other in (False, True))
    usual, other = (call[0].numel() for call in calls)
    assert other < usual


def test_a_window_keeps_what_divided_a_size_before() -> None:
    state = State((("x", Want("float", ("batch", 3, "side", "side"))),)).with_size("side", 56)
    assert 112 in {other.sizes["side"] for other in multiples(state, [("x",)], 7, 2)}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(16, 16)

    def forward(self, x, steps: int, mode, f: Callable[..., torch.Tensor], mask=None):
        y = f(self.net(x))
        if mode == "mean":
            y = y.mean(-1, keepdim=True) + x
        elif mode != "plain":
            raise ValueError(mode)
        return y * steps if mask is None else y.masked_fill(~mask[..., None], 0.0)


def test_strings_functions_numbers_and_optional_masks() -> None:
    recipe = recipe_for(Masked())
    given = dict(recipe.state.wants)
    assert given["mode"].value == "mean" and given["f"].value is torch.relu and given["steps"].value == 2
    calls = recipe.draw(Masked(), 0)
    assert calls.keys() == {"forward", "forward with masks"} and "mask" not in calls["forward"]
    assert calls["forward with masks"]["mask"].dtype == torch.bool


class Limited(nn.Module):
    """Takes its own mask only where a sequence is as long as that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("mask", torch.tril(torch.ones(24, 24)))

    def forward(self, x):
        length = x.shape[1]
        mask = torch.ones(length, length).tril() if length < self.mask.size(-1) else self.mask
        return self.down(mask @ torch.relu(self.up(x)))


def test_a_call_as_long_as_a_mask_is_recorded_where_it_takes_another_path() -> None:
    model = Limited().eval()
    calls = recipe_for(model).draw(model, 0)
    assert {name: call["x"].shape[1] for name, call in calls.items()} == {"forward": 10, "forward at full length": 24}
    assert autoplan.verify(model, autoplan.plan(model, tp_size=2)).ok


def test_edges_are_one_value_for_each_pair() -> None:
    model = EXACT["Pairs"]().eval()
    calls = [recipe_for(model).draw(model, 0, other=other)["forward"] for other in (False, True)]
    assert [call["edges"].dim() for call in calls] == [4, 4]
    assert calls[0]["nodes"].shape[1] != calls[1]["nodes"].shape[1]


# Words in the names of arguments stand in rules/arguments.toml, and nothing of them in Python.


HEAD = """
states = '^h0$'
offsets = '^start$'
loss_switches = '^with_loss$'
[[argument]]
words = 'mask'
"""


def test_the_file_is_read_in_its_order() -> None:
    names = usual_names()
    assert names.usual("Padding_Mask")[0] == Want("nowhere", ("batch", "length"))
    assert names.usual("some_mask")[0] == Want("bool", ("batch", "length"))
    assert names.usual("edge_index") == (Want("ids", (2, "edges"), "nodes"),)
    assert names.usual("max_seqlen") == (Want("size", value="length"),)
    assert names.usual("quux") == ()
    assert names.has_edges(["x", "senders"]) and not names.has_edges(["x", 1])
    assert names.loss_switches.search("return_loss") and not names.loss_switches.search("loss_kind")
    assert names.loss_switches.search("y") and not names.loss_switches.search("y_scale")
    assert names.states.search("h_0") and not names.states.search("hat")


def test_a_word_is_added_there_alone(tmp_path: Path) -> None:
    text = (rules_folder() / "arguments.toml").read_text("utf-8")
    place = text.index("\n[[argument]]") + 1
    more = "[[argument]]\nwords = 'quux'\nusually = ['float batch 7', 'none']\n\n"
    (tmp_path / "a.toml").write_text(text[:place] + more + text[place:])
    assert read_names(tmp_path / "a.toml").usual("a_quux") == (Want("float", ("batch", 7)), Want("none"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "usually = ['floats batch']", "'floats batch' is no kind"),
        (HEAD + "usually = ['float breadth']", "'breadth' is neither a number nor one of"),
        (HEAD + "usually = ['ids batch < 2 3']", "is no kind, sizes, and what ids are below"),
        (HEAD + "usually = 'none'", "usually must be a list"),
        (HEAD.replace("mask", "(mask") + "usually = ['none']", "missing \\), unterminated subpattern"),
        ("states = 'h'", "missing key"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(AutoplanError, match=said):
        read_names(tmp_path / "a.toml")


class Branches(nn.Module):
    """What `torch.cond` runs has to be traced by torch's compiler, which a recording turns off."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(torch.cond(h.sum() > 0, torch.relu, torch.tanh, (h,)))


def test_code_that_must_be_traced_is_refused() -> None:
    with pytest.raises(CaptureError, match="torch.compile must trace") as error:
        autoplan.plan(Branches().eval(), 2)
    assert "torch.cond(" in str(error.value), "the line is named"


class Flexible(nn.Module):
    """Attention by an operator that runs a function of each score."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).unflatten(-1, (4, 4)).transpose(1, 2)
        return self.down(flex_attention(h, h, h, score_mod=_twice).transpose(1, 2).flatten(2))


def _twice(score: torch.Tensor, *place: torch.Tensor) -> torch.Tensor:
    return score * 2


@pytest.mark.parametrize(
    ("model", "operator", "line"),
    [(Branches, "cond", "torch.cond("), (Flexible, "flex_attention", "flex_attention(h")],
)
def test_an_operator_that_runs_functions_is_refused_with_inputs_too(
    model: type[nn.Module], operator: str, line: str
) -> None:
    with pytest.raises(CaptureError, match=f"it calls {operator}, which torch.compile must trace") as error:
        autoplan.plan(model().eval(), tp_size=2, inputs={"x": torch.randn(2, 8, 16)})
    assert line in str(error.value), "the line is named"
