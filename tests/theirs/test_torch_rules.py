"""torch's own check of sharding rules, applied to what `autoplan/ops` says of each op of torch's op database.

An op is asked of alone: its tensors are activations that nothing made. Along each axis that no event forbids to split,
its record says where the axis comes out, or that ranks sum. torch's `strategy_validation` shards the operands,
runs the op, puts the results together and compares. Left to our own law (`tests/ops`) are ops that a rank runs in
another way than as written, ops that are told sizes, and axes that are not the leading factor of a dim. OPS= names some
ops, SAMPLES= says how many samples of each.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from op_samples import database, name_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.utils import _pytree as pytree

from autoplan.analyse.infer import Axes, Shards, infer_axes
from autoplan.axes.events import FORBIDDING
from autoplan.axes.terms import Term, factors, find, leaves
from autoplan.ops import op_record
from autoplan.ops.records.answers import Reduction, Shows
from autoplan.ops.records.on_shards import NO_SIZES, SplitOp, as_written
from autoplan.values import Op, Ref, TensorInfo, Trace

RANKS = 2
SAMPLES = int(os.environ.get("SAMPLES", "4"))
NAMES = os.environ.get("OPS", "").split()


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    """torch's module, in the world of fake ranks that it wants."""
    warnings.simplefilter("ignore")
    validation = pytest.importorskip(
        "torch.distributed.tensor._ops.strategy_validation",
        reason="NOT TRIED: this torch has no strategy_validation (2.13 has)",
    )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield validation
    dist.destroy_process_group()


def _traced(function: Any, args: Any, kwargs: Any, result: Any) -> Trace | None:
    """The call as a trace of one op; None where it returns something that is no tensor, or is written in place."""
    infos: list[TensorInfo] = []

    def noted(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            infos.append(TensorInfo(tuple(value.shape), str(value.dtype).removeprefix("torch."), "activation"))
            return Ref(len(infos) - 1)
        if isinstance(value, list | tuple):
            return tuple(noted(item) for item in value)
        plain = value is None or isinstance(value, bool | int | float | str | complex)
        return value if plain else str(value).removeprefix("torch.")

    results = result if isinstance(result, list | tuple) else (result,)
    tensors = [one for one in pytree.tree_leaves((args, kwargs, results)) if isinstance(one, torch.Tensor)]
    sparse = any(one.layout != torch.strided for one in tensors)
    if function._schema.is_mutable or sparse or not all(isinstance(one, torch.Tensor) for one in results):
        return None
    name = function._schema.name.removeprefix("aten::")
    taken, named = noted(args), {key: noted(value) for key, value in kwargs.items()}
    op = Op(name, function._overloadname, taken, named, tuple(noted(one) for one in results), "")
    return Trace(tuple(infos), (op,), (), (), {})


def _placed(terms: tuple[Term, ...], axis: Term) -> Any:
    """How torch says that a tensor's axis is split; None where it cannot, since other factors come before it."""
    dims = [dim for dim, term in enumerate(terms) if axis in {find(leaf) for leaf in leaves(term)}]
    if not dims:
        return Replicate()
    first = find(factors(terms[dims[0]])[0])
    return Shard(dims[0]) if len(dims) == 1 and first is axis and axis.size % RANKS == 0 else None


def _claims(trace: Trace) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Placements of operands and results, for every axis that may be split."""
    axes: Axes = infer_axes(trace)
    op = trace.ops[0]
    record = op_record(op.name)
    made = {ref.id for ref in op.outputs}
    given = [tensor for tensor in range(len(trace.tensors)) if tensor not in made]
    known = {find(leaf) for tensor in given for term in axes.of(tensor) for leaf in leaves(term)}
    for axis in sorted(known, key=lambda term: term.id):
        alone = axis.size == RANKS and record.shows is Shows.RESHAPED  # squeeze() drops what is of size 1 on a rank
        if axis.size == 1 or alone or axis.events & FORBIDDING:
            continue
        inputs = tuple(_placed(axes.of(tensor), axis) for tensor in given)
        outputs = tuple(_placed(axes.of(ref.id), axis) for ref in op.outputs)
        sums = record.reduces(SplitOp(Shards(trace, axes, {axis: "!"}, RANKS), op))
        if sums is Reduction.SUM and not (record.product and record.product.bias is not None):
            outputs = tuple(Partial("sum") if isinstance(one, Replicate) else one for one in outputs)
        elif sums is not None or record.runs is not as_written or record.sizes is not NO_SIZES:
            continue
        if None not in inputs and None not in outputs:
            yield inputs, outputs


@pytest.mark.parametrize("op", [op for op in database() if not NAMES or name_of(op) in NAMES], ids=name_of)
def test_what_is_said_of_an_op_holds(op: Any, theirs: Any, record_property: Any) -> None:
    from torch.distributed._local_tensor import LocalTensorMode

    counts: Counter[str] = Counter()
    if op.name in theirs.SKIP_OPS or not op.supports_dtype(torch.float64, "cpu"):
        pytest.skip("random, or of no floats")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (RANKS,))
    samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
    for number, sample in enumerate(samples[:: max(1, len(samples) // SAMPLES)]):
        for function, args, kwargs, result in theirs.get_aten_op_for_sample(op.op, sample, op.name).all_ops:
            result = result if function._schema.is_mutable else function(*args, **kwargs)  # later ops wrote to it
            trace = _traced(function, args, kwargs, result)
            truth = None if trace is None else theirs._check_ground_truth(result)
            if trace is None or truth is None or any(0 in info.shape for info in trace.tensors):
                continue
            for placed in _claims(trace):
                with LocalTensorMode(frozenset(range(RANKS))):
                    held, why = theirs.validate_aten_combination(function, args, kwargs, truth, placed, RANKS, mesh)
                counts[str(held)] += 1
                shapes = [list(info.shape) for info in trace.tensors]
                assert held is not False, f"{function} sample {number} {shapes}: {placed}: {why}"
    record_property("claims", dict(counts))
    if not counts["True"]:
        pytest.skip("nothing that torch can try is said of it")
