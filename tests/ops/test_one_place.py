"""No room but ops/ knows ops by their names: neither lists of them, nor `op.name == "…"`, nor beginnings of names.

The scan reads what a file compares with something that is called a name. It does not see regular expressions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from autoplan.ops import CALLS, OPS
from autoplan.ops.records.answers import Drawn, Reduction

PACKAGE = Path(__file__).parents[2] / "autoplan"
ROOMS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")} - {"ops"})

# Words of other vocabularies that are names of ops, too: reductions, boxes of pictures, what hooks do, arithmetic.
OTHER_WORDS = {*Reduction, *Drawn, "copy", "sub", "neg"}
NAMES = {"name", "function", "__name__"}  # what a variable or an attribute is called that holds a name
AS_TEXT = {"strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "lower"}

# Where which of them may stand, and why.
_EXECUTOR = "what a rank computes in the place of the function, which is no fact of it but the code itself"
_REPLACED = "methods of DTensor that are replaced while a sharded model lives: code outside of the model calls them"
_OTHERS = "words of its own that are names of ops, too"
ALLOWED: dict[str, tuple[set[str], str]] = {
    "capture/feeding/conditions.py": ({"all", "amax", "amin", "max", "min"}, "Python that is read as text"),
    "capture/feeding/told.py": ({"values"}, "methods of dicts"),
    "capture/feeding/wants.py": ({"complex", "float", "ones"}, _OTHERS),
    "capture/feeding/watch.py": (
        {"__getitem__", "eq", "ge", "gt", "le", "lt", "ne", "new_empty", "new_full", "new_ones", "new_zeros", "unbind"},
        "how Python reads a tensor, and how authors ask for padding: what they mean, no fact of an op",
    ),
    "capture/recorder.py": ({"numel", "size"}, "questions that Python asks, answered with traced integers: no ops run"),
    "check/verify/drawn.py": (
        {
            "bernoulli",
            "binomial",
            "cauchy",
            "exponential",
            "geometric",
            "log_normal",
            "multinomial",
            "native_dropout",
            "normal",
            "poisson",
            "rand",
            "rand_like",
            "randint",
            "randint_like",
            "randn",
            "randn_like",
            "random",
            "randperm",
            "rrelu_with_noise",
            "uniform",
        },
        "what stands for the numbers that an op draws, which needs tensors: ops/ loads no torch",
    ),
    "common/options.py": ({"all"}, _OTHERS),
    "doctor/private_engines.py": (
        {
            "_grouped_mm",
            "_scaled_dot_product_attention_math",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_flash_attention",
        },
        "ops whose arguments a canary looks at",
    ),
    "execute/hooks/reductions.py": (
        {"_weight_norm", "gru_cell", "lstm_cell", "normalize", "rnn_relu_cell", "rnn_tanh_cell", "std"},
        _EXECUTOR,
    ),
    "execute/guard/watch.py": (
        {
            "_unique2",
            "argwhere",
            "bincount",
            "clone",
            "contiguous",
            "detach",
            "double",
            "dropout",
            "float",
            "half",
            "linear",
            "layer_norm",
            "log_softmax",
            "rms_norm",
            "to",
            "type_as",
            "masked_select",
            "nonzero",
            "numel",
            "size",
            "softmax",
            "unique_consecutive",
        },
        "questions that Python asks of the numbers and sizes of a tensor, and torch functions by which a size of a "
        "part is known of the whole value; others tell nothing",
    ),
    "hf/own_sharding.py": ({"norm"}, "a module that transformers' pipelines know by its name"),
    "execute/parameters/outside.py": ({"__setitem__"}, _REPLACED),
    "execute/vocabulary/leaving.py": (
        {
            "__getitem__",
            "__setitem__",
            "_is_all_true",
            "argwhere",
            "bincount",
            "chunk",
            "corrcoef",
            "cov",
            "cummax",
            "cummin",
            "cumprod",
            "cumprod_",
            "cumsum",
            "cumsum_",
            "cumulative_trapezoid",
            "diagonal",
            "diff",
            "fill_diagonal_",
            "histc",
            "histogram",
            "hsplit",
            "index_add_",
            "index_copy_",
            "index_fill_",
            "index_put_",
            "index_reduce_",
            "log_sigmoid",
            "logcumsumexp",
            "masked_scatter_",
            "max",
            "median",
            "min",
            "mode",
            "nanmedian",
            "nanquantile",
            "narrow",
            "nonzero",
            "norm",
            "prod",
            "put_",
            "quantile",
            "renorm",
            "renorm_",
            "scatter_",
            "scatter_add_",
            "scatter_reduce_",
            "searchsorted",
            "select",
            "sort",
            "split",
            "split_with_sizes",
            "std",
            "std_mean",
            "tensor_split",
            "trapezoid",
            "trapz",
            "tril_",
            "triu_",
            "unbind",
            "unfold",
            "unique_consecutive",
            "var",
            "var_mean",
            "vsplit",
        },
        "what DTensor does not do along a dim that is split, which is no fact of the op",
    ),  # fmt: skip
    "hf/stacks.py": ({"tril", "tril_", "triu", "triu_"}, "names in the code of a module that nobody has run"),
    "hf/quantised/weights.py": ({"q_scale"}, _OTHERS),
    "patches/tensors.py": (
        {"__getitem__", "__setitem__", "chunk", "diagonal", "narrow", "select", "split", "unbind"},
        _REPLACED,
    ),
}


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_knows_ops_by_name(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py")) if (PACKAGE / room).is_dir() else [PACKAGE / room]
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": sorted(unknown)
        for path in files
        for line, names in ops_named_in(ast.parse(path.read_text()))
        if (unknown := set(names) - ALLOWED.get(str(path.relative_to(PACKAGE)), (set(), ""))[0])
    }
    assert not found, "what these ops have in common belongs into their records (autoplan/ops)"


def test_what_is_allowed_is_there() -> None:
    for path, (words, reason) in ALLOWED.items():
        named = {word for _, names in ops_named_in(ast.parse((PACKAGE / path).read_text())) for word in names}
        assert named == words, f"{path} names {sorted(named)}"
        print(f"{path} may name {', '.join(sorted(words))}: {reason}")


@pytest.mark.parametrize(
    "text",
    [
        'X = ("mm", "addmm", "bmm")',
        'X = {"view": 1, "reshape": 2, "dropout_": 3}',
        'op.name == "permute"',
        'call.name != "__setitem__"',
        '"mm" == op.name',
        'name in ("var", "std")',
        'X = frozenset({"detach", "detach_"})\nfound = call.name in X',
        'op.name.startswith(("add", "sub"))',
        'op.name.endswith("_like")',
        'op.name.rstrip("_") == "nonzero"',
        'match op.name:\n    case "glu" | "silu":\n        pass',
    ],
)
def test_the_law_can_fail(text: str) -> None:
    assert list(ops_named_in(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        'X = ("sum", "mean", "norm", "gather")',
        'X = ("embed", "head")\nname in X',
        'kind == "linear"',
        'name == "weight"',
        'name.startswith("layers")',
        'X = ("var", "std")',
    ],
)
def test_other_words_are_none(text: str) -> None:
    assert not list(ops_named_in(ast.parse(text)))


# ------------------------------------------------------------------------------------------------ the scan


@cache
def _known() -> frozenset[str]:
    named = (name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("aten::"))  # fmt: skip
    return frozenset({*OPS, *CALLS, *named})


def ops_named_in(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """Line, and the ops that are named there."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        names = _named(node, constants)
        if names:
            yield getattr(node, "lineno", 0), names


