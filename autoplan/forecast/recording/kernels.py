"""Kernels of a GPU in the place of CPU references that keep far more, and the floating-point operations of an op.

`KERNELS` is the table of torch's own; those of other libraries are files in rules/kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from autoplan.common.errors import IndivisibleError
from autoplan.common.torch_internals import efficient_attention, flash_attention, is_fake, outside_of_modes, schema_of
from autoplan.forecast.recording.fused import KernelFile, kernel_files
from autoplan.patches.kernels import KERNEL_STAND_INS, OptionalKernel, optional_kernels
from autoplan.patches.patched import Place, patched

_ATEN = torch.ops.aten
_FLASH_WIDTH = 256  # of a head
_ALIGNED = 8  # rows of a mask; aten/src/ATen/native/transformers/attention.cpp, preprocess_mask pads others


@dataclass(frozen=True)
class Kernel:
    """`called`: in the model's code; `recorded`: the op in its place; `keeps`: for backward; `source`: who says so."""

    called: str
    recorded: str
    keeps: str
    source: str


KERNELS = (
    Kernel(
        "scaled_dot_product_attention, heads of one width, no dropout", "_scaled_dot_product_flash_attention_for_cpu",
        "queries, keys, values, output, one float32 for each row", "torch/_meta_registrations.py: as for CUDA",
    ),
    Kernel(
        "scaled_dot_product_attention with fewer key heads, or dropout", "_scaled_dot_product_flash_attention",
        "queries, keys, values, output, one float32 for each row",
        "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_head_dim_size_flash: widths are equal, up to 256",
    ),
    Kernel(
        "scaled_dot_product_attention, values narrower than keys (latent attention), or with a mask and dropout",
        "_scaled_dot_product_efficient_attention", "queries, keys, values, output, one float32 for each row",
        "sdp_utils.cpp, can_use_mem_efficient_attention: widths may differ",
    ),
    Kernel(
        "scaled_dot_product_attention whose mask is not contiguous along keys (a bias with heads as its last dim)",
        "_scaled_dot_product_attention_math", "all scores and probabilities, in float32 of half precision",
        "sdp_utils.cpp, check_last_dim_stride_equals_1_dense; attention.cpp, _scaled_dot_product_attention_math",
    ),
    Kernel(
        "grouped_mm in another dtype than bfloat16", "_grouped_mm", "both operands",
        "aten/src/ATen/native/cuda/GroupedBlas.cpp: other dtypes fall back to a product for each group",
    ),
    Kernel(
        "dropout in training, not in place", "native_dropout", "a mask of one byte for each number",
        "aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable; cuda/Dropout.cu: a CPU keeps noise in the dtype",
    ),
    Kernel(
        "backward of an embedding of more than 3,072 indices", "embedding_dense_backward",
        "nothing; it holds a copy of a gradient that is not contiguous, sorted indices, and sums of parts in float32",
        "aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu: embedding_backward_cuda_kernel",
    ),
)  # fmt: skip
_SORTED_FROM, _ROWS_OF_A_PART = 3073, 10  # of an embedding's indices


