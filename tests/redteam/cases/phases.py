"""Phases of a program: training and use by turns, precision, hooks of the user's, copies, frozen parts, derivatives."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoplan

from ..case import HOSTILE, call, case, floats, ids
from ..parts import Attention, Mlp, Net

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=1)
BOTH = (2, 4)


def trained(model, x, y, turns=2, lr=0.05):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(turns):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def whole(model):
    return {name: tensor.detach().clone() for name, tensor in autoplan.full_tensors(model).items()}


@case(
    call(X, _autocast=torch.bfloat16, _train=True),
    call(X, _autocast=torch.bfloat16, _grad=False),
    tp=BOTH,
    dtype=torch.float32,
    tolerance=0.05,
    vary=False,
)
class UnderAutocast(Net):
    pass


def to_and_fro(model, x, y):
    seen = []
    for _ in range(2):
        model.train()
        trained(model, x, y)
        model.eval()
        with torch.inference_mode():
            seen.append(model(x[:1]))
            seen.append(model(y[:, :3]))
    return seen, whole(model)


@case(call(X, Y, _do=to_and_fro), tp=BOTH, vary=False)
class ToAndFro(nn.Module):
    """Batch norms over hidden values, trained, used on one sample, and trained on."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 16)

    def forward(self, x):
        h = self.norm(self.up(x).mT).mT.relu()
        return x + self.down(h)


@case(call(X, _train=True), call(X), tp=BOTH, sequence=None)
class CheckpointedInTraining(nn.Module):
    """Blocks are recomputed in training: one by a closure, one with two results."""

    def __init__(self):
        super().__init__()
        self.mix, self.feed, self.gate = Attention(), Mlp(), nn.Linear(16, 32)

    def both(self, x):
        return self.feed(x), self.feed.inner(x) * self.gate(x).sigmoid()

    def forward(self, x):
        if self.training:
            x = checkpoint(lambda z: self.mix(z), x, use_reentrant=False)
            y, h = checkpoint(self.both, x, use_reentrant=False)
        else:
            x = self.mix(x)
            y, h = self.both(x)
        return y + self.feed.down(h)


def steered(model, x):
    """A direction is added to the stream by a hook on a block, and what another block says is kept."""
    kept = []
    handles = [
        model.mix.register_forward_hook(lambda module, args, out: out + 0.5 * torch.ones(16, dtype=out.dtype)),
        model.feed.register_forward_hook(lambda module, args, out: kept.append(out.detach().clone())),
        model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    ]
    y = model(x)
    for handle in handles:
        handle.remove()
    return y, kept, model(x)


@case(call(X, _do=steered), tp=BOTH, vary=False)
class Steered(Net):
    pass


def frozen_by_turns(model, x, y):
    for part in (model.mix, model.feed):
        model.requires_grad_(False)
        part.requires_grad_(True)
        trained(model, x, y)
        assert model.out.weight.grad is None
    model.requires_grad_(True)
    trained(model, x, y)
    return whole(model)


@case(call(X, Y, _do=frozen_by_turns, _train=True), tp=BOTH, vary=False)
class FrozenByTurns(Net):
    pass


def attacked(model, x, y):
    """Adversarial steps on the input, then a step of training on it."""
    z = x.clone()
    for _ in range(2):
        z = z.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.mse_loss(model(z), y), z)
        z = z + 0.1 * slope.sign()
    model.zero_grad()
    trained(model, z.detach(), y)
    return z.detach(), whole(model)


@case(
    call(X, Y, _do=attacked),
    tp=BOTH,
    vary=False,
    input_gradients=True,
    allowed=HOSTILE,
    inputs={"x": X.clone().requires_grad_()},
)
class Attacked(Net):
    pass


