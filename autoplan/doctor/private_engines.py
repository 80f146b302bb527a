"""Undocumented names of engines and of FSDP2 that autoplan uses, each with a canary."""

from __future__ import annotations

import inspect
import logging
import threading
from functools import partial

import torch
from torch._C import _distributed_c10d as c10d
from torch._guards import detect_fake_mode
from torch._subclasses import fake_tensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _python_dispatch as dispatch

from autoplan.doctor.examine import Private, Table

FSDP = Table()
ENGINES = Table()
_STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
_WALKED = "a rank that skips an FSDP2 unit must still gather and free it"
_RANKS = "simulated ranks are threads in the process group of torch's own tests"
_FAKE = "models are recorded without storage for their weights"
_PG = "torch.testing._internal.distributed.multi_threaded_pg"

# The undocumented parts of FSDP2 that autoplan uses, with their canaries.


def _parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


@FSDP.hold("whether the caller requested zeros for unused parameters", f"{_STATE}._fsdp_param_groups")
def _zeros_for_unused() -> bool:
    """Return whether each parameter group keeps the choice under this name; torch before 2.13 has no such choice."""
    has_choice = "self.reduce_scatter_unused_params" in inspect.getsource(_fsdp_param_group.FSDPParamGroup.__init__)
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        return not has_choice
    return has_choice and getattr(_fsdp_state.FSDPState(), "_fsdp_param_groups", None) == []


@FSDP.hold(
    "in versions whose loop keeps it, the last gradient stays allocated until it is reduced; estimates count it",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.foreach_reduce",
)
def _tells_who_holds_gradients() -> bool:
    """Return whether either its own loop holds the last gradient, or it is passed a function that does."""
    function = _fsdp_collectives.foreach_reduce
    loops = "torch.chunk(unsharded_grad," in inspect.getsource(function)
    return loops != ("prepare_reduce_scatter_inputs" in inspect.signature(function).parameters)


# The undocumented parts of torch behind simulated ranks and behind tensors without storage, with their canaries.


_KERNELS = {  # with the arguments that an estimate passes
    "_grouped_mm": ("self", "mat2"),
    "_scaled_dot_product_flash_attention": ("query", "key", "value", "dropout_p", "is_causal"),
    "_scaled_dot_product_efficient_attention": ("query", "key", "value", "attn_bias", "compute_log_sumexp"),
    "_scaled_dot_product_attention_math": ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}


def _takes(name: str, names: tuple[str, ...]) -> bool:
    arguments = getattr(torch.ops.aten, name).default._schema.arguments
    return tuple(argument.name for argument in arguments[: len(names)]) == names


@ENGINES.hold(f"{_RANKS}; collectives are counted there; waiting ranks wake when one fails", f"{_PG}.ProcessLocalGroup")
@ENGINES.hold(
    "waiting ranks are released if one fails",
    f"{_PG}.ProcessLocalGroup._terminate",
    f"{_PG}.ProcessLocalGroup._coll_lock",
    f"{_PG}.ProcessLocalGroup._cur_coll_on_pgs",
)
def _threaded_group() -> bool:
    group = threaded.ProcessLocalGroup
    first = {
        "allreduce": ["self", "tensor_list"],
        "allgather": ["self", "output_tensors", "input_tensor"],
        "reduce_scatter": ["self", "output_tensor", "scatter_list"],
        "broadcast": ["self", "tensor_list"],
        "alltoall": ["self", "output_tensor_list", "input_tensor_list"],
    }
    same = all(_parameters(getattr(group, name))[: len(parameters)] == parameters for name, parameters in first.items())
    shared = isinstance(group._terminate, threading.Event) and hasattr(group._coll_lock, "acquire")
    return same and shared and isinstance(group._cur_coll_on_pgs, dict) and callable(group.reset)


@ENGINES.hold("waiting ranks are woken", f"{_PG}.Collective._start_cond", f"{_PG}.Collective._done_cond")
def _collective() -> bool:
    collective = threaded.Collective(2, None, None)
    conditions = collective._start_cond, collective._done_cond
    waiting = all(isinstance(condition, threading.Condition) for condition in conditions)
    return waiting and _parameters(threaded.Collective.join) == ["self", "rank", "data"]


@ENGINES.hold(_FAKE, "torch._subclasses.fake_tensor.FakeTensorMode", "torch._subclasses.fake_tensor.FakeTensor")
@ENGINES.hold("known integers are computed for real", "torch._subclasses.fake_tensor.unset_fake_temporarily")
def _fake() -> bool:
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        number, inside = torch.tensor(3), torch.ones(2)
        with fake_tensor.unset_fake_temporarily():
            real = torch.ones(2)
    is_fake = isinstance(inside, fake_tensor.FakeTensor)
    return is_fake and not isinstance(real, fake_tensor.FakeTensor) and number.constant.item() == 3