class _OnAGpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, result = kwargs or {}, None
        if func is F.scaled_dot_product_attention:
            result = _fused(*args, **kwargs)
        elif func in (F.dropout, torch.dropout):
            result = _dropped(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _fused(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor | None:  # fmt: skip
    """None where the op of a CPU keeps what that of a GPU keeps."""
    tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
    if any(isinstance(tensor, DTensor) or tensor.dim() != 4 for tensor in tensors) or not (
        query.is_meta or is_fake(query)
    ):
        return None  # a step that runs for real
    alike, shared = query.shape[-1] == value.shape[-1], query.shape[1] != key.shape[1]
    if attn_mask is not None and attn_mask.stride(-1) != 1 and attn_mask.shape[-1] != 1:
        unfused: torch.Tensor = _ATEN._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return unfused
    if alike and not dropout_p and not shared:
        return None
    if alike and attn_mask is None and query.shape[-1] <= _FLASH_WIDTH:
        whole = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
    elif shared:
        return None
    else:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        whole = efficient_attention(query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale)
    mixed: torch.Tensor = whole[0]
    return mixed


def _dropped(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
) -> torch.Tensor | None:
    """Drop out as CUDA does; None if a CPU does the same. `train`: as torch.dropout calls `training`."""
    drops = training and train and not inplace and 0 < p < 1
    if not drops or isinstance(input, DTensor) or not (input.is_meta or is_fake(input)) or not input.numel():
        return None
    dropped: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return dropped


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype)
    if any(stride % _ALIGNED for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = F.pad(mask, (0, _ALIGNED - width % _ALIGNED))[..., :width]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


@dataclass
class _Recording:
    """The recording of this thread. `whole`: no layer is sharded, so kernels that take weights of layers run too."""

    whole: bool
    work: Callable[[int, str], None] | None
    used: set[str] = field(default_factory=set)


_recording: ContextVar[_Recording | None] = ContextVar("autoplan_kernels", default=None)


@contextmanager
def kernels_of_a_gpu(
    model: nn.Module, whole: bool = False, work: Callable[[int, str], None] | None = None
) -> Iterator[set[str]]:
    """Record a GPU's kernels for what `model` runs; gives the libraries of those met. `work` is told operations and
    dtype."""
    files = kernel_files()
    there = ((place, files.get((place.package, place.function))) for place in optional_kernels(model))
    places = [Place(place.home, place.name, _stand_in(place, kernel)) for place, kernel in there if kernel is not None]
    mine = _Recording(whole, work)
    token = _recording.set(mine)
    try:
        with _OnAGpu(), patched(KERNEL_STAND_INS, places):
            yield mine.used
    finally:
        _recording.reset(token)


def _stand_in(optional: OptionalKernel, kernel: KernelFile) -> Callable[[Any], Any]:
    def instead_of(original: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            mine = _recording.get()
            bound = kernel.bound(args, kwargs) if mine is not None and (mine.whole or not kernel.of_layers) else None
            if mine is None or bound is None or not _without_storage(bound[0].values()):
                return original(*args, **kwargs)
            mine.used.add(kernel.package)
            return kernel.run(*bound, mine.work)

        return called

    return instead_of


def _without_storage(values: Any) -> bool:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(is_fake(tensor) and not isinstance(tensor, DTensor) for tensor in tensors)


def grouped_in_any_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Products of groups in any dtype: torch knows their shapes in bfloat16 alone. None: torch is asked."""
    if func is not _ATEN._grouped_mm.default:
        return None
    left, right = args[:2]
    aligned = 16 // left.element_size()
    for step in (max(left.stride()[-2:]), max(right.stride()[-2:])):
        if step % aligned:
            raise IndivisibleError(
                f"experts' matrices are {step} numbers wide on a rank; grouped_mm takes multiples of {aligned} "
                f"({str(left.dtype).removeprefix('torch.')}, 16 bytes)",
                hint="take fewer ranks, or another implementation of experts",
            )
    if left.dtype == torch.bfloat16:
        return None
    groups = left.shape[:-2] if left.dim() == right.dim() else ()
    if left.dim() == right.dim() == 2:
        groups = (args[2] if len(args) > 2 else kwargs["offs"]).shape
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]))


def held_meanwhile(func: Any, args: tuple[Any, ...]) -> int:
    """Bytes that an op of a GPU holds while it runs, beside what it is given and what it makes."""
    if func is not _ATEN.embedding_dense_backward.default:
        return 0
    gradient, indices, rows = args[0], args[1], int(args[2])
    copied = 0 if gradient.is_contiguous() else gradient.nbytes
    if indices.numel() < _SORTED_FROM:
        return copied
    order, sums = indices.nbytes, max(4, gradient.element_size()) * gradient.shape[-1]
    segments = min(indices.numel(), rows)
    parts = indices.numel() // _ROWS_OF_A_PART + segments
    sorting = 5 * order  # the indices in order and where they were, before and after; and their places
    summing = 3 * order + (2 * segments + parts) * indices.element_size() + parts * sums
    return int(copied + max(sorting, summing))


def _grouped(args: Any, kwargs: Any, result: Any) -> int:
    """Rows of each expert times its matrix: every row is multiplied once."""
    left, other = args[0], args[1]
    if left.dim() == other.dim() == 2:  # the gradient of the matrices
        return 2 * prod(left.shape) * int(other.shape[-1])
    rows, matrix = (left, other) if left.dim() == 2 else (other, left)
    return 2 * prod(rows.shape) * int(matrix.shape[-1])


_SCORES = "_scaled_dot_product_"
_MORE = {"_grouped_mm": _grouped, "grouped_mm_fallback": _grouped}


def is_attention(func: Any) -> bool:
    """Return whether it is a fused kernel of attention, forward or backward."""
    return bool(schema_of(func).name.partition("::")[2].startswith(_SCORES))


def layer_of(func: Any, result: Any) -> Literal["", "linear", "experts"]:
    """Return the kind of layer of an op with operations: their products are of matrices, attention's have more dims."""
    if schema_of(func).name.partition("::")[2] in _MORE:
        return "experts"
    return "linear" if isinstance(result, torch.Tensor) and result.dim() == 2 else ""


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Zero for what only moves data or works element by element."""
    name = schema_of(func).name.partition("::")[2]
    if is_attention(func):  # torch's count all scores of causal ones; those of 2.11 know no fewer key heads
        # Two products of the forward; of backward the scores again, and two for either product
        arguments = dict(zip((parameter.name for parameter in schema_of(func).arguments), args, strict=False)) | kwargs
        query, key, value = arguments["query"], arguments["key"], arguments["value"]
        wide, narrow = (3, 2) if func.overloadpacket.__name__.endswith("_backward") else (1, 1)
        scores = prod(query.shape[:-1]) * key.shape[-2]
        flops = 2 * scores * (wide * query.shape[-1] + narrow * value.shape[-1])
        keys = key.shape[-2]
        unseen = min(query.shape[-2], keys) if arguments.get("is_causal") else 0  # by the first, half of it on average
        return int(flops) * (2 * keys - unseen) // (2 * keys)
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        with outside_of_modes():
            return int(formula(*args, **kwargs, out_val=result))
    more = _MORE.get(name)
    return 0 if more is None else more(args, kwargs, result)
