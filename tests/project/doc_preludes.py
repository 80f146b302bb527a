"""What the Python of the documents needs before it runs: a model, a folder, a mesh of simulated ranks.

A document speaks of "model" and "mesh" as its reader has them. Here stands what they are in the tests: small, and the
same at every run. One `Setting` for each block that needs one, by document and by its number there.
"""

from __future__ import annotations

import ast
import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.ranks.run import run_ranks


@dataclass(frozen=True)
class Each:
    """A name that stands for a new thing wherever it is read."""

    make: Callable[[], Any]


@dataclass(frozen=True)
class Setting:
    """`names` are there before the block. What comes from the first use of a `live` name on runs on each of `ranks`
    simulated ranks, with the names `of_rank` of its own. `apart`: later blocks see nothing of it."""

    names: dict[str, Any] = field(default_factory=dict)
    ranks: int = 0
    of_rank: Callable[[dict[str, Any]], dict[str, Any]] = dict
    live: tuple[str, ...] = ("mesh",)
    apart: bool = False


class _MadeAnew(ast.NodeTransformer):
    """Each use of a name that stands for a new thing makes one."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = {name for name, value in names.items() if isinstance(value, Each)}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.names or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(ast.parse(f"{node.id}.make()", mode="eval").body, node)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def run(code: str, where: str, names: dict[str, Any], setting: Setting) -> None:
    """A block of Python, whole; what it makes stays in `names`."""
    if setting.apart:
        names = dict(names)
    names.update(setting.names)
    tree = ast.fix_missing_locations(_MadeAnew(names).visit(ast.parse(code, where)))
    uses = [any(_name(part) in setting.live for part in ast.walk(node)) for node in tree.body]
    once = uses.index(True) if setting.ranks else len(uses)
    exec(compile(ast.Module(tree.body[:once], []), where, "exec"), names)
    if setting.ranks:
        rest = compile(ast.Module(tree.body[once:], []), where, "exec")
        run_ranks(lambda rank: exec(rest, names | setting.of_rank(names)), setting.ranks)


def llama(heads: int = 8, device: str = "cpu") -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 96}
    torch.manual_seed(0)
    with torch.device(device):
        config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=heads)
        return LlamaForCausalLM(config).eval()


def tp_mesh(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def folder() -> Path:
    return Path(tempfile.mkdtemp())


IDS = torch.arange(20).view(2, 10)


def readme() -> Setting:
    saved = folder()
    llama().save_pretrained(saved)
    names = {"model": llama(), "folder": saved, "inputs": {"input_ids": IDS, "max_new_tokens": 2, "do_sample": False}}
    return Setting(names, 8, lambda _: {"model": llama(), "mesh": tp_mesh(8), "folder": saved})


def elsewhere() -> Setting:
    Path("mine/rules/plans").mkdir(parents=True)
    return Setting({"autoplan": autoplan, "model": llama()})


def feed() -> Setting:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    model.forward = lambda x: nn.Sequential.forward(model, x)  # type: ignore[method-assign]
    return Setting({"autoplan": autoplan, "torch": torch, "model": model})


def packed(method: str, adapters: bool) -> Setting:
    from quantised_models import METHODS, adapted, built, checkpoint, random_state, tiny
    from safetensors.torch import save_file

    config, saved = tiny(METHODS[method]), folder()

    def model() -> nn.Module:
        return adapted(config, "meta") if adapters else built(config, "meta")

    made = autoplan.plan(model(), tp_size=4, prove="none")
    if adapters:
        save_file(random_state(autoplan.packed_model(model(), made)), saved / "model.safetensors")
    else:
        checkpoint(config, made, saved)
    name = "peft_model_on_meta" if adapters else "plain_model_on_meta"
    own = {"autoplan": autoplan, "plan": made, "folder": saved, name: Each(model)}
    return Setting(own, 4, lambda _: {"mesh": tp_mesh(4)}, ("mesh", "packed_model"))


def framework() -> Setting:
    names = {"autoplan": autoplan, "tp_size": 2, "options": autoplan.Options()}
    return Setting(names, 2, lambda _: {"model": llama(), "mesh": tp_mesh(2)}, ("model",))


def stage() -> Setting:
    def of_rank(_: dict[str, Any]) -> dict[str, Any]:
        part = llama()
        part.lm_head = None  # type: ignore[assignment]
        return {"whole_on_meta": llama(device="meta"), "stage": part, "mesh": tp_mesh(2)}

    return Setting({"autoplan": autoplan, "tp_size": 2}, 2, of_rank, ("whole_on_meta",))


def losses() -> Setting:
    plan = autoplan.plan(llama(), 2, prove="none")

    def of_rank(_: dict[str, Any]) -> dict[str, Any]:
        return {"model": autoplan.parallelize(llama(), tp_mesh(2), plan, check=False)}

    return Setting({"autoplan": autoplan, "torch": torch, "ids": IDS}, 2, of_rank, ("model",))


def on_gpus() -> Setting:
    """The tutorial's mesh has 32 GPUs; here "tp" is as large, on the CPU, and there is one of them."""

    def small(device: str, sizes: tuple[int, ...], **named: Any) -> DeviceMesh:
        return init_device_mesh("cpu", (1, sizes[-1]), **named)

    def of_rank(names: dict[str, Any]) -> dict[str, Any]:
        return {"model": copy.deepcopy(names["model"]), "init_device_mesh": small}

    return Setting({}, 8, of_rank, apart=True)


