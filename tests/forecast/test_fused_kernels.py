"""Fused kernels are recorded as what they keep: held against what the public autograd functions save, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, Mamba2Config, MambaConfig, Qwen3NextConfig

from autoplan.common.errors import AutoplanError
from autoplan.forecast.asked import Asked
from autoplan.forecast.devices import load_device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.recording.fused import KernelFile, kernel_files
from autoplan.forecast.recording.kernels import KERNELS
from autoplan.forecast.step import Steps
from autoplan.hf.source import resolve

HALF, WIDE = torch.bfloat16, torch.float32
B, L, H, P, N, G, CHUNK = 2, 512, 8, 64, 128, 1, 256  # batch, length, heads, width, states, groups, chunk


def _tensor(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def _conv() -> dict[str, Any]:
    return {"x": _tensor(B, 96, L), "weight": _tensor(96, 4), "bias": _tensor(96)}


def _selective(gate: bool) -> dict[str, Any]:
    found = {"u": _tensor(B, 96, L), "delta": _tensor(B, 96, L), "A": _tensor(96, 16, dtype=WIDE),
             "B": _tensor(B, 16, L), "C": _tensor(B, 16, L), "D": _tensor(96, dtype=WIDE)}  # fmt: skip
    return found | ({"z": _tensor(B, 96, L)} if gate else {})


def _chunks() -> dict[str, Any]:
    return {"x": _tensor(B, L, H, P), "dt": _tensor(B, L, H), "A": _tensor(H, dtype=WIDE), "B": _tensor(B, L, G, N),
            "C": _tensor(B, L, G, N), "chunk_size": CHUNK, "D": _tensor(H), "dt_bias": _tensor(H)}  # fmt: skip


def _delta(heads: int, gates: tuple[int, ...]) -> dict[str, Any]:
    return {"q": _tensor(B, L, 4, P), "k": _tensor(B, L, 4, P), "v": _tensor(B, L, heads, N),
            "g": _tensor(B, L, heads, *gates, dtype=WIDE), "beta": _tensor(B, L, heads),
            "use_qk_l2norm_in_kernel": True}  # fmt: skip


ROWS = B * L
CASES: list[tuple[str, Callable[[], dict[str, Any]], int, tuple[int, ...]]] = [
    # kernel, arguments, bytes that it makes and saves (its arguments are there anyway), shape of what comes out
    ("causal_conv1d_fn", _conv, 0, (B, 96, L)),
    # x: states of each chunk of 2,048, pairs, as A is; without a gate its result is saved, and lives as the result
    ("selective_scan_fn", lambda: _selective(False), B * 96 * 1 * 32 * 4, (B, 96, L)),
    ("selective_scan_fn", lambda: _selective(True), B * 96 * 1 * 32 * 4 + B * 96 * L * 2, (B, 96, L)),
    # dA_cumsum, float32; the result
    ("mamba_chunk_scan_combined", _chunks, ROWS * H * 4, (B, L, H, P)),
    # queries and keys, normalised, and a float32 for each row; the sums of gates; the inverse, 64 wide
    ("chunk_gated_delta_rule", lambda: _delta(8, ()), 2 * (ROWS * 4 * P * 2 + ROWS * 4 * 4) + ROWS * 8 * (4 + 64 * 2),
     (B, L, 8, N)),
    # the same, gates for each channel, and two matrices
    ("chunk_kda", lambda: _delta(4, (P,)), 2 * (ROWS * 4 * P * 2 + ROWS * 4 * 4) + ROWS * 4 * (P * 4 + 2 * 64 * 2),
     (B, L, 4, N)),
]  # fmt: skip


def _kernel(name: str) -> KernelFile:
    return next(one for (_, kernel), one in kernel_files().items() if kernel == name)


@pytest.mark.parametrize(
    ("name", "arguments", "made", "shape"), CASES, ids=[f"{c[0]} {i}" for i, c in enumerate(CASES)]
)
def test_what_is_kept_is_what_the_public_function_saves(
    name: str, arguments: Callable[[], dict[str, Any]], made: int, shape: tuple[int, ...]
) -> None:
    kept: dict[int, torch.Tensor] = {}
    with FakeTensorMode():
        given = arguments()
        named, dims = _kernel(name).bound((), given) or ({}, {})
        with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.setdefault(id(one), one), lambda one: one):
            out = _kernel(name).run(named, dims, None)
        out = out[0] if isinstance(out, tuple) else out
        there = {one.untyped_storage()._cdata for one in (*given.values(), out) if isinstance(one, torch.Tensor)}
        extra = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in kept.values()}
        assert sum(size for key, size in extra.items() if key not in there) == made
        assert out.shape == shape
        out.sum().backward()
        for value in given.values():
            if isinstance(value, torch.Tensor):
                assert value.grad is not None and value.grad.shape == value.shape and value.grad.dtype == value.dtype


def test_kernels_of_whole_mixers_save_what_goes_in() -> None:
    """They compute the convolution, the scan and the norm again: no more than the result of the scan is saved."""
    with FakeTensorMode():
        inner, width = H * P, 2 * H * P + 2 * G * N + H
        given = {"zxbcdt": _tensor(B, L, width), "conv1d_weight": _tensor(inner + 2 * G * N, 4),
                 "conv1d_bias": _tensor(inner + 2 * G * N), "dt_bias": _tensor(H), "A": _tensor(H, dtype=WIDE),
                 "D": _tensor(H), "chunk_size": CHUNK, "rmsnorm_weight": _tensor(inner),
                 "outproj_weight": _tensor(96, inner), "headdim": P, "ngroups": G}  # fmt: skip
        kernel = _kernel("mamba_split_conv1d_scan_combined")
        named, dims = kernel.bound((), given) or ({}, {})
        assert kernel.of_layers and dims["n"] == N
        assert kernel.run(named, dims, None).shape == (B, L, 96)


def test_arguments_of_another_form_run_the_reference() -> None:
    kernel = _kernel("mamba_chunk_scan_combined")
    assert kernel.bound((), _chunks() | {"B": torch.empty(B, L, N)}) is None
    with pytest.raises(AutoplanError, match="a kernel dim is"):
        KernelFile("k", "p", "s", {}, {}, (), (), {}, flops=("f(x)",)).operations({"x": 1})


def test_every_kernel_has_its_source() -> None:
    assert {one.kernel for one in kernel_files().values()} >= {name for name, *_ in CASES}
    assert all(one.source and one.saves and one.returns and one.flops for one in kernel_files().values())
    assert all(one.source and one.keeps for one in KERNELS)


MAMBA2 = Mamba2Config(hidden_size=256, num_hidden_layers=2, vocab_size=512, num_heads=8, head_dim=64, n_groups=1,
                      dtype=HALF)  # fmt: skip
MAMBA = MambaConfig(hidden_size=256, num_hidden_layers=2, vocab_size=512, dtype=HALF)
NEXT = Qwen3NextConfig(hidden_size=256, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, vocab_size=512,
                       head_dim=32, num_attention_heads=4, num_key_value_heads=2, linear_num_value_heads=8,
                       linear_num_key_heads=4,
                       moe_intermediate_size=64, shared_expert_intermediate_size=64, intermediate_size=128,
                       layer_types=["linear_attention"] * 2, dtype=HALF)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "tp"),
    [
        pytest.param(MAMBA2, 1, marks=pytest.mark.long),
        (MAMBA2, 2),
        (NEXT, 2),
        pytest.param(MAMBA, 2, marks=pytest.mark.slow),
    ],
    ids=["mamba2 whole", "mamba2", "delta rule", "mamba"],
)
def test_scans_are_recorded_as_on_a_gpu(config: Any, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference keeps several times as much, and the estimate says which libraries it counts on."""
    steps = Steps(resolve(config))
    asked = Asked((("tp", tp),), 1, 256, updates=False)
    fused = estimate_with(steps, asked, load_device("h100"))
    monkeypatch.setattr("autoplan.forecast.recording.kernels.kernel_files", dict)
    plain = estimate_with(Steps(resolve(config)), asked, load_device("h100"))
    activations = [one.peak - one.parts.overhead - one.parts.weights - one.parts.optimizer for one in (fused, plain)]
    assert activations[0] < activations[1] / 1.5
    assert "fused kernels" in fused.notes[0] and not plain.notes
    assert {(s.dim, s.kind, s.number, s.bytes) for s in fused.messages} == {
        (s.dim, s.kind, s.number, s.bytes) for s in plain.messages
    }


