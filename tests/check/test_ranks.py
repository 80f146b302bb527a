"""Simulated ranks: they compute what real ranks compute, fail loudly, end, and leave the process as it was."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed import multi_threaded_pg

from autoplan.check.ranks import threads
from autoplan.check.ranks.common import RankError, RankTimeout
from autoplan.check.ranks.run import count_collectives, run_processes, run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.execute import random_streams


class SumGradients(torch.autograd.Function):
    """A collective that happens in backward only."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def split_mlp(rank: int) -> tuple[float, list[list[float]], dict[str, int]]:
    """A two-layer MLP split column-then-row with DTensors: loss, whole gradients, collectives counted."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    up, down, x = torch.randn(6, 3), torch.randn(2, 6), torch.randn(4, 3)
    up = distribute_tensor(up, mesh, [Shard(0)]).requires_grad_()
    down = distribute_tensor(down, mesh, [Shard(1)]).requires_grad_()
    x = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    with count_collectives() as counts:
        loss = (torch.relu(x @ up.T) @ down.T).redistribute(mesh, [Replicate()]).sum()
        loss.backward()
    return loss.full_tensor().item(), [t.grad.full_tensor().flatten().tolist() for t in (up, down, x)], dict(counts)


def test_both_engines_compute_what_one_rank_computes() -> None:
    alone = run_ranks(split_mlp, 1)[0]
    threads, gloo = run_ranks(split_mlp, 2), run_ranks(split_mlp, 2, engine="gloo", timeout=120)
    for loss, gradients, counts in [*threads, *gloo]:
        assert loss == pytest.approx(alone[0], rel=1e-5)
        for ours, theirs in zip(gradients, alone[1], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
        assert counts["all_reduce"] >= 1
    assert threads[0][2] == gloo[0][2]


def test_collectives_in_backward_and_functional_ones_meet() -> None:
    def body(rank: int) -> tuple[float, float, int]:
        x = torch.tensor([float(rank + 1)], requires_grad=True)
        with count_collectives() as counts:
            (SumGradients.apply(x) * (rank + 1)).sum().backward()
            total = all_reduce(x.detach(), "sum", dist.group.WORLD)
        return x.grad.item(), total.item(), counts["all_reduce"]

    assert run_ranks(body, 3) == [(6.0, 6.0, 2)] * 3


def test_mesh_of_two_dims_has_its_own_groups() -> None:
    def body(rank: int) -> tuple[float, float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        return tuple(all_reduce(torch.tensor(float(rank)), "sum", mesh[name]).item() for name in ("dp", "tp"))

    assert run_ranks(body, 4) == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_first_failure_is_raised_with_its_rank_and_the_others_are_woken(culprit: int) -> None:
    def body(rank: int) -> None:
        if rank == culprit:
            raise KeyError("the real cause")
        dist.all_reduce(torch.ones(1))

    start = time.monotonic()
    with pytest.raises(RankError, match=f"rank {culprit} of 3 raised KeyError") as caught:
        run_ranks(body, 3)
    assert isinstance(caught.value.cause, KeyError) and caught.value.rank == culprit
    assert time.monotonic() - start < 4


def test_failure_inside_a_collective_is_the_cause() -> None:
    with pytest.raises(RankError, match="stack expects each tensor to be equal size"):
        run_ranks(lambda rank: dist.all_reduce(torch.ones(1 + rank)), 2)


def test_ranks_that_never_meet_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.check.ranks.threads.STUCK_AFTER", 0.4)

    def body(rank: int) -> None:
        if rank == 1:
            dist.all_reduce(torch.ones(1))

    with pytest.raises(RankTimeout, match=r"others never enter: rank 1 at .*test_ranks\.py"):
        run_ranks(body, 2, timeout=60)
    assert run_ranks(lambda rank: rank, 2) == [0, 1]


def test_ranks_that_wait_for_the_processor_are_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at them more time goes by than ranks may wait, as where the process gets no processor."""
    clock = (2 * threads.STUCK_AFTER * look for look in itertools.count())
    monkeypatch.setattr(threads, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    add_up = multi_threaded_pg.AllReduce.work

    def slowly(self: multi_threaded_pg.AllReduce, data: list[list[list[torch.Tensor]]]) -> None:
        time.sleep(0.4)
        add_up(self, data)

    monkeypatch.setattr(multi_threaded_pg.AllReduce, "work", slowly)

    def body(rank: int) -> float:
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(body, 2, timeout=1e6) == [2.0, 2.0]


def test_rank_that_loops_is_given_up_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autoplan.check.ranks.threads.GRACE", 0.1)
    release = threading.Event()
    with pytest.raises(RankTimeout, match=r"did not finish in 0\.2 s: rank 0 at"):
        run_ranks(lambda rank: release.wait() if rank == 0 else None, 2, timeout=0.2)
    with pytest.raises(RankTimeout, match="earlier run"):
        run_ranks(lambda rank: rank, 2)
    release.set()
    time.sleep(0.2)
    assert run_ranks(lambda rank: rank, 2) == [0, 1]


def test_everything_is_as_before() -> None:
    def look() -> tuple[object, ...]:
        prop = torch.distributed.tensor._sharding_prop.ShardingPropagator
        return (
            dist.distributed_c10d._world,
            torch.get_num_threads(),
            torch.random.default_generator,
            prop._propagate_tensor_meta_non_cached,
            torch.get_rng_state().tolist(),
            dist.is_initialized(),
        )

    before = look()
    for _ in range(3):
        run_ranks(lambda rank: torch.rand(3), 2)
    with pytest.raises(RankError):
        run_ranks(lambda rank: 1 / 0, 2)
    assert look() == before


@pytest.fixture
def live_group(tmp_path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_live_process_group_is_set_aside_and_put_back(live_group: None) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    group = dist.group.WORLD
    assert run_ranks(split_mlp, 2)[0][0] == pytest.approx(run_ranks(split_mlp, 1)[0][0], rel=1e-5)
    assert dist.group.WORLD is group and dist.get_backend() == "gloo"
    assert all_reduce(torch.ones(2), "sum", mesh).tolist() == [1.0, 1.0]
    assert isinstance(distribute_tensor(torch.ones(2), mesh, [Shard(0)]), DTensor)


def test_simulated_ranks_do_not_nest() -> None:
    with pytest.raises(RankError, match="inside a simulated rank"):
        run_ranks(lambda rank: run_ranks(lambda inner: inner, 2), 2)


@pytest.mark.parametrize("call", [lambda: run_ranks(abs, 0), lambda: run_ranks(abs, 2, engine="mpi")])
def test_nonsense_is_refused(call) -> None:
    with pytest.raises(AutoplanError):
        call()


# ------------------------------------------------------------------------------------------------ processes


def fail_on_one(rank: int, message: str) -> None:
    if rank == 1:
        raise KeyError(message)
    dist.all_reduce(torch.ones(1))


def echo(rank: int, tensor: torch.Tensor) -> dict[str, object]:
    return {"rank": rank, "sum": tensor + rank}


def test_processes_return_plain_data_and_leave_arguments_alone() -> None:
    tensor = torch.arange(3.0)
    results = run_processes(echo, (tensor,), 2)
    assert [r["sum"].tolist() for r in results] == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    assert not tensor.is_shared()


def test_processes_name_the_rank_that_failed_first() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 raised KeyError: 'the real cause'"):
        run_processes(fail_on_one, ("the real cause",), 2)


def test_processes_refuse_what_cannot_travel() -> None:
    with pytest.raises(AutoplanError, match="cannot be pickled for other processes"):
        run_processes(lambda rank: rank, (), 2)


# ------------------------------------------------------------------------------------------------ randomness


def draws(rank: int, seed_by_rank: bool) -> tuple[list[float], list[float], list[float]]:
    random_streams.manual_seed(11 + (rank if seed_by_rank else 0))
    ones = torch.ones(64, requires_grad=True)
    dropped = torch.nn.functional.dropout(ones, 0.5).tolist()
    with random_streams.fork(5):
        forked = torch.rand(4).tolist()
    return dropped, forked, torch.rand(4).tolist()


@pytest.mark.parametrize("engine", ["threads", "gloo"])
def test_ranks_draw_their_own_numbers(engine) -> None:
    call = run_processes if engine == "gloo" else lambda fn, args, n: run_ranks(lambda rank: fn(rank, *args), n)
    alike, apart = call(draws, (False,), 2), call(draws, (True,), 2)
    assert alike[0] == alike[1]
    assert apart[0][0] != apart[1][0] and apart[0][2] != apart[1][2]
    assert apart[0][1] == apart[1][1]
    assert apart[0] == alike[0]


def test_threads_and_processes_draw_the_same_numbers() -> None:
    assert run_ranks(lambda rank: draws(rank, True), 2) == run_processes(draws, (True,), 2)


def test_checkpoint_recompute_draws_again_what_it_drew() -> None:
    from torch.utils.checkpoint import checkpoint

    def body(rank: int) -> bool:
        random_streams.manual_seed(rank)
        x = torch.ones(256, requires_grad=True)
        y = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5) * t, x, use_reentrant=False)
        torch.rand(7)
        y.sum().backward()
        return torch.equal(x.grad, 2 * y)

    assert run_ranks(body, 2) == [True, True]


