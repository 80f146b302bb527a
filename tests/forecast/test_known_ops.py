"""An op that was run before makes what torch makes of tensors without storage."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from autoplan.capture.dry_run import fake_mode
from autoplan.common.torch_internals import storage_id
from autoplan.forecast.recording.known_ops import KnownOps

_OPS = torch.ops.aten


@pytest.mark.parametrize("kept", [False, True], ids=["once", "again"])
@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (_OPS.mm.default, ((4, 6), (6, 8))),
        (_OPS.t.default, ((4, 6),)),
        (_OPS.split.Tensor, ((4, 6), 2)),
        (_OPS.add_.Tensor, ((4, 6), (6,))),
        (_OPS.add.Tensor, ((4, 6), 1)),
        (_OPS.add.Tensor, ((4, 6), 1.0)),
        (_OPS.native_layer_norm.default, ((4, 6), [6], (6,), (6,), 1e-5)),
        (_OPS.cat.default, ([(4, 6), (2, 6)],)),
        (_OPS.sum.dim_IntList, ((4, 6), [0])),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_a_known_op_makes_what_torch_makes(op: Any, arguments: Any, kept: bool) -> None:
    def made(mode: Any, run: Any, dtype: torch.dtype) -> list[Any]:
        def tensor(value: Any) -> Any:
            if isinstance(value, list) and isinstance(value[0], tuple):
                return [tensor(one) for one in value]
            return torch.zeros(value, dtype=dtype) if isinstance(value, tuple) else value

        given = [tensor(value) for value in arguments]
        storages = [storage_id(one) for one in given if isinstance(one, torch.Tensor)]
        result = run(op, tuple(given), {})
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        return [(one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one.untyped_storage().nbytes(),
                 [storage_id(one) == other for other in storages],
                 any(one is other for other in given)) for one in results]  # fmt: skip

    for dtype, _ in product((torch.float32, torch.int64, torch.bfloat16), range(2 if kept else 1)):
        if dtype is torch.int64 and op is _OPS.native_layer_norm.default:
            continue
        with fake_mode() as mode:
            expected = made(mode, lambda op, args, kwargs: op(*args, **kwargs), dtype)
            known = KnownOps(mode)
            assert made(mode, known.run, dtype) == expected
