"""Loops that pick tokens by what they hold, run an expert for those, and put them back, over cp."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from ..case import HOSTILE, call, case, ids
from ..parts import Attention
from .streams import OVER_CP, Stack, next_tokens, stacked

CALLS = (
    *(call(ids(2, 12)), call(ids(2, 7, seed=2), _train=True), call(ids(1, 40, seed=3))),
    *(call(ids(1, 3, seed=4)), call(ids(1, 80, seed=5))),
)
COUNT, MOST = 4, 30  # more than a short call has for an expert


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise, self.fall = nn.Linear(16, 24, bias=False), nn.Linear(24, 16, bias=False)

    def forward(self, x):
        return self.fall(F.silu(self.rise(x)))


class Routed(nn.Module):
    """Each token goes to two experts of four, and what they return is weighted."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, COUNT, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(COUNT))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).softmax(-1).topk(2, -1)
        return self.mixed(rows, weights / weights.sum(-1, keepdim=True), chosen).view(x.shape)

    def mixed(self, rows, weights, chosen):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out.index_add_(0, token, self.of_expert(expert, rows[token]) * weights[token, place, None])
        return out

    def of_expert(self, expert, x):
        return expert(x)


class Block(nn.Module):
    experts = Routed

    def __init__(self):
        super().__init__()
        self.norm, self.mix, self.norm2, self.feed = nn.LayerNorm(16), Attention(), nn.LayerNorm(16), self.experts()

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        return x + self.feed(self.norm2(x))


def routed(allowed=("exact",), **how):
    """Register stacks of blocks with these experts."""

    def register(cls):
        build = stacked(type(cls.__name__, (Block,), {"experts": cls, "__doc__": cls.__doc__}))
        build.__module__ = __name__
        case(*CALLS, tp=(), cp=2, allowed=allowed, options={"sequence_padding": "pad"}, **how)(build)
        return cls

    return register


routed(also="tp2+cp2")(Routed)


@routed()
class MaskOfExperts(Routed):
    """Mixtral, before its experts were packed: ids as a mask, and only experts that have tokens."""

    def mixed(self, rows, weights, chosen):
        out, mask = torch.zeros_like(rows), F.one_hot(chosen, COUNT).permute(2, 1, 0)
        for number in mask.sum((-1, -2)).nonzero():
            place, token = torch.where(mask[number[0]])
            out.index_add_(0, token, self.experts[int(number[0])](rows[token]) * weights[token, place, None])
        return out


@routed()
class Counted(Routed):
    """DeepSeek: experts without tokens are left out by their counts."""

    def mixed(self, rows, weights, chosen):
        out, counts = torch.zeros_like(rows), torch.bincount(chosen.flatten(), minlength=COUNT).tolist()
        for number, expert in enumerate(self.experts):
            if counts[number] == 0:
                continue
            token, place = torch.where(chosen == number)
            out[token] += expert(rows[token]) * weights[token, place, None]
        return out


@routed()
class MaskedInPlace(Routed):
    """Masks of batch and positions, one for each expert."""

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = (chosen == number).any(-1)
            if mask.any():
                share = (weights * (chosen == number)).sum(-1)
                out[mask] += expert(x[mask]) * share[mask].unsqueeze(-1)
        return out


@routed()
class MeanForEach(Routed):
    """Each expert that has tokens sees a mean over all, which ranks without such tokens would not reach."""

    def mixed(self, rows, weights, chosen):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if token.numel():
                out.index_add_(0, token, expert(rows[token] - rows.mean(0)) * weights[token, place, None])
        return out


@routed()
class Repeated(Routed):
    """Each token is repeated for its experts, and what they return is written in place."""

    def mixed(self, rows, weights, chosen):
        repeated, flat = rows.repeat_interleave(2, 0), chosen.flatten()
        out = torch.empty_like(repeated)
        for number, expert in enumerate(self.experts):
            out[flat == number] = expert(repeated[flat == number])
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


@routed()
class OfThoseChosen(Routed):
    """A loop over the ids that occur."""

    def mixed(self, rows, weights, chosen):
        out = torch.zeros_like(rows)
        for number in chosen.unique().tolist():
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, self.experts[number](rows[token]) * weights[token, place].unsqueeze(-1))
        return out


@routed()
class NormOfEachRow(Routed):
    def of_expert(self, expert, x):
        return F.layer_norm(expert(x), (16,))


@routed(HOSTILE)
class NormOverRows(Routed):
    """Statistics over the tokens of an expert."""

    def of_expert(self, expert, x):
        y = expert(x)
        return y - y.mean(0, keepdim=True) if len(y) else y


@routed(HOSTILE)
class WeighedAmongRows(Routed):
    def of_expert(self, expert, x):
        return expert(x) * x.sum(-1, keepdim=True).softmax(0)


@routed(HOSTILE)
class DividedByLoad(Routed):
    """Results are divided by how many tokens an expert has."""

    def mixed(self, rows, weights, chosen):
        out, load = torch.zeros_like(rows), F.one_hot(chosen, COUNT).sum((0, 1))
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out[token] += expert(rows[token]) * weights[token, place, None] / (1 + load[number])
        return out


@routed(HOSTILE)
class LoadInPython(Routed):
    """The same by a number of Python's."""

    def mixed(self, rows, weights, chosen):
        out, load = torch.zeros_like(rows), torch.bincount(chosen.flatten(), minlength=COUNT).tolist()
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out[token] += expert(rows[token]) * weights[token, place, None] / (1 + load[number])
        return out


