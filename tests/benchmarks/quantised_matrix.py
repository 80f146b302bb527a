"""Are the dequantised weights of all ranks, put together, those of the checkpoint, bit for bit? One line a method.

    python tests/benchmarks/quantised_matrix.py [--only fp8] [--tp 2 4 8]

Small models (dense, experts, latent attention, fused matrices, turned stacks) under every method that is described,
with random checkpoints of each, experts one by one. For every size: a plain model is filled with dequantise=True on
simulated ranks, and a packed one. "=": bit for bit the same, "u": the same with uneven cuts too, "packed": packed
tensors too, "whole": nothing quantised is cut at this size. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parents[1]
sys.path.append(str(HERE / "helpers"))

from quantised_models import METHODS, MODELS, built, checkpoint  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import autoplan  # noqa: E402
from autoplan.check.ranks.run import run_ranks  # noqa: E402
from autoplan.common.errors import PlanMismatchError  # noqa: E402

NOT_LOADED: dict[str, str] = {}  # why a packed model was not filled, and whose


def cell(name: str, kind: str, tp: int) -> str:
    config = MODELS[kind](METHODS[name])
    made = autoplan.plan(config, tp_size=tp, prove="none", uneven="blocks")
    cut = [tensor.dim for weight in made.packed for tensor in weight.tensors]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = checkpoint(config, made, folder)
        same = _same(config, made, folder, plain)
    if not same:
        return "DIFFERS"
    if all(dim is None for dim in cut):
        return "whole"
    return "=" + ("u" if made.uneven != "never" else "") + same


def _same(config: Any, made: autoplan.Plan, folder: Path, plain: dict[str, torch.Tensor]) -> str:
    """ "" where anything differs; else what was held against the checkpoint."""
    found: list[str] = []

    def rank_body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (made.tp_size,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(built(config, "meta"), mesh, made)
        autoplan.load_weights(model, folder, dequantise=True)
        whole = autoplan.full_tensors(model)
        good = all(torch.equal(whole[key], value.float()) for key, value in plain.items())
        packs = _packed_as_stored(config, made, mesh, folder)
        if rank == 0 and good and packs is not False:
            found.append(" packed" if packs else " ")

    run_ranks(rank_body, made.tp_size)
    return found[0] if found else ""


def _packed_as_stored(config: Any, made: autoplan.Plan, mesh: Any, folder: Path) -> bool | None:
    """Does a sharded packed model hold what an unsharded one loads? None: this method is not computed with here."""
    try:
        whole = autoplan.packed_model(built(config, "meta"), made)
        model = autoplan.parallelize(autoplan.packed_model(built(config, "meta"), made), mesh, made)
    except PlanMismatchError:
        return None
    try:
        autoplan.load_weights(whole, folder)
    except autoplan.AutoplanError as error:
        NOT_LOADED.setdefault(str(error), config.architectures[0])
        return None
    autoplan.load_weights(model, folder)
    wanted = dict(whole.named_parameters())
    held = autoplan.full_tensors(model)
    return all(v.dtype == wanted[k].dtype and torch.equal(v.float(), wanted[k].float()) for k, v in held.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--only", action="append", help="part of a method's name; repeatable")
    given = parser.parse_args()
    wrong = 0
    for name in METHODS:
        if given.only and not any(part in name for part in given.only):
            continue
        line = []
        for kind in MODELS:
            cells = [cell(name, kind, tp) for tp in given.tp]
            wrong += sum("DIFFERS" in one for one in cells)
            line.append(f"{kind} {' / '.join(one.strip() for one in cells)}")
        print(f"{name}: {'; '.join(line)}", flush=True)
    for why, whose in NOT_LOADED.items():
        print(f"not packed: {whose}: {why}")
    print(f"{wrong} differ")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