def _named(node: ast.AST, constants: dict[str, ast.expr]) -> list[str]:
    match node:
        case ast.Tuple() | ast.List() | ast.Set() | ast.Dict():
            listed = [word for word in _words(node) if word not in OTHER_WORDS and _is_recorded(word)]
            return listed if len(listed) >= 3 else []
        case ast.Compare(left=left, comparators=[right]) if _is_name(left) or _is_name(right):
            other = right if _is_name(left) else left
            other = constants.get(other.id, other) if isinstance(other, ast.Name) else other
            return [word for word in _words(other) if _is_op(word)]
        case ast.Call(func=ast.Attribute(value=value, attr="startswith" | "endswith" as end), args=[parts]):
            known = [name for name in (*OPS, *CALLS) if name.isidentifier()] if _is_name(value) else []
            return [part for part in _words(parts) if len(part) > 2 and any(getattr(n, end)(part) for n in known)]
        case ast.Match(subject=subject, cases=cases) if _is_name(subject):
            return [word for case in cases for word in _words(case.pattern) if _is_op(word)]
    return []


def _is_name(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in AS_TEXT:
        return _is_name(node.func.value)
    return isinstance(node, ast.Name) and node.id in NAMES or isinstance(node, ast.Attribute) and node.attr in NAMES


def _words(node: ast.AST) -> list[str]:
    """The texts that stand in a literal, alone or in a collection."""
    items: Iterable[ast.AST | None] = [node]
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        items = node.elts
    elif isinstance(node, ast.Dict):
        items = node.keys
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("frozenset", "set"):
        items = [item for argument in node.args for item in ast.iter_child_nodes(argument)]
    elif isinstance(node, ast.pattern):
        items = [inner.value for inner in ast.walk(node) if isinstance(inner, ast.MatchValue)]
    return [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def _is_op(word: str) -> bool:
    return word in _known() or word.removesuffix("_") in _known()


def _is_recorded(word: str) -> bool:
    return bool({word, word.removesuffix("_")} & {*OPS, *CALLS})