def op_names() -> Setting:
    from autoplan.ops.records import on_shards, record, site

    names = {name: value for part in (on_shards, record, site) for name, value in vars(part).items()}
    return Setting({name: value for name, value in names.items() if not name.startswith("__")})


def instruction_names() -> Setting:
    from autoplan import values
    from autoplan.execute.collectives import all_reduce
    from autoplan.execute.executors import At, executes

    own = {"Callable": Callable, "dataclass": dataclass, "torch": torch}
    return Setting(vars(values) | own | {"all_reduce": all_reduce, "At": At, "executes": executes})


@contextmanager
def lists_as_they_were() -> Iterator[None]:
    """What a document registers is forgotten afterwards."""
    import autoplan.execute.hooks.install  # noqa: F401 - registers all of ours
    from autoplan.execute.executors import EXECUTORS
    from autoplan.ops.records.record import CALLS, OPS, _forget
    from autoplan.values import INSTRUCTIONS

    lists: tuple[dict[Any, Any], ...] = (EXECUTORS, CALLS, OPS, INSTRUCTIONS)
    before = [dict(one) for one in lists]
    try:
        yield
    finally:
        for one, known in zip(lists, before, strict=True):
            for key in one.keys() - known.keys():
                del one[key]
        _forget()


SETTINGS: dict[tuple[str, int], Callable[[], Setting]] = {
    ("README.md", 0): readme,
    ("docs/plans-elsewhere.md", 0): elsewhere,
    ("docs/howto/feed-a-model.md", 0): feed,
    ("docs/howto/train-on-long-sequences.md", 0): lambda: Setting({"autoplan": autoplan, "model": "llama"}),
    ("docs/howto/plan-a-quantised-model.md", 0): lambda: Setting({"autoplan": autoplan}),
    ("docs/howto/plan-a-quantised-model.md", 1): lambda: packed("fp8 blocks", False),
    ("docs/howto/plan-a-quantised-model.md", 2): lambda: packed("awq", True),
    ("docs/for-frameworks.md", 0): framework,
    ("docs/for-frameworks.md", 1): stage,
    ("docs/losses.md", 0): losses,
    ("docs/tutorial.md", 3): on_gpus,
    ("docs/howto/add-an-instruction.md", 0): instruction_names,
    ("docs/howto/add-an-op.md", 0): op_names,
}

LONG = {"README.md", "docs/howto/plan-a-quantised-model.md"}
