"""Count what makes the code harder to carry on than it need be; asserts nothing.

    python tests/benchmarks/house.py [folder]

Lines, files, short functions, private functions used once, filler names, docstrings that do not open with what is
done or what a thing is, private names of torch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

FILLERS = frozenset(["found", "one", "known", "held", "told", "said", "made", "asked", "given", "kept"])
# Docstrings that open so ask a question or begin in the middle of a sentence: "What the …", "Of how many …".
INDIRECT = re.compile(
    "(what|which|who|whose|where|when|why|how|whether|of|in|on|at|by|for|from|to|with|without|is|are|does|do|did|can|may|"
    "has|have|as|if|among|behind|before|after|beside)$"
)
SHORT = 5  # lines of a function, its head and docstring counted

Function = ast.FunctionDef | ast.AsyncFunctionDef


def assigned(tree: ast.AST) -> Iterator[str]:
    """Yield every name that is bound: variables, loop targets, parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg


def private_torch(tree: ast.AST) -> Iterator[str]:
    """Yield dotted names of torch with a part that begins with an underscore, imported or read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def opening_words(trees: Iterable[ast.AST]) -> list[str]:
    """Return the first word of each docstring of a function or a class."""
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function | ast.ClassDef)]
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    return [text.split()[0].lower().strip("`'\",.:") for text in texts]


def main(folder: Path) -> None:
    files = sorted(folder.rglob("*.py"))
    texts = [path.read_text(encoding="utf-8") for path in files]
    trees = [ast.parse(text) for text in texts]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]
    words = Counter(re.findall(r"\b_\w+", "\n".join(texts)))
    private = [node.name for node in functions if node.name.startswith("_") and not node.name.startswith("__")]
    # The definition is one occurrence, so a function that stands twice in the text is used once.
    once = [name for name in private if words[name] == 2]
    names = Counter(name for tree in trees for name in assigned(tree))
    fillers = sum(names[name] for name in FILLERS)
    private_names = {n for t in trees for n in private_torch(t) if re.match(r"torch\..*\._[a-z]|torch\._[a-zA-Z]", n)}
    short = sum((node.end_lineno or 0) - node.lineno < SHORT for node in functions)
    openings = opening_words(trees)
    indirect = sum(INDIRECT.match(word) is not None for word in openings)
    lines = sum(text.count("\n") for text in texts)
    print(f"lines                          {lines}")
    print(f"files                          {len(files)}")
    print(f"lines in a file                {lines / max(len(files), 1):.0f}")
    print(f"functions                      {len(functions)}")
    print(f"functions of {SHORT} lines or fewer  {short}")
    print(f"private functions              {len(private)}")
    print(f"private functions used once    {len(once)}")
    print(f"assigned names                 {names.total()}")
    print(f"filler names                   {fillers} ({fillers / max(names.total(), 1):.1%})")
    print(f"indirect docstrings            {indirect} ({indirect / max(len(openings), 1):.1%})")
    print(f"private names of torch         {len(private_names)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parents[2] / "autoplan")
