"""A call that takes a way through the model's code of which the plan knows nothing is refused.

Without the guard each of these is wrong without a word.
"""

from __future__ import annotations

import copy
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from apart import run_apart, script
from other_ways import CASES, Case, X
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError, UnprovenPlanWarning
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.values import Plan

# Ways that the trial runs, or calls that are refused by another name: right, or refused.
ELSEWHERE = (
    "statistics",
    "training in a helper",
    "training in a lambda",
    "one head on a rank",
    "a second round",
    "the grad mode",
)


REFUSED = r"other_ways\.py:\d+: .* ran on sharded values but was not traced|was added after|takes the branch"


def planned(case: Case) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    random.seed(0)
    model = case.model().double().eval()
    plan = autoplan.plan(model, case.tp, inputs={"x": X})
    assert plan.proof.ok, plan.proof
    return model, plan


def called(case: Case, model: nn.Module, guard: str = "", plan: Plan | None = None) -> dict[str, torch.Tensor]:
    """What the other call gives: output, and gradients where it has some."""
    if plan is not None:
        mesh = init_device_mesh("cpu", (case.tp,), mesh_dim_names=("tp",))
        autoplan.parallelize(model, mesh, plan, path_guard=guard)
        model(X)  # the one that was planned
        model.zero_grad()
    else:
        model(X)
        model.zero_grad()
    if case.prepare is not None:
        case.prepare(model)
    if case.seed is not None:
        random.seed(case.seed)
    given: dict[str, Any] = {"x": X, **case.other}
    with torch.set_grad_enabled(case.grad):
        for _ in range(case.times):
            model.zero_grad()
            output = model(**given)
            first = output[0] if isinstance(output, tuple) else output
            if case.grad:
                first.pow(2).sum().backward()
    found = {"output": first.detach()}
    if case.grad:
        own = {name: p.grad for name, p in model.named_parameters()} if plan is None else full_tensors(model, True)
        found |= {name: gradient for name, gradient in own.items() if gradient is not None}
    return found


def on_ranks(case: Case, model: nn.Module, plan: Plan, guard: str) -> dict[str, torch.Tensor]:
    models = [copy.deepcopy(model) for _ in range(case.tp)]
    return run_ranks(lambda rank: called(case, models[rank], guard, plan), case.tp)[0]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_ways_that_the_trial_runs_are_right_and_others_refused(name: str) -> None:
    case = CASES[name]
    model, plan = planned(case)
    want = called(case, copy.deepcopy(model))
    try:
        got = on_ranks(case, model, plan, "refuse")
    except RankError as error:
        assert isinstance(error.__cause__, AutoplanError)
        return
    for key in want:
        torch.testing.assert_close(got[key], want[key])


@pytest.mark.parametrize("name", [name for name in CASES if name not in ELSEWHERE])
def test_a_way_never_seen_is_refused_and_wrong_without_the_guard(name: str) -> None:
    case = CASES[name]
    model, plan = planned(case)
    want = called(case, copy.deepcopy(model))
    got = on_ranks(case, model, plan, "off")
    worst = max(float((got[key] - want[key]).abs().max() / want[key].abs().max()) for key in want if key in got)
    assert worst > 1e-4, "it is right anyway"
    with pytest.raises(RankError, match=REFUSED):
        on_ranks(case, model, plan, "refuse")


