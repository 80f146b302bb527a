"""Updates by hand: optimizers, averages, penalties and projections that read parameters and gradients by name."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autoplan

from ..case import HOSTILE, call, case, floats
from ..parts import Net

X = floats(2, 6, 16)
Y = floats(2, 6, 16, seed=1)
BOTH = (2, 4)


def whole(model):
    return {name: tensor.detach().clone() for name, tensor in autoplan.full_tensors(model).items()}


def backward(model, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def adam_by_hand(model, x, y):
    state, losses = {}, []
    for turn in range(1, 4):
        model.zero_grad()
        losses.append(backward(model, x, y))
        with torch.no_grad():
            for name, p in model.named_parameters():
                m, v = state.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.addcdiv_(m / (1 - 0.9**turn), (v / (1 - 0.99**turn)).sqrt().add_(1e-3), value=-0.05)
    return losses, whole(model)


@case(call(X, Y, _do=adam_by_hand, _train=True), tp=BOTH, vary=False)
class AdamByHand(Net):
    pass


def averaged_copy(model, x, y):
    slow = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(slow.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.3)
    return slow(x), model(x).detach()


@case(call(X, Y, _do=averaged_copy, _train=True), tp=BOTH, vary=False)
class AveragedCopy(Net):
    pass


def averaged_by_torch(model, x, y):
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for _ in range(3):
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
        mean.update_parameters(model)
    with torch.no_grad():
        return mean(x), model(x)


@case(call(X, Y, _do=averaged_by_torch, _train=True), vary=False, also="tp2+meta")
class AveragedByTorch(Net):
    pass


def sharpness(model, x, y):
    """SAM: climb by the norm of all gradients, take the gradient there, come back, and step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, x, y)
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            climbed = [p.grad * (0.5 / (norm + 1e-12)) for p in model.parameters()]
            for p, e in zip(model.parameters(), climbed, strict=True):
                p.add_(e)
        optimizer.zero_grad()
        backward(model, x, y)
        with torch.no_grad():
            for p, e in zip(model.parameters(), climbed, strict=True):
                p.sub_(e)
        optimizer.step()
    return whole(model), norm


@case(call(X, Y, _do=sharpness, _train=True), tp=BOTH, vary=False)
class Sharpness(Net):
    pass


def gradient_penalty(model, x, y):
    loss = F.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(g.pow(2).sum() for g in gradients)
    (loss + 0.1 * penalty).backward()
    return penalty.detach(), {n: g.clone() for n, g in autoplan.full_tensors(model, grads=True).items()}


@case(call(X, Y, _do=gradient_penalty, _train=True), vary=False, allowed=HOSTILE)
class PenaltyOfGradients(Net):
    pass


def trust_ratios(model, x, y):
    ratios = {}
    for _ in range(2):
        model.zero_grad()
        backward(model, x, y)
        for name, p in model.named_parameters():
            weight, gradient = p.data.norm(), p.grad.data.norm()
            ratios[name] = 0.02 * weight / (gradient + 1e-9) if weight > 0 else torch.ones_like(weight)
            p.data.add_(p.grad.data, alpha=-float(ratios[name]))
    return ratios, whole(model)


@case(call(X, Y, _do=trust_ratios, _train=True), tp=BOTH, vary=False)
class TrustRatios(Net):
    pass


def one_vector(model, x, y):
    backward(model, x, y)
    flat = parameters_to_vector(model.parameters()).detach()
    slope = parameters_to_vector([p.grad for p in model.parameters()])
    step = 0.1 * slope / slope.norm()
    vector_to_parameters(flat - step, model.parameters())
    return whole(model), model(x).detach()


@case(call(X, Y, _do=one_vector, _train=True), tp=BOTH, vary=False, allowed=HOSTILE)
class OneVector(Net):
    pass


def centred_gradients(model, x, y):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, x, y)
        for p in model.parameters():
            if p.grad.dim() > 1:
                p.grad.add_(-p.grad.mean(dim=tuple(range(1, p.grad.dim())), keepdim=True))
        optimizer.step()
    return whole(model)


@case(call(X, Y, _do=centred_gradients, _train=True), tp=BOTH, vary=False)
class CentredGradients(Net):
    pass


def consolidated(model, x, y):
    """EWC: what was learned first is held by the squares of its gradients."""
    backward(model, x, y)
    fisher = {n: p.grad.detach().clone() ** 2 for n, p in model.named_parameters()}
    anchor = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        held = sum((fisher[n] * (p - anchor[n]) ** 2).sum() for n, p in model.named_parameters())
        loss = F.mse_loss(model(x.flip(0)), y) + 100 * held
        loss.backward()
        optimizer.step()
    return loss.detach(), whole(model)


@case(call(X, Y, _do=consolidated, _train=True), tp=BOTH, vary=False)
class Consolidated(Net):
    pass


