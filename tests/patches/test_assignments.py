"""Nobody but `autoplan/patches` assigns onto modules and classes of other packages: read from every file's syntax."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from canaries.uses import files

PATCHES = "autoplan/patches/"

# What is set by name on an object that this file has been given: an instance, never a module or class.
INSTANCES = {
    ("autoplan/capture/capture.py", "value"): "settings of a throw-away copy",
    ("autoplan/capture/known_values.py", "TracedInt"): "a class of ours",
    ("autoplan/check/audit/executors.py", "module"): "head counts of a module that is sharded",
    ("autoplan/check/ranks/threads.py", "_CountingGroup"): "a class of ours",
    ("autoplan/execute/guard/watch.py", "PartSize"): "a class of ours",
    ("autoplan/check/verify/compare.py", "self"): "an object of ours",
    ("autoplan/execute/vocabulary/split_logits.py", "part.__class__"): "a tensor that was made here",
    ("autoplan/execute/vocabulary/leaving.py", "logits.__class__"): "a tensor that was made here",
    ("autoplan/execute/vocabulary/leaving.py", "detached.__class__"): "a tensor that was made here",
    ("autoplan/execute/data_parallel/fsdp.py", "register_fsdp_forward_method"): "a method of the caller's own model",
    (
        "autoplan/execute/parameters/buffers.py",
        "register_module_parameter_registration_hook",
    ): "torch's hook, removed at the end of its block",
    (
        "autoplan/hf/configs.py",
        "torch_modules.register_module_module_registration_hook",
    ): "torch's hook, removed at the end of its block",
    (
        "autoplan/hf/configs.py",
        "torch_modules.register_module_parameter_registration_hook",
    ): "torch's hook, removed at the end of its block",
    (
        "autoplan/check/ranks/common.py",
        "register_module_forward_hook",
    ): "torch's hook, removed at the end of its block",
    ("autoplan/hf/configs.py", "AttentionInterface.register"): "an entry of ours beside transformers' own",
    ("autoplan/forecast/trained.py", "part"): "a copy without storage, for an estimate",
    ("autoplan/execute/executors.py", "copied"): "an object of ours",
    (
        "autoplan/execute/hooks/replaced.py",
        "super(subclass, self).__setattr__(name, value)",
    ): "a module sets its own child",
    ("autoplan/forecast/sharded.py", "value"): "settings of a copy without storage",
    ("autoplan/hf/shrink.py", "section"): "a copy of a config, for the tiny clone",
    ("autoplan/execute/hooks/sequence.py", "tensor"): "a mark on one tensor",
    ("autoplan/execute/hooks/root.py", "value"): "a mark on one cache",
    ("autoplan/execute/parameters/held.py", "parameter"): "a mark on one parameter",
    ("autoplan/execute/parameters/optimizer.py", "optimizer"): "a mark on one optimizer",
}

# What a process has for everybody to write into.
EVERYBODYS = ("os.environ", "sys.path")


def assignments(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of each assignment onto what another package owns, or that may be one.

    Targets are attributes and namespaces of imported names, `sys.modules`, `type(x)`, any `__class__`; whatever is
    set by `setattr`, or looked up by `vars` and `__dict__` of an imported name; what is put into a set, list or dict
    that such a name holds, under whatever name of ours; and what is registered with another package.
    """
    tree = ast.parse(source)
    foreign = _imported(tree)
    held = _held_under_a_name(tree, foreign)
    for node in ast.walk(tree):
        for target in (one for several in _targets(node) for one in _flat(several)):
            own_class = isinstance(target, ast.Attribute) and target.attr == "__class__"
            onto = target.value if isinstance(target, ast.Attribute | ast.Subscript) else None
            inside = isinstance(target, ast.Subscript)
            if (
                own_class
                or onto is not None
                and (_is_holder(onto, foreign, held) if inside else _is_foreign(onto, foreign))
            ):
                yield target.lineno, ast.unparse(target)
        if isinstance(node, ast.Call) and (what := _set_by_call(node, foreign, held)):
            yield node.lineno, what


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    if isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
        return [node.target]
    return [node.optional_vars] if isinstance(node, ast.withitem) and node.optional_vars is not None else []


def _set_by_call(node: ast.Call, foreign: set[str], held: set[str]) -> str:
    """What a call sets by name; "" for any other call."""
    if isinstance(node.func, ast.Name):
        if node.func.id in ("setattr", "delattr"):
            return ast.unparse(node.args[0])
        return node.func.id if node.func.id in foreign and _registers(node.func.id) else ""
    if not isinstance(node.func, ast.Attribute):
        return ""
    of = node.func.value
    by_name = node.func.attr in ("__setattr__", "__delattr__") and ast.unparse(of) != "object"  # our frozen records
    at_once = node.func.attr in _INTO and _is_holder(of, foreign, held)
    if _registers(node.func.attr) and _is_foreign(of, foreign):
        return ast.unparse(node.func)
    return ast.unparse(node) if by_name or at_once else ""


