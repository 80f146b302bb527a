"""The checks of `verify`. Each is a function that runs one model and returns named tensors.

The same function runs on the unsharded model and on every rank; `judge` then compares. Most groups of tensors must
equal the unsharded model's on every rank. If the unsharded model cannot say what is right (random numbers), ranks must
at least agree with each other: replicated values that drift apart would otherwise go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoplan.capture.called import calls_the_model, has_training_paths, reads
from autoplan.capture.copies import copied
from autoplan.check.verify.drawn import RUNS, Draws, FixedNoise
from autoplan.check.verify.subject import (
    CANNOT_RUN,
    SAME,
    Group,
    Observation,
    Subject,
    gradient_of,
    kept_in,
    may_ask,
    plain,
    state_kept,
    tensors_in,
    unchanged,
)
from autoplan.common.code.ways import has_own_code, uncompared
from autoplan.common.conventions import conventions
from autoplan.common.torch_internals import DROPOUTS
from autoplan.hf.driving import attention_switched, decoded, generative_feed, has_attentions, lacks, other_attention
from autoplan.hf.names import ATTENTION, CACHE, TARGETS

NOISE = Group("drawn at random")  # its presence says that training draws random numbers
_RAISED = 0.2  # rate of dropout
DRAWS = Group("draw", drawn=True)
NORM = Group("norm of all gradients")


@dataclass(frozen=True)
class Check:
    """`run` runs one model. `absent` returns why the check does not apply to it, or "". `if_it_runs`: a model that
    cannot run it unsharded is verified without this check, and the report says so. `apart`: the ways
    that it takes through the model's code count as seen only if it is right. `may_fail`: calls that nobody promised."""

    name: str
    about: str
    run: Callable[[Subject], Observation]
    absent: Callable[[Subject], str] = lambda subject: ""
    if_it_runs: bool = False
    apart: bool = False
    may_fail: bool = False


# The checks


def parameters(subject: Subject) -> Observation:
    return {Group("parameter"): subject.parameters()}


def forward(subject: Subject) -> Observation:
    """Run once; once more if the first run changed what the model keeps (a cached table, a state, "is initialised");
    and without gradients, if its code asks whether they are on."""
    before = kept_in(subject.model)
    seen = inputs(subject) if subject.asks else _each(subject, subject.feeds)
    if not unchanged(before, kept_in(subject.model)):
        again = _each(subject, subject.feeds)
        seen |= {replace(group, name=f"{group.name}, again"): tensors for group, tensors in again.items()}
    if reads(subject.model, "is_grad_enabled"):
        quiet = _each(subject, calls_the_model(subject.feeds), backward=False)
        seen |= {replace(group, name=f"{group.name} under no_grad"): tensors for group, tensors in quiet.items()}
    return seen


def inputs(subject: Subject) -> Observation:
    """Return the gradients of inputs that nobody asked for: those of an attack, a penalty, a map of what matters.
    Where that changes nothing else, `forward` asks for them, and no call is made for them alone (sharded.py)."""
    seen = Observation()
    for feed, feed_inputs in subject.feeds.items():
        differentiable = may_ask(subject, feed_inputs)
        if differentiable or subject.asks:
            call = subject.forward_and_backward({**feed_inputs, **differentiable})
            tensors = {name: call["inputs"][name] for name in differentiable if name in call["inputs"]}
            others = {name: x for name, x in call["outputs"].items() if name not in map(gradient_of, differentiable)}
            seen[Group(f"{feed} gradient", gradient=True)] = call["gradients"]
            seen[Group(f"{feed} output", output=True)] = others
            seen |= {Group(f"{feed} input", gradient=True, asked=True): tensors} if differentiable else {}
    return seen


def second_shape(subject: Subject) -> Observation:
    return _each(subject, subject.others)


def other_dims(subject: Subject) -> Observation:
    return _each(subject, subject.other_dims)


