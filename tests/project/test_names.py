"""transformers' names are known in hf/ and rules/, and nowhere else.

The problem: a name in the middle of the engine (of an argument, a config's field, a mask builder, a submodule) makes it
right for the models that use the name and silently wrong for copies and other code bases. Rooms below hf/ see what a
model does, or read `autoplan.common.conventions`. So the names are collected here: those of the table that the code
rests on (hf/names.py), in every spelling, and beside them those of the installed transformers, by reading its files.
They are looked for in every file of ours: in text, in attributes that are read, in keywords, and in imports. Each kind
is shown able to be found.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from autoplan.hf.names import NAMES

PACKAGE = Path(__file__).resolve().parents[2] / "autoplan"
LIBRARY = Path(transformers.__file__).parent
COMMON = 10  # what so many configs, forwards or modules have is a convention

# Files outside hf/ that speak a foreign language, each with the reason.
DIALECTS = {
    "patches/kernels.py": "patches transformers: swaps kernels that it puts into models for their references",
    "decide/written_plans/dialects.py": "reads DeepSpeed's plans, and looks through wrappers of PEFT and accelerate",
    "doctor/private_modules.py": "canaries of what transformers does not document",
    "common/requirements.py": "asks which version is installed",
}

# What transformers uses and everybody else too: words of plain English, and of Python.
PLAIN = frozenset(
    {
        "cache", "config", "embeddings", "height", "inputs", "key", "layers", "lengths", "logits", "loss", "mask",
        "model", "optimizer", "params", "query", "radio", "reset", "scale", "self", "value", "width", "x",
    }
)  # fmt: skip
# Torch has these too (its RNNs are made with one), but whoever reads them here reads a config.
TELLING = frozenset({"hidden_size"})
# Names that autoplan uses for its own things, where they happen to be the same.
OURS = {
    "model_type": "a field of our own results, and a column of their tables",
    "tp_size": "how many ranks: an argument of plan()",
    "to_dict": "a method of our plans, and how any kind of config is told from other objects",
}


# ------------------------------------------------------------------------------------------------ their names


# Attributes that code sets on itself: walking the trees of all files would take half a minute. Making them takes ten
# seconds for the files of models, so of these the text of a class and the head of its forward are found by their shape.
_SET = re.compile(r"\bself\.(\w+)(?:: [^=\n]+)? = ")
_CLASS = re.compile(r"^class .*?(?=^(?:class |def |@|\w+ = )|\Z)", re.MULTILINE | re.DOTALL)
_FORWARD = re.compile(r"^    (def forward\(.*?\)[^()\n]*:) *(?:#[^\n]*)?$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class _Class:
    """What is asked of a class of theirs that is a model or a part of one."""

    arguments: frozenset[str]
    stored: frozenset[str]


def _trees(pattern: str) -> Iterator[ast.Module]:
    for path in sorted(LIBRARY.glob(pattern)):
        yield ast.parse(path.read_text(encoding="utf-8"))


def _class_nodes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in tree.body if isinstance(node, ast.ClassDef))


def _models() -> Iterator[_Class]:
    for path in sorted(LIBRARY.glob("models/*/modeling_*.py")):
        for text in _CLASS.findall(path.read_text(encoding="utf-8")):
            yield _class_of(text)


def _class_of(text: str) -> _Class:
    heads = ast.parse("".join(f"{head} ...\n" for head in _FORWARD.findall(text)))
    named = (_argument_names(node.args) for node in heads.body if isinstance(node, ast.FunctionDef))
    return _Class(frozenset(name for names in named for name in names), frozenset(_SET.findall(text)))


def _fields(node: ast.ClassDef) -> set[str]:
    """What instances of a class are made with: annotated fields, and arguments of the constructor."""
    fields = {m.target.id for m in node.body if isinstance(m, ast.AnnAssign) and isinstance(m.target, ast.Name)}
    made = (m.args for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__")
    return fields.union(*map(_argument_names, made))


def _argument_names(given: ast.arguments) -> set[str]:
    return {argument.arg for argument in (*given.args, *given.kwonlyargs)}


def _stored(node: ast.ClassDef) -> set[str]:
    """Attributes that a class's own code sets on itself."""
    stores = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}


def _interface(node: ast.ClassDef) -> set[str]:
    """All that a class has: fields, methods, attributes."""
    assigned = {t.id for m in node.body if isinstance(m, ast.Assign) for t in m.targets if isinstance(t, ast.Name)}
    return _fields(node) | _stored(node) | assigned | {m.name for m in node.body if isinstance(m, ast.FunctionDef)}


