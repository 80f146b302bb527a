"""Plans made once: by one rank for all, kept in a folder, and taken apart for the stages of a pipeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_processes, run_ranks
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.execute import fits
from autoplan.execute.fits import Reading, model_hash
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.hf.source import resolve

WIDTH, WORDS = 8, 20


class Block(nn.Module):
    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Whole(nn.Module):
    """A model that pipelines take apart as torchtitan does: what is not there is None, blocks keep their numbers."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleDict({str(number): Block(heads) for number in range(4)})
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def built(heads: int = 2) -> Whole:
    torch.manual_seed(0)
    return Whole(heads)


def stage(number: int) -> Whole:
    """The first half with the table, the second with the head."""
    model = built()
    model.blocks = nn.ModuleDict({key: block for key, block in model.blocks.items() if int(key) // 2 == number})
    model.embed, model.head = (model.embed, None) if number == 0 else (None, model.head)
    return model


IDS = torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def whole() -> autoplan.Plan:
    return autoplan.plan(built(), 2, inputs={"x": IDS})


# ------------------------------------------------------------------------------------------------ stages


def test_two_stages_do_what_the_whole_does(whole: autoplan.Plan) -> None:
    assert whole.proof.ok
    reference = built()
    reference(IDS).square().sum().backward()
    stages = [[stage(number) for number in range(2)] for _ in range(2)]

    def rank(number: int) -> dict[str, torch.Tensor]:
        mesh, parts = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), stages[number]
        for part in parts:  # checked, not derived once more: nobody could
            autoplan.parallelize(part, mesh, whole.part_for(part), gather_logits=True)
        parts[1](parts[0](IDS)).square().sum().backward()
        return {name: g for part in parts for name, g in full_tensors(part, grads=True).items() if g is not None}

    for found in run_ranks(rank, 2):
        assert found.keys() == dict(reference.named_parameters()).keys()
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, msg=name)


def test_a_part_says_what_it_is_for(whole: autoplan.Plan) -> None:
    first, last = (whole.part_for(stage(number)) for number in range(2))
    assert {e.pattern for e in whole.entries} - {e.pattern for e in first.entries} == {"head"}
    assert {e.pattern for e in whole.entries} - {e.pattern for e in last.entries} == {"embed"}
    assert first.layers[0].fqns == ("blocks.0", "blocks.1") and last.layers[0].fqns == ("blocks.2", "blocks.3")
    assert first.proof == whole.proof and first.made_for.model == model_hash(stage(0))
    assert whole.part_for(built()) == whole


