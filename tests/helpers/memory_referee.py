"""The referee of memory estimates: torch's MemTracker on the sharded model in fake mode, which runs every layer."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

import autoplan
from autoplan.capture.dry_run import quiet
from autoplan.capture.fold import fold
from autoplan.capture.known_values import KnownValues
from autoplan.common.random_values import untouched_randomness
from autoplan.forecast.recording.kernels import kernels_of_a_gpu
from autoplan.forecast.sharded import as_on_a_gpu, fake_mesh, faker
from autoplan.forecast.step import Setting, Steps, inputs_of, loss_of, own
from autoplan.patches.kernels import on_reference_path, one_sequence_a_row
from autoplan.patches.simulated_ranks import asks_for_a_shape


class _Nothing:
    """Stands for a hook that was not registered."""

    def remove(self) -> None:
        pass


class _Tracker(MemTracker):
    """torch's tracker, which asks for the gradient of every parameter: not of those that have none; and for the storage
    of what a module returns, which would gather split logits: that is in no peak. It also counts whole tensors that
    DTensor makes to ask for a shape (a gradient added to an earlier one), where they are of the mode of the step."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks_for_a_shape():
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _track_inputs_or_outputs(self, args: Any) -> int:
        return 0

    def _track_module_params_and_buffers(self, module: nn.Module, install_grad_hooks: bool = True) -> tuple[int, int]:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                self._param_to_grad_hook_handles.setdefault(parameter, (_Nothing(), _Nothing()))
        return super()._track_module_params_and_buffers(module, install_grad_hooks)


def tracked_peak(
    steps: Steps, dims: dict[str, int], options: dict[str, Any], batch: int, sequence: int, *, ep: int = 1,
    along: bool = False, micro: int = 1, update: bool = False,
) -> int:  # fmt: skip
    """MemTracker's peak of a second step of `micro` micro-batches; the update is left out unless it is asked for.
    `along`: cut along the sequence."""
    tp = dims.get("tp", 1)
    given = inputs_of(steps, Setting(tp=tp, batch=batch, sequence=sequence))  # inside of a mode none has pictures
    problem: Exception | None = None
    for how in ("fake", "known"):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with (
                fake_mesh(dims) as mesh, quiet(), untouched_randomness(), on_reference_path(),
                one_sequence_a_row(),
            ):  # fmt: skip
                model = fold(steps.module, faker(mode, None), fold=False).module
                as_on_a_gpu(model)
                autoplan.parallelize(model, mesh, steps.plan(tp, ep, along, dims.get("cp", 1)), check=False, **options)
                model.train()
                running: Any = mode if how == "fake" else KnownValues(mode)
                with kernels_of_a_gpu(model, tp == ep == dims.get("cp", 1) == 1), running:
                    inputs = {name: own(value, running, None) for name, value in given.items()}
                    return _tracked(model, inputs, micro, update)
        except Exception as error:
            problem = problem or error
    raise problem or AssertionError


def _tracked(model: nn.Module, inputs: dict[str, Any], micro: int, update: bool) -> int:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], foreach=update or None)

    def step() -> None:
        loss = loss_of(model(**inputs), None)
        assert loss is not None
        loss.backward()

    step()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(micro - 1):  # the tracker follows one forward and its backward
        step()
    tracker = _Tracker()
    tracker.track_external(model, optimizer)
    with tracker:
        step()
        if update:
            optimizer.step()
    peak = tracker.get_tracker_snapshot("peak")
    gc.collect()
    return int(peak[torch.device("cpu")]["Total"])  # on "meta" lie DTensor's questions about shapes: nothing is held