def _often(names: Iterable[frozenset[str]]) -> set[str]:
    counted = Counter(name for held in names for name in held)
    return {name for name, times in counted.items() if times >= COMMON}


def _functions(pattern: str) -> set[str]:
    return {node.name for tree in _trees(pattern) for node in tree.body if isinstance(node, ast.FunctionDef)}


@cache
def _theirs() -> dict[str, frozenset[str]]:
    """All of their names, by kind."""
    models = tuple(_models())
    configs = (node for tree in _trees("models/*/configuration_*.py") for node in _class_nodes(tree))
    labels = {name for one in models for name in one.arguments if "label" in name}
    found = {
        "model types": set(CONFIG_MAPPING_NAMES),
        "config fields": _often(frozenset(_fields(node)) for node in configs),
        "arguments": _often(one.arguments for one in models) | labels,
        "submodules": {name for name in _often(one.stored for one in models) if "_" in name.strip("_")},
        "mask builders": _functions("masking_utils.py"),
        "interfaces": {
            name
            for file in (
                "modeling_utils.py",
                "configuration_utils.py",
                "modeling_outputs.py",
                "cache_utils.py",
                "utils/generic.py",
            )
            for tree in _trees(file)
            for node in _class_nodes(tree)
            for name in _interface(node)
        },
    }
    for entry in NAMES:  # what the code rests on is forbidden in every spelling, whatever is installed
        if entry.kind in _KINDS:
            found[_KINDS[entry.kind]].update(entry.words)
    return {kind: frozenset(name for name in held if not name.startswith("__")) for kind, held in found.items()}


# Kinds of the table in hf/names.py, by ours.
_KINDS = {
    "argument": "arguments",
    "output": "interfaces",
    "member": "interfaces",
    "field": "config fields",
    "function": "mask builders",
}


@cache
def names() -> dict[str, frozenset[str]]:
    """Those that are nobody else's."""
    others = (PLAIN | OURS.keys() | _of_torch_and_python()) - TELLING
    return {kind: held - others for kind, held in _theirs().items()}


def _of_torch_and_python() -> frozenset[str]:
    spaces = (builtins, dict, list, str, torch, torch.Tensor, nn, nn.Module, nn.functional, torch.distributed, DTensor)
    found = {name for space in spaces for name in dir(space)}
    layers = [value for value in vars(nn).values() if isinstance(value, type)]
    calls = (*vars(nn.functional).values(), *vars(torch.distributed).values())
    for function in (*layers, *calls, torch.load, distribute_tensor, Optimizer):
        if callable(function):
            try:
                found.update(inspect.signature(function).parameters)
            except (TypeError, ValueError):  # written in C: no signature
                continue
    return frozenset(found)


# ------------------------------------------------------------------------------------------------ our files


@cache
def _ours() -> frozenset[str]:
    """What autoplan's own classes and functions define: reading that is reading our own."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found |= _interface(node)
            elif isinstance(node, ast.FunctionDef):
                found |= {node.name, *(a.arg for a in (*node.args.args, *node.args.kwonlyargs))}
    return frozenset(found)


def _said(tree: ast.Module, ours: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of everything in a file that could be a name of somebody else's."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    skipped = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and _has_doc(node)}  # type: ignore[attr-defined]
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            skipped |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.lineno, node.value
            words = {word for word in re.findall(r"\w+", node.value) if "_" in word.strip("_")}
            yield from ((node.lineno, word) for word in words - ours)
            yield from ((node.lineno, name) for name in _matched(node.value) - ours)
        elif isinstance(node, ast.Attribute) and node.attr not in ours:
            yield node.lineno, node.attr
        elif isinstance(node, ast.keyword) and node.arg and node.arg not in ours:
            yield node.value.lineno, node.arg


_MARKS = re.compile(r"[\^$?()|\[\]*+\\]")
_NOBODYS = ("zz_nobodys_name", "zz9", "")  # a pattern that takes these knows no name


@cache
def _matched(text: str) -> frozenset[str]:
    """Names that a text means where it is a pattern: those that it matches from end to end.

    >>> sorted(_matched(r"^(return|compute)_loss$"))
    ['return_loss']
    """
    if not _MARKS.search(text) or " " in text:
        return frozenset()
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError):  # no pattern
        return frozenset()
    if any(map(pattern.fullmatch, _NOBODYS)):
        return frozenset()
    return frozenset(filter(pattern.fullmatch, _kinds()))


def _has_doc(node: ast.AST) -> bool:
    return ast.get_docstring(node) is not None  # type: ignore[arg-type]


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Imports of transformers, and modules of it that are named in text."""
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            modules += [node.value] if node.value.startswith("transformers.") else []
        yield from ((node.lineno, name) for name in modules if name.split(".")[0] == "transformers")