def test_dropout_keeps_a_byte_for_each_number() -> None:
    """GPT-2's layer: 38.07 bytes for each of its widths and tokens with noise in bfloat16, and 2 masks fewer bytes."""
    known = {"n_embd": 512, "n_head": 8, "vocab_size": 1024, "n_positions": 1024, "dtype": HALF}
    kept = []
    for rate in (0.1, 0.0):
        few, many = (
            estimate_with(
                Steps(resolve(GPT2Config(**known, n_layer=n, resid_pdrop=rate, attn_pdrop=0.0, embd_pdrop=0.0))),
                Asked((("dp_shard", 1),), 1, 1024, updates=False), load_device("h100"),
            ).parts.kept for n in (3, 4)
        )  # fmt: skip
        kept.append((many - few) / (1024 * 512))
    assert kept[0] - kept[1] == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_mask_that_is_not_contiguous_along_keys_is_recorded_unfused(contiguous: bool) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    from autoplan.forecast.recording.kernels import _OnAGpu

    called: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode():
        q = torch.zeros(1, 4, 16, 8, dtype=torch.bfloat16)
        bias = torch.zeros(16, 16, 4, dtype=torch.bfloat16).permute(2, 0, 1)[None]
        with _OnAGpu(), Names():
            torch.nn.functional.scaled_dot_product_attention(q, q, q, bias.contiguous() if contiguous else bias, 0.1)
    assert any("softmax" in name for name in called) is not contiguous
