"""The modules that activation checkpointing takes, and an estimate of what that saves.

The problem: a request for checkpointing that has no effect is noticed when a full-size run is out of memory. So
whatever is skipped is noted, nothing wrapped is an error, and an estimate of the saving is in the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Checkpointing, Request
from autoplan.execute.checkpointing.blocks import install_checkpoints
from autoplan.execute.tensor_parallel import applied, record
from autoplan.values import Stack


@dataclass(frozen=True)
class Checkpoints:
    """A choice of checkpoints. `wanted`: {module name: mode}. `saved_bytes`: estimate per token. `notes`: omissions."""

    wanted: dict[str, str]
    saved_bytes: int
    notes: tuple[str, ...]


def choose_checkpoints(
    model: nn.Module, stacks: tuple[Stack, ...], request: Request, scope: str | Iterable[str] = "all"
) -> Checkpoints:
    """Return the modules to checkpoint. Frozen blocks are skipped unless a callable asks for them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    kinds = Checkpointing(request, scope).kinds()
    wanted: dict[str, str] = {}
    notes: list[str] = []
    chosen_ids: set[int] = set()
    for stack in stacks:
        if stack.kind not in kinds:
            notes.append(f"{stack.name}: {len(stack.fqns)} blocks are not checkpointed: {stack.kind} is out of scope")
            continue
        frozen = 0
        for fqn in stack.fqns:
            mode = _mode_for(fqn, modules[fqn], request)
            if mode is None and not callable(request):
                frozen += 1
            elif mode:
                chosen = _modules_of(fqn, modules[fqn], mode, notes)
                wanted.update({n: m for n, m in chosen.items() if id(modules[n]) not in chosen_ids})
                chosen_ids.update(id(modules[n]) for n in chosen)
        if frozen:
            notes.append(f"{stack.name}: {frozen} of {len(stack.fqns)} blocks are frozen and not checkpointed")
    if not wanted:
        raise AutoplanError(
            f"activation_checkpointing={_said(request)} was requested, but no block of {type(model).__name__} "
            "was wrapped",
            hint="; ".join(notes) or "autoplan.layers(model) finds no repeated blocks: checkpoint the model by hand",
        )
    refuse_libraries_own(model)
    saved = sum(saved_bytes_per_token(modules[name], mode) for name, mode in wanted.items())
    return Checkpoints(wanted, saved, tuple(notes))


def checkpoint_blocks(
    model: nn.Module, stacks: tuple[Stack, ...], request: Request, scope: str | Iterable[str] = "all"
) -> Callable[[], None]:
    """Checkpoint the requested blocks, after tensor parallelism and before FSDP2; return a function that undoes it."""
    before = applied(model)
    assert before is not None, "what was done is recorded first"
    choice = choose_checkpoints(model, stacks, request, scope)
    installed = install_checkpoints(model, choice.wanted, before.running)
    record(
        model,
        before.plan,
        checkpointed=tuple(choice.wanted),
        saved_bytes=choice.saved_bytes,
        notes=before.notes + choice.notes,
    )
    return installed.remove


def _mode_for(fqn: str, block: nn.Module, request: Request) -> str | None:
    """Return the mode for one block; "" for none; None if it is frozen."""
    if callable(request):
        answer = request(fqn, block)
        if answer is False or answer is None:
            return ""
        Checkpointing(answer)
        return "block" if answer is True else str(answer)
    if not any(parameter.requires_grad for parameter in block.parameters()):
        return None
    return "block" if request is True else str(request)


def _modules_of(fqn: str, block: nn.Module, mode: str, notes: list[str]) -> dict[str, str]:
    if mode != "submodule":
        return {fqn: mode}
    parts = {f"{fqn}.{name}": "block" for name, part in _parts(block) if _keeps_activations(part)}
    if not parts:
        notes.append(f"{fqn} has no submodules that save activations: it is checkpointed as a whole")
        return {fqn: "block"}
    return parts


def _parts(module: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """Yield the child modules, with module lists opened."""
    for name, child in module.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from ((f"{name}.{inner}", part) for inner, part in _parts(child))
        else:
            yield name, child


def _keeps_activations(part: nn.Module) -> bool:
    """Return whether a part saves more than its input, as a lone matmul or table does not."""
    parameters = list(part.parameters())
    if any(True for _ in part.children()):
        return bool(parameters)
    return bool(parameters) and all(parameter.dim() < 2 for parameter in parameters)


def refuse_libraries_own(model: nn.Module) -> None:
    """Raise where the library's own checkpointing is on: inside ours it would recompute everything twice."""
    switch, ending = conventions().own_checkpointing
    for name, module in model.named_modules():
        if getattr(module, switch, False) is True:
            raise AutoplanError(
                f"{name or 'the model'} already has {switch} on",
                hint=f"call model.{ending}() before parallelize",
            )


def saved_bytes_per_token(module: nn.Module, mode: str = "block") -> int:
    """Return the bytes per token that checkpointing saves: the layers' inputs and outputs, less the module's own input.

    An estimate from widths: normalisations and activation functions between layers keep about as much as layers return;
    every layer is assumed to see every token, so a mixture of experts is overestimated.
    """
    widths = [_widths(weight) for weight in _weights(module)]
    if not widths:
        return 0
    total = sum((reads + writes) * size for reads, writes, size in widths)
    checkpointed = widths[0][0] * widths[0][2]
    if mode == "selective":
        checkpointed += sum(writes * size for _, writes, size in widths[::2])
    return max(0, total - checkpointed)


def _weights(module: nn.Module) -> Iterable[torch.Tensor]:
    detached = (parameter.detach() for parameter in module.parameters() if parameter.dim() > 1)
    return [p.to_local() if isinstance(p, DTensor) else p for p in detached]


def _widths(weight: torch.Tensor) -> tuple[int, int, int]:
    reads = weight.shape[1] if weight.dim() == 2 else weight.shape[-1]
    writes = weight.shape[0] if weight.dim() == 2 else weight.shape[-2]
    return int(reads), int(writes), weight.element_size()


def _said(request: Request) -> str:
    return "a function" if callable(request) else repr(request)
