"""The Python that a sharded step costs: ours beside torch's `parallelize_module` and transformers' own sharding.

    python tests/benchmarks/step_cost.py [--layers 12] [--repeats 12]

The process group is torch's fake one: collectives return at once and move nothing. Widths are so small that computing
takes no time, so what is measured is what each way adds to a forward and a backward on the host, in processor time.
Each way runs in turn, several times; the least of all rounds is taken, so that a busy machine does not count.

"own code" is the same llama whose MLPs are of a class that is not trusted: there the path guard follows the first
calls. Both are measured with the guard and without, after it has seen enough calls.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.models.llama.modeling_llama import LlamaMLP

import autoplan

STEPS = 5  # in a round
FOLLOWED = 4  # calls of one kind that the guard has seen before the clock starts


def build(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class OwnMLP(LlamaMLP):
    """A part whose code is the user's: the guard follows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def own_code(layers: int) -> Any:
    model = build(layers)
    for layer in model.model.layers:
        layer.mlp.__class__ = OwnMLP
    return model


def ours(model: Any, mesh: DeviceMesh, path_guard: Any = "refuse") -> Any:
    plan = autoplan.plan(model, 2, prove="none")
    return autoplan.parallelize(model, mesh, plan, check=False, path_guard=path_guard)


def torchs(model: Any, mesh: DeviceMesh) -> Any:
    """The module that we export for torch: stock styles alone, as one would write them by hand."""
    module: dict[str, Any] = {"__name__": "generated_plan"}
    text = autoplan.plan(model, 2, prove="none").export("torch", model)
    assert "autoplan import" not in text and "import autoplan" not in text
    exec(compile(text, "generated_plan.py", "exec"), module)
    return module["parallelize"](model, mesh)


def transformers_own(model: Any, mesh: DeviceMesh) -> Any:
    """The plan that ships with the model, as `from_pretrained(distributed_config=...)` applies it."""
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2, tp_plan="auto"))
    return apply_tensor_parallelism(model, mesh, plan)


unguarded = partial(ours, path_guard="off")
WAYS: dict[str, tuple[Callable[[int], Any], Callable[[Any, DeviceMesh], Any]]] = {
    "plain": (build, lambda model, mesh: model),
    "autoplan.parallelize": (build, ours),
    '  with path_guard="off"': (build, unguarded),
    "own code": (own_code, ours),
    '  own code, path_guard="off"': (own_code, unguarded),
    "transformers' own": (build, transformers_own),
    "torch's parallelize_module": (build, torchs),
}


def step(model: Any, ids: torch.Tensor) -> None:
    output = model(input_ids=ids, use_cache=False)
    logits = output.logits
    (logits.to_local() if hasattr(logits, "to_local") else logits).sum().backward()
    model.zero_grad()


def measured(layers: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a step, by way."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ids = torch.randint(0, 64, (1, 8))
    models = {name: way(made(layers), mesh) for name, (made, way) in WAYS.items()}
    found = dict.fromkeys(models, float("inf"))
    for model in models.values():
        for _ in range(FOLLOWED):
            step(model, ids)
    for _ in range(repeats):
        for name, model in models.items():
            begin = time.process_time()
            for _ in range(STEPS):
                step(model, ids)
            found[name] = min(found[name], 1e3 * (time.process_time() - begin) / STEPS)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=12)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = measured(asked.layers, asked.repeats)
    dist.destroy_process_group()
    print(f"a step of a llama of {asked.layers} layers at tp 2, processor time on the host:")
    for name, spent in found.items():
        print(f"    {name:28}{spent:8.1f} ms   + {spent - found['plain']:6.1f}")
    best = min(found["transformers' own"], found["torch's parallelize_module"])
    print(f"ours is {found['autoplan.parallelize'] / best:.2f} of the better of the two; the limit is 0.33")


if __name__ == "__main__":
    main()
