"""transformers' own tests of tensor and expert parallelism, over every type that has a plan, on models that we load.

The tests come out of transformers' source archive (`make test-theirs` fetches the one of the installed version; THEIRS=
names a folder that holds test_tensor_parallel_mixin). What is replaced: where they load a model with a
`distributed_config`, it is made on meta, parallelised by autoplan and filled from their checkpoint; what a rank holds
of a gradient is what autoplan says it holds; ranks are forks. What reads transformers' own tables of styles is left
out: two tests, and a check of shapes that rows on several ranks do not pass. TYPES= names some types.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import traceback
import unittest
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import autoplan
from autoplan.execute.parameters.held import held_by
from autoplan.hf.shrink import tiny_config
from autoplan.hf.source import resolve

FOLDER = Path(os.environ.get("THEIRS", "build/theirs"))
FILES = {
    "test_tensor_parallel_mixin": "TensorParallelTesterMixin",
    "test_expert_parallel_mixin": "ExpertParallelTesterMixin",
}
OWN_TABLES = ("test_tp_plan_shards_input_embeddings", "test_moe_parallel_plans_shard_experts")
SECONDS = 300


def run_distributed(world_size: int, **_: Any) -> Callable[..., Any]:
    """Run a function on forked gloo ranks, in place of theirs; the first error is raised here."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        def started(*args: Any) -> None:
            context = get_context("fork")
            pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
            with tempfile.TemporaryDirectory() as store:
                ranks = [
                    context.Process(target=_rank, args=(rank, world_size, store, pipes[rank][1], function, args))
                    for rank in range(world_size)
                ]
                for one in ranks:
                    one.start()
                try:
                    said = [pipe.recv() if pipe.poll(SECONDS) else f"no answer in {SECONDS} s" for pipe, _ in pipes]
                finally:
                    for one in ranks:
                        one.kill()
                        one.join()
            errors = [text for text in said if text]
            assert not errors, min(errors, key=lambda text: "Connection" in text)

        return started

    return decorated


def _rank(rank: int, size: int, store: str, pipe: Any, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(f"{store}/ranks", size), rank=rank, world_size=size)
        PreTrainedModel.from_pretrained = classmethod(_loaded)  # type: ignore[assignment]
        function(rank, *args)
        pipe.send("")
    except BaseException:
        pipe.send(traceback.format_exc())
    finally:
        os._exit(0)


_FROM_PRETRAINED = PreTrainedModel.__dict__["from_pretrained"].__func__
_SHARDED: dict[str, torch.nn.Parameter] = {}


def _loaded(cls: Any, path: str, *, distributed_config: Any = None, **options: Any) -> Any:
    """A whole model as transformers loads it, or one that autoplan shards and fills from the same files."""
    if distributed_config is None:
        return _FROM_PRETRAINED(cls, path, **options)
    tp, ep = dist.get_world_size(), getattr(distributed_config, "ep_size", None) or 1
    if options:  # quantised while loading: here in a checkpoint of its own
        whole, path = path, f"{path}/quantised"
        if dist.get_rank() == 0:
            _FROM_PRETRAINED(cls, whole, **options).save_pretrained(path)
        dist.barrier()
    with torch.device("meta"):
        model = cls(cls.config_class.from_pretrained(path))
    plan = autoplan.plan_once(model, tp, ep_size=ep)
    model = autoplan.packed_model(model, plan) if options else model
    model = autoplan.parallelize(model, init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",)), plan)
    autoplan.load_weights(model, path)
    _SHARDED.update(model.named_parameters())
    return model.eval()


def _own_part(name: str, grad: torch.Tensor, *_: Any) -> torch.Tensor:
    held = held_by(_SHARDED[name])
    return grad if held is None else held.cut(grad)


def _theirs(name: str) -> ModuleType:
    """One of their files, as a module of a package whose helper for starting ranks is ours."""
    places = [place for place in FOLDER.glob(f"**/{name}.py")]
    if not places:
        pytest.skip(f"NOT TRIED: no {name}.py under {FOLDER}: run `make test-theirs`", allow_module_level=True)
    helper = ModuleType("theirs.distributed_testing_utils")
    helper.run_distributed = run_distributed  # type: ignore[attr-defined]
    package = ModuleType("theirs")
    package.__path__ = [str(places[0].parent)]
    sys.modules.setdefault("theirs", package)
    sys.modules.setdefault(helper.__name__, helper)
    spec = importlib.util.spec_from_file_location(f"theirs.{name}", places[0])
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Tester:
    """What their mixins ask of a model's tester."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.causal_lm_class = AutoModelForCausalLM._model_mapping[type(resolve(model_type).config)]

    def get_config(self) -> Any:
        source = resolve(self.model_type)
        assert source.config is not None
        return tiny_config(source.config, 0, source.shrink, (2, 2))


def _case(model_type: str, mixins: tuple[type, ...]) -> type:
    def tester(self: Any) -> _Tester:
        return _Tester(model_type)

    body: dict[str, Any] = {"model_tester": property(tester)} | dict.fromkeys(OWN_TABLES)
    return type(f"Test_{model_type}", (*mixins, unittest.TestCase), body)


def _has_plan(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]
    return getattr(config, "base_model_tp_plan", None) is not None


for _name in FILES:
    vars(_module := _theirs(_name)).update({
        "_reference_grad_shard": _own_part,
        "_verify_tp_sharding": lambda *_: [],
        "TP_DISTRIBUTED_TEST_MODEL_TYPES": None,
        "EP_DISTRIBUTED_TEST_MODEL_TYPES": None,
    })  # fmt: skip
_MIXINS = tuple(getattr(sys.modules[f"theirs.{file}"], name) for file, name in FILES.items())
_ASKED = os.environ.get("TYPES", "").split()
for _type in _ASKED or [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if _has_plan(name)]:
    globals()[f"Test_{_type}"] = _case(_type, _MIXINS)
