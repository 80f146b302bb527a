"""Read the module tree of a model, and find the stacks of blocks in it."""

from __future__ import annotations

import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from types import FunctionType

from torch import nn

from autoplan.analyse.picture.stacks import find_blocks, kind_of
from autoplan.common.code.code_place import names_in
from autoplan.common.options import check_argument
from autoplan.common.torch_internals import CONVOLUTIONS, own_modules, own_parameters
from autoplan.ops import call_record
from autoplan.values import Stack, Trace
from autoplan.values.module_tree import Feed, Mask, ModuleNode, ModuleTree, ParameterShape

# Read a model's modules into plain data. A module's modality shows in the torch layer that could be first, the argument
# names of its forward, and the mask builders that its class refers to (as objects: renaming changes nothing).

# Modality of the arguments of a public forward: an interface that all models of a kind share.
ARGUMENTS: dict[str, Feed] = {
    **dict.fromkeys(("input_ids", "decoder_input_ids"), "text"),
    **dict.fromkeys(("pixel_values", "pixel_values_videos", "flattened_patches", "image_patches"), "vision"),
    **dict.fromkeys(("input_features", "input_values", "input_features_mask", "audio_values", "audio_codes"), "audio"),
    **dict.fromkeys(("past_values", "state_sequence"), "other"),
}
MASK_BUILDERS: dict[str, Mask] = {
    **dict.fromkeys(("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask",
                     "create_recurrent_attention_mask", "create_masks_for_generate"), "causal"),
    **dict.fromkeys(("create_bidirectional_mask", "create_bidirectional_sliding_window_mask"), "bidirectional"),
}  # fmt: skip
# Python names in the code of a module, no ops of a trace: the code is not run.
TRIANGLES = frozenset({"tril", "triu", "tril_", "triu_"})
WRITES_TEXT = "prepare_inputs_for_generation"  # the method by which transformers' generate() drives a model


def module_tree(model: nn.Module) -> ModuleTree:
    """Return all modules of `model`, shared ones once with all their names."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules.setdefault(id(module), module)
    numbers = {identity: number for number, identity in enumerate(modules)}
    classes: dict[type, int] = {}
    tensors: dict[int, int] = {}
    nodes: list[ModuleNode] = []
    for identity, module in modules.items():
        kind = type(module)
        inputs, masks, generates = _class_facts(kind)  # type: ignore[arg-type]  # classes are hashable
        shapes = []
        for key, p in own_parameters(module).items():
            if p is not None:
                number = tensors.setdefault(id(p), len(tensors))
                shapes.append(ParameterShape(key, tuple(p.shape), p.numel() * p.element_size(), number))
        reads = writes = None
        if isinstance(module, nn.Linear):
            reads, writes = module.in_features, module.out_features
        elif isinstance(module, CONVOLUTIONS):
            reads, writes = module.in_channels, module.out_channels
        node = ModuleNode(
            names=tuple(names[identity]),
            class_id=classes.setdefault(kind, len(classes)),
            class_name=kind.__name__,
            container=not shapes and _is_container(module),
            parameters=tuple(shapes),
            children=tuple((key, numbers[id(m)]) for key, m in own_modules(module).items() if m is not None),
            inputs=inputs,
            stem=_stem(module),
            masks=masks,
            generates=generates,
            reads=reads,
            writes=writes,
            runs=kind is not nn.Module and not isinstance(module, nn.ParameterList | nn.ParameterDict),
        )
        nodes.append(node)
    return ModuleTree(tuple(nodes))


def _is_container(module: nn.Module) -> bool:
    children = [child for child in own_modules(module).values() if child is not None]
    if isinstance(module, nn.Sequential):
        return any(own_modules(child) for child in children)  # a Sequential of leaves is a network of its own
    namespace = type(module) is nn.Module  # `group = nn.Module(); group.blocks = ...`
    return isinstance(module, nn.ModuleList | nn.ModuleDict) or (namespace and bool(children))


def _stem(module: nn.Module) -> Feed | None:
    """Return the modality that this module would read as a first layer; a spectrogram is an image of one channel."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "text"
    if isinstance(module, nn.Conv2d | nn.Conv3d):
        return "audio" if module.in_channels == 1 else "vision"
    return "audio" if isinstance(module, nn.Conv1d) else None