@ENGINES.hold("distinguishes a tensor without storage from a real one", "torch._subclasses.fake_tensor.is_fake")
def _is_fake() -> bool:
    with fake_tensor.FakeTensorMode():
        inside = torch.ones(2)
    return bool(fake_tensor.is_fake(inside) and not fake_tensor.is_fake(torch.ones(2)))


@ENGINES.hold(
    "a tensor without storage is made from its shape", "torch._subclasses.fake_tensor.in_kernel_invocation_manager"
)
def _made_by_shape() -> bool:
    with fake_tensor.FakeTensorMode() as mode:
        base = torch.ones(2, 3)
        with fake_tensor.in_kernel_invocation_manager(mode):
            empty = torch.empty_strided((3, 2), (1, 3), device="meta")
            empty.set_(base.untyped_storage(), 0, (3, 2), (1, 3))
        fake = fake_tensor.FakeTensor(mode, empty, torch.device("cpu"))
        same = fake.untyped_storage()._cdata == base.untyped_storage()._cdata
        return bool(same and fake.shape == (3, 2) and fake.device.type == "cpu" and mode.cache_enabled in (False, True))


@ENGINES.hold("no messages are sent for tensors without values", "torch._guards.detect_fake_mode")
def _detected() -> bool:
    with fake_tensor.FakeTensorMode() as mode:
        return detect_fake_mode() is mode


@ENGINES.hold("identifies a storage while it is alive", "torch.UntypedStorage._cdata")
def _same_storage() -> bool:
    tensor = torch.ones(4)
    part, whole, other = (x.untyped_storage()._cdata for x in (tensor[1:], tensor, torch.ones(4)))
    return bool(part == whole != other)


@ENGINES.hold(
    "raised when Python asks a fake tensor for its value", "torch._subclasses.fake_tensor.DataDependentOutputException"
)
@ENGINES.hold(
    "raised when Python asks for a size that depends on tensor values",
    "torch._subclasses.fake_tensor.DynamicOutputShapeException",
)
def _depends_on_data() -> bool:
    """Return whether asking for a value, or for a value-dependent number of rows, raises these errors."""
    mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        unknown = torch.ones(2) > 0
        for ask, error in (
            (lambda: bool(unknown.any()), fake_tensor.DataDependentOutputException),
            (lambda: unknown.nonzero(), fake_tensor.DynamicOutputShapeException),
        ):
            try:
                ask()
            except error:
                continue
            return False
    return bool(logging.getLogger("torch._subclasses.fake_tensor"))


class _Seeing(dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@ENGINES.hold("observes every op of a run", "torch.utils._python_dispatch.TorchDispatchMode")
@ENGINES.hold(
    "reads a number from a tensor without recording it", "torch.utils._python_dispatch._disable_current_modes"
)
def _dispatch() -> bool:
    with _Seeing() as mode:
        with dispatch._disable_current_modes():
            torch.ones(1)
        nobody = not mode.seen
        torch.ones(1) + 1
    return nobody and mode.seen[-1] == "aten.add.Tensor"


FSDP.there(
    {
        "torch.distributed.fsdp.FSDPModule._get_fsdp_state(self)": "FSDP2's state of a unit",
        f"{_STATE}._pre_forward(self, module, args, kwargs)": _WALKED,
        f"{_STATE}._post_forward(self, module, input, output)": _WALKED,
    }
)
# The propagator's only method in which DTensor runs ops on full tensors without storage.
_META = "torch.distributed.tensor._sharding_prop.ShardingPropagator:_propagate_tensor_meta_non_cached(self, op_schema)"
_BARRIER = "_store_based_barrier(rank, store, group_name, rendezvous_count, timeout, …)"
ENGINES.there(
    {
        _META: "simulated ranks call it one at a time",
        f"torch.distributed.distributed_c10d.{_BARRIER}": "subgroups may be created in any order",
        "torch.distributed.distributed_c10d._world": f"{_RANKS}, and a world for each",
    }
)
ENGINES += [
    Private(
        f"{_PG}.ThreadLocalWorld",
        f"{_RANKS}, and a world for each",
        lambda: hasattr(threaded.ThreadLocalWorld(), "pg_map"),
    ),
    Private(
        "torch._C._distributed_c10d",
        "an in-memory store, and per-thread group names",
        lambda: callable(c10d.HashStore) and callable(vars(c10d)["_set_thread_isolation_mode"]),
    ),
    Private(
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        "a world of fake ranks, for dry runs",
        lambda: isinstance(FakeStore(), torch.distributed.Store),
    ),
    Private(
        "torch.distributed.distributed_c10d._resolve_process_group",
        "whether a group is a fake one",
        lambda: "group_name" in str(distributed_c10d._resolve_process_group.__doc__),
    ),
]
ENGINES.extend(
    Private(f"torch.ops.aten.{name}", "an estimate records the kernel that a GPU runs", partial(_takes, name, names))
    for name, names in _KERNELS.items()
)
