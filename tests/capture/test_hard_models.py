"""Small models that once got a wrong or no plan: each is the least code that shows one mechanism."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan.values import AllGather


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for p, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OneValueUnderTwoNames(nn.Module):
    """The memory enters attention as key and as value: both ways back need a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.attention = nn.Linear(32, 32), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = torch.tanh(self.memory(x))
        return x + self.attention(torch.tanh(x), key=memory, value=memory) + memory


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(F.layer_norm(x, x.shape[-1:]))))


class FirstRoundsWithoutGradient(nn.Module):
    """One block runs three times, the first two under no_grad: there its gradient sums are no work."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x
        for turn in range(3):
            with torch.set_grad_enabled(turn == 2):
                state = self.block(state + x)
        return state


class GroupedConvolutions(nn.Module):
    """Two groups of channels between two grouped convolutions: each group is cut, their number stays."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(32, 64, 1, groups=2), nn.Conv1d(64, 32, 1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x.transpose(1, 2)))).transpose(1, 2)


class BiasOfAProductComesLater(nn.Module):
    """Of a slice, `linear` makes a product and an addition: it is gathered after the two, where the bias is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.block = nn.Linear(30, 32), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.patches(x[:, :, 2:]) + x)


class ValueReadByPython(nn.Module):
    """Which way it goes depends on numbers, so nothing can be said of readers that did not come up."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Mlp(), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        return self.one(x) if x.sum().item() > -1e9 else self.other(x)


class PowerOfASize(nn.Module):
    """A size that Python computed with a power."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.mlp = 2, Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tiles = x.view(x.shape[0], -1, self.side**2, x.shape[-1])
        return self.mlp(tiles.mean(2))


class NormedTable(nn.Embedding):
    """A table whose own forward goes on after the lookup: the sum must come before."""

    def __init__(self) -> None:
        super().__init__(512, 32, padding_idx=270)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(super().forward(ids), (32,))


class TableInsideAModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mlp, self.head = NormedTable(), Mlp(), nn.Linear(32, 512)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.table(ids)))


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(32, 32, 3, groups=32, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)


class ShortConvolutionOfHeads(nn.Module):
    """Queries are smoothed along the sequence, each channel by itself: x + f(x), but no stream of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention.q = nn.Sequential(self.attention.q, Smooth())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x)


class ProductThatIsNoLinear(nn.Module):
    """A bare matrix on the queries stays whole, for it cannot be gathered; the heads are cut all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.bare = Attention(), nn.Parameter(torch.randn(8, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x.unflatten(-1, (4, 8)).tanh() @ self.bare).square().mean(-1).repeat_interleave(8, -1)
        return x + self.attention(x, x, x) + wide


@functools.lru_cache(maxsize=64)
def shape_of_heads(shape: torch.Size, heads: int) -> tuple[int, ...]:
    return (*shape[:2], heads, shape[2] // heads)


class SizesFromACache(nn.Module):
    """As einops does: sizes of heads come from a cache, filled by whichever module, or model, came first."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.attention = Attention(), Attention()
        self.heads = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.one, self.attention):
            values = [p(x) for p in (part.q, part.k, part.v)]
            q, k, v = (t.reshape(shape_of_heads(t.shape, self.heads)).transpose(1, 2) for t in values)
            x = x + part.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x


class ToHeads(nn.Module):
    """Keeps its number of heads where no attribute of its own is: only a rewritten call can change it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.settings = {"heads": heads}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.settings["heads"]
        return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)


class HeadsInADictionary(nn.Module):
    """The width of a head follows from the share of features and the heads that the dictionary still says."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.split = Attention(), ToHeads(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.attention
        q, k, v = (self.split(p(x)) for p in (part.q, part.k, part.v))
        return x + part.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


MODELS = [
    SizesFromACache,
    HeadsInADictionary,
    TableInsideAModule,
    ShortConvolutionOfHeads,
    ProductThatIsNoLinear,
    OneValueUnderTwoNames,
    FirstRoundsWithoutGradient,
    GroupedConvolutions,
    BiasOfAProductComesLater,
    ValueReadByPython,
    PowerOfASize,
]


WHERE_IT_PAYS = ("attention", "mlp", "block", "one", "up", "down", "table")


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_planned_and_exact(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    inputs = {"ids": torch.randint(512, (2, 8))} if kind is TableInsideAModule else {"x": torch.randn(2, 8, 32)}
    made = autoplan.plan(model, tp_size=2, inputs=inputs)
    cut = {rule.pattern for rule in made.runtime.parameters if rule.dim is not None}
    wanted = {n for n, p in model.named_parameters() if p.dim() > 1 and n.split(".")[0] in WHERE_IT_PAYS}
    assert wanted and wanted <= cut, made
    gathered = {gather.pattern for gather in made.runtime.of(AllGather)}
    assert gathered <= {"memory", "patches"}, made  # these are read whole by everyone
    report = autoplan.verify(model, made, tp_size=2, inputs=inputs, checks=["parameters", "forward", "state_dict"])
    assert report.ok and max(report.gradients.values()) < 1e-10, report.findings


def test_caches_see_no_traced_sizes() -> None:
    """A size that is traced in one model would be found by the next one, in which it means nothing."""
    shape_of_heads.cache_clear()
    autoplan.plan(SizesFromACache(), 2, inputs={"x": torch.randn(2, 8, 32)}, prove="none")
    assert shape_of_heads.cache_info().currsize == 0
    shape_of_heads(torch.Size((2, 8, 32)), 4)
    assert shape_of_heads.cache_info().currsize == 1, "the cache is back"


class InnerStep(nn.Module):
    """A step of descent inside of the forward, by a gradient by parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(32, 32)), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        with torch.enable_grad():
            loss = (x @ weight).tanh().square().mean()
            (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
        return self.out(x @ (weight - slope))


def test_a_forward_that_asks_for_gradients_by_parameters_is_planned() -> None:
    plan = autoplan.plan(InnerStep(), 2, inputs={"x": torch.randn(2, 8, 32)})
    assert any("parameters that require gradients" in finding.message for finding in plan.findings)
    assert plan.proof.trial.outcome == "passed"


@pytest.mark.slow  # its run on real tensors alone takes half a minute
def test_a_live_model_whose_kernels_take_no_repeated_rows() -> None:
    """Routing that depends on data is recorded on real numbers, for which every weight has storage of its own."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    from autoplan.hf.shrink import tiny_config

    config = tiny_config(Glm5NextConfig(), 0, "all")
    text = config.text_config
    text.n_routed_experts, text.num_experts_per_tok, text.hidden_size, text.moe_intermediate_size = 4, 2, 64, 48
    config.vision_config.out_hidden_size = 64
    torch.manual_seed(0)
    plan = autoplan.plan(Glm5NextForConditionalGeneration(config).eval(), 2, prove="none")
    assert {"model.visual.blocks.*.attn.qkv", "model.language_model.embed_tokens"} <= {e.pattern for e in plan.entries}
