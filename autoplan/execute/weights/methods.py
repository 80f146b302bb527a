"""Methods of a sharded model that load and save, and the state of its optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.execute.agreement import Voters, fail_together, meet, same_model, voters_of
from autoplan.execute.parameters.held import record_of
from autoplan.execute.weights.save import replace_files, save_weights, whole_on_writer, writes

# Methods that would fail or go wrong on a sharded model (`save_pretrained`, `resize_token_embeddings`, adding adapters,
# DistributedDataParallel) are replaced on the model itself: saving gathers and writes, the others raise with advice.

_NOTHING_TO_US = ("safe_serialization", "save_function", "save_peft_format", "token")  # no effect here
_CHOICES = ("selected_adapters", "save_embedding_layers")  # options of saving adapters
_REPLICAS = "_ddp_params_and_buffers_to_ignore"  # the first attribute that DistributedDataParallel reads


def take_methods(model: nn.Module) -> None:
    """Replace methods of a sharded model, and of models inside it, by ones for sharded models."""
    for module in model.modules():
        vars(module).update(_methods_of(module))
    vars(model)[_REPLICAS] = _NoReplicas()


def leave_methods(model: nn.Module) -> None:
    """Restore the library's own methods."""
    for module in model.modules():
        for name in _methods_of(module):
            vars(module).pop(name, None)
    vars(model).pop(_REPLICAS, None)


def _methods_of(module: nn.Module) -> Mapping[str, Callable[..., Any]]:
    library = conventions()
    if library.adapters_of(module):
        there = [(name, at) for name, at in library.adding if callable(getattr(type(module), name, None))]
        named = {name: partial(_fill_adapter, module, name, at) for name, at in there}
        return named | {library.saving: partial(_save_adapters, module)}
    if not library.saves(module):
        return {}
    return {library.saving: partial(_save, module), library.resizing: partial(_resize, module)}


class _NoReplicas:
    """An attribute that raises with advice when DistributedDataParallel reads it."""

    def __iter__(self) -> Iterator[str]:
        raise AutoplanError(
            "DistributedDataParallel around a sharded model: its ranks hold different shards",
            hint="data parallelism is a dim of the mesh (dp_shard, dp_replicate); for a Trainer or an Accelerator, "
            "autoplan.hand_over",
        )


def _save(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    *,
    max_shard_size: int | str = "5GB",
    save_original_format: bool = True,
    **options: Any,
) -> None:
    """Save a sharded model; every rank calls it. `is_main_process` does not matter: the first rank writes."""
    with fail_together(Voters.everyone(model), conventions().saving):
        if unsupported := sorted(name for name, value in options.items() if value and name not in _NOTHING_TO_US):
            raise AutoplanError(
                f"a sharded model cannot be saved with {', '.join(unsupported)}",
                hint="save it without, and apply that to the folder; autoplan.full_tensors(model) returns full tensors",
            )
        parts = conventions().parts_to_save(model, {})
        if parts is not None:
            _save_parts(model, save_directory, parts)
            return
        if state_dict is not None and not any(isinstance(value, DTensor) for value in state_dict.values()):
            if writes():  # the caller has gathered it
                save = getattr(type(model), conventions().saving)
                save(model, save_directory, state_dict=state_dict, max_shard_size=max_shard_size)
            return
        save_weights(model, save_directory, max_shard_size=max_shard_size, original_names=save_original_format)
        settings = conventions().checkpoint_writer(model, save_original_format, {}).settings
        if writes() and settings is not None:
            record = record_of(model)
            unsharded = (cls for cls in type(model).__mro__ if not cls.__name__.startswith("FSDP"))
            own_class = record.original if record is not None else next(unsharded)
            replace_files(Path(save_directory), lambda folder: settings(folder, own_class))


def _save_adapters(model: nn.Module, save_directory: str | os.PathLike[str], *_: Any, **options: Any) -> None:
    """Save the gathered adapters of a wrapped model by the library's own method, on the first rank."""
    with fail_together(Voters.everyone(model), conventions().saving):
        if unsupported := sorted(options.keys() - {*_CHOICES, *_NOTHING_TO_US, "is_main_process", "state_dict"}):
            raise AutoplanError(
                f"adapters of a sharded model cannot be saved with {', '.join(unsupported)}",
                hint="save them without, and apply that to the saved folder",
            )
        chosen = {name: value for name, value in options.items() if name in _CHOICES}
        parts = conventions().parts_to_save(model, chosen)
        _save_parts(model, save_directory, () if parts is None else parts, **chosen)


def _save_parts(model: nn.Module, folder: str | os.PathLike[str], parts: tuple[str, ...], **options: Any) -> None:
    """Gather the parts of a model that the library saves, on every rank; the first one writes them."""
    meet(same_model(model))  # making a state dict may communicate
    state, writing = model.state_dict(), writes()
    state.update({name: whole_on_writer(state[name], keep=writing) for name in parts})
    meet()
    if writing:
        save = partial(getattr(type(model), conventions().saving), model)
        replace_files(Path(folder), lambda folder: save(folder, state_dict=state, **options), read=("README.md",))


def _resize(model: nn.Module, *args: Any, **options: Any) -> Any:
    """Call the library's method if the table keeps its size; refuse another size."""
    with fail_together(voters_of(model), conventions().resizing):
        name = conventions().resizing
        table: Any = getattr(model, conventions().ends[0])()
        wanted = args[0] if args else options.get("new_num_tokens")
        padded = len(args) > 1 or options.get("pad_to_multiple_of") is not None
        if padded or wanted not in (None, len(table.weight)):
            raise AutoplanError(
                f"{name} of a sharded model: its table of {len(table.weight)} rows is sharded over ranks",
                hint="resize first, then call autoplan.plan and autoplan.parallelize",
            )
        return getattr(type(model), name)(model, *args, **options)


def _fill_adapter(model: nn.Module, method: str, at: int, *args: Any, **options: Any) -> Any:
    """Call the library's method for a planned adapter; refuse another one."""
    wanted = args[at] if len(args) > at else options.get("adapter_name")
    adapters = conventions().adapters_of(model)
    with fail_together(voters_of(model), method):
        if wanted not in adapters:
            raise AutoplanError(
                f"{method} of a sharded model: adapter {wanted!r} was not planned (it has {', '.join(adapters)})",
                hint="add it first, then call autoplan.plan and autoplan.parallelize",
            )
        meet()
        return getattr(type(model), method)(model, *args, **options)


# The state of a sharded optimizer is saved with torch.distributed.checkpoint by parameter names and in the checkpoint's
# order, so that a run can be resumed at another tp size.


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Write the optimizer's state to a folder. Every rank calls it."""
    with fail_together(Voters.everyone(model), "save_optimizer"):
        meet(same_model(model))
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        files = dcp.FileSystemWriter(folder, overwrite=True)
        meet()
        with _as_our_error(f"{folder} could not be written", "is the disk full, or not writable?"):
            dcp.save(state, storage_writer=files)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Load a saved state into an optimizer of the same kind, fresh or not. Every rank calls it."""
    with fail_together(Voters.everyone(model), "load_optimizer"):
        meet(same_model(model))
        state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        meet()
        with _as_our_error(f"{folder} could not be read", "is it a complete folder written by save_optimizer?"):
            dcp.load(state, checkpoint_id=folder)
        meet()
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


@contextmanager
def _as_our_error(problem: str, hint: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which all ranks get and which is no Exception, into an AutoplanError."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise AutoplanError(f"{problem} by rank {rank}: {type(failure).__name__}: {failure}", hint=hint) from error