def normed_convolution(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).detach()


def test_parametrized_modules_are_sent() -> None:
    """torch refuses to pickle them, and their class exists in this process only."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2)), nn.ReLU())
    x = torch.randn(2, 3, 5)
    for found in run_ranks(partial(_on_a_rank, model, x), 2, engine="gloo"):
        assert torch.equal(found, normed_convolution(model, x))


def _on_a_rank(model: nn.Module, x: torch.Tensor, rank: int) -> torch.Tensor:
    return normed_convolution(model, x)


def test_two_ranks_that_use_an_op_first_make_one_object_of_it() -> None:
    """Dispatch keeps a bare pointer to it: of two, one is freed and used on."""
    names = [f"op{number}" for number in range(200)]
    library = torch.library.Library("first_use", "DEF")  # nobody has used these, whatever ran in this process before
    for name in names:
        library.define(f"{name}(Tensor x) -> Tensor")
    ops, interval = torch.ops.first_use, sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        first, second = run_ranks(lambda rank: [(getattr(ops, name), getattr(ops, name).default) for name in names], 2)
    finally:
        sys.setswitchinterval(interval)
    assert all(a is b for pair in zip(first, second, strict=True) for a, b in zip(*pair, strict=True))


def test_attention_with_fewer_keys_than_values_is_an_error_and_does_not_end_the_process() -> None:
    """Torch's kernel for CPUs reads beyond the end of the keys: a plan that leaves one of both whole gets there."""
    query, key = torch.randn(2, 8, 64, 16), torch.randn(2, 8, 32, 16)
    with pytest.raises(RankError, match="32 keys, but 64 values"):
        run_ranks(lambda rank: nn.functional.scaled_dot_product_attention(query, key, query), 2)
