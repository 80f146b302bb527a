"""Ranks as processes with a real gloo process group on the loopback device.

Processes come from a fork server that has imported what they need and does nothing else, so that none pays for the
imports again and no forked child inherits a thread. Arguments and results travel as pickled bytes: tensors are copied,
never moved into shared memory, and the caller's model is not touched. The first rank that fails ends the run.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from autoplan.check.ranks.common import RankError, RankLost, RankNotStarted, RankTimeout, end_process, process_context
from autoplan.common.errors import AutoplanError
from autoplan.common.files.rule_files import from_here
from autoplan.patches.kernels import on_reference_path

CANNOT_TRAVEL = (pickle.PicklingError, AttributeError, TypeError)  # raised by pickle: lambdas, local classes, locks
_GRACE = 5.0  # seconds in which a rank may end by itself
_LAST_WORDS = 1.0  # seconds after a failure in which another rank may turn out to be lost


def start_and_collect(target: Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout: float) -> list[Any]:
    """Start the ranks, wait for all or for the first failure, and return their results (see `run_processes`)."""
    try:
        job = packed((target, args))
    except CANNOT_TRAVEL as error:
        raise AutoplanError(
            f"{getattr(target, '__qualname__', target)!r} cannot be pickled for other processes: {error}",
            hint="use module-level functions (a lambda in a model cannot be pickled), or engine='threads'",
        ) from error
    if multiprocessing.current_process().daemon:  # Python forbids such a process to start others
        hint = "plan in the main process or in a non-daemonic one, and pass the plan on"
        raise AutoplanError("a daemonic process cannot start rank processes", hint=hint)
    context, places = process_context(), from_here()
    with tempfile.TemporaryDirectory(prefix="autoplan-ranks-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(world_size):
                receiving, sending = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main, args=(rank, world_size, folder, timeout, job, places, sending), daemon=True
                )
                try:
                    process.start()
                except BrokenPipeError as error:  # it ended while it imported the caller's main module
                    raise RankLost(rank, world_size, None) from error
                sending.close()
                processes.append(process)
                pipes.append(receiving)
            return _collect(pipes, processes, timeout)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                end_process(process, _GRACE)


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            hint = "every rank must issue the same collectives in the same order"
            raise RankTimeout(f"ranks {missing} of {len(pipes)} did not finish in {timeout:g} s", hint=hint)
        failed: list[tuple[float, int, Any]] = []
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, when, payload = _unpacked(pipes[rank].recv_bytes())
            except EOFError:
                raise _lost(rank, processes) from None
            if isinstance(payload, bytes):
                payload = pickle.loads(payload)
            if ok:
                results[rank] = payload
            else:
                failed.append((when, rank, payload))
        if failed:
            _refuse_lost(pipes, processes, {*results, *(rank for _, rank, _ in failed)})
            _, rank, cause = min(failed, key=lambda failure: failure[:2])
            if isinstance(cause, RankNotStarted):
                raise cause
            raise RankError(rank, len(pipes), cause)
    return [results[rank] for rank in range(len(pipes))]


def _lost(rank: int, processes: list[Any]) -> RankLost:
    processes[rank].join(_GRACE)
    return RankLost(rank, len(processes), processes[rank].exitcode)


def _refuse_lost(pipes: list[Connection], processes: list[Any], answered: set[int]) -> None:
    """Raise if a rank ended without an answer: then broken connections of other ranks are its consequence."""
    rest = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answered}
    deadline = time.monotonic() + _LAST_WORDS
    while rest and (ready := wait(list(rest), max(0.0, deadline - time.monotonic()))):
        for pipe in ready:
            rank = rest.pop(pipe)  # type: ignore[call-overload]
            try:
                pipes[rank].recv_bytes()
            except EOFError:
                raise _lost(rank, processes) from None


def _rank_main(
    rank: int, world_size: int, folder: str, timeout: float, job: bytes, places: list[str], pipe: Connection
) -> None:
    """Run one rank's process from start to end.

    The result is sent before the group is left: the others fail as soon as a rank disconnects, and the first to report
    counts as the cause.
    """
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller, who ends this process
    sys.path[:] = places
    gc.freeze()  # what the fork server imported stays: collections need not look at it
    try:
        result = _run(rank, world_size, folder, timeout, job)
        message = packed((True, time.monotonic(), result))
    except BaseException as error:  # raised by the caller
        message = packed((False, time.monotonic(), _sendable(error)))
    pipe.send_bytes(message)
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


def packed(value: Any) -> bytes:
    """Return a value pickled by torch: plain pickle writes tensors in an old format without 8-bit floats."""
    target = io.BytesIO()
    torch.save(value, target, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_Pickler))
    return target.getvalue()


class _Pickler(pickle.Pickler):
    """Also pickles modules with parametrizations (weight norm), whose class is generated: it is generated again."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, nn.Module) or not parametrize.is_parametrized(value):
            return NotImplemented
        # Without the hooks that read the names of old checkpoints, which cannot be pickled.
        state = {**value.__dict__, "_load_state_dict_pre_hooks": OrderedDict()}
        return _bare, (type(value).__mro__[1],), state, None, None, _parametrized_again


def _bare(kind: Any) -> Any:
    return kind.__new__(kind)


def _parametrized_again(module: nn.Module, state: dict[str, Any]) -> None:
    module.__dict__.update(state)
    parametrize._inject_new_class(module)
    names: Any = module.parametrizations
    for name in names:
        parametrize._inject_property(module, name)


def _unpacked(sent: bytes) -> Any:
    return torch.load(io.BytesIO(sent), weights_only=False)


def _sendable(error: BaseException) -> bytes | str:
    """Return the error itself if it survives pickling, else its text; torch's own and many users' errors do not."""
    text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    try:
        sent = pickle.dumps(error)
        again = pickle.loads(sent)
    except Exception:  # any class may fail in any way here, and the text is enough
        return text
    return sent if isinstance(error, AutoplanError) and str(again) == str(error) else text


def _run(rank: int, world_size: int, folder: str, timeout: float, job: bytes) -> Any:
    import torch.distributed as dist

    for loopback in [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")][:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store, timeout=timedelta(seconds=timeout))
    try:
        target, args = _unpacked(job)  # its classes are imported here, and importing runs the user's code
    except Exception as error:  # an import may raise anything
        name = f" {error.name!r}" if isinstance(error, ImportError) and error.name else ""
        raise RankNotStarted(
            f"a rank's process cannot import{name}, which the model needs: {type(error).__name__}: {error}",
            hint="make the module importable in a new process (add its folder to PYTHONPATH), or use engine='threads'",
        ) from error
    with on_reference_path(compiled=True):  # what a rank compiles is what runs
        result = target(rank, *args)
    dist.barrier()  # no rank leaves while another still needs it
    return result
