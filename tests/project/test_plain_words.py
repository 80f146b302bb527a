"""No private words: what the field has a word for is called by it, in names, in messages and in the documents.

The list is the one that this project once used for itself. A word that also means something plain is looked for in
names only. "Beside" is no name of a thing; in a sentence, or in a longer name, it is English.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.house import INDIRECT, opening_words

ROOT = Path(__file__).resolve().parents[2]
CODE = [*(ROOT / "autoplan").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "rules").rglob("*.*"), ROOT / "Makefile"]
HISTORY = {"CHANGELOG.md"}  # tells what was released, in the words of its time

# Private word -> the field's.
EVERYWHERE = {
    "owed": "partial, or needed",
    "owes": "needs",
    "dealt": "sharded, or divided",
    "dearer": "costlier: costs more",
    "mend": "edit, or fix",
    "mended": "edited, or fixed",
    "mends": "edits, or fixes",
    "mending": "editing, or fixing",
    "homeless": "without a parameter of its own",
    "sayable": "expressible",
    "kin": "like",
}
IN_NAMES = EVERYWHERE | {
    "door": "boundary",
    "doors": "boundaries",
    "border": "boundary",
    "debt": "partial gradient",
    "debts": "partial gradients",
    "dear": "costly",
}
_WORD = re.compile(r"[A-Za-z]+")


def names_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(found := getattr(node, field, None), str):
                yield found


def texts_of(code: str) -> Iterator[str]:
    """Literals, docstrings and comments."""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)):
            yield token.string


def in_code(code: str) -> list[str]:
    names = {re.sub(r"([A-Z])", r"_\1", name).lower().strip("_") for name in names_of(ast.parse(code))}
    named = {word for name in names for word in _WORD.findall(name)} & IN_NAMES.keys()
    said = {word.lower() for text in texts_of(code) for word in _WORD.findall(text)} & EVERYWHERE.keys()
    return sorted({*named, *said, *(names & {"beside"})})


def in_text(text: str) -> list[str]:
    return sorted({word.lower() for word in _WORD.findall(text)} & EVERYWHERE.keys())


def test_code_uses_the_words_of_the_field() -> None:
    found = {str(p.relative_to(ROOT)): in_code(p.read_text(encoding="utf-8")) for p in CODE}
    assert {file: words for file, words in found.items() if words} == {}, EVERYWHERE


def test_documents_use_the_words_of_the_field() -> None:
    pages = [page for page in PAGES if page.is_file() and page.suffix != ".png" and page.name not in HISTORY]
    found = {str(p.relative_to(ROOT)): in_text(p.read_text(encoding="utf-8")) for p in pages}
    assert {file: words for file, words in found.items() if words} == {}, EVERYWHERE


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("beside = 1", "beside"),
        ("def _dealt_out(): ...", "dealt"),
        ("class NextDoor: ...", "door"),
        ("found(is_dear=1)", "dear"),
        ("raise ValueError(f'{x} is owed by {y}')", "owed"),
        ('"""It owes a sum."""', "owes"),
        ("x = 1  # to be mended", "mended"),
    ],
)
def test_private_words_are_found(code: str, word: str) -> None:
    assert in_code(code) == [word]


def test_plain_english_passes() -> None:
    assert in_code("kept_beside = 1") == []
    assert in_code('"""The bias lies beside its weight; a door is no word of ours."""') == []
    assert in_text("A sum that each rank owes.") == ["owes"]


# One class has the name: glossary words that once had several meanings.
ONCE = ("Choice", "Subject", "Check", "State", "Trial", "Rule", "Entry", "Row", "Finding", "Source")


def classes(package: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(path.relative_to(package).as_posix())
    return found


def test_one_class_has_the_name(tmp_path: Path) -> None:
    """And the check can fail."""
    found = classes(ROOT / "autoplan")
    assert {name: found[name] for name in ONCE if len(found.get(name, ())) > 1} == {}
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("class Choice: ...\n")
    assert classes(tmp_path) == {"Choice": ["a.py", "b.py"]}


def test_the_glossary_gives_each_word_one_meaning() -> None:
    """No word has two rows, and no meaning says "Of …:", which begins a second one."""
    rows = re.findall(
        r"^\| ([^|]+) \| (.+) \|$", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    words = [word.strip() for names, _ in rows for word in names.split(",")]
    assert sorted({word for word in words if words.count(word) > 1}) == []
    assert [names for names, meaning in rows if re.search(r"\. Of [\w ]+:", meaning)] == []


def test_docstrings_say_what_is_done() -> None:
    """Few open with a question or in the middle of a sentence, as a translation does."""
    openings = opening_words(ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "autoplan").rglob("*.py"))
    indirect = [word for word in openings if INDIRECT.match(word)]
    assert len(indirect) < 0.05 * len(openings)
    assert opening_words([ast.parse('def f():\n    """Of how many rows."""')]) == ["of"]
