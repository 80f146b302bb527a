"""Every option refuses every wrong value at once, with one clear error."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from mesh_toys import deep, mesh_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Checkpointing, DataParallel, Options, TensorParallel, Wish

Kind = type[Any]
NUMBER, LIST, THING = 5, [1], object()
WRONG: dict[tuple[Kind, str], tuple[Any, ...]] = {
    (Wish, "tp_size"): (0, -1, True, "2", 2.0, None, LIST),
    (Wish, "ep_size"): (0, -1, True, "2", 2.0, None, LIST),
    (Wish, "cp_size"): (0, -1, True, "2", 2.0, None, LIST),
    (Wish, "sequence_parallel"): ("yes", 1, None, LIST),
    (Wish, "strict"): ("yes", 1, None, LIST),
    (Wish, "prove"): ("x", None, True, LIST),
    (Wish, "uneven"): ("x", None, True, LIST),
    (Wish, "trial_seconds"): (0, -1, True, "2", None, LIST, float("nan")),
    (Options, "strict"): ("yes", 1, None, LIST),
    (TensorParallel, "gather_logits"): ("yes", 1, LIST),
    (TensorParallel, "sequence_padding"): ("x", None, True, LIST),
    (TensorParallel, "path_guard"): ("x", None, True, LIST),
    (TensorParallel, "reproducible_forward"): ("yes", 1, None, LIST),
    (Checkpointing, "blocks"): ("x", 1, None, LIST),
    (Checkpointing, "scope"): ("x", 1, None, LIST, ("text", "x"), THING),
    (DataParallel, "mp_policy"): ("x", 5, 1, 0.5, LIST, THING, torch.bfloat16, MixedPrecisionPolicy),
    (DataParallel, "offload_policy"): ("x", 5, True, LIST, THING, CPUOffloadPolicy),
    (DataParallel, "cpu_offload"): ("x", 1, None, LIST),
    (DataParallel, "reshard_after_forward"): ("x", 0, -1, 0.5, LIST, THING),
    (DataParallel, "prefetch"): ("x", -1, True, 0.5, LIST, (1,), (1, 2, 3), (1, "x"), (1, None), THING),
    (DataParallel, "frozen"): ("x", None, True, LIST),
    (Options, "tensor"): (None, 5, DataParallel()),
    (Options, "checkpointing"): (None, 5, DataParallel()),
    (Options, "data"): (None, 5, TensorParallel()),
}


def test_no_field_is_left_out() -> None:
    kinds = (Wish, TensorParallel, Checkpointing, DataParallel, Options)
    assert set(WRONG) == {(kind, field.name) for kind in kinds for field in fields(kind)}


@pytest.mark.parametrize(("kind", "name"), WRONG, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_wrong_values_are_refused_when_the_value_is_made(kind: Kind, name: str) -> None:
    kind()
    for value in WRONG[kind, name]:
        with pytest.raises(AutoplanError) as error:
            kind(**{name: value})
        assert error.value.hint, value


RIGHT: dict[tuple[Kind, str], tuple[Any, ...]] = {
    (Checkpointing, "blocks"): (True, "selective", lambda name, block: True),
    (Checkpointing, "scope"): ("text", ["text", "vision"], "decoder", iter(["audio"])),
    (DataParallel, "mp_policy"): (None, True, False, "bf16", MixedPrecisionPolicy()),
    (DataParallel, "offload_policy"): (None, CPUOffloadPolicy()),
    (DataParallel, "reshard_after_forward"): (None, True, False, 2),
    (DataParallel, "prefetch"): (None, 0, 2, (1, 2)),
}


@pytest.mark.parametrize(("kind", "name"), RIGHT, ids=lambda one: one if isinstance(one, str) else one.__name__)
def test_right_values_pass(kind: Kind, name: str) -> None:
    for value in RIGHT[kind, name]:
        kind(**{name: value})


CALLS: dict[str, dict[str, Any]] = {
    "no mesh": {"mesh": None},
    "a number as mesh": {"mesh": 2},
    "names of dims": {"mesh_dims": 5},
    "a name of a dim": {"mesh_dims": {"tp": 5}},
    "prefetch": {"prefetch": "x"},
    "precision": {"mp_policy": 5},
    "resharding": {"reshard_after_forward": "x"},
    "resharding over three of two": {"reshard_after_forward": 3},
    "no options": {"options": 5},
    "options twice": {"options": Options(), "prefetch": 1},
    "check": {"check": "no"},
    "no model": {"model": "llama"},
    "a number as plan": {"plan": 5},
    "an empty plan": {"plan": {}},
}


def check_calls(rank: int) -> None:
    mesh = mesh_of(dp=2)
    for name, given in CALLS.items():
        model = deep(depth=1)
        before = dict(model.state_dict())
        call = {"model": model, "mesh": mesh_of(tp=2) if "plan" in given else mesh, **given}
        with pytest.raises(AutoplanError) as error:
            autoplan.parallelize(**call)
        assert len(error.value.message) > 5, name
        assert all(value is model.state_dict()[key] or torch.equal(value, model.state_dict()[key])
                   for key, value in before.items()) and not isinstance(model, nn.Sequential)  # fmt: skip
        assert autoplan.applied(model) is None


def test_wrong_calls_of_parallelize_are_one_clear_error() -> None:
    run_ranks(check_calls, 2)
