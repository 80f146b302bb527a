"""What users get wrong: one clear error each, with the numbers and what to do; exit code 2, nothing half applied."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.cli.app import app
from autoplan.common.errors import AutoplanError
from autoplan.common.requirements import TESTED, check_versions
from autoplan.hf.source import resolve

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **changes}, vocab_size=160, num_hidden_layers=2)).eval()


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ torch.ones(3, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "no_such_model_type", "--tp", "2"], ["no_such_model_type"]),
        (["plan", "{folder}", "--tp", "2"], ["config.json"]),
        (["plan", "llama", "--tp", "0"], ["--tp"]),
        (["plan", "llama", "--tp", "2", "--source", "nothing-like-it.yaml"], ["nothing-like-it.yaml"]),
        (["plan", "no.such.module:builder", "--tp", "2"], ["no.such.module"]),
        (["verify", "llama", "--plan", "{corrupt}"], ["corrupt.yaml"]),
        (["explain", "{future}", "lm_head"], ["future.yaml"]),
    ],
)
def test_the_command_line_says_what_and_exits_2(tmp_path, arguments, words):
    (tmp_path / "corrupt.yaml").write_text("autoplan: 1\nentries: [\n")
    (tmp_path / "future.yaml").write_text("autoplan: 99\n")
    (tmp_path / "empty").mkdir()
    places = {"folder": tmp_path / "empty", "corrupt": tmp_path / "corrupt.yaml", "future": tmp_path / "future.yaml"}
    result = CliRunner().invoke(app, [argument.format(**places) for argument in arguments])
    said = result.output + str(result.stderr if result.stderr_bytes is not None else "") + str(result.exception or "")
    assert result.exit_code == 2 or isinstance(result.exception, AutoplanError), said
    assert all(word in said for word in words), said


def test_a_forward_that_cannot_run_names_op_module_and_way_out():
    with pytest.raises(AutoplanError, match=r"forward.*(matmul|inner)[\s\S]*inputs="):
        autoplan.plan(Stubborn(), 2, inputs={"x": torch.randn(2, 8)})


def test_a_size_that_fits_nothing_says_which_would():
    model = llama(num_attention_heads=2, num_key_value_heads=2, head_dim=10, intermediate_size=50)
    with pytest.raises(AutoplanError, match=r"tp=7[\s\S]*1, 2"):
        autoplan.plan(model, 7, strict=True)


def test_strict_is_what_raises():
    plan = autoplan.plan(llama(intermediate_size=90), 4, prove="none")
    assert any("90 is not divisible by tp=4" in reason for _, _, reason in plan.replicated)
    with pytest.raises(AutoplanError, match=r"90 units[\s\S]*1, 2"):
        autoplan.plan(llama(intermediate_size=90), 4, strict=True)


def _parallelize(model, plan, shape=(2,), names=("tp",)):
    before = {name: parameter for name, parameter in model.named_parameters()}

    def run(rank):
        import copy

        own = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(AutoplanError) as caught:
            autoplan.parallelize(own, mesh, plan)
        assert autoplan.applied(own) is None
        same = all(torch.equal(p, before[n]) and type(p) is nn.Parameter for n, p in own.named_parameters())
        return str(caught.value), same

    (said, same), *_ = run_ranks(run, 2)
    assert same, "something was half applied"
    return said


def test_a_plan_for_another_model_leaves_the_model_as_it_was():
    said = _parallelize(llama(), autoplan.plan(resolve("gpt2").tiny(), 2, prove="none"))
    assert "matches no" in said and "nearest" in said


def test_a_mesh_without_a_tp_dim():
    plan = autoplan.plan(llama(), 2, prove="none")
    assert "'tp'" in _parallelize(llama(), plan, names=("dp_shard",))
    assert "known names are tp" in _parallelize(llama(), plan, names=("ranks",))


def test_a_mesh_of_another_size():
    plan = autoplan.plan(llama(), 4, prove="none")
    said = _parallelize(llama(), plan)
    assert "tp=4" in said and "2 ranks" in said


def test_ranks_with_different_weights_are_refused():
    plan = autoplan.plan(llama(), 2, prove="none")

    def run(rank):
        torch.manual_seed(rank)
        model = llama()
        with torch.no_grad():
            model.lm_head.weight.add_(rank)
        autoplan.parallelize(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)

    with pytest.raises((RankError, AutoplanError), match="different values"):
        run_ranks(run, 2)


FINE = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}


@pytest.mark.parametrize(("library", "version"), [("torch", "2.10.0"), ("transformers", "5.9.1"), ("torch", "x")])
def test_versions_older_than_any_that_was_tested_are_refused(library, version):
    check_versions(FINE)
    with pytest.raises(AutoplanError, match=f"{library} {version} is not supported".replace(".", r"\.")):
        check_versions({**FINE, library: version})


def test_a_newer_version_is_warned_of_once():
    newer = {**FINE, "torch": "2.99.0.dev20270101+cpu"}
    with pytest.warns(UserWarning, match=r"torch 2\.99\.0.* is newer than 2\.\d+, .*`autoplan doctor` lists"):
        check_versions(newer)
    check_versions(newer)  # a second warning would be an error


def test_the_range_of_versions_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    for library, (oldest, newest) in TESTED.items():
        low, high = (".".join(map(str, release)) for release in (oldest, newest))
        assert f"{library}>={low}" in project["dependencies"], "no upper bound: it would downgrade the user's"
        assert f"{library} {low} to {high}" in " ".join(readme.split())


def test_json_of_a_plan_is_what_files_hold(tmp_path):
    plan = autoplan.plan(llama(), 2)
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(plan.to_dict()))
    assert autoplan.load_plan(tmp_path / "plan.json") == plan
