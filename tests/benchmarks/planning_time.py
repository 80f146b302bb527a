"""How long does planning take, compared with what it cannot do without?

The whole process `autoplan plan FOLDER --tp 8 --source inferred`, proof included, is timed compared with a
process that only imports torch and transformers and builds the same model on the meta device; the ratio is what
matters, seconds belong to a machine. They are processor time, the least of some runs: other work on the machine counts
little. "with memory": the table of what a step needs at each legal size comes after the plan. Then the analysis alone
is timed on a stack of blocks and on one twice as deep. Nothing is asserted. A SHAPE is a folder of examples/shapes, or
a model type at the sizes of its default config.

    python tests/benchmarks/planning_time.py [--runs 3] [--pairs] [--json] [SHAPE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "examples" / "shapes"
DEFAULT = ("llama-3.1-8b", "llama-3.1-405b", "deepseek-v3", "nemotron_h")

BUILD = """
import os, sys, torch, transformers
there = os.path.isdir(sys.argv[1])
config = (transformers.AutoConfig.from_pretrained if there else transformers.AutoConfig.for_model)(sys.argv[1])
with torch.device("meta"):
    transformers.AutoModelForCausalLM.from_config(config)
"""

ANALYSE = """
import json, sys, time, torch, transformers
from autoplan.api import plan
models = []
for folder in sys.argv[2:]:
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        models.append(transformers.AutoModelForCausalLM.from_config(config))
rounds = []
for _ in range(int(sys.argv[1])):
    rounds.append([])
    for model in models:
        start = time.process_time()
        plan(model, 8, source="inferred", prove="none")
        rounds[-1].append(time.process_time() - start)
print(json.dumps(rounds))
"""


def seconds(command: list[str]) -> float:
    """Processor time of a process and all that it starts. It finds bytecode, as an installed package has it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = _spent()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    taken = _spent() - before
    if done.returncode not in (0, 1):  # 1: the plan has findings
        sys.exit(f"{' '.join(command)}\nexited with {done.returncode}\n{done.stderr}")
    return taken


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def analysis_seconds(runs: int, *configs: dict[str, Any]) -> list[float]:
    """The fastest analysis of each, all in one process that has planned before."""
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root, str(number)) for number in range(len(configs))]
        for folder, config in zip(folders, configs, strict=True):
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
        command = [sys.executable, "-c", ANALYSE, str(runs + 1), *map(str, folders)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return fastest(json.loads(done.stdout))


def fastest(rounds: list[list[float]]) -> list[float]:
    """Of each column: other work on the machine only ever adds. They take turns, so it adds to all alike."""
    return [min(column) for column in zip(*rounds, strict=True)]


def measure(shape: str, runs: int, pairs: bool) -> dict[str, Any]:
    folder = SHAPES / shape
    model = str(folder) if folder.is_dir() else shape
    command = [sys.executable, "-m", "autoplan", "plan", model, "--tp", "8", "--source", "inferred"]
    build_only = [sys.executable, "-c", BUILD, model]
    commands = [build_only, command] if pairs else [build_only, command, [*command, "--memory"]]
    build, plan, *with_memory = fastest([[seconds(each) for each in commands] for _ in range(runs)])
    row = {
        "shape": shape,
        "import_and_build_s": round(build, 2),
        "plan_s": round(plan, 2),
        "ratio": round(plan / build, 2),
    }
    if pairs:
        return row
    config = json.loads((folder / "config.json").read_text()) if folder.is_dir() else defaults(shape)
    deeper = {**config, "num_hidden_layers": 2 * config["num_hidden_layers"]}
    once, twice = analysis_seconds(runs, config, deeper)
    return row | {
        "with_memory_s": round(with_memory[0], 2),
        "analysis_s": round(once, 2),
        "analysis_of_twice_the_layers_s": round(twice, 2),
        "depth_ratio": round(twice / once, 2),
    }


def defaults(model_type: str) -> dict[str, Any]:
    import transformers

    config: dict[str, Any] = transformers.AutoConfig.for_model(model_type).to_dict()
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="*", default=DEFAULT, metavar="SHAPE")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pairs", action="store_true", help="a plan and what it cannot do without, no more")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for shape in options.shapes:
        print(f"measuring {shape}", file=sys.stderr)
        rows.append(measure(shape, options.runs, options.pairs))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    heads = ("import + build", "plan", "ratio", "with memory", "analysis", "2× layers", "ratio")
    widths = (15, 9, 8, 13, 11, 11, 8)
    shown = 3 if options.pairs else len(heads)
    print(f"{'shape':<16}" + "".join(f"{head:>{width}}" for head, width in zip(heads[:shown], widths, strict=False)))
    for row in rows:
        name, *figures = row.values()
        print(f"{name:<16}" + "".join(f"{x:>{w}.2f}" for x, w in zip(figures, widths, strict=False)))


if __name__ == "__main__":
    main()
