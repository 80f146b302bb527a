"""Sequence parallelism: exact where it applies, explained where it does not, at any length."""

from __future__ import annotations

import copy

import pytest
import torch
from slow_cases import marked
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import IndivisibleError
from autoplan.hf.source import resolve
from autoplan.values import AllGatherSequenceSumGradient, Boundary, NoteShard, ReduceScatterSequence, ScatterSequence


@pytest.mark.parametrize(
    "model_type",
    marked(
        ["llama", "gpt2", "falcon", "gemma2", "mixtral", "mamba2"],
        long=["mamba2"],
        slow=["gpt2", "falcon", "gemma2", "mixtral"],
    ),
)
def test_the_cut_stream_gives_the_same_numbers(model_type):
    report = autoplan.verify(
        model_type, sequence_parallel=True, checks=("forward", "second_shape", "loss", "state_dict", "optimizer")
    )
    assert report.ok, report
    assert report.details["capabilities"].sequence, "the stream was not cut"


@pytest.mark.parametrize(
    "model_type",
    [
        "bart",  # two runs of the model go through one stack, each with a sequence of its own
        pytest.param("zamba2", marks=pytest.mark.long),  # a whole value is sharded at several boundaries
        "rwkv",  # a gather outside makes those inside needless
        "nanochat",  # a norm that runs before the blocks and after them: gathered elsewhere
        "llama4_text",  # a sum that is written in place
        "cpmant",  # prompts and text one after the other
        pytest.param("prophetnet", marks=pytest.mark.long),  # several streams one after the other
        # what meets the stream was made in the block from what a module returns
        pytest.param("deepseek_v4", marks=pytest.mark.long),
        "inkling2_text",  # a value made for every position alike, and an empty one next to the stream
        "xlm",  # no block module; a norm's output is changed in place
    ],
)
def test_boundaries_are_found_where_the_first_ones_will_not_do(model_type):
    report = autoplan.verify(model_type, sequence_parallel=True, checks=("forward", "second_shape"))
    assert report.ok, report
    assert report.details["capabilities"].sequence, "the stream was not cut"


def test_a_llama_block_moves_the_bytes_of_two_reductions_and_no_more():
    """Two all-gathers and two reduce-scatters a block each way: the bytes of two all-reduces."""
    clone = resolve("llama").tiny()
    found = autoplan.plan(clone, 2, sequence_parallel=True, prove="none").runtime.of(Boundary)
    moves = [one for one in found if ".layers." in one.pattern and not isinstance(one, (ScatterSequence, NoteShard))]
    kinds = [AllGatherSequenceSumGradient, AllGatherSequenceSumGradient, ReduceScatterSequence, ReduceScatterSequence]
    assert sorted(map(type, moves), key=str) == kinds


class Tail(torch.nn.Module):
    """A block that looks at the first position for all, in its own code: no module boundary lies before the op."""

    def __init__(self):
        super().__init__()
        self.fore, self.hind = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        x = x - x[:, :1]
        return x + self.hind(torch.relu(self.fore(x)))


class Dog(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.smell, self.tails = torch.nn.Embedding(40, 16), torch.nn.ModuleList(Tail() for _ in range(2))
        self.bark = torch.nn.Linear(16, 40)

    def forward(self, scents):
        x = self.smell(scents)
        for tail in self.tails:
            x = tail(x)
        return self.bark(x)


def test_where_it_cannot_be_the_plan_names_the_op_and_the_module():
    plan = autoplan.plan(Dog(), 2, sequence_parallel=True, inputs={"scents": torch.arange(16).view(2, 8)})
    assert not plan.sequence_parallel
    (found,) = [f for f in plan.findings if f.check == "sequence"]
    assert found.level == "warn" and "not applied" in found.message and "__getitem__ in tails.0" in found.message


def _losses(model, plan, ids, padding):
    def run(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(models[rank], mesh, plan, gather_logits=True, sequence_padding=padding)
        logits = sharded(input_ids=ids).logits
        logits.square().mean().backward()
        return logits.detach(), autoplan.full_tensors(sharded, grads=True)

    models = [copy.deepcopy(model) for _ in range(2)]
    return run_ranks(run, 2)


def test_lengths_that_do_not_divide():
    model = resolve("llama").tiny()
    plan = autoplan.plan(model, 2, sequence_parallel=True, prove="none")
    ids = torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    with pytest.raises((RankError, IndivisibleError), match="7 is not divisible by 2"):
        _losses(model, plan, ids, "error")
    reference = model(input_ids=ids).logits
    reference.square().mean().backward()
    for logits, gradients in _losses(model, plan, ids, "pad"):
        torch.testing.assert_close(logits, reference.detach(), rtol=1e-9, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-11)


def test_decoding_one_token_needs_no_padding_option():
    model = resolve("llama").tiny()
    plan = autoplan.plan(model, 2, sequence_parallel=True, prove="none")
    ids = torch.randint(5, 90, (2, 6), generator=torch.Generator().manual_seed(0))
    wanted = model.generate(ids, max_new_tokens=3, do_sample=False)

    def run(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(models[rank], mesh, plan, gather_logits=True)
        with torch.no_grad():
            return sharded.generate(ids, max_new_tokens=3, do_sample=False)

    models = [copy.deepcopy(model) for _ in range(2)]
    for found in run_ranks(run, 2):
        assert torch.equal(found, wanted)
