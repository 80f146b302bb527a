"""The commands of the documents run as they are written, on a tiny model; what is not run is listed with the reason.

Only blocks are run, not what stands in the text. A synopsis is run without its optional parts, then with each of them;
of `a|b|c` each is run.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_doc_commands import DOCS, OTHERS, ROOT, commands_of
from transformers import LlamaConfig, MixtralConfig

import autoplan
from autoplan.cli.app import main

pytestmark = pytest.mark.long

NOT_RUN = {
    r"make ": "installs packages, or runs the tests themselves",
    r"pytest ": "the suite runs these tests",
    r"python tests/helpers/": "writes rules/README.md, or audits every shipped plan: the suite runs both",
    r"python tests/benchmarks/": "plans each type of a mapping: minutes",
    r"autoplan .*meta-llama/": "needs the hub",
    r"autoplan .*--engine gloo": "starts processes: tests/check runs it",
    r"autoplan .*--engine threads": "the default, which runs",
    r"autoplan choose (?!MODEL)": "prices every mesh of a large model: minutes; it runs on a tiny one",
    r"autoplan scoreboard MAPPING(?! --only)": "tries each type of a mapping: minutes",
}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "architectures": None}
STAND_INS = {
    "PATH": "model.layers.1.mlp.up_proj",
    "RULE": "attention",
    "MAPPING": "causal_lm",
    "TYPE": "llama",
    "N": "2",
    "FILE": "of_model.yaml",
    "DEVICE": "device.toml",
    "FOLDER": "quantised",
    "MODULE:FUNCTION": "of_a_reader:inputs",
    "package.module:PLAN": "of_a_reader:PLAN",
    "64": "2",  # GPUs among whose meshes is chosen: a minute less
}
WRITTEN = "written.yaml"  # what `-o FILE` writes: not over the plan that others read
REFUSED = {"hf-old": "--drop", "deepspeed": "--drop"}  # systems that cannot say all of the tiny model's plan, and how
READER = """
import torch

PLAN = {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


def inputs():
    return {"input_ids": torch.arange(16).view(2, 8)}
"""


def forms(command: str) -> Iterator[str]:
    """All that a line says: `autoplan rules list | show RULE` is two commands."""
    line = re.sub(r"\s#.*", "", command)
    first, *others = (part for part in line.split(" | ") if part.split()[0] not in OTHERS)
    for one in (first, *(f"{' '.join(first.split()[:2])} {other}" for other in others)):
        least = " ".join(re.sub(r"\[[^\]]*\]", "", one).split())
        yield from _each(least)
        chosen = next(_each(least))
        for part in re.findall(r"\[([^\]]*)\]", one):
            yield from (f"{chosen} {other}" for other in _each(part))


def _each(words: str) -> Iterator[str]:
    """One text for each alternative of the one word that has some."""
    word = next((word for word in words.split() if "|" in word), "|")
    for choice in word.split("|") if word != "|" else [""]:
        yield words.replace(word, choice) if choice else words


def words_of(form: str) -> list[str]:
    """The arguments of a command line, with a reader's own things in place of the names that stand for them."""
    known = {**STAND_INS, "MODEL": "experts" if "--ep" in form else "model"}
    known["FILE"] = "at_8.yaml" if "--tp 8" in form else known["FILE"]
    line = form.replace("-o FILE", f"-o {WRITTEN}")
    return [known.get(word, word) for word in shlex.split(line)[1:]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: tiny models, a plan, examples, a module of their own."""
    made = tmp_path_factory.mktemp("reader")
    LlamaConfig(**SIZES, **HEADS).save_pretrained(made / "model")
    MixtralConfig(**SIZES, **HEADS, num_local_experts=8).save_pretrained(made / "experts")
    scales = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    LlamaConfig(**SIZES, **HEADS, quantization_config=scales).save_pretrained(made / "quantised")
    autoplan.plan(LlamaConfig(**SIZES, **HEADS), tp_size=2, prove="none").save(made / "of_model.yaml")
    autoplan.plan(LlamaConfig(**SIZES, **HEADS), tp_size=8, prove="none").save(made / "at_8.yaml")
    autoplan.plan("llama", tp_size=2, prove="none").save(made / "of_llama.yaml")
    (made / "of_a_reader.py").write_text(READER)
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.fixture(scope="module")
def ran() -> set[tuple[str, ...]]:
    """Commands that several documents have are run once."""
    return set()


@pytest.mark.filterwarnings("ignore::autoplan.UnprovenPlanWarning")  # of a plan that is made without proof
@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_run(
    path: Path, folder: Path, ran: set[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    shutil.copy("of_llama.yaml", "plan.yaml")  # other documents write over it
    failed = {}
    for command in (command for command, whole in commands_of(path.read_text(encoding="utf-8")) if whole):
        for form in forms(command):
            reason = next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, form)), None)
            if reason is not None:
                with capsys.disabled():
                    print(f"\nnot run: {form} ({reason})", end="")
                continue
            words = tuple(words_of(form))
            if words in ran:
                continue
            ran.add(words)
            code, said = ended(words, capsys)
            option = next((option for system, option in REFUSED.items() if system in words), None)
            if option is not None and code == 2 and option in said:
                code, said = ended((*words, option), capsys)
            if code not in (0, 1) or not said:
                failed[form] = said[-300:]
    assert failed == {}


def ended(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """The exit code of a command, and all that it printed."""
    with pytest.raises(SystemExit) as end:
        main(words)
    said = capsys.readouterr()
    return end.value.code, said.out + said.err


def test_what_is_not_run_is_written_somewhere() -> None:
    """An exception that no document needs any more is a defect."""
    written = [
        form for path in DOCS for command, whole in commands_of(path.read_text()) if whole for form in forms(command)
    ]
    assert [one for one in NOT_RUN if not any(re.match(one, form) for form in written)] == []


@pytest.mark.parametrize(
    "words", [["plan", "nowhere", "--tp", "2"], ["calibrate", "--like", "nothing", "-o", "x.toml"]]
)
def test_a_command_that_does_not_run_is_noticed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(words, capsys)[0] == 2


def test_a_line_is_all_its_forms() -> None:
    assert list(forms("autoplan export M --to hf|torch [--drop] [-o FILE]  # written")) == [
        *("autoplan export M --to hf", "autoplan export M --to torch"),
        *("autoplan export M --to hf --drop", "autoplan export M --to hf -o FILE"),
    ]
    assert list(forms("autoplan rules list | show RULE")) == ["autoplan rules list", "autoplan rules show RULE"]