@cache
def _class_facts(kind: type[nn.Module]) -> tuple[frozenset[Feed], frozenset[Mask], bool]:
    try:
        arguments = tuple(inspect.signature(kind.forward).parameters)
    except (TypeError, ValueError, AttributeError):  # no signature: written in C, scripted, or an odd callable
        arguments = ()
    inputs = frozenset(ARGUMENTS[name] for name in arguments if name in ARGUMENTS)
    return inputs, frozenset(_masks(kind)), hasattr(kind, WRITES_TEXT)


def _masks(kind: type[nn.Module]) -> Iterator[Mask]:
    library = sys.modules.get("transformers.masking_utils")
    builders = {id(getattr(library, name)): mask for name, mask in MASK_BUILDERS.items() if hasattr(library, name)}
    own = itertools.takewhile(lambda base: base is not nn.Module, kind.__mro__)
    for function in (value for base in own for value in vars(base).values()):
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, FunctionType) or (function.__module__ or "torch.").startswith("torch."):
            continue
        names = set(names_in(function.__code__))
        for name in names:
            if name in TRIANGLES and "flip" not in names:  # a flipped triangle masks a band's corners
                yield "causal"
            elif id(function.__globals__.get(name)) in builders:
                yield builders[id(function.__globals__[name])]


# The repeated stacks of a model: FSDP2 wraps their blocks, activation checkpointing recomputes them.


def layers(model: nn.Module, trace: Trace | None = None, *, causal: frozenset[str] = frozenset()) -> tuple[Stack, ...]:
    """Return all repeated stacks of `model`, blocks in call order; works on meta models and runs nothing.

    With a `trace`, blocks are ordered and counted as they were called. `causal`: modules that called a causal
    attention.
    """
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    return stacks_of(module_tree(model), trace, causal)


def stacks_of(tree: ModuleTree, trace: Trace | None = None, causal: frozenset[str] = frozenset()) -> tuple[Stack, ...]:
    """Return the same as `layers`, from plain data."""
    block_lists, stacks = find_blocks(tree), []
    for blocks in block_lists:
        kind, guess = kind_of(blocks, block_lists, tree, causal)
        names = [tree.nodes[block].name for block in blocks.blocks]
        notes = [*blocks.notes, guess]
        if trace is not None:
            calls = Counter(visit.module for visit in trace.visits if visit.module in names)
            folded = ((fold.container, key, by) for fold in trace.folds for key, by in fold.members)
            standing_in = {f"{container}.{key}": f"{container}.{by}" for container, key, by in folded}
            if all(name in calls for name in names):  # in the order of their first calls
                order = {name: place for place, name in enumerate(calls)}
                names = sorted(names, key=order.__getitem__)
            total = sum(calls[name] or calls[standing_in.get(name, name)] for name in names)
            notes.append(f"{total} calls of {len(names)} modules" if total > len(names) else "")
        elif blocks.listed > len(names):
            notes.append(f"{blocks.listed} calls of {len(names)} modules")
        stacks.append(Stack(blocks.name, kind, tuple(names), "; ".join(filter(None, notes))))
    return tuple(stacks)


def without_idle(stacks: tuple[Stack, ...], trace: Trace) -> tuple[Stack, ...]:
    """Return the stacks without blocks that never ran while their parts did (`self.cross.q(x)`): hooks on such a block
    would not run."""
    ran = {visit.module for visit in trace.visits}

    def runs(block: str) -> bool:
        return block in ran or not any(name.startswith(f"{block}.") for name in ran)

    shortened = (replace(stack, fqns=tuple(filter(runs, stack.fqns))) for stack in stacks)
    return tuple(stack for stack in shortened if stack.fqns)


def text_last(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """Return the stacks with those of text behind the others, and of these the decoder last."""
    texts = "encoder", "decoder"
    return tuple(sorted(stacks, key=lambda stack: texts.index(stack.kind) if stack.kind in texts else -1))


def calls_causal(trace: Trace) -> frozenset[str]:
    """Return the modules that called attention with its causal flag on."""
    modules = set()
    for call in trace.calls:
        at, name = call_record(call.name).causal or (-1, "")
        if (call.args[at] if len(call.args) > at >= 0 else call.kwargs.get(name)) is True:
            modules.add(call.module)
    return frozenset(modules)
