"""Nothing steers by prose: what is said to people is never compared, searched or taken apart by code.

A sentence that code reads is an interface that nobody declared: whoever words it better breaks something elsewhere.
Reasons (values/reasons.py), kinds of findings and closed words are values; this law looks for what reads text instead,
in every file of the package, and is shown able to find it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "autoplan"

# What is read on purpose: (file, text) -> whose text it is.
ALLOWED = {
    ("hf/model_string.py", "trust_remote_code"): "transformers says in words only that a model needs it",
    ("decide/rulebook/conditions.py", "not "): "a word of the language of guards, not of a sentence",
    (
        "hf/quantised/schemes.py",
        r"(whole )?(out\*in|out|in)(?:/(\d+)(?:\*(\d+))?)?",
    ): "dims in rule files",
    (
        "decide/rulebook/rule_tests.py",
        "example.because in refusal.because",
    ): "an example of a rule says how its own rule refuses",
    ("forecast/recording/fused.py", " or "): "the notation of kernel files: forms that a tensor may have",
    ("forecast/recording/fused.py", " if "): "the notation of kernel files: what is made where an argument is given",
}

# A file of which all is read on purpose -> whose texts they are.
FOREIGN = {"capture/feeding/messages.py": "errors of torch, einops and unfamiliar models: they say nothing otherwise"}

_MATCHING = frozenset(("match", "search", "fullmatch", "findall", "finditer"))
_CUTTING = frozenset(("startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split"))
_READING = _MATCHING | _CUTTING | {"rsplit", "find", "rfind", "index", "count"}
# Names of what is said to people: in findings and errors, and what tables and pages show.
_SPOKEN = frozenset(("message", "hint", "reason", "because", "why", "problem", "title", "units", "heading", "label",
                     "caption", "group"))  # fmt: skip
_OF_ERRORS = frozenset(("failure", "error"))  # whose `.text` is what an error says
_SAME = frozenset(("lower", "upper", "strip", "casefold"))  # a text is still what was said
_ERRORS = frozenset(("error", "exc", "exception", "refused", "refusal"))
_PROSE = re.compile(r"\w ?\S* \S*\w|\w\w+\W? $|^ \w\w+|^ [×·–—→] $")  # words, and what stands between them in texts


def literals(node: ast.AST, constants: dict[str, list[str]]) -> Iterator[str]:
    """The texts that an operand is, or may be: also through a constant of the module, in a tuple, in an f-string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.Name):
        yield from constants.get(node.id, ())
    elif isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        for item in node.elts:
            yield from literals(item, constants)
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from literals(value, constants)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("frozenset", "set", "tuple", "re.compile"):
        for argument in node.args:
            yield from literals(argument, constants)


def is_spoken(node: ast.AST) -> bool:
    """Is it what was said to people: a message, a hint, a reason, a heading, the text of an error?"""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        if node.func.id == "str":
            return isinstance(node.args[0], ast.Name) and node.args[0].id in _ERRORS or is_spoken(node.args[0])
        if node.func.id == "getattr" and len(node.args) > 1:
            return isinstance(node.args[1], ast.Constant) and node.args[1].value in _SPOKEN
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME:
        return is_spoken(node.func.value)
    if isinstance(node, ast.Attribute) and node.attr == "text":
        return isinstance(node.value, ast.Name) and node.value.id in _OF_ERRORS
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) in _SPOKEN


def takes_apart(node: ast.AST) -> bool:
    """Is what was said to people searched or cut, whatever for: also for a name, or by a pattern?"""
    if isinstance(node, ast.Compare):
        return any(
            isinstance(how, ast.In | ast.NotIn) and is_spoken(whole) and ast.unparse(whole) != "group"
            for how, whole in zip(node.ops, node.comparators, strict=True)
        )
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    if node.func.attr in _CUTTING:
        return bool(node.args) and is_spoken(node.func.value)  # without arguments, `split` only tidies blanks
    return node.func.attr in _MATCHING and any(map(is_spoken, node.args))


def readings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every place that compares or takes apart prose."""
    constants: dict[str, list[str]] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            constants[node.targets[0].id] = list(literals(node.value, constants))
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        spoken = False
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READING:
            operands = [*node.args, *([node.func.value] if node.func.attr in _MATCHING else [])]
            spoken = is_spoken(node.func.value)
        elif isinstance(node, ast.MatchValue):
            operands = [node.value]
        spoken = spoken or any(map(is_spoken, operands))
        texts = [text for operand in operands for text in literals(operand, constants)]
        read = [text for text in texts if _PROSE.search(text) or (spoken and re.search(r"\w", text))]
        for text in read or ([ast.unparse(node)] if takes_apart(node) else ()):
            yield node.lineno, text  # type: ignore[attr-defined]


def found_in(package: Path) -> Iterator[tuple[str, int, str]]:
    for path in sorted(package.rglob("*.py")):
        for line, text in readings(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.relative_to(package).as_posix(), line, text


def test_nothing_compares_or_parses_prose() -> None:
    found = [(file, line, text) for file, line, text in found_in(PACKAGE) if (file, text) not in ALLOWED]
    read = [f"{file}:{line} reads {text!r}" for file, line, text in found if file not in FOREIGN]
    assert not read, "make it a value (values/reasons.py, Finding.kind, a StrEnum):\n" + "\n".join(read)


def test_what_is_allowed_is_still_there() -> None:
    found = {(file, text) for file, _, text in found_in(PACKAGE)}
    assert {pair for pair in found if pair[0] not in FOREIGN} == set(ALLOWED)
    assert {file for file, _ in found if file in FOREIGN} == set(FOREIGN)


@pytest.mark.parametrize(
    "code",
    [
        'if "does not divide" in axis.reason: pass',
        'if "indivisible" in axis.reason: pass',
        'half = hint.startswith("add")',
        'odd = finding.message.startswith("not comparable")',
        '_TOLD = "not comparable"\nodd = _TOLD in finding.message',
        '_TOLD = ("wrong", "cannot run")\nbad = row.verdict in _TOLD',
        'why = reduction.removeprefix("refused because ")',
        'import re\nfound = re.search("cannot be split", text)',
        'import re\n_SAID = re.compile("cannot be split")\nfound = _SAID.search(text)',
        'match text:\n    case "not run": pass',
        'if "trust_remote_code" in str(error): pass',
        'name = f"the head of {x}" == text',
        'between_ranks = group.startswith("agreement: ")',
        "what = group.removeprefix(AGREE)",
        'is_gradient = group.endswith("gradient")',
        'units = entry.units.partition(" × ")[0]',
        'units = shown.split(" × ")',
        'deep = "nesting" in str(getattr(error, "problem", ""))',
        "named = parameter.name in failure.text",
        "named = word in failure.text.lower()",
        "lacks = _NONE.search(failure.text)",
        "if part not in finding.message: pass",
    ],
)
def test_the_law_finds(code: str) -> None:
    assert list(readings(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        'text = "it does not divide"',
        "if isinstance(axis.reason, DoesNotDivide): pass",
        'if finding.kind == "not-comparable": pass',
        'places = where.split(", ")',
        'line.partition("  #")',
        "if error.message in seen: pass",
        'said = " ".join(str(error).split())',
        "if module in group: pass",
    ],
)
def test_the_law_lets_pass(code: str) -> None:
    assert not list(readings(ast.parse(code)))
