"""Adapt transformers' Trainer and accelerate's Accelerator to a model that is sharded already.

The problem: both wrap the model (in DDP, or in their own FSDP), save from the first rank alone, and write the optimizer
of one rank for that of all. Their code for models that transformers sharded itself cannot resume. So a subclass of the
user's own class does these few things the sharded way; how is passed in by the caller, as `Sharded`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

_OPTIMIZER, _SCHEDULER, _WEIGHTS = "optimizer", "scheduler.pt", "model"


@dataclass(frozen=True)
class Sharded:
    """Functions that handle a sharded model. `sizes`: its (replicas, shards, tp), None for any other model."""

    sizes: Callable[[Any], tuple[int, int, int] | None]
    save_weights: Callable[[Any, str], None]
    load_weights: Callable[[Any, str], Any]
    save_optimizer: Callable[[Any, Any, str], None]
    load_optimizer: Callable[[Any, Any, str], None]
    clip: Callable[[Any, float], torch.Tensor]
    together: Callable[[Any, str], AbstractContextManager[Any]]  # raises on all ranks what fails on one


def _mesh_of(sizes: tuple[int, int, int]) -> Any:
    """Return the mesh as accelerate's ParallelismConfig: ranks of one tp group get the same batches."""
    config = import_module("accelerate").ParallelismConfig

    class AnyDevice(config):  # type: ignore[misc, valid-type]
        """accelerate builds such a mesh on the CPU too, but refuses it there."""

        def _validate_accelerator(self, accelerator: Any) -> None:
            if accelerator.device.type != "cpu":
                super()._validate_accelerator(accelerator)

    return AnyDevice(dp_replicate_size=sizes[0], dp_shard_size=sizes[1], tp_size=sizes[2])


def _once(gathered: Any, ranks: int, tp: int) -> Any:
    """Return what was gathered from all ranks, once for each tp group, whose ranks had the same batches."""
    if isinstance(gathered, torch.Tensor):
        return gathered.unflatten(0, (ranks, -1))[::tp].flatten(0, 1)
    if isinstance(gathered, Mapping):
        return type(gathered)({key: _once(value, ranks, tp) for key, value in gathered.items()})  # type: ignore[call-arg]
    if isinstance(gathered, (list, tuple)):
        items = [_once(value, ranks, tp) for value in gathered]
        return type(gathered)(*items) if hasattr(gathered, "_fields") else type(gathered)(items)
    return gathered


