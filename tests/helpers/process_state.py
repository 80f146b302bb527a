"""What a process has for everybody: the state that others read, and that no call of autoplan may leave changed."""

from __future__ import annotations

import builtins
import gc
import io
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

__all__ = ["GENERATORS", "changes", "process_state"]

# What a run that draws random numbers changes
GENERATORS = ("torch generator", "cuda generator", "numpy generator", "python generator")


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    return [name for name, value in before.items() if after[name] != value]


def process_state() -> dict[str, Any]:
    """All of it, by name, as values that can be compared and sent to other processes."""
    return _random() | _of_python() | _of_torch()


def _random() -> dict[str, Any]:
    state: Any = numpy.random.get_state()
    cuda = torch.cuda.get_rng_state().tolist() if torch.cuda.is_initialized() else []
    return {
        "initial_seed": torch.initial_seed(),
        "torch generator": torch.get_rng_state().numpy().tobytes(),
        "cuda generator": cuda,
        "numpy generator": (state[1].tobytes(), *state[2:]),
        "python generator": random.getstate(),
    }


def _of_python() -> dict[str, Any]:
    handlers = {number: _named(signal.getsignal(number)) for number in signal.valid_signals()}
    loud = {name: logging.getLogger(name).level for name in ("", "torch", "transformers", "py.warnings")}
    return {
        "excepthook": _named(sys.excepthook),
        "unraisablehook": _named(sys.unraisablehook),
        "displayhook": _named(sys.displayhook),
        "threading.excepthook": _named(threading.excepthook),
        "warnings filters": [str(one) for one in warnings.filters],
        "showwarning": _named(warnings.showwarning),
        "environment": dict(os.environ),
        "signal handlers": handlers,
        "logging": (logging.root.manager.disable, loud),
        "streams": tuple(isinstance(one, io.StringIO) for one in (sys.stdout, sys.stderr)),
        "folder and paths": (os.getcwd(), list(sys.path), len(sys.meta_path)),
        "tracing": (_named(sys.gettrace()), _named(sys.getprofile()), _named(threading.gettrace())),
        "recursion limit": sys.getrecursionlimit(),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "locale": locale.setlocale(locale.LC_ALL),
        "import": _named(builtins.__import__),
        "numpy errors": numpy.geterr(),
        "numpy printing": str(numpy.get_printoptions()),
        "switch interval": sys.getswitchinterval(),
    }


def _of_torch() -> dict[str, Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    kinds = ("cpu", "cuda")
    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "backward in threads": torch.autograd.is_multithreading_enabled(),
        "anomaly mode": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()),
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "mkldnn": torch.backends.mkldnn.flags.__module__ and torch._C._get_mkldnn_enabled(),
        "matmul": (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32),
        "sdp": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        "function modes": len(_get_current_function_mode_stack()),
        "dispatch modes": len(_get_current_dispatch_mode_stack()),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "printing": str(vars(torch._tensor_str.PRINT_OPTS)),
        "process group": torch.distributed.is_initialized(),
        "flush denormal": torch.tensor([1e-310], dtype=torch.float64).mul(1).item() != 0,
    }


def _named(thing: Any) -> str:
    """Something that can be sent: a function by its name and where it is."""
    return f"{getattr(thing, '__qualname__', thing)} {id(thing)}" if callable(thing) else str(thing)
