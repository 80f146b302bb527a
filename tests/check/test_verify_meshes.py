"""`verify` and the command line on meshes, and `autoplan layers`."""

from __future__ import annotations

import json

import pytest
from mesh_toys import clone

import autoplan
from autoplan.check.verify.clone import MeshSizes, parse_mesh
from autoplan.cli.app import main
from autoplan.common.errors import AutoplanError


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2"])
def test_verify_covers_a_mesh(mesh: str) -> None:
    report = autoplan.verify(clone("gpt2").model, mesh=mesh, checks=["parameters", "forward"])
    assert report.ok and report.findings == ()
    assert report.details["mesh"] == mesh
    assert report.details["checked"] == ("parameters", "forward", "training", "training with checkpointing")
    assert max(report.gradients.values()) < 1e-9


@pytest.mark.parametrize(
    ("text", "names", "sizes"),
    [
        ("dp=2,tp=2", ("dp", "tp"), (2, 2)),
        ("tp=2,dp=4", ("dp", "tp"), (4, 2)),
        ("tp=2, dp_shard=1, dp_replicate=2", ("dp_replicate", "dp_shard", "tp"), (2, 1, 2)),
        ("fsdp=3", ("fsdp",), (3,)),
    ],
)
def test_meshes_are_written_as_text(text: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    assert parse_mesh(text) == MeshSizes(names, sizes)


@pytest.mark.parametrize("text", ["dp", "dp=x", "dp=0", "cows=2", "dp=2,tp=-1"])
def test_odd_meshes_are_refused(text: str) -> None:
    with pytest.raises(AutoplanError, match="mesh"):
        parse_mesh(text)


def test_a_mesh_without_the_ranks_that_were_asked_for_is_refused() -> None:
    with pytest.raises(AutoplanError, match="the mesh dp=3 has tp 1, tp_size is 2"):
        autoplan.verify("llama", tp_size=2, mesh="dp=3")


def test_layers_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["layers", "llama", "--json"])
    (stack,) = json.loads(capsys.readouterr().out)
    assert caught.value.code == 0
    assert (stack["name"], stack["kind"], len(stack["fqns"])) == ("model.layers", "decoder", 32)