def _metrics_once(
    host: Any, sizes: tuple[int, int, int] | None, gather: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Call accelerate's `gather_for_metrics` such that each data-parallel rank counts once.

    `gather` itself stays: what is counted with it is divided by the number of all processes.
    """
    everywhere = host.gather
    if sizes is not None and sizes[2] > 1 and host.num_processes > 1:
        host.gather = lambda data: _once(everywhere(data), host.num_processes, sizes[2])
    try:
        return gather(*args, **options)
    finally:
        vars(host).pop("gather", None)


@contextmanager
def _deferred(sync: Callable[[bool], None]) -> Iterator[None]:
    """Do without sums of gradients over ranks meanwhile."""
    sync(False)
    try:
        yield
    finally:
        sync(True)


def _plain(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


# Trainer


def trainer_class(base: Any, sharded: Sharded) -> Any:
    """Return a subclass of a Trainer that trains a sharded model, saves it and resumes from what it saved."""

    class ShardedTrainer(base):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # Set late: Trainer refuses to save optimizers of models that transformers sharded itself.
            self.is_distributed_loading_by_transformers = self._sharded_sizes is not None
            host = self.accelerator
            host.gather_for_metrics = partial(_metrics_once, host, self._sharded_sizes, host.gather_for_metrics)
            objects = self.args.eval_use_gather_object
            self.gather_function = partial(host.gather_for_metrics, use_gather_object=objects)
            if self._sharded_sizes is not None:
                # Seed ranks of a tp group identically if the Trainer draws tokens; the first rank keeps its stream.
                process, tp = host.process_index, self._sharded_sizes[2]
                if process % tp and torch.initial_seed() == self.args.seed + process:
                    import_module("accelerate.utils").set_seed(self.args.seed + process - process % tp)

        @property
        def _sharded_sizes(self) -> tuple[int, int, int] | None:
            return sharded.sizes(self.model)

        def _move_model_to_device(self, model: Any, device: torch.device) -> None:
            if sharded.sizes(model) is None:
                super()._move_model_to_device(model, device)

        def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
            args: dict[str, Any] = super()._build_accelerator_args(**options)
            sizes = self._sharded_sizes
            if sizes is not None and sizes[2] > 1 and args.get("parallelism_config") is None:
                args["parallelism_config"] = _mesh_of(sizes)
            return args

        def get_tp_size(self) -> int:
            sizes = self._sharded_sizes
            return int(super().get_tp_size()) if sizes is None else sizes[2]

        def _defer_fsdp_gradient_reduction(self) -> AbstractContextManager[None]:
            return _deferred(self.model.set_requires_gradient_sync)

        def _clip_grad_norm(self, model: Any) -> Any:
            if self._sharded_sizes is None:
                return super()._clip_grad_norm(model)
            return sharded.clip(self.model, self.args.max_grad_norm)

        def _save_checkpoint(self, *args: Any, **options: Any) -> None:
            """Raise on all ranks what fails on one; files that the first rank alone writes are part of a checkpoint."""
            alone = self._sharded_sizes is None
            with nullcontext() if alone else sharded.together(self.model, "saving a checkpoint"):
                super()._save_checkpoint(*args, **options)

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            if self._sharded_sizes is None:
                super()._save_optimizer_and_scheduler(output_dir)
                return
            with sharded.together(self.model, "saving the optimizer"):
                sharded.save_optimizer(self.model, _plain(self.optimizer), os.path.join(output_dir, _OPTIMIZER))
                if self.args.should_save:
                    torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            folder = os.path.join(checkpoint or "", _OPTIMIZER)
            if self._sharded_sizes is None:
                super()._load_optimizer_and_scheduler(checkpoint)
            elif checkpoint is not None:
                with sharded.together(self.model, "loading the optimizer"):
                    if os.path.isdir(folder):
                        sharded.load_optimizer(self.model, _plain(self.optimizer), folder)
                        state = torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True)
                        self.lr_scheduler.load_state_dict(state)

        def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
            if self._sharded_sizes is None:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            else:
                sharded.load_weights(self.model, resume_from_checkpoint)

        def _load_best_model(self) -> None:
            if self._sharded_sizes is None:
                super()._load_best_model()
            else:
                sharded.load_weights(self.model, self.state.best_model_checkpoint)

    return _named(ShardedTrainer, base)


# Accelerator


def accelerator_class(base: Any, sharded: Sharded, model: Any) -> Any:
    """Return a subclass of Accelerator for `model`: it has the model's mesh, and does not wrap the model."""

    class ShardedAccelerator(base):
        def __init__(self, *args: Any, **options: Any) -> None:
            sizes = sharded.sizes(model)
            if sizes is not None and sizes[2] > 1:
                options.setdefault("parallelism_config", _mesh_of(sizes))
            super().__init__(*args, **options)

        def prepare_model(self, model: Any, *args: Any, **options: Any) -> Any:
            if sharded.sizes(model) is None:
                return super().prepare_model(model, *args, **options)
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)

        def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
            listed = list(parameters)
            if norm_type == 2 and {id(p) for p in listed} == {id(p) for p in model.parameters()}:
                self.unscale_gradients()
                return sharded.clip(model, max_norm)
            return super().clip_grad_norm_(listed, max_norm, norm_type)

        def gather_for_metrics(self, *args: Any, **options: Any) -> Any:
            return _metrics_once(self, sharded.sizes(model), super().gather_for_metrics, *args, **options)

        @contextmanager
        def no_sync(self, model: Any = None) -> Iterator[None]:
            defer = None if sharded.sizes(model) is None else getattr(model, "set_requires_gradient_sync", None)
            if defer is None:
                with super().no_sync(model):
                    yield
                return
            with _deferred(defer):
                yield

        def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
            if sharded.sizes(model) is None:
                return super().get_state_dict(model, unwrap)
            return model.state_dict()

        def save_model(self, model: Any, save_directory: str, *args: Any, **options: Any) -> None:
            if sharded.sizes(model) is None:
                super().save_model(model, save_directory, *args, **options)
            else:
                sharded.save_weights(model, save_directory)

        def save_state(self, output_dir: str | None = None, **options: Any) -> str:
            rest = partial(super().save_state, output_dir, **options)
            with sharded.together(model, "save_state"):
                folder: str = self._without_model(rest)
                sharded.save_weights(model, os.path.join(folder, _WEIGHTS))
                for number, optimizer in enumerate(self._optimizers):
                    sharded.save_optimizer(model, _plain(optimizer), os.path.join(folder, f"{_OPTIMIZER}_{number}"))
                return folder

        def load_state(self, input_dir: str | None = None, **options: Any) -> None:
            rest = partial(super().load_state, input_dir, **options)
            with sharded.together(model, "load_state"):
                result = self._without_model(rest)
                folder = result if input_dir is None else input_dir
                sharded.load_weights(model, os.path.join(folder, _WEIGHTS))
                for number, optimizer in enumerate(self._optimizers):
                    sharded.load_optimizer(model, _plain(optimizer), os.path.join(folder, f"{_OPTIMIZER}_{number}"))

        def _without_model(self, rest: Callable[[], Any]) -> Any:
            """Let accelerate handle everything but the sharded model and its optimizers."""
            everything: tuple[Any, Any] = (self._models, self._optimizers)
            self._models: Any = []
            self._optimizers: Any = []
            try:
                return rest()
            finally:
                self._models, self._optimizers = everything

    return _named(ShardedAccelerator, base)


def _named(cls: Any, base: Any) -> Any:
    """Return the class under the user's name for it, which appears in logs and reports."""
    cls.__name__, cls.__qualname__, cls.__module__ = base.__name__, base.__qualname__, base.__module__
    return cls
