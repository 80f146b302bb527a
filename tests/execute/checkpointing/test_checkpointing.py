"""Activation checkpointing: everything it takes runs twice, gives the same numbers, and nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mesh_toys import Block, clone, deep, ids, layers_only, mesh_of, model_of, plan_of
from torch import nn
from torch.overrides import TorchFunctionMode

import autoplan
from autoplan.check.ranks.run import count_collectives, run_ranks
from autoplan.check.verify.subject import Subject
from autoplan.check.verify.verify import clone_of, verify_clone
from autoplan.common.errors import AutoplanError
from autoplan.execute.agreement import APPLIED
from autoplan.execute.checkpointing.blocks import checkpoint_blocks, is_checkpointed, runs_of, saved_bytes_per_token
from autoplan.execute.tensor_parallel import record
from autoplan.hf.source import resolve
from autoplan.values import Plan, Stack


def checkpointed(model: nn.Module, request: Any = True, scope: Any = "all") -> Any:
    """Checkpointing alone, without ranks."""
    plan = layers_only(model)
    record(model, plan)
    checkpoint_blocks(model, plan.layers, request, scope)
    return model


def gradients(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(5)
    model(*args, **kwargs).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("request_", [True, "block", "submodule", "selective", lambda name, block: True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_are_the_same_numbers(request_: Any, dropout: float) -> None:
    expected = gradients(deep(dropout=dropout), ids())
    found = gradients(checkpointed(deep(dropout=dropout), request_), ids())
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


class Biased(Block):
    """Changes in place, through a view, what a matmul has made and others have read."""

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        y = x @ self.first.up.weight.T
        read = y * 2
        y.unsqueeze(1).squeeze(1).add_(self.first.up.bias)
        y.tanh_()
        return x + (y * read) @ self.first.down.weight.T


@pytest.mark.parametrize("request_", ["block", "selective"])
def test_a_matmul_that_is_changed_in_place_keeps_its_gradients(request_: str) -> None:
    plain, model = deep(), deep()
    for one in (plain, model):
        for block in one.blocks:
            block.__class__ = Biased
    expected, found = gradients(plain, ids()), gradients(checkpointed(model, request_), ids())
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_blocks_run_twice_and_names_stay() -> None:
    model = deep()
    names, keys = [n for n, _ in model.named_modules()], list(model.state_dict())
    classes = [type(m) for m in model.modules()]
    checkpointed(model)
    gradients(model, ids())
    assert [name for name, _ in model.named_modules()] == names and list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    runs: list[int] = []
    model.blocks[0].first.up.register_forward_hook(lambda *_: runs.append(1))
    gradients(model, ids())
    assert len(runs) == 2
    runs.clear()
    with torch.no_grad():
        model(ids())
    assert len(runs) == 1


def test_what_was_done_is_recorded() -> None:
    model = checkpointed(deep())
    done = autoplan.applied(model)
    assert done is not None and done.checkpointed == ("blocks.0", "blocks.1", "blocks.2")
    assert done.saved_bytes == 3 * saved_bytes_per_token(deep().blocks[0]) > 0
    parts = autoplan.applied(checkpointed(deep(), "submodule"))
    assert parts is not None
    assert parts.checkpointed[:3] == ("blocks.0.norm", "blocks.0.first", "blocks.0.second")


def test_undoing_leaves_no_trace() -> None:
    model = deep()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    record(model, layers_only(model))
    checkpoint_blocks(model, layers_only(model).layers, True)()
    del vars(model)[APPLIED]
    for name, module in model.named_modules():
        assert module.__dict__.keys() == before[name].keys(), name
        assert not is_checkpointed(module)


def test_selective_keeps_every_other_matmul() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Matmuls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func._opname in ("addmm", "mm")
            return func(*args, **(kwargs or {}))

    def backward_matmuls(request: Any) -> int:
        model = deep() if request is None else checkpointed(deep(), request)
        loss = model(ids()).sum()
        with Matmuls() as seen:
            loss.backward()
        return seen.count

    plain, whole, selective = map(backward_matmuls, (None, True, "selective"))
    # 4 a block; torch stops before the last one, whose result nobody needs
    assert whole - plain == 3 * 3 and 0 < selective - plain < whole - plain


@pytest.mark.parametrize("mode", [True, "selective"])
def test_selective_never_repeats_a_collective(mode: Any) -> None:
    models = [model_of("llama") for _ in range(2)]

    def rank_body(rank: int) -> int:
        model = autoplan.parallelize(models[rank], mesh_of(tp=2), plan_of("llama", 2), activation_checkpointing=mode)
        feed = next(iter(clone("llama").feeds.values()))
        loss = autoplan.to_local(model(**{**feed, "use_cache": False}).logits).sum()
        with count_collectives() as seen:
            loss.backward()
        return seen["all_reduce"]

    counts = run_ranks(rank_body, 2)
    depth = len(plan_of("llama", 2).layers[0].fqns)
    assert counts[0] == (2 * depth + 1 if mode == "selective" else 3 * depth + 1)


def test_selective_keeps_sums_over_ranks_and_gathers_again() -> None:
    """What sequence parallelism gathers has whole sequences: kept, it would take the memory that was to be saved."""
    from types import SimpleNamespace

    from torch.utils.checkpoint import CheckpointPolicy

    from autoplan.execute.checkpointing.policies import _Policy

    policy, ops = _Policy(), torch.ops._c10d_functional
    kept = {op: policy(SimpleNamespace(is_recompute=False), op) is CheckpointPolicy.MUST_SAVE
            for op in (ops.all_gather_into_tensor.default, ops.wait_tensor.default, ops.all_reduce.default,
                       ops.reduce_scatter_tensor.default)}  # fmt: skip
    assert list(kept.values()) == [False, False, True, True]


# ------------------------------------------------------------------------------------------------ caches


def test_caches_are_off_while_training_only() -> None:
    model = checkpointed(deep())
    gradients(model, ids())
    assert model.cache is None
    gradients(model, ids(), use_cache=True)
    assert model.cache is None
    model(ids(), True)
    assert model.cache is None
    model.eval()
    model(ids())
    assert len(model.cache.seen) == 3


def test_evaluation_with_a_cache_is_not_run_twice() -> None:
    model = checkpointed(deep()).eval()
    expected = gradients(deep().eval(), ids())
    found = gradients(model, ids())
    assert len(model.cache.seen) == 3 and all(torch.equal(found[n], expected[n]) for n in expected)


class Shelf:
    """Keys of all blocks so far: of each block its own entry, and one that blocks after it read too."""

    def __init__(self) -> None:
        self.entries: list[torch.Tensor] = []
        self.sums = {"all": torch.zeros(1, dtype=torch.float64)}

    def update_keys(self, keys: torch.Tensor) -> torch.Tensor:
        self.entries.append(keys)
        self.sums["all"].add_(1.0)  # in place, without gradient
        return sum(self.entries) * float(self.sums["all"])


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.keys = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shelf: Any = None) -> torch.Tensor:
        return self.inner(x) + shelf.update_keys(self.keys(x)).tanh()


class Shelved(nn.Module):
    """Makes its cache whatever it is told, and shares keys between blocks through it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reader() for _ in range(3))
        self.spoil = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shelf = Shelf()
        for block in self.blocks:
            x = block(x, self.shelf) if block is self.blocks[0] else block(x, shelf=self.shelf)
        if self.spoil:
            with torch.no_grad():
                self.shelf.entries[0].mul_(2.0)
        return x