def clamped(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


def scaled_by_hooks(model, x, y):
    """Gradients are scaled by hooks on parameters; one counts how large they are."""
    sizes = []
    handles = [p.register_hook(lambda g: g * 0.5) for p in model.mix.parameters()]
    handles.append(model.feed.up.weight.register_hook(lambda g: sizes.append(float(g.norm()))))
    handles.append(model.feed.down.weight.register_post_accumulate_grad_hook(clamped))
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    for handle in handles:
        handle.remove()
    return sizes, {n: g.clone() for n, g in autoplan.full_tensors(model, grads=True).items()}


@case(call(X, Y, _do=scaled_by_hooks), tp=BOTH, vary=False)
class ScaledByHooks(Net):
    pass


def copied_then_trained(model, x, y):
    trained(model, x, y)
    other = copy.deepcopy(model)
    trained(model, y, x)
    trained(other, x, x)
    with torch.no_grad():
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.copy_((p + q) / 2)
    return other(x).detach(), model(x).detach(), whole(model)


@case(call(X, Y, _do=copied_then_trained, _train=True), tp=BOTH, vary=False)
class CopiedThenTrained(Net):
    pass


def with_new_head(model, x, y):
    torch.manual_seed(5)
    model.out = nn.Linear(16, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(
        [{"params": model.out.parameters(), "lr": 0.1}, {"params": model.feed.parameters()}], lr=0.01
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model(x).detach()


@case(call(X, Y, _do=with_new_head, _train=True), tp=BOTH, vary=False, allowed=HOSTILE)
class WithNewHead(Net):
    pass


def derivatives(model, x):
    parameters = {n: p for n, p in model.named_parameters()}
    loss = lambda q: torch.func.functional_call(model, q, (x,)).square().mean()  # noqa: E731
    gradients = torch.func.grad(loss)(parameters)
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g) for n, g in gradients.items()}


@case(call(X, _do=derivatives), vary=False, allowed=HOSTILE)
class ByFuncGrad(Net):
    pass


def each_sample(model, x):
    return torch.func.vmap(lambda z: model(z[None])[0])(x)


@case(call(X, _do=each_sample), vary=False, allowed=HOSTILE)
class UnderVmap(Net):
    pass


@case(call(X), tp=BOTH, dtype=torch.float32, tolerance=0.03)
class HalfInside(nn.Module):
    """The hidden layer is computed in bfloat16, its weights are cast in the forward; a norm stays in float."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x):
        y = self.norm(x.float()).bfloat16()
        h = F.linear(y, self.up.weight.bfloat16(), self.up.bias.bfloat16()).float().relu()
        return x + F.linear(h, self.down.weight.float(), self.down.bias.float()).type_as(x)


def deeper_by_turns(model, x, y):
    seen = []
    for depth in (1, 3, 2):
        model.depth = depth
        trained(model, x, y)
        seen.append(model(x).detach())
    return seen


@case(call(X), call(X, Y, _do=deeper_by_turns, _train=True), tp=BOTH, vary=False, allowed=HOSTILE)
class DeeperByTurns(nn.Module):
    """How many blocks run is an attribute that the program sets."""

    def __init__(self):
        super().__init__()
        self.blocks, self.depth = nn.ModuleList(Mlp() for _ in range(3)), 2

    def forward(self, x):
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x


def twice_through(model, tokens):
    """Two forwards, one backward over both; then a backward that keeps its graph."""
    one, two = model(tokens), model(tokens.flip(1))
    loss = F.cross_entropy(one.flatten(0, 1), tokens.flatten()) + (one - two).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach(), {n: g.clone() for n, g in autoplan.full_tensors(model, grads=True).items()}


@case(call(ids(2, 6)), call(ids(2, 6), _do=twice_through, _train=True), tp=BOTH, sequence=None, vary=False)
class TwiceThrough(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mix, self.feed, self.head = nn.Embedding(32, 16), Attention(), Mlp(), nn.Linear(16, 32)

    def forward(self, i):
        return self.head(self.feed(self.mix(self.table(i))))


def reset_parts(model, x, y):
    """Some modules are drawn anew, scaled, and zeroed, as programs do when they start over."""
    torch.manual_seed(3)
    trained(model, x, y)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        model.feed.down.weight.mul_(0.5)
        model.mix.o.weight.copy_(torch.eye(16, dtype=torch.float64))
        model.feed.up.weight[:8] = 0.25
        model.mix.q.weight[::2] *= -1
    return model(x).detach(), whole(model)


@case(call(X, Y, _do=reset_parts, _train=True), tp=BOTH, vary=False)
class ResetParts(Net):
    pass
