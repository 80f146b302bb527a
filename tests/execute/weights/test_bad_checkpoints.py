"""Checkpoints that do not belong to the model, or are damaged: one clear error, and no number of the model changes."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import Snapshot
from mesh_toys import model_of
from safetensors.torch import load_file, save_file
from torch import nn

from autoplan.common.errors import AutoplanError
from autoplan.execute.weights.load import load_weights

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
State = dict[str, torch.Tensor]


class Kinds(nn.Module):
    """Numbers of every kind that checkpoints hold."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4, bias=False)
        self.small = nn.Parameter(torch.ones(3, 2).to(torch.float8_e4m3fn), requires_grad=False)
        self.turns = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        self.register_buffer("count", torch.ones(3, dtype=torch.int32))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))


def kinds() -> State:
    torch.manual_seed(1)
    return {name: value.clone() for name, value in Kinds().state_dict().items()}


def with_tensor(name: str, value: torch.Tensor | None) -> Callable[[Path], None]:
    """The checkpoint with one tensor more, less, or other than it should be."""

    def write(folder: Path) -> None:
        state = {key: one for key, one in kinds().items() if key != name}
        save_file(state if value is None else state | {name: value}, folder / WHOLE)

    return write


def with_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file(kinds(), folder / WHOLE)
        (folder / WHOLE).write_bytes(change((folder / WHOLE).read_bytes()))

    return write


def with_header(header: Any) -> Callable[[Path], None]:
    """A file whose header says this; a function changes the true one."""

    def change(data: bytes) -> bytes:
        size = struct.unpack("<Q", data[:8])[0]
        said = header(json.loads(data[8 : 8 + size])) if callable(header) else header
        text = said if isinstance(said, bytes) else json.dumps(said).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size :]

    return with_bytes(change)


def with_index(index: Any) -> Callable[[Path], None]:
    """Two files, and an index: text, data, or a function of the right `weight_map`."""

    def write(folder: Path) -> None:
        state = kinds()
        where = {key: f"part-{number % 2}.safetensors" for number, key in enumerate(state)}
        for file in set(where.values()):
            save_file({key: value for key, value in state.items() if where[key] == file}, folder / file)
        said = {"weight_map": index(where)} if callable(index) else index
        (folder / INDEX).write_bytes(said if isinstance(said, bytes) else json.dumps(said).encode())

    return write