def loss(subject: Subject) -> Observation:
    """Pass targets, and use the loss that the model computes: its gradients are those of training."""
    names, seen = conventions(), Observation()
    for feed, labels in subject.labels.items():
        subject.model.zero_grad(set_to_none=True)
        outputs = tensors_in(subject.forward({**subject.feeds[feed], names.targets: labels}))
        subject.backward(outputs[names.loss])
        seen[Group(f"{feed} output", output=True)] = {name: tensor.detach().clone() for name, tensor in outputs.items()}
        seen[Group(f"{feed} gradient", gradient=True)] = subject.gradients()
    return seen


def attention(subject: Subject) -> Observation:
    """Run with the attention implementation that is not in use."""
    with attention_switched(subject.model):
        return _each(subject, subject.feeds)


def cache(subject: Subject) -> Observation:
    """Read all but two tokens, then decode two, one at a time, from the cache."""
    feed, ids = generative_feed(subject.signature, subject.feeds)
    with torch.no_grad():
        steps = decoded(subject.forward, subject.signature, subject.feeds[feed], ids)
    return {Group("decoded output", output=True): {tokens: plain(logits) for tokens, logits in steps.items()}}


def state_dict(subject: Subject) -> Observation:
    """Return names, shapes and values of the checkpoint, also after loading a plain full one into zeros."""
    saved = {name: plain(tensor).clone() for name, tensor in subject.model.state_dict().items()}
    with torch.no_grad():
        for parameter in subject.model.parameters():
            parameter.zero_()
    subject.model.load_state_dict(saved)
    again = {name: plain(tensor).clone() for name, tensor in subject.model.state_dict().items()}
    return {Group("saved tensor"): saved, Group("tensor loaded back"): again}


def training(subject: Subject) -> Observation:
    """Run in training mode without dropout, so that there is a right answer, and return the buffers as well."""
    with _dropout_at(subject.model, 0.0):
        return _trained(subject) | _drawn(subject)


def dropout(subject: Subject) -> Observation:
    """Run in training mode with a high rate for all dropout, each rank with another seed."""
    with _dropout_at(subject.model, _RAISED):
        return _trained(subject) | _drawn(subject)


def _trained(subject: Subject) -> Observation:
    """Run two steps in training mode, and return the buffers after the first (running statistics), which may change the
    second (values that the first batch sets).

    Unsharded, a step with another seed shows whether training draws random numbers.
    """
    feeds = calls_the_model(subject.feeds)  # submodules draw random numbers in the model's run
    with _training(subject):
        subject.seed(1)
        first = _each(subject, feeds)
        left = _buffers(subject.model)
        again = _each(subject, feeds)
    if subject.gather is None:
        with _training(subject):
            subject.seed(2)
            second = _each(subject, feeds)
        first[NOISE] = {} if _same(first, second) else {"yes": torch.ones(1)}
    first |= {replace(group, name=f"{group.name} of a second step"): seen for group, seen in again.items()}
    return first | {Group(f"buffer {name} after a step"): {name: value} for name, value in left.items()}


