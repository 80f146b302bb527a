"""What leaves a sharded model by another way than its output: whole, or refused by name."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from other_ways import Mlp, X
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError, UnprovenPlanWarning


class Keeping(Mlp):
    """Keeps a part, a whole value, and a state for the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = 0.0

    def forward(self, x: torch.Tensor, **flags: Any) -> torch.Tensor:
        h = self.up(x).tanh()
        self.part, self.whole, self.losses = h, x.mean(), [h.cos()]
        self.found = {"hidden": h, "input": x}
        y = h + 0.5 * self.state
        self.state = h.detach()
        return x + self.down(y)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Mlp) -> None:
        super().__init__()
        self.block, self.head = block(), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.block.up(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x).tanh()


def on_ranks(block: type[nn.Module], run: Callable[[nn.Module], Any], **options: Any) -> Any:
    """What `run` gives of the sharded model on a rank, and what it gives of the whole one."""
    torch.manual_seed(0)
    model = Net(block).double().eval()
    plan = autoplan.plan(model, 2, inputs={"x": X})
    assert plan.proof.ok

    def sharded(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return run(autoplan.parallelize(copy.deepcopy(model), mesh, plan, **options))

    return run_ranks(sharded, 2)[0], run(copy.deepcopy(model))


def refused(block: type[nn.Module], run: Callable[[nn.Module], Any], message: str) -> None:
    with pytest.raises(RankError, match=message) as caught:
        on_ranks(block, run)
    assert isinstance(caught.value.__cause__, AutoplanError)


@pytest.mark.parametrize("read", ["part", "losses[0]", 'found["hidden"]'])
def test_a_kept_part_is_refused_where_it_is_used(read: str) -> None:
    def run(model: nn.Module) -> Any:
        model(X)
        return eval(f"block.{read}", {"block": model.block}).sum()

    refused(Keeping, run, rf"block\.{read.split('[')[0]}.* is local to a rank")


class KeepingElsewhere(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("map", None, persistent=False)
        self.last, self.record = deque(maxlen=2), SimpleNamespace(map=None)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.up(x).relu()
        self.map, self.record.map = h, h
        setattr(self, "".join(("na", "med")), h)
        self.last.append(h)
        return self.down(h)


@pytest.mark.parametrize("read", ["map", "record.map", "named", "last[0]"])
def test_a_part_is_refused_wherever_it_is_kept(read: str) -> None:
    def run(model: nn.Module) -> Any:
        model(X)
        model(X)
        return eval(f"block.{read}", {"block": model.block}).sum()

    refused(KeepingElsewhere, run, rf"block\.{read.split('[')[0]} is local to a rank")


LATEST: dict[str, Any] = {}


class KeepingAround(Mlp):
    """In a variable of the function that made its methods, and in a global."""

    def __init__(self) -> None:
        super().__init__()
        box: list[Any] = []
        self.put, self.get = lambda h: box.__setitem__(slice(None), [h]), lambda: box[0]

    def forward(self, x: torch.Tensor) -> Any:
        h = self.up(x).relu()
        self.put(h)
        LATEST["hidden"] = h
        return self.down(h)


@pytest.mark.parametrize(("read", "words"), [("block.get()", "box"), ("LATEST['hidden']", r"LATEST\['hidden'\]")])
def test_a_part_that_is_kept_around_the_code_is_refused(read: str, words: str) -> None:
    def run(model: nn.Module) -> Any:
        model(X)
        return eval(read, {"block": model.block, "LATEST": LATEST}).sum()

    refused(KeepingAround, run, rf"{words} is local to a rank")


class Telling(Mlp):
    def forward(self, x: torch.Tensor, tell: Callable[[torch.Tensor], Any] = lambda h: None) -> Any:
        h = self.up(x).relu()
        tell(h)
        return self.down(h)


def test_a_part_that_a_callback_keeps_is_refused() -> None:
    def run(model: nn.Module) -> Any:
        found: list[torch.Tensor] = []
        model.block(X, found.append)
        return found[0].sum()

    refused(Telling, run, "argument 1 is local to a rank")


def replacing(model: nn.Module) -> Any:
    found: set[torch.Tensor] = set()
    model.block.tell = lambda h: found.add(h)  # type: ignore[union-attr]
    model(X)
    return found.pop().sum()


class TellingByAttribute(Telling):
    def __init__(self) -> None:
        super().__init__()
        self.tell: Any = lambda h: None

    def forward(self, x: torch.Tensor, tell: Any = None) -> Any:
        return super().forward(x, self.tell)


def test_a_part_that_a_new_function_is_given_is_refused() -> None:
    refused(TellingByAttribute, replacing, "ran on sharded values but was not traced")


class Rebinding(Mlp):
    def __init__(self) -> None:
        super().__init__()
        latest = None

        def put(h: torch.Tensor) -> None:
            nonlocal latest
            latest = h

        self.put, self.get = put, lambda: latest

    def forward(self, x: torch.Tensor) -> Any:
        h = self.up(x).relu()
        self.put(h)
        return self.down(h)


def test_a_part_that_is_bound_to_an_outer_variable_is_refused() -> None:
    refused(Rebinding, lambda model: model(X), "stores a rank's shard of a value in 'latest'")


class Hooking(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.up.weight.requires_grad:
            self.up.weight.register_hook(lambda gradient: gradient)
        return super().forward(x)


def test_a_hook_that_a_forward_sets_on_a_weight_is_refused() -> None:
    refused(Hooking, lambda net: net(X), "register_hook.*sets a hook on a weight in a forward")


def test_kept_whole_values_and_names_of_parts_can_be_read() -> None:
    def run(model: nn.Module) -> Any:
        model(X)
        return model.block.whole, model.block.found["input"].sum(), model.block.part is None

    got, want = on_ranks(Keeping, run)
    torch.testing.assert_close(got, want)


def test_a_state_is_carried_from_call_to_call_and_into_copies() -> None:
    def run(model: nn.Module) -> Any:
        with torch.no_grad():
            first = model(X), model(2 * X)
            return (*first, copy.deepcopy(model)(X), model(X))

    got, want = on_ranks(Keeping, run)
    torch.testing.assert_close(got, want)


def test_kept_parts_are_warned_of() -> None:
    with pytest.warns(UnprovenPlanWarning, match=r"local to a rank: .*block\.part"):
        on_ranks(Keeping, lambda model: model(X).sum(), path_guard="warn")


def hooked(name: str, hook: Callable[..., Any], register: str = "register_forward_hook") -> Callable[[nn.Module], Any]:
    def run(model: nn.Module) -> Any:
        for _ in range(4):  # of one kind with others, but for the hook
            model(X)
        handle = getattr(model.get_submodule(name), register)(hook)
        with torch.no_grad():
            model(X)
        output = model(X)
        handle.remove()
        return output.full_tensor() if isinstance(output, DTensor) else output

    return run


SEEN: list[Any] = []
BAD_HOOKS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "kept part": ("block.up", lambda module, args, output: SEEN.append(output), "register_forward_hook"),
    "changed part": ("block.up", lambda module, args, output: output.softmax(-1), "register_forward_hook"),
    "part before": ("block.down", lambda module, args: (args[0].softmax(-1),), "register_forward_pre_hook"),
    "gradient of a part": ("block.up", lambda module, before, after: SEEN.append(after), "register_full_backward_hook"),
}


@pytest.mark.parametrize("name", BAD_HOOKS)
def test_a_hook_that_is_given_a_part_is_refused(name: str) -> None:
    place, hook, register = BAD_HOOKS[name]
    refused(Mlp, hooked(place, hook, register), rf"a (backward )?hook on {place.replace('.', '[.]')} .*receives")


GOOD_HOOKS: dict[str, tuple[str, Callable[..., Any]]] = {
    "looks at nothing": ("block.up", lambda module, args, output: None),
    "a norm without gradient": ("block", lambda module, args, output: SEEN.append(output.detach().norm())),
    "a shape": ("block.down", lambda module, args, output: SEEN.append(output.shape)),
    "goes on": ("block", lambda module, args, output: output),
}


@pytest.mark.parametrize("name", GOOD_HOOKS)
def test_a_hook_on_whole_values_runs(name: str) -> None:
    got, want = on_ranks(Mlp, hooked(*GOOD_HOOKS[name]))
    torch.testing.assert_close(got, want)


def test_a_module_called_by_itself_is_whole_or_refused() -> None:
    def whole(model: nn.Module) -> Any:
        with torch.no_grad():
            return model.block(X), model.features(X), model(X)

    got, want = on_ranks(Mlp, whole)
    torch.testing.assert_close(got, want)
    refused(Mlp, lambda model: model.block.up(X), r"block\.up \(Linear\) was called directly")
    refused(Mlp, lambda model: (model(X), model.encode(X)), r"block\.up \(Linear\) was called directly")


class Scoring(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return (self(x) * self.scale).sum()


def test_a_method_that_reads_parameters_may_call_the_model() -> None:
    model = Scoring().double().eval()
    plan = autoplan.plan(model, 2, inputs={"x": X})

    def run(rank: int) -> Any:
        sharded: Any = copy.deepcopy(model)
        autoplan.parallelize(sharded, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        with torch.no_grad():
            return [sharded.score(X) for _ in range(3)], torch.overrides._get_current_function_mode_stack()

    for scores, modes in run_ranks(run, 2):
        torch.testing.assert_close(scores, [model.score(X).detach()] * 3)
        assert not modes


def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
    )
    return LlamaForCausalLM(config).double().eval()


LLAMA_CALLS: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "a hook on queries": ("a hook on model.layers.0.self_attn.q_proj", lambda m: m.model.layers[0].self_attn.q_proj),
    "a hook on a layer": ("", lambda m: m.model.layers[0]),
}


@pytest.mark.parametrize("name", LLAMA_CALLS)
def test_hooks_in_trusted_code_are_looked_at_too(name: str) -> None:
    """Of one rank alone, as who logs has them."""
    message, pick = LLAMA_CALLS[name]
    model, ids = llama(), torch.arange(6)[None]
    plan = autoplan.plan(model, 2)

    def run(rank: int) -> Any:
        sharded = autoplan.parallelize(
            copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan
        )
        if rank == 0:
            pick(sharded).register_forward_hook(lambda module, args, output: SEEN.append(output))
        with torch.no_grad():
            return sharded(ids).logits

    if message:
        with pytest.raises(RankError, match=message.replace(".", "[.]")):
            run_ranks(run, 2)
    else:
        torch.testing.assert_close(run_ranks(run, 2)[0], model(ids).logits.detach())


def test_modules_of_trusted_code_called_by_themselves() -> None:
    model, ids = llama(), torch.arange(6)[None]
    plan = autoplan.plan(model, 2)

    def run(rank: int) -> Any:
        sharded: Any = copy.deepcopy(model)
        autoplan.parallelize(sharded, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        with torch.no_grad():
            states = sharded.model(ids).last_hidden_state
            with pytest.raises(AutoplanError, match="mlp[.]up_proj .*was called directly"):
                sharded.model.layers[0].mlp.up_proj(states)
            return states, sharded.get_input_embeddings()(ids)

    whole: Any = model
    for got in run_ranks(run, 2):
        torch.testing.assert_close(got, (whole.model(ids).last_hidden_state, whole.get_input_embeddings()(ids)))


@pytest.mark.parametrize("own_code", [False, True])
def test_a_module_that_is_put_in_later_is_refused_where_it_is_given_a_part(own_code: bool) -> None:
    class Chain(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = nn.Identity()(layer(x))  # one that is made on the way belongs to the code
            return x

    torch.manual_seed(0)
    model = (Chain if own_code else nn.Sequential)(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)).double().eval()
    plan = autoplan.plan(model, 2, inputs={("x" if own_code else "input"): X})
    whole = copy.deepcopy(model).append(nn.Softmax(-1))(X)

    def sharded(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        made: Any = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        made(X)
        torch.testing.assert_close(made.append(nn.Softmax(-1))(X), whole)
        made[1] = nn.Softmax(-1)
        return made(X)

    with pytest.raises(RankError, match=r"1 \(Softmax\) was added after|ran on sharded values but was not traced"):
        run_ranks(sharded, 2)