def shelved() -> Shelved:
    torch.manual_seed(0)
    return Shelved().double()


def test_a_block_that_is_given_a_cache_fills_a_copy_in_its_second_run() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    expected = gradients(shelved(), x)
    model = checkpointed(shelved())
    found = gradients(model, x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(model.shelf.entries) == 3 and model.shelf.sums["all"] == 3
    assert [(run.kept, run.again) for run in runs_of(model).values()] == [(1, 1)] * 3
    result = model(x).square().sum()
    result.backward(retain_graph=True)
    result.backward()
    assert [(run.kept, run.again) for run in runs_of(model).values()] == [(2, 3)] * 3


def test_a_cache_that_was_changed_in_place_is_an_error() -> None:
    model = checkpointed(shelved())
    model.spoil = True
    with pytest.raises(AutoplanError, match="(?s)changed in place.*use_cache=False"):
        model(torch.randn(2, 3, 8, dtype=torch.float64)).sum().backward()


class Elsewhere(TorchFunctionMode):
    """Every `ones_like` is doubled while it is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ones_like else result


def test_function_modes_of_the_forward_are_on_in_the_second_run() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * torch.ones_like(x)) ** 2

    def found(wrap: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([Scaled(), Scaled()]))
        model.forward = lambda x: model[1][1](model[1][0](model[0](x)))  # type: ignore[method-assign]
        wrap(model)
        with Elsewhere():
            result = model(torch.ones(2, 8)).sum()
        result.backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, found(checkpointed), found(lambda model: model)))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mamba2", "t5"])
def test_transformers_models_train_without_caches_and_keep_their_config(kind: str) -> None:
    expected, model = model_of(kind), model_of(kind)
    before = copy.deepcopy(model.config.to_dict())
    checkpointed(model)
    feed = next(iter(clone(kind).feeds.values()))
    for m in (expected, model):
        m.train()
        for module in m.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    found = []
    for m in (expected, model):
        torch.manual_seed(3)
        found.append(Subject(m, {}).forward_and_backward(feed)["gradients"])
    want, got = found
    assert all(torch.allclose(got[name], want[name], rtol=1e-9, atol=1e-12) for name in want)
    assert model(**{**feed, "use_cache": True}).get("past_key_values") is None
    assert model.config.to_dict() == before


def test_generation_still_uses_its_cache() -> None:
    model = checkpointed(model_of("llama")).eval()
    prompt = torch.tensor([[3, 5, 7]])
    found = model.generate(prompt, max_new_tokens=4, do_sample=False)
    expected = model_of("llama").generate(prompt, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, expected)


# ------------------------------------------------------------------------------------------------ what is taken


def test_frozen_blocks_are_skipped_and_said() -> None:
    model = deep()
    model.blocks[0].requires_grad_(False)
    checkpointed(model)
    done = autoplan.applied(model)
    assert done is not None and done.checkpointed == ("blocks.1", "blocks.2")
    assert done.notes == ("blocks: 1 of 3 blocks are frozen and not checkpointed",)


def test_scope_chooses_among_stacks() -> None:
    model = model_of("llava")
    done = autoplan.applied(checkpointed(model, scope="text"))
    assert done is not None
    kinds = {stack.kind: set(stack.fqns) for stack in autoplan.layers(model)}
    assert set(done.checkpointed) == kinds["decoder"]
    assert any("vision is out of scope" in note for note in done.notes)


@pytest.mark.parametrize(
    ("request_", "scope", "said"),
    [
        (True, "vision", "no block of Deep was wrapped"),
        (lambda name, block: False, "all", "no block of Deep was wrapped"),
        ("blocks", "all", "activation_checkpointing='blocks'"),
        (True, "pictures", "not a kind of stack"),
        (lambda name, block: "all of it", "all", "activation_checkpointing='all of it'"),
    ],
)
def test_asking_in_vain_is_an_error(request_: Any, scope: str, said: str) -> None:
    with pytest.raises(AutoplanError, match=said):
        checkpointed(deep(), request_, scope)


def test_models_without_blocks_are_refused() -> None:
    with pytest.raises(AutoplanError, match="no repeated blocks"):
        checkpointed(nn.Sequential(nn.Linear(2, 2)))


def test_transformers_own_checkpointing_is_refused() -> None:
    model = model_of("llama")
    model.gradient_checkpointing_enable()
    with pytest.raises(AutoplanError, match="gradient_checkpointing"):
        checkpointed(model)


def test_a_function_chooses_block_by_block() -> None:
    model = deep()
    stack = Stack("blocks", "other", tuple(f"blocks.{i}" for i in range(3)))
    record(model, Plan("toy", 1, layers=(stack,)))
    answers = {"blocks.0": False, "blocks.1": "selective", "blocks.2": "submodule"}
    checkpoint_blocks(model, (stack,), lambda name, block: answers[name])
    done = autoplan.applied(model)
    assert done is not None
    assert done.checkpointed == ("blocks.1", "blocks.2.norm", "blocks.2.first", "blocks.2.second")


# ------------------------------------------------------------------------------------------------ living with others


def test_hooks_from_before_run_inside_and_later_ones_outside() -> None:
    model, seen = deep(), []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("before"))
    checkpointed(model)
    model.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    gradients(model, ids())
    assert seen.count("after") == 1 and seen[0] == "before"


def test_copies_run_on_their_own() -> None:
    model = checkpointed(deep())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(2)
    expected = gradients(deep(), ids())
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(model, ids()).items())
    assert not torch.equal(gradients(twin, ids())["head.weight"], expected["head.weight"])
    assert isinstance(twin.blocks[0], Block)


def test_compiled_models_are_checkpointed() -> None:
    model = checkpointed(deep())
    expected = gradients(deep(), ids())
    found = gradients(torch.compile(model, backend="aot_eager"), ids())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], gradient)


def test_dropout_under_tensor_parallelism_is_drawn_again() -> None:
    """Split activations draw per rank from a stream that a recomputation must find again."""
    models = [model_of("gpt2").train() for _ in range(4)]
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3
            elif hasattr(module, "attn_dropout"):
                module.attn_dropout.p = 0.3
    feed = next(iter(clone("gpt2").feeds.values()))

    def rank_body(rank: int, half: int) -> Any:
        mode = {"activation_checkpointing": bool(half)}
        model = autoplan.parallelize(models[2 * half + rank], mesh_of(tp=2), plan_of("gpt2", 2), **mode)
        torch.manual_seed(11)
        return Subject(model, {}, gather=autoplan.full_tensors).forward_and_backward(feed)["gradients"]

    plain = run_ranks(lambda rank: rank_body(rank, 0), 2)[0]
    again = run_ranks(lambda rank: rank_body(rank, 1), 2)[0]
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-9, atol=1e-12)


class Converting(Block):
    """Brings a module to the dtype of its input whenever it runs, as routers in transformers do."""

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        self.second.down = self.second.down.to(x.dtype)
        return super().forward(x, cache)


def test_modules_that_are_converted_in_a_forward_stay_in_its_second_run() -> None:
    model = deep()
    for place in range(3):
        model.blocks[place] = Converting().double()
    subject = clone_of(resolve(model, inputs={"ids": ids(), "use_cache": False}))
    plan = autoplan.plan(model, 2, inputs={"ids": ids()}, prove="none")
    report = verify_clone(subject, plan, checks=["forward"], checkpointing="block")
    assert report.ok and report.details["noted"] == (3, 3), report
