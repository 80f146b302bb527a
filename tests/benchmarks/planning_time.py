"""How long does planning take, beside what it cannot do without?

The whole process `autoplan plan FOLDER --tp 8 --source inferred`, proof included, is timed beside a process that only
imports torch and transformers and builds the same model on the meta device; the ratio is what matters, seconds belong
to a machine. Then the analysis alone is timed on a stack of blocks and on one twice as deep. Nothing is asserted.

    python tests/benchmarks/planning_time.py [--runs 3] [--json] [SHAPE ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "examples" / "shapes"
DEFAULT = ("llama-3.1-70b", "llama-3.1-405b", "deepseek-v3")

BUILD = """
import sys, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    transformers.AutoModelForCausalLM.from_config(config)
"""

ANALYSE = """
import sys, time, torch, transformers
from autoplan.api import plan
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
with torch.device("meta"):
    model = transformers.AutoModelForCausalLM.from_config(config)
start = time.perf_counter()
plan(model, 8, source="inferred", prove="none")
print(time.perf_counter() - start)
"""


def seconds(command: list[str], runs: int) -> float:
    """The median over whole processes."""
    taken = []
    for _ in range(runs):
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        taken.append(time.perf_counter() - start)
        if done.returncode not in (0, 1):  # 1: the plan has findings
            sys.exit(f"{' '.join(command)}\nexited with {done.returncode}\n{done.stderr}")
    return statistics.median(taken)


def analysis_seconds(config: dict[str, Any], runs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        taken = []
        for _ in range(runs):
            done = subprocess.run(
                [sys.executable, "-c", ANALYSE, folder], cwd=ROOT, capture_output=True, text=True, check=True
            )
            taken.append(float(done.stdout))
    return statistics.median(taken)


def measure(shape: str, runs: int) -> dict[str, Any]:
    folder = SHAPES / shape
    build = seconds([sys.executable, "-c", BUILD, str(folder)], runs)
    command = [sys.executable, "-m", "autoplan", "plan", str(folder), "--tp", "8", "--source", "inferred"]
    plan = seconds(command, runs)
    config = json.loads((folder / "config.json").read_text())
    once = analysis_seconds(config, runs)
    twice = analysis_seconds({**config, "num_hidden_layers": 2 * config["num_hidden_layers"]}, runs)
    return {
        "shape": shape,
        "import_and_build_s": round(build, 2),
        "plan_s": round(plan, 2),
        "ratio": round(plan / build, 2),
        "analysis_s": round(once, 2),
        "analysis_of_twice_the_layers_s": round(twice, 2),
        "depth_ratio": round(twice / once, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=DEFAULT, metavar="SHAPE")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for shape in options.shapes:
        print(f"measuring {shape}", file=sys.stderr)
        rows.append(measure(shape, options.runs))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'shape':<16}{'import + build':>15}{'plan':>9}{'ratio':>8}{'analysis':>11}{'2× layers':>11}{'ratio':>8}")
    for row in rows:
        name, *figures = row.values()
        print(f"{name:<16}" + "".join(f"{x:>{w}.2f}" for x, w in zip(figures, (15, 9, 8, 11, 11, 8), strict=True)))


if __name__ == "__main__":
    main()