@cache
def _kinds() -> dict[str, str]:
    return {name: kind for kind, held in names().items() for name in held}


def found_in(code: str, ours: frozenset[str] = frozenset()) -> set[tuple[int, str, str]]:
    """(line, kind, name) of each name of transformers in a file."""
    known, tree = _kinds(), ast.parse(code)
    seen = {(line, known[word], word) for line, word in _said(tree, ours) if word in known}
    return seen | {(line, "imports", name) for line, name in _imports(tree)}


def _searched() -> list[Path]:
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "hf")
    return [path for path in files if str(path.relative_to(PACKAGE)) not in DIALECTS]


def test_only_hf_and_the_dialects_know_the_names() -> None:
    ours = _ours()
    said = [
        f"{path.relative_to(PACKAGE)}:{line} knows {name!r} ({kind})"
        for path in _searched()
        for line, kind, name in sorted(found_in(path.read_text(encoding="utf-8"), ours))
    ]
    assert not said, "\n".join(said)


@pytest.mark.parametrize(
    ("code", "kind", "name"),
    [
        ("kind = 'mixtral'", "model types", "mixtral"),
        ("width = config.hidden_size", "config fields", "hidden_size"),
        ("width = getattr(config, 'num_hidden_layers')", "config fields", "num_hidden_layers"),
        ("model(input_ids=ids)", "arguments", "input_ids"),
        ("targets = given.get('labels')", "arguments", "labels"),
        ("outputs.past_key_values", "arguments", "past_key_values"),
        ("hint = 'train without a cache (use_cache=False)'", "config fields", "use_cache"),
        ("head = f'{prefix}.lm_head'", "submodules", "lm_head"),
        ("ends = 'model.layers.*.self_attn.q_proj'", "submodules", "q_proj"),
        ("library.create_causal_mask()", "mask builders", "create_causal_mask"),
        ("config._attn_implementation = 'eager'", "interfaces", "_attn_implementation"),
        ("table = model.get_input_embeddings()", "interfaces", "get_input_embeddings"),
        ("asked = re.search(r'^(return|compute)_loss$', name)", "arguments", "return_loss"),
        ("_IDS = re.compile('^(ids|input_ids|labels)$')", "arguments", "labels"),
        ("_IDS = 'inputs?_?ids'", "arguments", "input_ids"),
        ("def f():\n    from transformers import PreTrainedModel", "imports", "transformers"),
        ("library = sys.modules.get('transformers.modeling_utils')", "imports", "transformers.modeling_utils"),
    ],
)
def test_each_kind_is_found(code: str, kind: str, name: str) -> None:
    assert any(found[2] == name for found in found_in(code)), kind
    assert kind == "imports" or name in names()[kind]


@pytest.mark.parametrize(
    "code",
    [
        "re.search(r'\\w+', x)",
        "re.search('mask|label', x)",
        "x.shape",
        "'input'",
        '"""Reads input_ids."""',
        "f(weight=1)",
        "# hidden_size",
    ],
)
def test_plain_words_and_documentation_may_say_what_they_like(code: str) -> None:
    assert not found_in(code)


def test_nothing_is_excused_in_vain() -> None:
    """Every dialect's file speaks its dialect, and every excused word is one of theirs."""
    ours = _ours()
    for file in DIALECTS:
        assert found_in((PACKAGE / file).read_text(encoding="utf-8"), ours), f"{file} needs no excuse"
    all_of_them = frozenset[str]().union(*_theirs().values())
    assert not (PLAIN | OURS.keys()) - all_of_them, "not names of transformers"
    assert not PLAIN & OURS.keys()


# What is done is said once: no two functions of the package have the same arguments and the same body.

LINES = 3  # shorter ones are alike by chance


def said_twice(files: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Places of functions that are word for word the same, whatever they are called."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, source in files:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                text = "\n".join(map(ast.unparse, body))
                if len(text.splitlines()) >= LINES:
                    places[ast.unparse(node.args), text].append(f"{name}:{node.lineno} {node.name}")
    return [found for found in places.values() if len(found) > 1]


def test_nothing_is_said_twice() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = said_twice((path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8")) for path in paths)
    assert found == [], "say it once, below both"


def test_the_law_can_fail() -> None:
    one = "def one(x):\n    y = x\n    z = y\n    return z\n"
    other = 'def other(x):\n    "As one."\n    y = x\n    z = y\n    return z\n'
    assert said_twice([("a.py", one), ("b.py", other)]) == [["a.py:1 one", "b.py:1 other"]]
    assert not said_twice([("a.py", one), ("b.py", one.replace("z = y", "z = -y"))])
