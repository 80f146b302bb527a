"""A library's conversions on a rank's rows: the same numbers as of whole tensors, and no whole tensor is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.core_model_loading as library
from safetensors.torch import save_file
from sharded_toys import tp_mesh
from transformers import LlamaConfig

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.execute.weights.files import CheckpointFiles
from autoplan.execute.weights.key_matching import follow
from autoplan.execute.weights.load import load_weights
from autoplan.hf.checkpoints import _MOVING, _Converted


def of_library(name: str, *given: int, **named: Any) -> Any:
    """An operation of transformers, or its name where the installed version has none that takes these arguments."""
    try:
        return getattr(library, name)(*given, **named)
    except (AttributeError, TypeError):
        return name


QKV = ["q.weight", "k.weight", "v.weight"]
STACK = ["e.*.gate.weight", "e.*.up.weight"]
# operations, source patterns, target patterns, shapes by key
CASES: dict[str, tuple[list[Any], list[str], list[str], dict[str, tuple[int, ...]]]] = {
    "a fused matrix": ([library.Chunk(0)], ["qkv.weight"], QKV, {"qkv.weight": (24, 6)}),
    "of columns": ([library.Chunk(1)], ["qkv.weight"], QKV, {"qkv.weight": (6, 24)}),
    "a fused vector": ([library.Chunk(0)], ["qkv.weight"], QKV, {"qkv.weight": (24,)}),
    "of unlike parts": ([of_library("Split", 0)], ["qkv.weight"], QKV, {"qkv.weight": (24, 6)}),
    "rotary rows": (
        [of_library("PermuteForRope", permute_layer_names=["q.weight"])],
        ["q.weight"],
        ["q.weight"],
        {"q.weight": (16, 6)},
    ),
    "fused and rotary": (
        [library.Chunk(0), of_library("PermuteForRope", permute_layer_names=["q.weight", "k.weight"])],
        ["qkv.weight"],
        QKV,
        {"qkv.weight": (48, 6)},
    ),
    "turned experts": ([library.Transpose(1, 2)], ["e.gate"], ["e.gate"], {"e.gate": (4, 6, 8)}),
    "square experts": ([library.Transpose(1, 2)], ["e.gate"], ["e.gate"], {"e.gate": (4, 6, 6)}),
    "gate and up in turn": ([of_library("Interleave", 1)], ["e.gate"], ["e.gate"], {"e.gate": (4, 8, 6)}),
    "and apart": ([of_library("Interleave", 1), library.Chunk(1)], ["e.x"], ["e.gate", "e.up"], {"e.x": (4, 8, 6)}),
    "side by side": ([library.Concatenate(0)], QKV, ["qkv.weight"], dict.fromkeys(QKV, (8, 6))),
    "side by side in columns": (
        [library.Concatenate(1)], QKV, ["qkv.weight"],
        {"q.weight": (4, 6), "k.weight": (4, 2), "v.weight": (4, 3)},
    ),
    "a list of experts": (
        [library.MergeModulelist(0), library.Concatenate(1)], STACK, ["e.gate_up"],
        {f"e.{n}.{part}.weight": (4, 6) for part in ("gate", "up") for n in range(3)},
    ),
    "experts of two kinds": (
        [library.ErnieFuseAndSplitTextVisionExperts(0, 1)], STACK, ["text.e.gate_up", "vision.e.gate_up"],
        {f"e.{n}.{part}.weight": (4, 6) for part in ("gate", "up") for n in range(4)},
    ),
    "a convolution of patches": (
        [library.Conv3dToLinear(3, (2, 4, 4))], ["p.weight"], ["p.weight"], {"p.weight": (8, 3, 2, 4, 4)},
    ),
    "and back": ([library.LinearToConv3d(3, (2, 4, 4))], ["p.weight"], ["p.weight"], {"p.weight": (8, 96)}),
    "a stack taken apart": ([library.SplitModulelist(0)], ["e.gate"], ["e.*.gate"], {"e.gate": (4, 6, 8)}),
}  # fmt: skip


class Asked:
    """A model that has a config, and matrices of the sizes that a Split asks for."""

    config = LlamaConfig(num_attention_heads=4)

    def get_parameter(self, name: str) -> torch.Tensor:
        return torch.empty({"q.weight": 12, "k.weight": 8, "v.weight": 4}[name], 6)


def converted(case: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    operations, sources, targets, shapes = CASES[case]
    if missing := [operation for operation in operations if isinstance(operation, str)]:
        pytest.skip(f"the installed transformers has no such {missing[0]}")
    rule = library.WeightConverter(sources, targets, operations=operations)
    conversion = _Converted(rule, targets[0])
    for key, shape in shapes.items():
        pattern = next(one for one in sources if one == key or "*" in one and one.rsplit(".*.")[-1] in key)
        conversion.add(targets[0], key, pattern, shape)
    return conversion, shapes


def test_every_operation_that_moves_numbers_has_a_case() -> None:
    operations = [operation for operations, *_ in CASES.values() for operation in operations]
    tried = {operation if isinstance(operation, str) else type(operation).__name__ for operation in operations}
    assert tried == _MOVING


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_whole(case: str) -> None:
    conversion, shapes = converted(case)
    stored = {key: torch.randn(shape) for key, shape in shapes.items()}
    read: list[int] = []

    def part(key: str, rows: Mapping[int, Sequence[int]]) -> torch.Tensor:
        found = _rows(stored[key], rows)
        read.append(found.numel())
        return found

    def make(source: Any) -> dict[str, torch.Tensor]:
        return conversion.make(Asked(), source)

    whole, moved = make(stored.__getitem__), follow(make, shapes)
    assert moved is not None and moved.keys() == whole.keys()
    for name, one in moved.items():
        assert torch.equal(one.piece(part, {}), whole[name])
        for dim, size in enumerate(whole[name].shape):
            for wanted in (range(size // 2), range(size // 2, size), [size - 1, 0]):
                read.clear()
                asked = {dim: list(wanted)}
                found = one.piece(part, asked)
                assert torch.equal(found, _rows(whole[name], asked)), (name, dim, wanted)
                if isinstance(wanted, range):
                    assert sum(read) <= 2 * found.numel(), (name, dim)


def _rows(tensor: torch.Tensor, rows: Mapping[int, Sequence[int]]) -> torch.Tensor:
    for dim, held in rows.items():
        tensor = tensor.index_select(dim, torch.tensor(list(held), dtype=torch.long))
    return tensor


def test_entries_of_unlike_ranks_are_put_together_whole() -> None:
    assert follow(lambda read: {"both": read("a") + read("b")}, {"a": (4, 6), "b": (6,)}) is None


@pytest.mark.parametrize(("turned", "experts"), [(True, 24), (False, 24), (False, 8)])
def test_experts_of_qwen3_vl_are_read_by_rows(
    turned: bool, experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its published stacks are turned, and newer ones are not; the library tells them by sizes."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    config = _small(Qwen3VLMoeConfig, experts)
    torch.manual_seed(0)
    original = Qwen3VLMoeForConditionalGeneration(config).eval()
    state = {key: value.clone() for key, value in original.state_dict().items() if key != "lm_head.weight"}
    for key in state:
        if turned and ".experts." in key:
            state[key] = state[key].transpose(1, 2).contiguous()
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config.to_json_string())
    loaded = Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    if not all(torch.equal(loaded[key], value) for key, value in original.state_dict().items()):
        pytest.skip("the installed transformers does not load this checkpoint itself")
    plan = autoplan.plan(original, tp_size=2, prove="none")
    most: dict[str, int] = {}
    plain = CheckpointFiles.read

    def counted(self: CheckpointFiles, key: str, rows: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        found = plain(self, key, rows)
        most[key] = max(most.get(key, 0), found.numel())
        return found

    monkeypatch.setattr(CheckpointFiles, "read", counted)

    def rank_body(rank: int) -> None:
        with torch.device("meta"):
            model = Qwen3VLMoeForConditionalGeneration(config)
        autoplan.parallelize(model, tp_mesh(2), plan=plan, check=False)
        load_weights(model, tmp_path)
        found = full_tensors(model)
        for name, value in original.named_parameters():
            assert torch.equal(found[name], value), name

    run_ranks(rank_body, 2)
    stacks = [key for key in most if ".experts." in key]
    assert stacks and all(most[key] == state[key].numel() // 2 for key in stacks)


def _small(config: type, experts: int) -> Any:
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    text = dict(sizes, num_key_value_heads=2, head_dim=8, moe_intermediate_size=experts, num_experts=4,
                vocab_size=64, num_experts_per_tok=2, rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                                                        "mrope_section": [2, 1, 1]})  # fmt: skip
    vision = dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=16, patch_size=4,
                  deepstack_visual_indexes=[0], num_position_embeddings=16)  # fmt: skip
    return config(text_config=text, vision_config=vision, tie_word_embeddings=True)