def entry(name: str, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda header: header | {name: header[name] | changes}


def elsewhere(file: str) -> Callable[[Path], None]:
    """An index that leads to a file outside of its folder, which is there."""

    def write(folder: Path) -> None:
        folder.joinpath("below").mkdir()
        save_file(kinds(), folder / "outside.safetensors")
        with_index(lambda where: dict.fromkeys(where, file.replace("HERE", str(folder))))(folder)

    return write


def nothing(folder: Path) -> None:
    """An empty folder."""


def of_files(**files: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        for name, data in files.items():
            (folder / name.replace("__", ".")).write_bytes(data)

    return write


def twice(folder: Path) -> None:
    save_file(kinds(), folder / "a.safetensors")
    save_file(kinds(), folder / "b.safetensors")


def two_indexes(folder: Path) -> None:
    with_index(dict)(folder)
    (folder / "other.safetensors.index.json").write_text("{}")


def a_folder_as_file(folder: Path) -> None:
    (folder / WHOLE).mkdir()


UP = torch.ones(6, 4)
CASES: dict[str, Callable[[Path], None]] = {
    "missing weight": with_tensor("up.weight", None),
    "missing bias": with_tensor("up.bias", None),
    "missing buffer": with_tensor("count", None),
    "unexpected": with_tensor("sideways.weight", UP),
    "other rows": with_tensor("up.weight", torch.ones(5, 4)),
    "turned": with_tensor("up.weight", torch.ones(4, 6)),
    "one dim less": with_tensor("up.weight", torch.ones(24)),
    "one dim more": with_tensor("up.weight", torch.ones(1, 6, 4)),
    "a number": with_tensor("up.weight", torch.ones(())),
    "empty": with_tensor("up.weight", torch.ones(0, 4)),
    "integers for floats": with_tensor("up.weight", UP.to(torch.int64)),
    "bytes for floats": with_tensor("up.weight", UP.to(torch.uint8)),
    "bools for floats": with_tensor("up.weight", UP.to(torch.bool)),
    "fp8 for floats": with_tensor("up.weight", UP.to(torch.float8_e4m3fn)),
    "wide fp8 for floats": with_tensor("up.weight", UP.to(torch.float8_e5m2)),
    "scales for floats": with_tensor("up.weight", UP.to(torch.float8_e8m0fnu)),
    "complex for floats": with_tensor("up.weight", UP.to(torch.complex64)),
    "floats for fp8": with_tensor("small", torch.ones(3, 2)),
    "another fp8": with_tensor("small", torch.ones(3, 2).to(torch.float8_e5m2)),
    "bytes for fp8": with_tensor("small", torch.ones(3, 2).to(torch.uint8)),
    "floats for complex": with_tensor("turns", torch.ones(2)),
    "floats for integers": with_tensor("count", torch.ones(3)),
    "wide integers for narrow": with_tensor("count", torch.full((3,), 2**40)),
    "bools for integers": with_tensor("count", torch.ones(3, dtype=torch.bool)),
    "integers for bools": with_tensor("mask", torch.ones(3, dtype=torch.int64)),
    "cut short": with_bytes(lambda data: data[:-8]),
    "cut in the header": with_bytes(lambda data: data[:40]),
    "cut in the length": with_bytes(lambda data: data[:5]),
    "an empty file": with_bytes(lambda data: b""),
    "something behind": with_bytes(lambda data: data + b"rest"),
    "zeros": with_bytes(lambda data: bytes(len(data))),
    "text": with_bytes(lambda data: b"<html>404</html>"),
    "a huge header": with_bytes(lambda data: struct.pack("<Q", 2**62) + data[8:]),
    "a header of no JSON": with_header(b"{not json"),
    "a header that is a list": with_header([1, 2]),
    "a header of nothing": with_header({}),
    "an unknown dtype": with_header(entry("up.weight", dtype="F7")),
    "a dtype of other size": with_header(entry("up.weight", dtype="F64")),
    "negative sizes": with_header(entry("up.weight", shape=[-6, -4])),
    "sizes that overflow": with_header(entry("up.weight", shape=[2**62, 2**62])),
    "places that overlap": with_header(entry("up.weight", data_offsets=[0, 96])),
    "places outside": with_header(entry("up.weight", data_offsets=[10**12, 10**12 + 96])),
    "index of no JSON": with_index(b"{"),
    "index of no text": with_index(b"\xff\xfe\x00"),
    "index of a list": with_index([1]),
    "index without a map": with_index({"metadata": {}}),
    "index with an empty map": with_index({"weight_map": {}}),
    "index with a list as map": with_index({"weight_map": ["up.weight"]}),
    "index with numbers": with_index(lambda where: where | {"up.weight": 5}),
    "index with nothing": with_index(lambda where: where | {"up.weight": None}),
    "index that nests": with_index(b"[" * 100_000),
    "index with a key twice": with_index(b'{"weight_map": {"a": "part-0.safetensors", "a": "part-1.safetensors"}}'),
    "index of an absent file": with_index(lambda where: where | {"up.weight": "part-9.safetensors"}),
    "index of a pickle": with_index(lambda where: where | {"up.weight": "part-0.bin"}),
    "index of the wrong file": with_index(lambda where: where | {"up.weight": where["up.bias"]}),
    "index that lacks one": with_index(lambda where: {key: file for key, file in where.items() if key != "up.bias"}),
    "index above its folder": elsewhere("../outside.safetensors"),
    "index around its folder": elsewhere("below/../../x/outside.safetensors"),
    "index of an absolute path": elsewhere("HERE/outside.safetensors"),
    "two indexes": two_indexes,
    "the same in two files": twice,
    "an empty folder": nothing,
    "only pickles": of_files(pytorch_model__bin=b"\x80\x04."),
    "a folder in place of the file": a_folder_as_file,
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_checkpoint_is_one_clear_error_and_changes_nothing(case: str, tmp_path: Path) -> None:
    CASES[case](tmp_path)
    model = Kinds()
    before = Snapshot.before(model)
    with pytest.raises(AutoplanError) as error:
        load_weights(model, tmp_path)
    assert len(error.value.message) > 20
    assert before.differences(Snapshot.of(model)) == []


@pytest.mark.parametrize("folder", [5, None, "", "no such folder", "\0"])
def test_what_is_no_folder_is_one_clear_error(folder: Any) -> None:
    with pytest.raises(AutoplanError, match="folder"):
        load_weights(Kinds(), folder if folder != "" else "missing/")


def test_there_are_at_least_fifty_cases() -> None:
    assert len(CASES) >= 50


def test_the_cases_are_of_a_checkpoint_that_loads(tmp_path: Path) -> None:
    with_index(dict)(tmp_path)
    model = Kinds()
    load_weights(model, tmp_path)
    for name, value in kinds().items():
        assert torch.equal(model.state_dict()[name].to(torch.complex64), value.to(torch.complex64)), name


# ------------------------------------------------------------------------------------------------ experts


def without_an_expert(state: State) -> State:
    return {name: value for name, value in state.items() if not ("experts.1." in name and "layers.1." in name)}


def with_an_odd_expert(state: State) -> State:
    name = next(name for name in reversed(state) if "experts.1." in name)
    return state | {name: state[name][:-1].contiguous()}


def with_an_integer_expert(state: State) -> State:
    return {name: value.to(torch.int64) if "experts." in name else value for name, value in state.items()}


@pytest.mark.parametrize("spoil", [without_an_expert, with_an_odd_expert, with_an_integer_expert])
def test_a_failing_conversion_of_experts_changes_nothing(spoil: Callable[[State], State], tmp_path: Path) -> None:
    """All other tensors used to be filled before experts were put together."""
    model = model_of("mixtral")
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / WHOLE)
    assert any("experts.1." in name for name in state), "experts are saved one by one"
    save_file(spoil(state), tmp_path / WHOLE, metadata={"format": "pt"})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    before = Snapshot.before(model)
    with pytest.raises(AutoplanError):
        load_weights(model, tmp_path)
    assert before.differences(Snapshot.of(model)) == []
