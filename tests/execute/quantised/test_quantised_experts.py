"""Experts that a checkpoint stores one by one: packed and dequantised shards are the checkpoint's, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import METHODS, MODELS, built, checkpoint, random_state
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.conventions import Join
from autoplan.common.errors import AutoplanError
from autoplan.execute.weights.files import CheckpointFiles
from autoplan.execute.weights.key_matching import Joined

IDS = torch.arange(12).view(2, 6)
NAMES = ["fp8 blocks", "fp8 tensor", "awq", "gptq act order", "ct fp8 tensor", "ct packed, zero points",
         "ct packed act order", "ct nvfp4", "fp4 experts"]  # fmt: skip
QUICK = {("fp8 tensor", 2, 1), ("awq", 2, 1), ("gptq act order", 2, 2), ("ct packed, zero points", 4, 1),
         ("ct nvfp4", 2, 2), ("fp4 experts", 2, 1), ("ct fp8 tensor", 2, 1)}  # fmt: skip
CASES = [
    pytest.param(name, tp, ep, marks=() if (name, tp, ep) in QUICK else pytest.mark.slow)
    for name in NAMES
    for tp, ep in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 4))
]


def _on_ranks(made: autoplan.Plan, body: Any) -> None:
    def rank_body(rank: int) -> None:
        body(init_device_mesh("cpu", (made.ranks,), mesh_dim_names=("tp",)))

    run_ranks(rank_body, made.ranks)


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_experts_one_by_one(name: str, tp: int, ep: int, tmp_path: Path) -> None:
    """Plain shards, packed shards, what these compute, and what they save."""
    config = MODELS["experts"](METHODS[name])
    made = autoplan.plan(config, tp_size=tp, ep_size=ep, prove="none")
    assert any(".experts." in weight.name for weight in made.packed)
    plain = checkpoint(config, made, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.3.up_proj." in key for key in stored)
    whole = autoplan.packed_model(built(config, "meta"), made)
    autoplan.load_weights(whole, tmp_path)
    expected = whole(IDS).logits.detach()
    assert torch.isfinite(expected).all()

    def body(mesh: Any) -> None:
        model = autoplan.parallelize(built(config, "meta"), mesh, made)
        result = autoplan.load_weights(model, tmp_path, dequantise=True)
        assert not result.missing_keys and not result.unexpected_keys
        found = autoplan.full_tensors(model)
        assert all(torch.equal(found[key], value.float()) for key, value in plain.items())
        model = autoplan.packed_model(built(config, "meta"), made)
        model = autoplan.parallelize(model, mesh, made, gather_logits=True)
        autoplan.load_weights(model, tmp_path)
        torch.testing.assert_close(model(IDS).logits.detach(), expected, rtol=1e-4, atol=1e-4)
        autoplan.save_weights(model, tmp_path / "saved")

    _on_ranks(made, body)
    _same(load_file(tmp_path / "saved" / "model.safetensors"), stored)


def _loaded_and_saved(config: Any, made: Any, folder: Path, plain: dict[str, torch.Tensor]) -> None:
    """Dequantised shards of all ranks are the plain tensors; packed ones are saved in `folder`/saved."""

    def body(mesh: Any) -> None:
        model = autoplan.parallelize(built(config, "meta"), mesh, made)
        autoplan.load_weights(model, folder, dequantise=True)
        found = autoplan.full_tensors(model)
        assert all(torch.equal(found[key], value.float()) for key, value in plain.items())
        model = autoplan.parallelize(autoplan.packed_model(built(config, "meta"), made), mesh, made)
        autoplan.load_weights(model, folder)
        autoplan.save_weights(model, folder / "saved")

    _on_ranks(made, body)


def _same(found: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    assert found.keys() == stored.keys()
    for key, value in stored.items():
        assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
        assert torch.equal(found[key].float(), value.float()), key


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), pytest.param(4, 1, marks=pytest.mark.slow), (4, 4)])
def test_stacks_in_mxfp4(tp: int, ep: int, tmp_path: Path) -> None:
    """gpt-oss stores its experts as stacks, outputs before inputs; its plain ones lie the other way round."""
    from transformers import GptOssConfig

    config = GptOssConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, num_local_experts=4, num_experts_per_tok=2, vocab_size=96, sliding_window=8, pad_token_id=0,
        architectures=["GptOssForCausalLM"], layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    config._experts_implementation = "eager"
    config.quantization_config = {"quant_method": "mxfp4"}
    made = autoplan.plan(config, tp_size=tp, ep_size=ep, prove="none")
    cut = {tensor.name: tensor.dim for weight in made.packed for tensor in weight.tensors}
    assert cut["down_proj_blocks"] == cut["down_proj_scales"] == (0 if ep > 1 else 2)
    plain = checkpoint(config, made, tmp_path, listed=False)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.down_proj_blocks"].shape == (4, 64, 4, 16)

    _loaded_and_saved(config, made, tmp_path, plain)
    _same(load_file(tmp_path / "saved" / "model.safetensors"), stored)


@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        ("ct fp8 channel", 2, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("ct packed, zero points", 4, 1), ("awq", 2, 1), ("gptq act order", 4, 1))
        ),
    ],
)
def test_stacks_that_are_turned(name: str, tp: int, ep: int, tmp_path: Path) -> None:
    """Llama 4's hold inputs before outputs, and the library lists them nowhere; tools write entries."""
    config = MODELS["turned"](METHODS[name])
    made = autoplan.plan(config, tp_size=tp, ep_size=ep, prove="none")
    plain = checkpoint(config, made, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any(".experts.3.up_proj." in key for key in stored)

    _loaded_and_saved(config, made, tmp_path, plain)
    _same(load_file(tmp_path / "saved" / "model.safetensors"), stored)


def test_names_that_the_library_changes(tmp_path: Path) -> None:
    """Mixtral's checkpoints: block_sparse_moe.experts.0.w1.qweight."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, num_local_experts=4, vocab_size=96, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    config.quantization_config = METHODS["awq"]
    made = autoplan.plan(config, tp_size=2, prove="none")
    whole = autoplan.packed_model(built(config, "meta"), made)
    torch.manual_seed(3)
    state = random_state(whole)
    save_file(state, tmp_path / "model.safetensors")
    autoplan.load_weights(whole, tmp_path)  # stacks, as this model holds them
    autoplan.save_weights(whole, tmp_path / "public")
    keys = load_file(tmp_path / "public" / "model.safetensors")
    assert "model.layers.0.block_sparse_moe.experts.3.w1.qweight" in keys and not any("gate_up" in key for key in keys)

    def body(mesh: Any) -> None:
        model = autoplan.parallelize(autoplan.packed_model(built(config, "meta"), made), mesh, made)
        autoplan.load_weights(model, tmp_path / "public")
        _same(autoplan.full_tensors(model), state)

    _on_ranks(made, body)


def test_a_stack_is_dequantised_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward reads it once for each expert; nothing of it is kept afterwards."""
    from autoplan.execute.quantised import modules

    config = MODELS["experts"](METHODS["awq"])
    made = autoplan.plan(config, tp_size=1, prove="none")
    model = autoplan.packed_model(built(config, "meta"), made)
    state = random_state(model)
    model.load_state_dict(state, strict=False, assign=True)
    experts = model.model.layers[0].mlp.experts
    done, own = [], modules.dequantise

    def counted(weight: Any, *rest: Any) -> torch.Tensor:
        done.append(weight.parameter)
        return own(weight, *rest)

    monkeypatch.setattr(modules, "dequantise", counted)
    tokens = torch.randn(8, 64)
    routes = torch.arange(16).view(8, 2) % 4
    found = experts(tokens, routes, torch.full((8, 2), 0.5))
    assert sorted(done) == ["down_proj", "gate_up_proj"] and torch.isfinite(found).all()
    assert not experts.__dict__[modules._PLAIN]


# ------------------------------------------------------------------------------------------------------ what is read


def test_a_rank_reads_its_own_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MODELS["experts"](METHODS["awq"])
    made = autoplan.plan(config, tp_size=4, prove="none")
    checkpoint(config, made, tmp_path)
    read: list[int] = []
    own = CheckpointFiles.read

    def counted(self: Any, key: str, rows: Any = None) -> torch.Tensor:
        found = own(self, key, rows)
        if ".experts." in key and key.endswith(("qweight", "scales")):
            read.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(CheckpointFiles, "read", counted)
    sizes = {}
    for dequantise in (False, True):
        read.clear()

        def body(mesh: Any, dequantise: bool = dequantise) -> None:
            model = built(config, "meta")
            model = autoplan.parallelize(model if dequantise else autoplan.packed_model(model, made), mesh, made)
            autoplan.load_weights(model, tmp_path, dequantise=dequantise)

        _on_ranks(made, body)
        sizes[dequantise] = sum(read), max(read)
    stored = load_file(tmp_path / "model.safetensors")
    of = [value.numel() * value.element_size() for key, value in stored.items()
          if ".experts." in key and key.endswith(("qweight", "scales"))]  # fmt: skip
    for total, largest in sizes.values():
        assert total == sum(of) and largest == max(of) // 4  # by four ranks together


def _joined(shapes: list[tuple[int, ...]], count: int) -> tuple[Joined, dict[str, torch.Tensor]]:
    patterns = tuple("abc"[: len(shapes)])
    joined, kept = Joined("whole", Join(patterns, stacked=count > 0)), {}
    for pattern, shape in zip(patterns, shapes, strict=True):
        for number in range(max(count, 1)):
            key = f"{pattern}{number}"
            kept[key] = torch.randn(shape)

            def read(rows: Any = None, key: str = key) -> torch.Tensor:
                found = kept[key]
                for dim, held in (rows or {}).items():
                    found = found.index_select(dim, torch.tensor(list(held), dtype=torch.long))
                return found

            joined.add(key, pattern, read, shape)
    return joined, kept


@pytest.mark.parametrize(
    ("shapes", "count", "whole"),
    [
        ([(6, 4), (6, 4)], 3, (3, 12, 4)),  # rows
        ([(4, 6), (4, 6)], 3, (3, 4, 12)),  # columns
        ([(), ()], 3, (3, 2, 1)),  # one number each
        ([(1,), (1,)], 3, (3, 2)),
        ([(5,), (5,)], 3, (3, 2, 5)),  # one row each
        ([(6, 4)], 3, (3, 6, 4)),
        ([()], 3, (3,)),
        ([(8, 4), (2, 4), (2, 4)], 0, (12, 4)),  # side by side, of unequal sizes
    ],
)
def test_pieces_of_what_is_joined(shapes: list[tuple[int, ...]], count: int, whole: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    joined, kept = _joined(shapes, count)
    found = joined.piece(whole, {}, torch.float32)
    assert found.shape == whole and [form.shape for form in joined.forms(whole, kept.__getitem__)] == [whole]
    for dim, size in enumerate(whole):
        for rows in ([0], list(range(size)), list(range(0, size, 2)), [size - 1, 0], []):
            piece = joined.piece(whole, {dim: rows}, torch.float32)
            assert torch.equal(piece, found.index_select(dim, torch.tensor(rows, dtype=torch.long))), (dim, rows)


@pytest.mark.parametrize(
    ("shapes", "count", "whole", "said"),
    [
        ([(6, 4), (6, 4)], 3, (4, 12, 4), "4 tensors like a0, but the checkpoint has 3"),
        ([(6, 4), (6, 4)], 3, (3, 12, 5), r"a0 is \[6, 4\]: 6 such tensors do not form whole of \[3, 12, 5\]"),
        ([(6, 4), (5, 4)], 3, (3, 12, 4), "do not form whole"),
    ],
)
def test_what_does_not_make_the_whole(
    shapes: list[tuple[int, ...]], count: int, whole: tuple[int, ...], said: str
) -> None:
    with pytest.raises(AutoplanError, match=said):
        joined, kept = _joined(shapes, count)
        joined.forms(whole, kept.__getitem__)


@pytest.mark.parametrize("dequantise", [False, True])
@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (".experts.2.up_proj.", "is built from 4 tensors like .*up_proj.*, but the checkpoint has 3"),
        (".up_proj.", "is built from 2 kinds of tensors, but the checkpoint has no .*up_proj"),
    ],
)
def test_an_expert_is_absent(lost: str, said: str, dequantise: bool, tmp_path: Path) -> None:
    config = MODELS["experts"](METHODS["awq"])
    made = autoplan.plan(config, tp_size=2, prove="none")
    checkpoint(config, made, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({key: value for key, value in state.items() if lost not in key}, tmp_path / "model.safetensors")
    model = built(config, "meta")
    model = model if dequantise else autoplan.packed_model(model, made)
    with pytest.raises(AutoplanError, match=said):
        autoplan.load_weights(model, tmp_path, dequantise=dequantise)
    assert all(parameter.is_meta for parameter in model.parameters())
