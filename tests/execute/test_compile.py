"""torch.compile on a planned model: one graph, no break caused by what the plan does, the same numbers.

The ranks are two gloo processes: compiled code runs its collectives for real. `aot_eager` traces forward and backward
as inductor would, and generates no code. A model whose own code breaks the graph is not our business; llama-likes do
not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from other_calls import Optional, Raised, TwoStreams
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_processes
from autoplan.common.errors import PlanMismatchError
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.execute.random_streams import draws_in_code, may_draw
from autoplan.hf.source import resolve
from autoplan.values import CallRewrite, LocalExperts

# (model type, with labels, options of parallelize, options of plan)
CASES: tuple[tuple[str, bool, dict[str, Any], dict[str, Any]], ...] = (
    ("llama", False, {}, {}),
    ("llama", True, {}, {}),
    ("qwen3", True, {"gather_logits": True}, {}),
    ("gemma2", True, {}, {"sequence_parallel": True}),
    ("cohere", True, {}, {}),  # attention and MLP side by side: one withholds its part of the sum
    ("cohere", False, {}, {"sequence_parallel": True}),
    ("cohere", True, {"activation_checkpointing": True}, {}),  # what is withheld stays inside the block
    ("gemma2", False, {"activation_checkpointing": "selective"}, {"sequence_parallel": True}),
    ("mixtral", False, {}, {"ep_size": 2}),
)


def built(model_type: str) -> nn.Module:
    torch.manual_seed(0)
    return resolve(model_type).tiny(dtype=torch.float64, experts="batched_mm")


def ids() -> torch.Tensor:
    return torch.randint(100, (2, 8), generator=torch.Generator().manual_seed(5))


def step(model: Any, run: Any, given: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and every gradient of one step; without labels, of a sum over logits."""
    model.train().zero_grad(set_to_none=True)
    output = run(**given)
    logits = output.logits
    whole = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    loss = output.loss if "labels" in given else whole.square().mean()
    loss.backward()
    return loss.detach(), full_tensors(model, grads=True)


@dataclass(frozen=True)
class Compiled:
    """What came of one case: graphs, breaks, and the distance from the unsharded model that is not compiled."""

    breaks: int
    graphs: int
    loss: float
    gradient: float


def compiled(rank: int) -> list[Compiled]:
    """Every case on a rank."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return [one(mesh, *case) for case in CASES]


def one(mesh: Any, model_type: str, labels: bool, options: dict[str, Any], planned: dict[str, Any]) -> Compiled:
    given = {"input_ids": ids(), "use_cache": False, **({"labels": ids()} if labels else {})}
    unsharded = built(model_type)
    loss, gradients = step(unsharded, unsharded, given)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = autoplan.parallelize(built(model_type), mesh, plan_for(model_type, **planned), **options)
    got, theirs = step(model, torch.compile(model, backend="aot_eager"), given)
    counters = torch._dynamo.utils.counters
    worst = max(float((theirs[name] - wanted).abs().max()) for name, wanted in gradients.items())
    breaks = sum(counters["graph_break"].values())
    return Compiled(breaks, counters["stats"]["unique_graphs"], float((got - loss).abs()), worst)


def plan_for(model_type: str, **planned: Any) -> autoplan.Plan:
    plan = autoplan.plan(built(model_type), 2, prove="none", **planned)
    assert plan.sequence_parallel == ("sequence_parallel" in planned) and bool(plan.runtime.of(LocalExperts)) == (
        plan.ep_size > 1
    )
    return plan


@pytest.mark.gloo
@pytest.mark.slow
def test_planned_models_compile_whole() -> None:
    for ranks in run_processes(compiled, (), 2, timeout=900.0):
        for case, found in zip(CASES, ranks, strict=True):
            assert (found.breaks, found.graphs) == (0, 1), case
            limit = 1e-6 if case[1] or case[0] == "gemma2" else 1e-10  # losses, and gemma2's norms, are in float32
            assert found.loss < limit and found.gradient < limit, (case, found)


# ------------------------------------------------------------------------------------ steps of several lengths


@dataclass(frozen=True)
class Steps:
    """How a llama of two layers is compiled and trained. `what`: "whole", each of its "blocks", or whole with code of
    somebody's between head and loss that "breaks" the graph."""

    what: str
    checkpointing: bool | str
    labels: bool
    backend: str = "aot_eager"


QUICK = (Steps("blocks", True, False), Steps("whole", True, True))
MORE = (
    *(Steps(what, saved, labels) for what in ("whole", "blocks") for saved in (False, True, "selective")
      for labels in (False, True)),
    Steps("breaks", False, True),
    Steps("breaks", True, True),
    *(Steps(what, saved, labels, "inductor") for what in ("whole", "blocks") for saved in (False, True, "selective")
      for labels in (False, True)),
)  # fmt: skip
LENGTHS = (8, 12, 15)  # the second is compiled for any length, and the third finds that


