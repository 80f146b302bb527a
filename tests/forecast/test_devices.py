"""A device file is read whole, or refused in one line that names what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import autoplan
from autoplan.cli.app import app
from autoplan.common.files.rule_files import rules_folder
from autoplan.forecast.devices import Measured, device_names, device_text, load_device

H100 = (rules_folder() / "devices" / "h100.toml").read_text(encoding="utf-8")


def _with(key: str, value: str) -> str:
    """The file of the H100 with another value of `key`."""
    lines = [f"{key} = {value}" if line.split(" = ")[0] == key else line for line in H100.splitlines()]
    assert lines != H100.splitlines(), key
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (_with("memory", "inf"), "memory = inf, which is not a whole number"),
        (_with("memory", "nan"), "memory = nan"),
        (_with("memory", "1.5"), "memory = 1.5, which is not a whole number"),
        (_with("context", "-1"), "overhead.context = -1, which is below 0"),
        (_with("context", "inf"), "overhead.context = inf"),
        (_with("latency_inside", "-1e-6"), "links.latency_inside = -1e-06, which is below 0"),
        (_with("latency_between", "nan"), "links.latency_between = nan"),
        (_with("bandwidth", "0"), "bandwidth = 0, which is not above 0"),
        (_with("per_node", "true"), "per_node = True, which is not a whole number"),
        (_with("bfloat16", '"fast"'), "flops.bfloat16 = 'fast'"),
        (_with("name", '["a"]'), r"name = \['a'\], which is not text"),
        (H100.replace("latency_between", "latency_betwen"), "unknown key links.latency_betwen"),
        (H100.replace("per_node", "per_nodes"), "unknown key per_nodes; known are name, memory"),
        (H100.replace("float8 = 0.5", "float8 = 0"), "efficiencies.float8 = 0, which is not above 0"),
        (H100.replace("[efficiencies]", "[[efficiencies]]"), r"has no table \[efficiencies\]"),
        (H100.replace("[overhead]", "[overheads]"), r"says nothing of \[overhead\]"),
    ],
)
def test_what_is_no_device_file(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(autoplan.AutoplanError, match=why):
        load_device(str(path))


def test_a_dtype_may_reach_another_share_of_its_peak() -> None:
    device = load_device("b200")
    assert device.reached("float8") > 1.2 * 2 * device.reached("bfloat16")


def test_ours_are_read() -> None:
    others = {name: load_device(name).per_node for name in device_names() if load_device(name).per_node != 8}
    assert others == {"gb200": 72, "gb300": 72} and len(device_names()) == 17


@pytest.mark.parametrize(("ranks", "measured", "copied"), [(8, "inside", "between"), (16, "between", "inside")])
def test_a_calibrated_file_says_what_was_measured(tmp_path: Path, ranks: int, measured: str, copied: str) -> None:
    like = load_device("h100")
    path = tmp_path / "mine.toml"
    path.write_text(device_text(Measured("X", 10**10, 7e14, 3e14, 2e12, 2e11, ranks, 8), like), encoding="utf-8")
    found = load_device(str(path))
    assert found.per_node == 8 and getattr(found, measured) == (2e11 if ranks == 8 else 2e11 / 8)
    assert getattr(found, copied) == getattr(like, copied)
    assert f"links.{measured}" in found.sources[0] and f"links.{copied}, latencies" in found.sources[1]


def test_plan_refuses_an_unknown_device_before_it_prints_a_plan() -> None:
    ended = CliRunner().invoke(app, ["plan", "gpt2", "--tp", "2", "--gpu", "nope"])
    assert isinstance(ended.exception, autoplan.AutoplanError) and "unknown device" in str(ended.exception)
    assert "Split" not in ended.output