@routed(HOSTILE)
class LengthOfList(Routed):
    """The same by the length of the list."""

    def of_expert(self, expert, x):
        return expert(x) / (1 + len(x))


@routed(HOSTILE)
class BusiestIsScaled(Routed):
    def mixed(self, rows, weights, chosen):
        busiest = torch.bincount(chosen.flatten(), minlength=COUNT).argmax()
        return super().mixed(rows, torch.where(chosen == busiest, 2 * weights, weights), chosen)


@routed(HOSTILE)
class FewAreLeftOut(Routed):
    """An expert runs only if not too many tokens chose it."""

    def mixed(self, rows, weights, chosen):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token) < MOST:
                out[token] += expert(rows[token]) * weights[token, place, None]
        return out


@routed(HOSTILE)
class FirstOfEach(Routed):
    """Capacity: an expert takes its first tokens."""

    def mixed(self, rows, weights, chosen):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = (each[:MOST] for each in torch.where(chosen == number))
            out[token] += expert(rows[token]) * weights[token, place, None]
        return out


@routed(HOSTILE)
class LoadBelow(Routed):
    """Busy experts drop all their tokens, found by looking up their loads."""

    def mixed(self, rows, weights, chosen):
        below = torch.bincount(chosen.flatten(), minlength=COUNT) < MOST
        return super().mixed(rows, weights, torch.where(below[chosen], chosen, -1))


@routed(HOSTILE)
class LoadInMask(Routed):
    """The same by each expert's own mask."""

    def mixed(self, rows, weights, chosen):
        out, load = torch.zeros_like(rows), F.one_hot(chosen, COUNT).sum((0, 1))
        for number, expert in enumerate(self.experts):
            token, place = torch.where((chosen == number) & (load[number] < MOST))
            out[token] += expert(rows[token]) * weights[token, place, None]
        return out


@routed(HOSTILE)
class RankInExpert(Routed):
    """Capacity by a running count."""

    def mixed(self, rows, weights, chosen):
        order = F.one_hot(chosen[:, 0], COUNT).cumsum(0).gather(1, chosen[:, :1])
        return super().mixed(rows, weights * (order <= MOST), chosen)


@routed(HOSTILE)
class PutBackReversed(Routed):
    """What is made of one token goes to another one."""

    def mixed(self, rows, weights, chosen):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out[token.flip(0)] += expert(rows[token]) * weights[token, place, None]
        return out


@routed(HOSTILE)
class ExpertsChoose(Routed):
    """Each expert takes the three tokens that it likes most."""

    def mixed(self, rows, weights, chosen):
        out, scores = torch.zeros_like(rows), self.gate(rows).softmax(-1)
        for number, expert in enumerate(self.experts):
            share, token = scores[:, number].topk(3)
            out[token] += expert(rows[token]) * share.unsqueeze(-1)
        return out


@routed(HOSTILE)
class SortedByExpert(Routed):
    """Rows in the order of their experts, a slice for each."""

    def mixed(self, rows, weights, chosen):
        order = chosen.flatten().argsort(stable=True)
        sorted_rows, made, start = rows[order // 2], [], 0
        for expert, many in zip(self.experts, torch.bincount(chosen.flatten(), minlength=COUNT).tolist(), strict=True):
            made.append(expert(sorted_rows[start : start + many]))
            start += many
        out = torch.empty(len(order), 16, dtype=rows.dtype)
        out[order] = torch.cat(made)
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


@case(*CALLS, tp=(), cp=2, allowed=HOSTILE, options={"sequence_padding": "pad"})
class BetweenStreams(Stack):
    """Tokens that a router picks, run by the model's own code between blocks."""

    def __init__(self):
        super().__init__(Block)
        self.more = Routed()

    def forward(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x)
            rows = x.flatten(0, 1)
            picked = self.more.gate(rows)[:, 0] > 0
            x = rows.masked_scatter(picked.unsqueeze(-1), self.more.experts[0](rows[picked])).view_as(x)
        return self.head(self.norm(x))


class Balanced(Routed):
    """Keeps a loss of its load, which the model adds to its own."""

    def mixed(self, rows, weights, chosen):
        load = F.one_hot(chosen, COUNT).to(rows.dtype).sum(1).mean(0)
        self.balance = COUNT * (load * self.gate(rows).softmax(-1).mean(0)).sum()
        return super().mixed(rows, weights, chosen)


@case(*CALLS[:3], call(ids(2, 7), ids(2, 7, seed=3), _train=True), call(ids(1, 40), ids(1, 40, seed=3)), **OVER_CP)
class BalanceInTheLoss(Stack):
    """Returns logits, or logits and a loss."""

    def __init__(self):
        super().__init__(type("Block", (Block,), {"experts": Balanced}))

    def forward(self, input_ids, labels=None):
        logits = super().forward(input_ids)
        if labels is None:
            return logits
        return logits, next_tokens(logits, labels) + 0.1 * sum(block.feed.balance for block in self.blocks)


class HashedBlock(Block):
    def forward(self, x, input_ids):
        x = x + self.mix(self.norm(x))
        rows, chosen = self.norm2(x).flatten(0, 1), (input_ids.reshape(-1) * 7 + 3) % COUNT
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.feed.experts):
            (token,) = torch.where(chosen == number)
            out[token] = expert(rows[token])
        return x + out.view_as(x)


@case(*CALLS, **OVER_CP)
class Hashed(Stack):
    """A token's id chooses its expert: blocks take the ids in beside the stream."""

    def __init__(self):
        super().__init__(HashedBlock)

    def forward(self, input_ids):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x, input_ids)
        return self.head(self.norm(x))