def walked(rank: int, cases: tuple[Steps, ...], lengths: tuple[int, ...]) -> list[tuple[int, int, float, float]]:
    """Of each case: breaks, graphs, and how far loss and gradients are from the unsharded model that is not compiled.

    With one length, what was compiled for a model is kept: it must not stand in the way of the next one.
    """
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = plan_for("llama")
    found = []
    for case in cases:
        if len(lengths) > 1:
            torch._dynamo.reset()
        found.append(walk(mesh, plan, case, lengths))
    return found


def walk(mesh: Any, plan: autoplan.Plan, case: Steps, lengths: tuple[int, ...]) -> tuple[int, int, float, float]:
    torch._dynamo.utils.counters.clear()
    unsharded = built("llama")
    model = autoplan.parallelize(built("llama"), mesh, plan, activation_checkpointing=case.checkpointing)
    run: Any = model
    if case.what == "blocks":
        for name in blocks_of(plan):
            model.get_submodule(name).compile(backend=case.backend)
    else:
        run = torch.compile(model, backend=case.backend)
    if case.what == "breaks":
        model.loss_function = partial(_broken, model.loss_function)  # type: ignore[assignment]
    worst = [0.0, 0.0]
    for length in lengths:
        ids = torch.randint(100, (2, length), generator=torch.Generator().manual_seed(length))
        given = {"input_ids": ids, "use_cache": False, **({"labels": ids} if case.labels else {})}
        loss, gradients = step(unsharded, unsharded, given)
        got, ours = step(model, run, given)
        far = max(float((ours[name] - wanted).abs().max()) for name, wanted in gradients.items())
        worst = [max(worst[0], float((got - loss).abs())), max(worst[1], far)]
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"], worst[0], worst[1]


def blocks_of(plan: autoplan.Plan) -> tuple[str, ...]:
    return tuple(name for stack in plan.layers for name in stack.fqns)


def _broken(function: Any, *args: Any, **kwargs: Any) -> Any:
    torch._dynamo.graph_break()
    return function(*args, **kwargs)


def check_walk(cases: tuple[Steps, ...], lengths: tuple[int, ...], timeout: float) -> None:
    for ranks in run_processes(walked, (cases, lengths), 2, timeout=timeout):
        for case, (breaks, graphs, loss, gradient) in zip(cases, ranks, strict=True):
            print(case, breaks, graphs, loss, gradient)
            # models compute their losses in float32, and inductor fuses what norms do in it
            limit = 1e-6 if case.labels or case.backend == "inductor" else 1e-10
            assert loss < limit and gradient < limit, case
            if case.what == "breaks":
                assert breaks, case  # theirs; the loss is right, and nobody waits
                continue
            compiled_apart = len(blocks_of(plan_for("llama"))) if case.what == "blocks" else 1
            assert (breaks, graphs) == (0, compiled_apart * min(len(lengths), 2)), case


@pytest.mark.long
@pytest.mark.gloo
def test_steps_compile_with_checkpointing_labels_and_any_length() -> None:
    check_walk(QUICK, LENGTHS[:1], 240.0)


@pytest.mark.gloo
@pytest.mark.slow
def test_every_way_to_compile_steps() -> None:
    check_walk(MORE, LENGTHS, 3600.0)


def over_cp(rank: int) -> list[tuple[int, int, float, float]]:
    """The same of models over cp whose MLPs are compiled, of two layers each."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    found = []
    for model_type in ("llama", "mixtral"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        given = {"input_ids": ids()[:, :7], "use_cache": False, "labels": ids()[:, :7]}
        unsharded = built(model_type)
        loss, gradients = step(unsharded, unsharded, given)
        plan = autoplan.plan(built(model_type), cp_size=2, prove="none")
        model = autoplan.parallelize(built(model_type), mesh, plan, activation_checkpointing=True)
        for layer in model.model.layers:
            layer.mlp.compile(backend="aot_eager")
        got, ours = step(model, model, given)
        far = max(float((ours[name] - wanted).abs().max()) for name, wanted in gradients.items())
        counters = torch._dynamo.utils.counters
        breaks = sum(counters["graph_break"].values())
        found.append((breaks, counters["stats"]["unique_graphs"], float((got - loss).abs()), far))
        model.model.layers[1].self_attn.compile(backend="eager")
        with pytest.raises(
            PlanMismatchError, match=r"layers.1.self_attn \(positions are moved at .*q_proj\) is compiled"
        ):
            model(**given)
    return found


@pytest.mark.long
@pytest.mark.gloo
def test_mlps_compile_over_cp_with_checkpointing_in_one_graph() -> None:
    for ranks in run_processes(over_cp, (), 2, timeout=240.0):
        for breaks, graphs, loss, gradient in ranks:
            assert (breaks, graphs) == (0, 1) and loss < 1e-6 and gradient < 1e-6


def drawing(rank: int) -> float:
    """How far gradients of a compiled model that draws are from those of the same one that is not compiled."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan, found = plan_for("llama"), []
    for backend in (None, "aot_eager"):
        torch.manual_seed(3)
        model = built("llama")
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.3  # type: ignore[assignment]
        model.config.attention_dropout = 0.3
        model = autoplan.parallelize(model, mesh, plan, activation_checkpointing=True)
        run = model if backend is None else torch.compile(model, backend=backend)
        torch.manual_seed(3)
        found.append(step(model, run, {"input_ids": ids(), "use_cache": False, "labels": ids()})[1])
    eager, compiled = found
    return max(float((compiled[name] - wanted).abs().max()) for name, wanted in eager.items())