def _drawn(subject: Subject) -> Observation:
    """Return what several runs draw and, if they draw anything, a step with fixed numbers in place of random ones."""
    if not subject.draws:
        return {}
    feeds = calls_the_model(subject.feeds)
    with _training(subject), torch.no_grad(), uncompared(), Draws() as draws:
        for run in range(RUNS):  # equal seeds show numbers that should differ, other seeds those that should agree
            if run == RUNS // 2 and subject.gather is None and not draws.found:
                break  # unsharded, both seeds are the same
            if run in (0, RUNS // 2):
                subject.seed(3, alike=run > 0)
            for inputs in feeds.values():
                subject.forward(inputs)
    if not draws.found:
        return {}
    with _training(subject), FixedNoise() as noise:
        fixed = _each(subject, feeds)
    named = {replace(group, name=f"{group.name}, with fixed noise", fixed=True): seen for group, seen in fixed.items()}
    return {DRAWS: dict(draws.observed()), **({} if noise.unknown else named)}


@contextmanager
def _training(subject: Subject) -> Iterator[None]:
    subject.model.train()
    try:
        with state_kept(subject.model):
            yield
    finally:
        subject.model.eval()


def _buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return full buffers as a checkpoint holds them."""
    names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    return {name: plain(tensor).clone() for name, tensor in model.state_dict().items() if name in names}


@contextmanager
def _dropout_at(model: Any, rate: float) -> Iterator[None]:
    """Set the rate of all dropout: in dropout modules, and in attributes named so. (Tiny configs have none.)"""
    places = _rates(model)
    for state, name, _ in places:
        state[name] = rate
    try:
        yield
    finally:
        for state, name, before in places:
            state[name] = before


def _rates(model: Any) -> list[tuple[dict[str, Any], str, float]]:
    places: list[tuple[dict[str, Any], str, float]] = []
    for module in model.modules():
        names = ["p"] if isinstance(module, DROPOUTS) else []
        names += [name for name in vars(module) if name.endswith(conventions().rate_suffix)]
        rates = ((name, vars(module).get(name)) for name in names)
        places += [(vars(module), name, p) for name, p in rates if isinstance(p, float) and 0.0 <= p < 1.0]
    return places


def optimizer(subject: Subject) -> Observation:
    """Take three steps of SGD at a rate that moves the parameters visibly; then clip and use AdamW over all at once."""
    wanted = [parameter for parameter in subject.model.parameters() if parameter.requires_grad]
    feed = next(iter(subject.feeds.values()))
    gradients = subject.forward_and_backward(feed)["gradients"].values()
    largest = max((float(gradient.abs().max()) for gradient in gradients if gradient.numel()), default=0.0)
    largest = largest or 1.0  # if all gradients are zero, nothing moves at any rate
    sgd = torch.optim.SGD(wanted, lr=0.01 / largest, momentum=0.9)
    sgd.step()
    for _ in range(2):
        subject.forward_and_backward(feed, gather=False)
        sgd.step()
    stepped = subject.parameters()
    norm = torch.nn.utils.clip_grad_norm_(wanted, 0.1 * largest, foreach=True)
    torch.optim.AdamW(wanted, lr=1e-3, foreach=True).step()
    return {
        Group("parameter after three steps"): stepped,
        NORM: {"": plain(norm)},
        Group("parameter after AdamW", between_ranks=True): subject.parameters(),
    }


def _each(subject: Subject, feeds: Any, *, backward: bool = True) -> Observation:
    observed: Observation = {}
    for feed, inputs in feeds.items():
        if backward:
            seen = subject.forward_and_backward(inputs)
            observed[Group(f"{feed} gradient", gradient=True)] = seen["gradients"]
        else:
            with torch.no_grad():
                seen = {"outputs": tensors_in(subject.forward(inputs))}
        observed[Group(f"{feed} output", output=True)] = seen["outputs"]
    return observed


def _same(first: Observation, other: Observation) -> bool:
    return all(torch.equal(tensor, other[group][name]) for group in first for name, tensor in first[group].items())


# Whether checks apply


def labels_for(subject: Subject) -> dict[str, torch.Tensor]:
    """Return random labels for each feed of a class that takes them: one per row of its logits."""
    names, labels = conventions(), dict[str, torch.Tensor]()
    for feed, inputs in calls_the_model(subject.feeds).items():
        with torch.no_grad():
            logits = tensors_in(subject.forward(inputs)).get(names.logits)
        if logits is not None and logits.dim() > 1 and logits.shape[-1] > 1 and names.targets not in inputs:
            generator = torch.Generator().manual_seed(3)
            labels[feed] = torch.randint(logits.shape[-1], logits.shape[:-1], generator=generator).to(logits.device)
    return labels


def _without(what: str, has: Callable[[Subject], Any]) -> Callable[[Subject], str]:
    return lambda subject: "" if has(subject) else what


_no_inputs = _without(
    "all gradients of inputs are checked with the others",
    lambda subject: any(may_ask(subject, given) for given in subject.feeds.values()),
)
_no_second_shape = _without("no inputs of another batch and length", lambda subject: subject.others)
_no_other_dims = _without("no inputs with another number of dims", lambda subject: subject.other_dims)
_no_dropout = _without("the model has no adjustable dropout", lambda subject: _rates(subject.model))
_sparse = _without(
    "its tables have sparse gradients, which AdamW does not support",
    lambda subject: not any(getattr(module, "sparse", False) is True for module in subject.model.modules()),
)


def _one_attention(subject: Subject) -> str:
    if not has_attentions(subject.model):
        return lacks(subject.model, ATTENTION)
    try:
        with attention_switched(subject.model):
            _each(subject, subject.feeds, backward=False)
    except (ValueError, RuntimeError, TypeError, NotImplementedError) as error:
        other = other_attention(subject.model)
        return f"the unsharded model does not support {other} attention: {str(error).splitlines()[0]}"
    return ""


def _no_cache(subject: Subject) -> str:
    if not generative_feed(subject.signature, subject.feeds)[0]:
        return lacks(subject.model, CACHE)
    try:
        cache(subject)
    except (AttributeError, ValueError, RuntimeError, TypeError, IndexError, NotImplementedError) as error:
        return f"the unsharded model cannot decode with a cache: {(str(error) or repr(error)).splitlines()[0]}"
    return ""


def _trains_alike(subject: Subject) -> str:
    """Return why training mode need not be checked: no training-only code, and equal outputs and buffers; else "".

    Code that only reads the mode (a rate of zero) takes a way of its own, which the path guard would refuse.
    """
    if has_training_paths(subject.model) or (has_own_code(subject.model) and reads(subject.model, "training")):
        return ""
    runs: list[list[torch.Tensor]] = []
    for mode in (False, True):
        twin = replace(subject, model=copied(subject.model).train(mode))
        try:
            with _dropout_at(twin.model, 0.0):
                subject.seed(1)
                outputs = [tensors_in(twin.forward(inputs)) for inputs in calls_the_model(twin.feeds).values()]
        except CANNOT_RUN:  # the check itself reports why
            return ""
        runs.append([tensor for result in outputs for tensor in result.values()] + list(twin.model.buffers()))
    return SAME if len(runs[0]) == len(runs[1]) and all(map(torch.equal, *runs)) else ""


# The state dict comes early: a forward may write into weights, and only ranks go on with what it wrote. Later checks
# run on the state that was loaded back.
CHECKS = (
    Check("parameters", "every rank's parameters, gathered, equal the original's", parameters),
    Check("state_dict", "saved names, shapes and values; a plain checkpoint loads back", state_dict),
    Check("forward", "outputs and every gradient, in eval mode", forward),
    Check("inputs", "gradients of float inputs that require none", inputs, _no_inputs, if_it_runs=True, apart=True),
    Check("second_shape", "the same at another batch size and length", second_shape, _no_second_shape),
    Check("other_dims", "the same with one dim more or less, if it runs", other_dims, _no_other_dims,
          if_it_runs=True, apart=True, may_fail=True),
    Check("training", "training mode without dropout, buffers afterwards", training, _trains_alike, if_it_runs=True),
    Check("loss", "the loss that the model computes from labels, and its gradients", loss,
          lambda subject: "" if subject.labels else lacks(subject.model, TARGETS)),
    Check("attention", "the same with the other attention implementation", attention, _one_attention),
    Check("cache", "decoding token by token with a cache", cache, _no_cache),
    Check("dropout", "training mode with dropout and a seed per rank", dropout, _no_dropout, if_it_runs=True),
    Check("optimizer", "parameters after three steps; AdamW over all of them", optimizer, _sparse),
)  # fmt: skip
