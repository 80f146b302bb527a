"""Weights from safetensors: every rank reads its own rows, whatever the layout; what does not fit is named."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sharded_toys import TOYS, build, inputs, reference, rule, set_group, shard_parameters, tp_mesh
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError, PlanMismatchError, SourceError
from autoplan.execute.collectives import RankGroup
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.execute.weights.files import CheckpointFiles, runs
from autoplan.execute.weights.load import load_weights

LOADABLE = [name for name in TOYS if name != "split buffer"]  # its unsaved buffer has a test of its own


def saved(name: str, folder: Path, files: int = 1) -> Path:
    """The toy's checkpoint, ties stored once, in one file or in several with an index."""
    state, seen = {}, set()
    for key, value in build(name).state_dict().items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            state[key] = value
    if files == 1:
        save_file(state, folder / "model.safetensors")
        return folder
    where = {key: f"part-{i % files}.safetensors" for i, key in enumerate(state)}
    for file in set(where.values()):
        save_file({key: value for key, value in state.items() if where[key] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def sharded(name: str, tp: int, device: str = "meta", fsdp: bool = False) -> Any:
    model = build(name, device)
    mesh = init_device_mesh("cpu", (2, tp), mesh_dim_names=("dp", "tp")) if fsdp else tp_mesh(tp)
    shard_parameters(model, mesh["tp"], TOYS[name][1])
    set_group(model, RankGroup.of(mesh["tp"]))
    return fully_shard(model, mesh=mesh["dp"]) if fsdp else model


# ------------------------------------------------------------------------------------------------------------ filling


@pytest.mark.parametrize(("name", "tp"), [(name, 2) for name in LOADABLE] + [("tied", 4), ("shared key", 4)])
@pytest.mark.parametrize("files", [1, 3])
def test_a_meta_model_is_filled(name: str, tp: int, files: int, tmp_path: Path) -> None:
    saved(name, tmp_path, files)

    def rank_body(rank: int) -> None:
        model = sharded(name, tp)
        if name == "foreign readers":
            model = model.double()
        result = load_weights(model, tmp_path)
        assert not result.missing_keys and not result.unexpected_keys
        for fqn, value in full_tensors(model).items():
            assert torch.equal(value, build(name).state_dict()[fqn]), fqn
        torch.testing.assert_close(model(inputs(name)).detach(), reference(name)[0])
        if name == "tied":
            assert model.head.weight is model.embed.weight

    run_ranks(rank_body, tp)


@pytest.mark.parametrize("name", ["mlp", "packed", "shared key", "tied"])
@pytest.mark.parametrize("forward_first", [False, True])
def test_a_model_under_fsdp_is_filled(name: str, forward_first: bool, tmp_path: Path) -> None:
    saved(name, tmp_path)

    def rank_body(rank: int) -> Any:
        model = sharded(name, 2, "cpu" if forward_first else "meta", fsdp=True)
        if forward_first:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(2)
            model(inputs(name))
        load_weights(model, tmp_path)
        model(inputs(name)).square().sum().backward()
        return full_tensors(model), full_tensors(model, grads=True)

    for weights, gradients in run_ranks(rank_body, 4):
        for fqn, expected in reference(name)[1].items():
            assert torch.equal(weights[fqn], build(name).state_dict()[fqn])
            torch.testing.assert_close(gradients[fqn], expected)


def test_a_real_model_is_overwritten_in_place_and_cast(tmp_path: Path) -> None:
    saved("packed", tmp_path)

    def rank_body(rank: int) -> None:
        model = sharded("packed", 2, "cpu").to(torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        before = [id(parameter) for parameter in model.parameters()]
        load_weights(model, tmp_path)
        assert before == [id(parameter) for parameter in model.parameters()]
        for fqn, value in full_tensors(model).items():
            assert value.dtype == torch.float32
            torch.testing.assert_close(value, build("packed").state_dict()[fqn].float())

    run_ranks(rank_body, 2)


def test_a_rank_reads_only_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("packed", tmp_path)
    sizes: list[tuple[str, int]] = []
    read = CheckpointFiles.read

    def counted(self: CheckpointFiles, key: str, rows: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        tensor = read(self, key, rows)
        sizes.append((key, tensor.numel()))
        return tensor

    monkeypatch.setattr(CheckpointFiles, "read", counted)
    run_ranks(lambda rank: load_weights(sharded("packed", 2), tmp_path), 2)
    assert sorted(sizes) == sorted([("qkv.weight", 48), ("qkv.bias", 8), ("out.weight", 24)] * 2)


@pytest.mark.parametrize("rows", [[0, 1, 2], [4, 5, 9, 10], list(range(0, 200, 2)), [7, 3, 4], []])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_are_read_in_order_whatever_their_runs(rows: list[int], dim: int, tmp_path: Path) -> None:
    whole = torch.arange(200 * 201.0).view(200, 201)
    save_file({"x": whole, "scalar": torch.tensor(3.0)}, tmp_path / "model.safetensors")
    files = CheckpointFiles(tmp_path)
    assert torch.equal(files.read("x", {dim: rows}), whole.index_select(dim, torch.tensor(rows, dtype=torch.long)))
    assert torch.equal(
        files.read("x", {dim: rows, 1 - dim: range(3, 9)}), files.read("x", {dim: rows}).narrow(1 - dim, 3, 6)
    )
    assert files.read("scalar").item() == 3.0 and files.shape("x") == (200, 201)
    assert [row for run in runs(rows) for row in run] == rows


def test_base_model_prefixes_may_be_lacking_or_too_much(tmp_path: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 4)

    weights = {"weight": torch.randn(4, 2), "bias": torch.randn(4)}
    bare, prefixed = tmp_path / "bare", tmp_path / "prefixed"
    for folder, prefix in ((bare, ""), (prefixed, "model.")):
        folder.mkdir()
        save_file({prefix + key: value for key, value in weights.items()}, folder / "model.safetensors")

    def rank_body(rank: int) -> None:
        for folder in (bare, prefixed):
            for cls in (Wrapped, lambda: nn.Linear(2, 4)):
                with torch.device("meta"):
                    model = cls()
                inner = "model." if isinstance(model, Wrapped) else ""
                shard_parameters(model, tp_mesh(2), {inner + "weight": rule(0, "4!")})
                load_weights(model, folder)
                assert torch.equal(full_tensors(model)[inner + "weight"], weights["weight"])

    run_ranks(rank_body, 2)


# ----------------------------------------------------------------------------------------------------------- refusals


def on_one_rank(name: str, folder: Path, **options: Any) -> Any:
    return run_ranks(lambda rank: load_weights(sharded(name, 1, "cpu"), folder, **options), 1)[0]


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    state = {key.replace("up.", "upp."): value for key, value in build("mlp").state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")

    def rank_body(rank: int) -> None:
        model = sharded("mlp", 2)
        with pytest.raises(PlanMismatchError) as caught:
            load_weights(model, tmp_path)
        assert "2 missing: up.weight (nearest: upp.weight)" in str(caught.value)
        assert "2 unexpected: upp.bias (nearest: up.bias)" in str(caught.value)
        assert all(parameter.is_meta for parameter in model.parameters())

    run_ranks(rank_body, 2)
    result = on_one_rank("mlp", tmp_path, strict=False)
    assert sorted(result.missing_keys) == ["up.bias", "up.weight"]
    assert sorted(result.unexpected_keys) == ["upp.bias", "upp.weight"]


@pytest.mark.parametrize("strict", [True, False])
def test_other_shapes_are_refused(strict: bool, tmp_path: Path) -> None:
    save_file(build("mlp").state_dict() | {"up.weight": torch.ones(9, 6)}, tmp_path / "model.safetensors")
    with pytest.raises(AutoplanError, match=r"up.weight is \[9, 6\], but the model expects \[8, 6\]"):
        on_one_rank("mlp", tmp_path, strict=strict)


def test_folders_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no folder"):
        CheckpointFiles(tmp_path / "absent")
    with pytest.raises(SourceError, match="holds no .safetensors"):
        CheckpointFiles(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SourceError, match="only pickle files"):
        CheckpointFiles(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"garbage!")
    with pytest.raises(SourceError, match="not a safetensors file"):
        CheckpointFiles(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
    with pytest.raises(SourceError, match="1 are missing: part-1.safetensors"):
        CheckpointFiles(tmp_path)
    index.write_text("[]")
    with pytest.raises(SourceError, match="not a safetensors index"):
        CheckpointFiles(tmp_path)


def test_unsaved_buffers_of_plain_modules_are_named(tmp_path: Path) -> None:
    saved("split buffer", tmp_path)

    def rank_body(rank: int) -> None:
        with pytest.raises(AutoplanError, match="passing are in no checkpoint, and"):
            load_weights(sharded("split buffer", 2), tmp_path)
        model = sharded("split buffer", 2)
        model.passing = build("split buffer").passing[2 * rank : 2 * rank + 2]
        load_weights(model, tmp_path)
        torch.testing.assert_close(model(inputs("split buffer")).detach(), reference("split buffer")[0])

    run_ranks(rank_body, 2)


# ------------------------------------------------------------------------------------------------- transformers' models


def tiny(name: str, **more: Any) -> Any:
    """A small model of a transformers class, with its config."""
    import transformers

    config = getattr(transformers, f"{name}Config")(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=64,
        **more,
    )
    return getattr(transformers, f"{name}ForCausalLM"), config


@pytest.mark.parametrize(
    ("name", "more", "rules"),
    [
        ("Llama", {"tie_word_embeddings": True}, {"model.layers.0.self_attn.q_proj.weight": rule(0, "4!*4")}),
        (
            "Mixtral",
            {"num_local_experts": 3, "num_experts_per_tok": 2},
            {
                "model.layers.1.mlp.experts.gate_up_proj": rule(1, "24!|24!"),
                "model.layers.1.mlp.experts.down_proj": rule(2, "24!"),
            },
        ),
    ],
)
def test_a_transformers_checkpoint_fills_its_meta_model(name: str, more: Any, rules: Any, tmp_path: Path) -> None:
    """Rotary frequencies are rebuilt, ties kept, per-expert entries merged by transformers' own rules."""
    cls, config = tiny(name, **more)
    torch.manual_seed(0)
    original = cls(config).eval()
    original.save_pretrained(tmp_path)

    def rank_body(rank: int) -> None:
        with torch.device("meta"):
            model = cls(config)
        shard_parameters(model, tp_mesh(2), rules)
        state = torch.get_rng_state()
        result = load_weights(model, tmp_path)
        assert not result.missing_keys and not result.unexpected_keys and torch.equal(state, torch.get_rng_state())
        expected = dict(original.named_parameters(remove_duplicate=False))
        found = full_tensors(model)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[fqn], expected[fqn]) for fqn in expected)
        buffers = dict(model.named_buffers())
        for fqn, buffer in original.named_buffers():
            assert torch.equal(buffers[fqn], buffer), fqn
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == bool(config.tie_word_embeddings)

    run_ranks(rank_body, 2)


def test_a_checkpoint_without_one_expert_is_refused(tmp_path: Path) -> None:
    cls, config = tiny("Mixtral", num_local_experts=3, num_experts_per_tok=2)
    cls(config).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    lacking = [key for key in state if "layers.1" in key and "experts.2" in key][:1]
    save_file({key: value for key, value in state.items() if key not in lacking}, tmp_path / "model.safetensors")

    def rank_body(rank: int) -> None:
        with torch.device("meta"):
            model = cls(config)
        shard_parameters(model, tp_mesh(1), {})
        with pytest.raises(AutoplanError, match="layers.1.*experts"):
            load_weights(model, tmp_path)

    assert lacking
    run_ranks(rank_body, 1)


def test_a_base_models_checkpoint_lacks_the_head_and_its_prefix(tmp_path: Path) -> None:
    cls, config = tiny("Llama", tie_word_embeddings=True)
    original = cls(config)
    original.model.save_pretrained(tmp_path)

    def rank_body(rank: int) -> None:
        with torch.device("meta"):
            model = cls(config)
        shard_parameters(model, tp_mesh(2), {})
        load_weights(model, tmp_path)
        for fqn, value in full_tensors(model).items():
            assert torch.equal(value, original.get_parameter(fqn)), fqn

    run_ranks(rank_body, 2)