def test_what_is_no_piece_of_the_model_is_refused(whole: autoplan.Plan) -> None:
    strange = stage(0)
    strange.extra = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(PlanMismatchError, match="extra.weight and 1 more, which the plan for .*Whole does not include"):
        whole.part_for(strange)
    renamed = stage(0)
    renamed.layers = renamed.blocks
    del renamed.blocks
    with pytest.raises(PlanMismatchError, match=r"layers.0.norm.weight.*"):
        whole.part_for(renamed)
    wide = stage(1)
    wide.blocks["2"].up = nn.Linear(WIDTH, 3 * WIDTH)

    def rank(number: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(PlanMismatchError, match="blocks.2.up.weight has shape"):
            autoplan.parallelize(wide, mesh, whole.part_for(wide))

    run_ranks(rank, 1 + 1)
    with pytest.raises(AutoplanError, match="model"):
        whole.part_for("a stage")


# ------------------------------------------------------------------------------------------------ once for all


def of_a_rank(rank: int) -> list[str]:
    """What each rank holds, and what it is told where ranks differ and where the first cannot plan."""
    torch.set_num_threads(1)
    plan = autoplan.plan_once(built(), 2, inputs={"x": IDS}, prove="none")
    said = [str(plan.to_dict())]
    for call in (
        lambda: autoplan.plan_once(built(2 + 2 * rank), 2, inputs={"x": IDS}, prove="none"),
        lambda: autoplan.plan_once(built(), 2, inputs={"x": IDS}, prove=("none", "graph")[rank]),
        lambda: autoplan.plan_once(built(), 2, inputs={"x": IDS}, source="nothing.like:it"),
    ):
        try:
            said.append(str(call()))
        except AutoplanError as error:
            said.append(str(error))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = autoplan.plan_once(built(), 2, group=mesh, inputs={"x": IDS}, prove="none")
    model = autoplan.parallelize(built(), mesh, plan)
    assert autoplan.applied(model) is not None
    return said


@pytest.mark.gloo
def test_one_rank_plans_for_all() -> None:
    first, second = run_processes(of_a_rank, (), 2)
    assert first[0] == second[0] == str(autoplan.plan(built(), 2, inputs={"x": IDS}, prove="none").to_dict())
    for mine, other in zip(first[1:3], second[1:3], strict=True):
        assert "have a different model, version or arguments" in mine and mine == other
    assert "nothing.like" in first[3] and first[3] == second[3]
    assert "nothing.like" in second[3]


def test_a_hash_does_not_depend_on_what_is_read_first() -> None:
    nested = {"a": {"b": {"c": 1}}}
    reading = Reading(built())
    assert reading.value(nested, 2) != reading.value(nested)  # less deep: of a set of classes any may come first
    assert reading.value(nested) == Reading(built()).value(nested)


def test_packages_of_another_environment_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A venv on top of another one: their code is known by name, and what they hold by process is not read."""
    for folder, installed in (("lib/python3/dist-packages", True), ("checkout", False)):
        package = ModuleType(f"of_{folder[:3]}")
        package.__path__ = [str(tmp_path / folder / package.__name__)]
        monkeypatch.setitem(sys.modules, package.__name__, package)
        assert fits._is_installed(package.__name__) is installed


def test_without_ranks_it_is_a_plan() -> None:
    assert autoplan.plan_once(built(), 2, inputs={"x": IDS}, prove="none").entries


# ------------------------------------------------------------------------------------------------ kept in a folder


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was planned anew, by name."""
    from autoplan import api

    made: list[str] = []
    proven: Callable[..., Any] = api.proven_plan

    def counting(source: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(source.name)
        return proven(source, *args, **kwargs)

    monkeypatch.setattr(api, "proven_plan", counting)
    return made


def test_a_plan_is_kept_and_found(tmp_path: Path, planned: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = autoplan.plan("llama", 2, prove="none", cache=tmp_path)
    assert autoplan.plan("llama", 2, prove="none", cache=tmp_path) == made and len(planned) == 1
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path))
    assert autoplan.plan("llama", 2, prove="none") == made and len(planned) == 1
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def test_whatever_a_plan_depends_on_is_in_the_name(tmp_path: Path, planned: list[str]) -> None:
    def kept(*args: Any, **wishes: Any) -> int:
        before = len(planned)
        autoplan.plan(*args, prove="none", cache=tmp_path, **wishes)
        return len(planned) - before

    config = resolve("llama").tiny().config
    assert kept(config, 2) and not kept(config, 2)
    assert (
        kept(config, 2, source="inferred") and kept(config, 2, overrides={"lm_head": "replicate"}) and kept(config, 1)
    )
    config.hidden_act = "relu"  # neither a number nor a shape
    assert kept(config, 2) and not kept(config, 2)
    rules = tmp_path / "rules"
    (rules / "plans").mkdir(parents=True)
    assert kept(config, 2, rules=rules) and not kept(config, 2, rules=rules)
    take_away = autoplan.register_plan("mine.Model", {"a": "colwise"})
    assert kept(config, 2)
    take_away()
    assert not kept(config, 2)


def test_what_is_damaged_is_made_anew(tmp_path: Path, planned: list[str]) -> None:
    made = autoplan.plan("llama", 2, prove="none", cache=tmp_path)
    (file,) = tmp_path.iterdir()
    text = file.read_text()
    edited = json.loads(text)
    edited["plan"]["entries"] = edited["plan"]["entries"][1:]
    for number, damage in enumerate((text[: len(text) // 2], "", "[]", json.dumps(edited))):
        file.write_text(damage)
        assert autoplan.plan("llama", 2, prove="none", cache=tmp_path) == made
        assert len(planned) == 2 + number and file.read_text() == text
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_no_plain_wish_is_not_kept(tmp_path: Path) -> None:
    autoplan.plan(built(), 2, inputs={"x": IDS}, prove="none", cache=tmp_path / "more")
    assert list((tmp_path / "more").iterdir()) == [] if (tmp_path / "more").exists() else True
    (tmp_path / "file").write_text("")
    with pytest.raises(AutoplanError, match="cannot write plans to"):
        autoplan.plan("llama", 2, prove="none", cache=tmp_path / "file" / "below")
