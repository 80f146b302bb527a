"""The Python that a sharded step costs: ours beside torch's `parallelize_module` and transformers' own sharding.

    python tests/benchmarks/step_cost.py [--layers 12] [--repeats 12]

The process group is torch's fake one: collectives return at once and move nothing. Widths are so small that computing
takes no time, so what is measured is what each way adds to a forward and a backward on the host, in processor time.
Each way runs in turn, several times; the least of all rounds is taken, so that a busy machine does not count.

Context parallelism at cp 2 is held against torch's `context_parallel`, which has no kernel for CPUs: its ring runs with
torch's attention kernel for CPUs here, and gradients are summed in one message. Under FSDP2 neither would sum them.

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
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.models.llama.modeling_llama import LlamaMLP

import autoplan

STEPS = 5  # in a round
KERNELS = (
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
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


def ours_over_cp(model: Any, mesh: DeviceMesh) -> Any:
    return autoplan.parallelize(model, mesh, autoplan.plan(model, cp_size=2, prove="none"), check=False)


def torchs_over_cp(model: Any, mesh: DeviceMesh) -> Any:
    for layer in model.model.layers:  # as accelerate does: the ring takes no mask
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {**kwargs, "attention_mask": None, "is_causal": True}), with_kwargs=True
        )
    return model


def _ring(op: Any, args: Any, kwargs: Any) -> Any:
    """torch's ring around the kernel for CPUs."""
    lies, local = args[0]._spec, [one.to_local() if isinstance(one, DTensor) else one for one in args]
    group = lies.mesh.get_group()
    if op is KERNELS[1]:
        names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
        given = dict(zip(names, local, strict=True)) | kwargs
        found = ring._templated_ring_attention_backward(group, 2, op, grad_out_name="grad_out", **given)
    else:
        query, key, value, rate, causal = (*local, 0.0, False)[:5]
        found = ring._templated_ring_attention(group, 2, op, query, key, value, causal, dropout_p=rate, **kwargs)
    return tuple(DTensor.from_local(one, lies.mesh, [Shard(2)], run_check=False) for one in found)


def context_step(model: Any, mesh: DeviceMesh, ids: torch.Tensor) -> None:
    """A step in torch's context: the batch is cut by it."""
    ids, places = ids.clone(), torch.arange(ids.shape[1])[None]
    with context_parallel(mesh, buffers=[ids, places], buffer_seq_dims=[1, 1]):
        model(input_ids=ids, position_ids=places, use_cache=False).logits.sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    summed = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(summed)
    for gradient, part in zip(gradients, summed.split([one.numel() for one in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    model.zero_grad()


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
    steps: dict[str, Callable[[], None]] = {name: partial(step, model, ids) for name, model in models.items()}
    over_cp = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    steps["autoplan over cp"] = partial(step, ours_over_cp(build(layers), over_cp), ids)
    steps["torch's context_parallel"] = partial(context_step, torchs_over_cp(build(layers), over_cp), over_cp, ids)
    found = dict.fromkeys(steps, float("inf"))
    for run in steps.values():
        for _ in range(FOLLOWED):
            run()
    for _ in range(repeats):
        for name, run in steps.items():
            begin = time.process_time()
            for _ in range(STEPS):
                run()
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
    ring.custom_ops.update(dict.fromkeys(KERNELS, _ring))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = measured(asked.layers, asked.repeats)
    dist.destroy_process_group()
    print(f"a step of a llama of {asked.layers} layers at tp 2, processor time on the host:")
    for name, spent in found.items():
        print(f"    {name:28}{spent:8.1f} ms   + {spent - found['plain']:6.1f}")
    best = min(found["transformers' own"], found["torch's parallelize_module"])
    print(f"ours is {found['autoplan.parallelize'] / best:.2f} of the better of the two; the limit is 0.33")
    over_cp = found["autoplan over cp"] / found["torch's context_parallel"]
    print(f"over cp ours is {over_cp:.2f} of torch's; the limit is 1.15")


if __name__ == "__main__":
    main()
