"""Adapt classes of training frameworks to a sharded model."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_argument
from autoplan.common.torch_internals import uncompiled
from autoplan.execute.agreement import Voters, fail_together
from autoplan.execute.data_parallel.gradients import clip_gradients
from autoplan.execute.tensor_parallel import applied
from autoplan.execute.weights.load import load_weights
from autoplan.execute.weights.methods import load_optimizer, save_optimizer
from autoplan.execute.weights.save import save_weights
from autoplan.hf.hosts import Sharded, accelerator_class, trainer_class

Host = TypeVar("Host", bound=type)


def hand_over(host: Host, model: nn.Module | None = None) -> Host:
    """Return a Trainer or an Accelerator class for a model that `parallelize` sharded: no DDP, and full checkpoints.

    `host` is the class: transformers' `Trainer` or a subclass, or accelerate's `Accelerator`, which needs the `model`
    at once. Use the result in its place:

        trainer = autoplan.hand_over(Trainer)(model, args, train_dataset=data)
        trainer.train(resume_from_checkpoint=True)

        accelerator = autoplan.hand_over(Accelerator, model)()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    Checkpoints hold the unsharded model's weights, as `save_pretrained` writes them, and the optimizer's state by names
    of parameters: a run can be resumed at another tp size. Every rank saves and loads.
    """
    check_argument("host", host, type, "pass a class: Trainer, a subclass of it, or Accelerator")
    names = {cls.__name__ for cls in host.__mro__}
    adapted: Any = None
    if "Trainer" in names:
        adapted = trainer_class(host, _SHARDED)
    elif "Accelerator" in names:
        if model is None or _sizes(model) is None:
            raise AutoplanError(
                "an Accelerator needs the sharded model before it is created",
                hint="hand_over(Accelerator, model), after autoplan.parallelize(model, ...)",
            )
        adapted = accelerator_class(host, _SHARDED, model)
    if adapted is None:
        raise AutoplanError(f"{host.__name__} is neither a Trainer nor an Accelerator")
    return adapted


def _sizes(model: nn.Module) -> tuple[int, int, int] | None:
    record = applied(uncompiled(model))
    if record is None:
        return None
    plan, (replicas, shards) = record.plan, record.data_parallel
    # FSDP2 shards over cp ranks too, which get the same batches, as tp ranks do
    return replicas, max(1, shards // plan.cp_size), max(plan.tp_size, plan.ep_size) * plan.cp_size


_SHARDED = Sharded(
    _sizes,
    save_weights,
    lambda model, folder: load_weights(uncompiled(model), str(folder)),
    save_optimizer,
    load_optimizer,
    clip_gradients,
    lambda model, doing: fail_together(Voters.everyone(model), doing),
)