class Checked(nn.Module):
    """Sizes of parts are held against counts of modules, against each other, against those of whole values."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = 4, 8
        self.q, self.k, self.o = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.q(x), self.k(x)
        if q.shape != k.shape or q.shape[:-1] != x.shape[:2] or q.size(-1) != self.heads * self.width:
            raise ValueError("sizes do not fit")
        q, k = (y.view(*y.shape[:2], self.heads, self.width) for y in (q, k))
        if q.shape[2] != self.heads or q.shape[-1] > 8:
            raise ValueError("heads do not fit")
        return x + self.o((q * k.softmax(-1)).flatten(2))


def test_sizes_that_fit_are_compared_as_before() -> None:
    case = Case(Checked, {"x": X[:1].expand(8, 6, 16)})
    model, plan = planned(case)
    want, got = called(case, copy.deepcopy(model)), on_ranks(case, model, plan, "refuse")
    for key in want:
        torch.testing.assert_close(got[key], want[key])


@pytest.mark.parametrize("act", ["gelu", "silu"])  # in C and in Python
def test_another_elementwise_function_is_as_right(act: str) -> None:
    case = replace(CASES["a function that is looked up"], other={"act": act})
    model, plan = planned(case)
    want, got = called(case, copy.deepcopy(model)), on_ranks(case, model, plan, "refuse")
    for key in want:
        torch.testing.assert_close(got[key], want[key])


def test_it_warns_where_that_is_asked_for() -> None:
    case = CASES["a flag"]
    model, plan = planned(case)
    with pytest.warns(UnprovenPlanWarning, match=r"other_ways\.py:\d+: .* ran on sharded values but was not traced"):
        on_ranks(case, model, plan, "warn")


def test_a_refused_call_is_refused_again_and_a_known_one_runs() -> None:
    case = CASES["a flag"]
    model, plan = planned(case)

    def run(rank: int) -> tuple[int, bool, bool]:
        mesh = init_device_mesh("cpu", (case.tp,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        refused = 0
        for _ in range(2):
            try:
                sharded(X, **case.other)
            except AutoplanError:
                refused += 1
        same = [torch.allclose(sharded(x), model(x)) for x in (X, X[:, :3], X[:1])]
        return refused, all(same), sys.gettrace() is None

    assert run_ranks(run, case.tp) == [(2, True, True)] * case.tp


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o, self.heads = nn.Linear(16, 48), nn.Linear(16, 16), 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, 4).permute(2, 0, 3, 1, 4)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return x + self.o(y.transpose(1, 2).reshape(b, s, self.heads * 4))


def test_a_count_that_is_set_after_sharding_is_refused() -> None:
    model = Counted().double()
    plan = autoplan.plan(model, 2, inputs={"x": X})

    def run(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded: Any = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        sharded(X)
        before = sharded.heads
        sharded.heads = model.heads
        with pytest.raises(AutoplanError) as error:
            sharded(X)
        sharded.heads = before
        sharded(X)
        return str(error.value)

    assert "heads is 4; sharding had set it to 2" in run_ranks(run, 2)[0]


def test_the_trace_of_a_debugger_is_left_alone() -> None:
    case = CASES["a flag"]
    model, plan = planned(case)

    def run(rank: int) -> bool:
        mesh = init_device_mesh("cpu", (case.tp,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        mine = lambda frame, event, arg: None  # noqa: E731
        sys.settrace(mine)
        try:
            sharded(X)
            return sys.gettrace() is mine
        finally:
            sys.settrace(None)

    with pytest.warns(UnprovenPlanWarning, match="not guarded"):
        assert all(run_ranks(run, case.tp))


def test_ways_go_along_in_files(tmp_path: Path) -> None:
    _, plan = planned(CASES["a flag"])
    plan.save(tmp_path / "plan.yaml")
    assert plan.paths and autoplan.load_plan(tmp_path / "plan.yaml").paths == plan.paths


SCRIPT = """
import sys, torch, autoplan
from autoplan.check.ranks.run import run_ranks
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())

def on_rank(rank):
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return autoplan.parallelize(Net(), mesh, sys.argv[1])(torch.ones(2, 8)).shape

if __name__ == "__main__":
    if len(sys.argv) == 3:
        autoplan.plan(Net(), tp_size=2, inputs={"x": torch.ones(2, 8)}).save(sys.argv[1])
    print(run_ranks(on_rank, 2))
"""


PLANS = "s.autoplan.plan(s.Net(), tp_size=2, inputs={'x': torch.ones(2, 8)}).save('plan.yaml')"
RUNS = "print(s.run_ranks(s.on_rank, 2))"


def _imported(folder: Path, code: str, *arguments: str) -> None:
    sys.path.insert(0, str(folder))
    sys.argv = ["-c", *arguments]
    exec(f"import torch, script_of_mine as s; {code}", {})


@pytest.mark.parametrize("planned_by", ["an import", "the script"])
def test_a_plan_serves_a_script_that_is_run(planned_by: str, tmp_path: Path) -> None:
    (tmp_path / "script_of_mine.py").write_text(SCRIPT)
    file = tmp_path / "script_of_mine.py"
    if planned_by == "an import":
        planned, ran = (
            run_apart(tmp_path, (_imported, tmp_path, PLANS)),
            run_apart(tmp_path, (script, file, "plan.yaml")),
        )
    else:
        planned = run_apart(tmp_path, (script, file, "plan.yaml", "now"))
        ran = run_apart(tmp_path, (_imported, tmp_path, RUNS, "plan.yaml"))
    assert (planned.returncode, ran.returncode) == (0, 0), planned.stdout + ran.stdout
    assert ran.stdout.count("torch.Size([2, 8])") == 2