def accumulated(model, x, y):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    norms = []
    for _ in range(3):
        for part, goal in zip(x.split(1), y.split(1), strict=True):
            (F.mse_loss(model(part), goal) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        plan.step()
        optimizer.zero_grad(set_to_none=False)
    return norms, whole(model)


@case(call(X, Y, _do=accumulated, _train=True), tp=BOTH, vary=False)
class AccumulatedAndClipped(Net):
    pass


def came_back(model, x, y):
    kept = copy.deepcopy(model.state_dict())
    before = model(x).detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
    far = model(x).detach()
    told = model.load_state_dict(kept)
    return before, far, model(x).detach(), len(told.missing_keys), len(kept)


@case(call(X, Y, _do=came_back, _train=True), tp=BOTH, vary=False)
class CameBack(Net):
    pass


def orthogonal_steps(model, x, y):
    """Muon: the step of a matrix is made orthogonal by a few products."""
    for _ in range(2):
        model.zero_grad()
        backward(model, x, y)
        with torch.no_grad():
            for p in model.parameters():
                g = p.grad
                if g.dim() == 2:
                    u = g / (g.norm() + 1e-7)
                    for _ in range(3):
                        a = u @ u.T
                        u = 1.5 * u - 0.5 * a @ u
                    g = u * max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.sub_(g, alpha=0.02)
    return whole(model)


@case(call(X, Y, _do=orthogonal_steps, _train=True), tp=BOTH, vary=False, allowed=HOSTILE)
class OrthogonalSteps(Net):
    pass


def surgery(model, x, y):
    """Two tasks: where their gradients disagree, each loses the part against the other."""
    parameters = list(model.parameters())
    one = torch.autograd.grad(F.mse_loss(model(x), y), parameters)
    two = torch.autograd.grad(F.l1_loss(model(y), x), parameters)
    a, b = (torch.cat([g.reshape(-1) for g in each]) for each in (one, two))
    dot = a @ b
    if dot < 1e9:
        a = a - dot / (b @ b) * b
    at = 0
    with torch.no_grad():
        for p in parameters:
            p -= 0.1 * a[at : at + p.numel()].view_as(p)
            at += p.numel()
    return dot, whole(model)


@case(call(X, Y, _do=surgery, _train=True), vary=False, allowed=HOSTILE)
class Surgery(Net):
    pass


def by_functional_call(model, x, y):
    moved = {n: p.detach() * 1.1 for n, p in model.named_parameters()}
    return torch.func.functional_call(model, moved, (x,)), model(x)


@case(call(X, Y, _do=by_functional_call), vary=False, allowed=HOSTILE)
class MovedByFunctionalCall(Net):
    pass


def factored(model, x, y):
    """Adafactor by hand: the second moment is a product of means over rows and over columns."""
    backward(model, x, y)
    with torch.no_grad():
        for p in model.parameters():
            square = p.grad.square() + 1e-30
            if p.dim() == 2:
                rows, columns = square.mean(1), square.mean(0)
                scale = torch.outer(rows, columns) / rows.mean()
            else:
                scale = square
            update = p.grad / scale.sqrt()
            update /= max(1.0, update.square().mean().sqrt().item())
            p.add_(update, alpha=-0.01 * max(1e-3, p.square().mean().sqrt().item()))
    return whole(model)


@case(call(X, Y, _do=factored, _train=True), tp=BOTH, vary=False)
class FactoredByHand(Net):
    pass


def signs(model, x, y):
    """Lion and a decay for matrices alone; gradients that are not finite would skip the step."""
    moments = [torch.zeros_like(p) for p in model.parameters()]
    taken = 0
    for turn in range(3):
        model.zero_grad()
        backward(model, x * (1e200 if turn == 1 else 1), y)
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            continue
        taken += 1
        with torch.no_grad():
            for p, m in zip(model.parameters(), moments, strict=True):
                if p.ndim >= 2:
                    p.mul_(1 - 0.1 * 0.01)
                p.add_(torch.sign(m * 0.9 + p.grad * 0.1), alpha=-0.01)
                m.mul_(0.99).add_(p.grad, alpha=0.01)
    return taken, whole(model)


@case(call(X, Y, _do=signs, _train=True), tp=BOTH, vary=False)
class Signs(Net):
    pass


def held_in_a_ball(model, x, y):
    """Weights are clamped, and rows are scaled back into a ball, after each step."""
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("weight") and p.dim() == 2:
                    p.mul_((0.7 / p.norm(dim=1, keepdim=True)).clamp(max=1.0))
                    sigma = torch.linalg.matrix_norm(p, 2)
                    p.div_(sigma.clamp(min=1.0))
                p.clamp_(-0.3, 0.3)
    return whole(model), math.sqrt(sum(float(p.square().sum()) for p in model.parameters()))


@case(call(X, Y, _do=held_in_a_ball, _train=True), tp=BOTH, vary=False)
class HeldInABall(Net):
    pass


def looked_ahead(model, x, y):
    slow = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02, foreach=True)
    for turn in range(4):
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()
        if turn % 2:
            torch._foreach_lerp_(slow, [p.detach() for p in model.parameters()], 0.5)
            for p, s in zip(model.parameters(), slow, strict=True):
                p.data.copy_(s)
    return whole(model)


@case(call(X, Y, _do=looked_ahead, _train=True), tp=BOTH, vary=False)
class LookedAhead(Net):
    pass
