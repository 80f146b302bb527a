"""A copy of a modeling module in which every class and every submodule has a meaningless name.

What is decided without names must come out the same on such a copy. Only names that torch or a base class outside the
module own (`config`, `forward`, `nn.Linear`) and the arguments of public forwards stay.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterable
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import EmbeddingAccessMixin

FOREIGN = {"torch", "nn", "functional", "F", "config", "logger", "weight", "bias"}  # names that torch and bases own
UNWANTED_DECORATORS = {"auto_docstring"}  # they look names up in the original file


def renamed_copy(module_name: str, kept: Iterable[str] = ()) -> tuple[ModuleType, dict[str, str]]:
    """The renamed module, and the new name of each class and attribute but those `kept`."""
    original = importlib.import_module(module_name)
    tree = ast.parse(inspect.getsource(original))
    names = {old: new for old, new in _new_names(tree).items() if old not in kept}
    tree = ast.fix_missing_locations(_Renamer(names).visit(tree))
    copy = ModuleType(f"{module_name}_renamed")
    copy.__package__ = original.__package__
    sys.modules[copy.__name__] = copy
    exec(compile(tree, f"<renamed {module_name}>", "exec"), copy.__dict__)
    for value in vars(copy).values():
        own = isinstance(value, type) and value.__module__ == copy.__name__ and issubclass(value, PreTrainedModel)
        if own and value.get_input_embeddings is EmbeddingAccessMixin.get_input_embeddings:
            value.get_input_embeddings = _input_embeddings
    return copy, names


def _input_embeddings(model: PreTrainedModel) -> nn.Module:
    """transformers finds it by the names that were taken away."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    return next((table for table in tables if table.num_embeddings == size), tables[0])


def _new_names(tree: ast.Module) -> dict[str, str]:
    classes = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    attributes: dict[str, None] = {}
    for node in ast.walk(tree):
        made = node.value.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp) else None
        if isinstance(node, ast.Assign) and isinstance(made or node.value, ast.Call):
            for target in node.targets:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    attributes[target.attr] = None
    names = {name: f"Class{number}" for number, name in enumerate(classes)}
    return names | {name: f"attribute{number}" for number, name in enumerate(attributes) if name not in FOREIGN}


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self.names[node.name]
        return self._without_decorators(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._without_decorators(node)

    def _without_decorators(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        kept = []
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if not (isinstance(called, ast.Name) and called.id in UNWANTED_DECORATORS):
                kept.append(decorator)
        node.decorator_list = kept
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if self.names.get(node.id, "").startswith("Class"):  # local variables may be called like attributes
            node.id = self.names[node.id]
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        if owner not in FOREIGN:
            node.attr = self.names.get(node.attr, node.attr)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str) and node.value.replace(".", "").replace("_", "").isalnum():
            node.value = ".".join(self.names.get(part, part) for part in node.value.split("."))
        return node
