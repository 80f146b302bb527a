"""Tell bugs from rounding, layer by layer.

The problem: in bfloat16 a sharded model never equals the unsharded one, since sums over ranks round differently, and a
small mistake in a plan looks the same. In float64 rounding is far below every mistake: `verify` decides there. What is
left is how far apart correct bfloat16 results may lie. So the clone's weights are rounded to bfloat16 once, a float64
run of these weights says what is right, and each layer's output is measured against it: unsharded, sharded, and the two
against each other. Both deviate from the truth; a correct sharded model does not deviate much further.

An error is |got - truth| / |truth|, as norms of the layer's full output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from autoplan.capture.called import call
from autoplan.capture.copies import copied
from autoplan.capture.dry_run import own
from autoplan.check.ranks.common import one_compute_thread
from autoplan.check.ranks.run import Engine, run_processes, run_ranks
from autoplan.check.verify.on_ranks import mesh_of
from autoplan.check.verify.subject import tensors_in
from autoplan.common.conventions import conventions
from autoplan.common.random_values import inputs_in
from autoplan.execute.data_parallel.mesh_dims import tp_mesh_of
from autoplan.execute.tensor_parallel import apply_plan
from autoplan.values import Plan

_FAR = 4.0  # times further from the truth than the unsharded model: more than the order of sums explains
_OUTPUT = "output"
Outputs = dict[str, torch.Tensor]


def measure_rounding(
    model: Any, feeds: Mapping[str, Any], plan: Plan, *, exact: bool, engine: Engine = "threads", mesh: Any = None
) -> dict[str, Any]:
    """Return the verdict ("rounding", "bug", "unclear" or "not measured"), why, and the spread of each layer.

    `exact`: the same plan was found exact in float64.
    """
    names = tuple(name for stack in plan.layers for name in stack.fqns)
    try:
        with one_compute_thread():
            layers = _spread(_Job(model, feeds, plan, names), engine, mesh)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        why = (str(error) or repr(error)).splitlines()[0]
        return {"verdict": "bug" if not exact else "not measured", "why": f"not run in bfloat16: {why}", "layers": {}}
    return {**_verdict(layers, exact), "layers": layers}


def _verdict(layers: Mapping[str, Mapping[str, float]], exact: bool) -> dict[str, str]:
    if not exact:
        return {"verdict": "bug", "why": "results differ in float64, where rounding errors are a billion times smaller"}
    if not layers:
        return {"verdict": "not measured", "why": "no layer returned a comparable tensor"}
    ratios = {name: errors["sharded"] / max(errors["unsharded"], 1e-12) for name, errors in layers.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    errors = layers[worst]
    numbers = f"{errors['sharded']:.1e} sharded, {errors['unsharded']:.1e} unsharded"
    if errors["sharded"] > _FAR * errors["unsharded"] + 1e-6:
        why = f"exact in float64, but in bfloat16 the error of {worst} is {ratios[worst]:.1f} times the unsharded "
        why += f"model's ({numbers}); a choice such as a router's top-k may have flipped"
        return {"verdict": "unclear", "why": why}
    return {"verdict": "rounding", "why": f"exact in float64; largest bfloat16 error ratio: {worst} ({numbers})"}


# The three runs


@dataclass(frozen=True)
class _Job:
    model: Any
    feeds: Mapping[str, Any]
    plan: Plan
    layers: tuple[str, ...]


def _spread(job: _Job, engine: Engine, mesh: Any) -> dict[str, dict[str, float]]:
    half = _in_dtype(job, torch.bfloat16)
    truth = _outputs(_in_dtype(half, torch.float64))
    unsharded = _outputs(_in_dtype(half, torch.bfloat16))
    ranks = _on_ranks(half, engine, mesh)
    spread = {}
    for name, right in truth.items():
        whole = _together([rank.get(name) for rank in ranks], right)
        if whole is None or name not in unsharded or not bool(torch.isfinite(right).all()):
            continue
        sharded = max(_error(got, right) for got in whole)
        apart = max(_error(got, unsharded[name]) for got in whole)
        spread[name] = {"unsharded": _error(unsharded[name], right), "sharded": sharded, "apart": apart}
    return spread


def _in_dtype(job: _Job, dtype: torch.dtype) -> _Job:
    """Return a copy of the model and its inputs in a dtype."""
    return _Job(copied(job.model).eval().to(dtype), inputs_in(dtype, job.feeds), job.plan, job.layers)


def _on_ranks(job: _Job, engine: Engine, mesh: Any) -> list[Outputs]:
    if mesh is not None:
        import torch.distributed as dist

        from autoplan.execute.agreement import meet

        everyone: list[Any] = [None] * job.plan.ranks
        outputs = _sharded(job, mesh)
        meet()
        dist.all_gather_object(everyone, outputs, group=_split_over(mesh, job.plan).get_group())
        return everyone
    if engine == "gloo":
        return run_processes(_on_rank, (job,), job.plan.ranks)
    jobs = [_in_dtype(job, torch.bfloat16) for _ in range(job.plan.ranks)]
    return run_ranks(lambda rank: _on_rank(rank, jobs[rank]), job.plan.ranks)


def _on_rank(rank: int, job: _Job) -> Outputs:
    ((name, size),) = mesh_of(job.plan).items()
    return _sharded(job, init_device_mesh("cpu", (size,), mesh_dim_names=(name,)))


def _split_over(mesh: Any, plan: Plan) -> Any:
    split = tp_mesh_of(mesh, plan)
    assert split is not None, "a plan for one rank rounds like the model"
    return split


def _sharded(job: _Job, mesh: Any) -> Outputs:
    model = job.model.to(mesh.device_type)
    apply_plan(model, _split_over(mesh, job.plan), job.plan, sequence_padding="pad")
    return _outputs(_Job(model, job.feeds, job.plan, job.layers))


def _outputs(job: _Job) -> Outputs:
    """Return the outputs of each layer and of the model itself, in each of its calls."""
    seen: Outputs = {}
    with torch.no_grad():
        for feed, inputs in job.feeds.items():
            with _watched(job, feed, seen):
                result = call(job.model, own(dict(inputs)))
            names = conventions()
            for name, tensor in tensors_in(result).items():
                if name in (names.logits, names.hidden, "output"):
                    seen[f"{feed}: {_OUTPUT}"] = tensor.detach().to("cpu", torch.float64)
    return seen


@contextmanager
def _watched(job: _Job, feed: str, seen: Outputs) -> Iterator[None]:
    def note(name: str, module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            seen[f"{feed}: {name}"] = first.detach().to("cpu", torch.float64)

    modules = dict(job.model.named_modules())
    with ExitStack() as hooks:
        for name in job.layers:
            if name in modules:
                hooks.enter_context(modules[name].register_forward_hook(partial(note, name)))
        yield


def _together(pieces: Sequence[torch.Tensor | None], right: torch.Tensor) -> list[torch.Tensor] | None:
    """Return each rank's full output; one, concatenated, if the stream is sharded along the sequence."""
    outputs = [piece for piece in pieces if piece is not None]
    if len(outputs) < len(pieces) or outputs[0].dim() != right.dim():
        return None
    if outputs[0].shape == right.shape:
        return outputs
    dim, *more = (dim for dim in range(right.dim()) if outputs[0].shape[dim] != right.shape[dim])
    if more:
        return None
    whole = torch.cat(outputs, dim).narrow(dim, 0, right.shape[dim])
    return [whole] if whole.shape == right.shape else None


def _error(got: torch.Tensor, right: torch.Tensor) -> float:
    scale = float(right.norm())
    error = float((got - right).norm()) / (scale or 1.0)
    return float(f"{error:.3g}")