# What changes a set, a list or a dict in place.
_INTO = frozenset(("add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update",
                   "difference_update", "intersection_update", "popitem"))  # fmt: skip


def _registers(name: str) -> bool:
    return name == "register" or name.startswith(("register_", "unregister_"))


def _flat(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for one in target.elts:
            yield from _flat(one)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def _imported(tree: ast.AST) -> set[str]:
    """Names of whatever is imported from other packages, and names given to modules that are found at run time."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] != "autoplan":
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign) and _finds_a_module(node.value):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def _held_under_a_name(tree: ast.AST, foreign: set[str]) -> set[str]:
    """Our names for what an imported name holds: `untraced = torch._dynamo.config.classes`."""
    return {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and _is_foreign(node.value, foreign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _finds_a_module(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.startswith(("sys.modules", "import_module(", "importlib.import_module("))


def _is_foreign(node: ast.expr, foreign: set[str]) -> bool:
    while isinstance(node, ast.Attribute):
        if node.attr == "__class__":
            return True
        node = node.value
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) == "type" or _finds_a_module(node)
    return isinstance(node, ast.Name) and node.id in foreign or _finds_a_module(node)


def _is_holder(node: ast.expr, foreign: set[str], held: set[str]) -> bool:
    """A namespace, or what a module or class of others holds."""
    if ast.unparse(node) in EVERYBODYS:
        return False
    of_theirs = isinstance(node, ast.Attribute) and _is_foreign(node, foreign)
    return of_theirs or isinstance(node, ast.Name) and node.id in held or _is_foreign_namespace(node, foreign)


def _is_foreign_namespace(node: ast.expr, foreign: set[str]) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        return _is_foreign(node.args[0], foreign)
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return _is_foreign(node.value, foreign)
    return ast.unparse(node) == "sys.modules"


@cache
def all_of_them() -> tuple[tuple[str, int, str], ...]:
    """(file, line, what) in every file."""
    return tuple((path, line, what) for path, source in files().items() for line, what in assignments(source))


def test_only_patches_assign_onto_other_packages() -> None:
    found = {
        f"{path}:{line}: {what}"
        for path, line, what in all_of_them()
        if not path.startswith(PATCHES) and (path, what) not in INSTANCES
    }
    assert not found, f"enter these in autoplan/patches, each as a Patch with a canary: {sorted(found)}"


def test_no_exception_is_stale() -> None:
    assert INSTANCES.keys() <= {(path, what) for path, _, what in all_of_them()}


def test_assignments_are_seen_however_they_are_written() -> None:
    planted = """
import os, sys, torch
import torch.distributed as dist
from importlib import import_module
from torch.optim import Optimizer
home = sys.modules.get("transformers")
Optimizer.__init__ = ours  # seen
torch.random.default_generator, kept = ours, 1  # seen
dist.distributed_c10d._world += 1  # seen
del torch.nn.Linear  # seen
with open() as torch.file: pass  # seen
for torch.x in y: pass  # seen
home.asked = ours  # seen
import_module("torch").x = 1  # seen
type(model).forward = ours  # seen
model.__class__ = ours  # seen
model.__class__.forward = ours  # seen
setattr(anything, name, ours)  # seen
vars(torch)["x"] = 1  # seen
torch.nn.__dict__.update(x=1)  # seen
sys.modules["torch"] = ours  # seen
torch.Tensor.__setattr__(x, y, z)  # seen
torch._dynamo.config.classes.add(Ours)  # seen
torch._dynamo.config.classes.update(ours)  # seen
dist.distributed_c10d._world.names["x"] = ours  # seen
table = torch.distributed.tensor.rules
table.update(ours)  # seen
table["x"] = ours  # seen
from torch.distributed.tensor.experimental import register_sharding
register_sharding(op)(rule)  # seen
torch.library.register_fake("x")  # seen
dist.Backend.register_backend("x", make)  # seen
import_module("torch").hooks.append(ours)  # seen
from autoplan.values import Plan
self.x = torch.x
module.forward = ours
record.reading.inside = True
object.__setattr__(self, "shared", 1)
self.seen.add(torch.x)
found.append(torch.add(x, y))
module.register_forward_hook(ours)
os.environ.setdefault("X", "y")
module.__dict__["forward"] = ours
"""
    seen = {number for number, line in enumerate(planted.splitlines(), 1) if line.endswith("# seen")}
    assert {line for line, _ in assignments(planted)} == seen
