"""The commands of the documents exist: programs, subcommands, options, targets, files. Nothing is run.

Lines of `sh` blocks are read as a shell would; of the text, what stands in backticks and begins with a program of ours.
`[…]` is optional in a synopsis and is read as if it were given; of `a|b|c` each is tried.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer

from autoplan.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
CLI = typer.main.get_command(app)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROGRAMS = ("autoplan", "make", "python", "pytest", "torchrun")
OTHERS = {"grep"}  # programs that are not ours


def commands_of(text: str) -> Iterator[tuple[str, bool]]:
    """Each command, and whether it is whole: one in the text may be only named."""
    for block in re.findall(r"^ *```sh\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.strip() and not line.strip().startswith("#"):
                yield line.strip(), True
    for line in re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE).split("`")[1::2]:
        if re.match(rf"(?:\w+=\S+ )*(?:{'|'.join(PROGRAMS)}) \S", line):
            yield " ".join(line.split()), False


def faults(command: str, whole: bool = True) -> list[str]:
    """What a command names and is not there."""
    said = re.sub(r"\[([^\]]*)\]", r"\1", re.sub(r"\s#.*", "", command)).replace("|--", " --")
    first, *piped = said.split(" | ")
    words = shlex.split(first.split(" > ")[0])
    folders = [word.partition("=")[2] for word in words if word.startswith("PYTHONPATH=")]
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, rest = words[0], [word for word in words[1:] if word != "…"]
    match program:
        case "autoplan":
            others = [part.split() for part in piped if part.split()[0] not in OTHERS]
            found = of_cli(CLI, rest, whole)
            return found + [one for part in others for one in of_cli(CLI, [rest[0], *part], whole)]
        case "make":
            return [f"no target or variable {word}" for word in rest if not in_makefile(word)]
        case "python" if rest[0] == "-m":
            own = Path(*rest[1].split(".")).with_suffix(".py")
            there = any((ROOT / folder / own).exists() for folder in folders) or of_module(rest[1])
            return [] if there else [f"no module {rest[1]}"]
        case "python" | "pytest":
            return of_files(rest)
        case "torchrun":
            return []
    return [f"{program} is none of {', '.join(PROGRAMS)}"]


def of_cli(command: Any, words: list[str], whole: bool) -> list[str]:
    """Subcommands, options, their values, and how many arguments there are: as click parses them.

    typer comes with click's classes or with its own copies of them, so they are known by what they have.
    """
    if hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return [f"no command {words[0] if words else ''}"] if whole or words else []
        return of_cli(command.commands[words[0]], words[1:], whole)
    parser = command.make_parser(command.context_class(command))
    try:
        given, left, _ = parser.parse_args(list(words))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        unsaid = type(error).__name__ == "BadOptionUsage"  # an option that is only named, without its value
        return [] if unsaid and not whole else [error.format_message()]
    found = [f"one argument too many: {left}"] if left else []
    kinds = get_type_hints(command.callback)
    for parameter in command.params:
        value = given.get(parameter.name)
        if value is None and parameter.required and whole:
            found.append(f"{parameter.name} is missing")
        kind = kinds.get(parameter.name)
        if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
            known = {one.value for one in kind}
            found += [f"{parameter.name} cannot be {one}" for one in value.split("|") if one not in known]
    return found


def in_makefile(word: str) -> bool:
    name, is_value, _ = word.partition("=")
    if is_value:
        return bool(re.search(rf"\$\({name}\)|\$\(or \$\({name}\)|^{name} *\??=", MAKEFILE, re.MULTILINE))
    return bool(re.search(rf"^{re.escape(name)}:", MAKEFILE, re.MULTILINE))


def of_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def of_files(words: list[str]) -> list[str]:
    """The file that is run, or tested, and that it knows the options."""
    file, *rest = (words[0].partition("::")[0], *words[1:])
    paths = [word.partition("::")[0] for word in (file, *rest) if word.startswith(("tests/", "examples/"))]
    missing = [f"{path} is missing" for path in paths if not (ROOT / path).exists()]
    if missing or not (ROOT / file).is_file():
        return missing
    text = (ROOT / file).read_text(encoding="utf-8")
    return [f"{file} knows no {word}" for word in rest if word.startswith("--") and word.partition("=")[0] not in text]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = {command: faults(command, whole) for command, whole in commands_of(text)}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


def test_every_command_line_is_in_a_block_that_is_read() -> None:
    """A block without a language, or one that is only indented, would be overlooked."""
    line = rf"^ *(?:{'|'.join(PROGRAMS)}) \S.*$"
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"^ *```(?!sh\n)\w*\n(.*?)^ *```|((?:^    .*\n)+)", text, re.DOTALL | re.MULTILINE):
            assert not [found for part in block for found in re.findall(line, part, re.MULTILINE)], path.name


def test_every_how_to_ends_with_a_command() -> None:
    for path in sorted((ROOT / "docs" / "howto").glob("*.md")):
        last = path.read_text(encoding="utf-8").rstrip().rpartition("\n\n")[2]
        assert re.fullmatch(r"```sh\n(.+\n)+```", last), f"{path.name} does not end with a command"


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("autoplan plna llama --tp 2", "no command"),
        ("autoplan plan llama --no-such 2", "no-such"),
        ("autoplan plan --tp 2", "missing"),
        ("autoplan plan llama gpt2 --tp 2", "too many"),
        ("autoplan verify llama --tp 2 --engine treads", "cannot be treads"),
        ("autoplan rules list | shwo RULE", "no command"),
        ("autoplan plan llama --tp 2 [--sequence-paralel]", "sequence-paralel"),
        ("make tets", "no target"),
        ("make fuzz CUONT=3", "CUONT"),
        ("python tests/benchmarks/nothing.py", "is missing"),
        ("python tests/benchmarks/op_database.py --smaples 3", "knows no --smaples"),
        ("python -m autoplan.decide.nothing", "no module"),
        ("pytest tests/nothing", "is missing"),
        ("pyton tests/fuzz", "is none of"),
    ],
)
def test_the_check_of_commands_can_fail(command: str, what: str) -> None:
    assert any(what in fault for fault in faults(command)), faults(command)
    assert faults(command) == faults(next(commands_of(f"```sh\n{command}\n```"))[0])


def test_text_in_backticks_is_read() -> None:
    assert list(commands_of("`plan` and `autoplan plan\nllama`, `make fuzz`.")) == [
        ("autoplan plan llama", False),
        ("make fuzz", False),
    ]