@pytest.mark.gloo
@pytest.mark.long
def test_checkpointed_blocks_draw_the_same_again_in_a_compiled_model() -> None:
    """Their graph is broken: what runs again in backward must switch streams as what ran first did."""
    assert max(run_processes(drawing, (), 2, timeout=300.0)) < 1e-8


def test_who_may_draw() -> None:
    """Compiled training agrees on a seed only where something draws: that interrupts the graph."""
    quiet, loud = built("llama"), built("llama")
    assert not may_draw(quiet)
    loud.config.attention_dropout = 0.1
    assert may_draw(loud)
    assert may_draw(nn.Sequential(nn.Dropout(0.1))) and not may_draw(nn.Sequential(nn.Dropout(0.0)))


def in_other_calls(rank: int) -> dict[str, str]:
    """What comes of calls that run what no recorded one ran: in one module compiled, or in the whole model."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x, found = torch.linspace(-1, 1, 2 * 6 * 16).view(2, 6, 16), {}

    def stepped(model: nn.Module, run: Any, given: dict[str, Any]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        output = run(x, **given)
        output = output[0] + output[1] if isinstance(output, tuple) else output
        output.square().mean().backward()
        return [output.detach(), *full_tensors(model, grads=True).values()]

    for what in ("a reader more", "random numbers", "a constant"):
        other: dict[str, Any] = {"filled": True} if what == "a constant" else {"context": torch.ones(1)}
        make = partial(TwoStreams, "zeros") if what == "a constant" else partial(Optional, what)
        for how in ("a module", "the model"):
            torch.manual_seed(0)
            model = make()
            whole = copy.deepcopy(model)
            wanted = stepped(whole, whole, other)
            plan = autoplan.plan(copy.deepcopy(model).eval(), 2, inputs={"x": x}, prove="none")
            model = autoplan.parallelize(model, mesh, plan)
            torch._dynamo.reset()
            if how == "a module":
                (model.into if what == "a constant" else model.norms[0]).compile(backend="aot_eager")
            run = model if how == "a module" else torch.compile(model, backend="aot_eager")
            try:
                pairs = zip(stepped(model, run, other), wanted, strict=True)
                off = max(float((mine - its).abs().max()) for mine, its in pairs)
                found[f"{what}, {how}"] = "exact" if off < 1e-6 else f"off by {off}"
            except autoplan.PlanMismatchError as error:
                found[f"{what}, {how}"] = str(error).splitlines()[0]
    found |= rewritten(mesh, x, stepped)
    return found


class Heads(nn.Module):
    """Its code says numbers of heads and of features, which the plan rewrites."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (y.view(batch, length, 4, width // 4).transpose(1, 2) for y in self.qkv(x).split(width, 2))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        made: torch.Tensor = self.out(mixed.reshape(batch, length, width))
        return made


def rewritten(mesh: Any, x: torch.Tensor, stepped: Callable[..., list[torch.Tensor]]) -> dict[str, str]:
    """The same where calls are rewritten."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Heads(), nn.Linear(16, 16))
    wanted = stepped(whole := copy.deepcopy(model), whole, {})
    plan = autoplan.plan(copy.deepcopy(model), 2, inputs={"input": x}, prove="none")
    assert plan.runtime.of(CallRewrite)
    model = autoplan.parallelize(model, mesh, plan)
    torch._dynamo.reset()
    pairs = zip(stepped(model, torch.compile(model, backend="aot_eager"), {}), wanted, strict=True)
    off = max(float((mine - its).abs().max()) for mine, its in pairs)
    model[1].compile(backend="aot_eager")
    with pytest.raises(PlanMismatchError, match="1 is compiled, and the plan rewrites calls in its code"):
        model(x)
    return {"rewritten calls": "exact" if off < 1e-6 else f"off by {off}"}


@pytest.mark.gloo
@pytest.mark.long
def test_calls_that_nobody_recorded_are_right_or_refused_in_compiled_code() -> None:
    extra, fill = (
        f"{name} did not run in any recorded call; in compiled code it is unknown whether its gradients are summed "
        "over ranks"
        for name in ("extra", "fill")
    )
    for found in run_processes(in_other_calls, (), 2, timeout=300.0):
        assert found == {
            "a reader more, a module": extra,
            "a reader more, the model": extra,
            "random numbers, a module": "exact",
            "random numbers, the model": "exact",
            "a constant, a module": "exact",
            "a constant, the model": fill,
            "rewritten calls": "exact",
        }


def test_code_that_draws() -> None:
    assert draws_in_code(Optional("random numbers")) == {"always"} and not draws_in_code(TwoStreams("zeros"))
    assert draws_in_code(Raised()) == draws_in_code(nn.Sequential(nn.Dropout(0.0))) == {"rate"}
    assert not draws_in_code(built("whisper")), "its config says the rates"
