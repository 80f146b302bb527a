"""Read a model's modules into plain data (`analyse.module_tree`), without running anything and for any device.

What a module is fed cannot be seen from the modules alone, so three facts are taken from torch and from interfaces:
the torch layer that could stand first (a table of ids, a convolution), the argument names of forward signatures, and
which mask builders the code of a class refers to (compared as objects, so renaming them changes nothing).
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator
from functools import cache
from types import FunctionType

from torch import nn

from autoplan.common.code.forward_code import names_in
from autoplan.values.module_tree import Feed, Mask, ModuleNode, ModuleTree, ParameterShape

__all__ = ["module_tree"]

# What arguments of a public forward carry: an interface that is the same for all models of a kind.
ARGUMENTS: dict[str, Feed] = {
    "input_ids": "text",
    "decoder_input_ids": "text",
    "pixel_values": "vision",
    "pixel_values_videos": "vision",
    "flattened_patches": "vision",
    "image_patches": "vision",
    "input_features": "audio",
    "input_values": "audio",
    "input_features_mask": "audio",
    "audio_values": "audio",
    "audio_codes": "audio",
    "past_values": "other",
    "state_sequence": "other",
}
MASK_BUILDERS: dict[str, Mask] = {
    "create_causal_mask": "causal",
    "create_sliding_window_causal_mask": "causal",
    "create_chunked_causal_mask": "causal",
    "create_recurrent_attention_mask": "causal",
    "create_masks_for_generate": "causal",
    "create_bidirectional_mask": "bidirectional",
    "create_bidirectional_sliding_window_mask": "bidirectional",
}
# Names that occur in the code of a module, nobody having run it: Python names, no ops of a trace.
TRIANGLES = frozenset({"tril", "triu", "tril_", "triu_"})
WRITES_TEXT = "prepare_inputs_for_generation"  # the method by which transformers' generate() drives a model


def module_tree(model: nn.Module) -> ModuleTree:
    """All modules of `model`, shared ones once with all their names."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules.setdefault(id(module), module)
    numbers = {identity: number for number, identity in enumerate(modules)}
    classes: dict[type, int] = {}
    tensors: dict[int, int] = {}
    return ModuleTree(
        tuple(_node(module, tuple(names[identity]), numbers, classes, tensors) for identity, module in modules.items())
    )


def _node(
    module: nn.Module,
    names: tuple[str, ...],
    numbers: dict[int, int],
    classes: dict[type, int],
    tensors: dict[int, int],
) -> ModuleNode:
    kind = type(module)
    inputs, masks, generates = _class_facts(kind)  # type: ignore[arg-type]  # classes are hashable
    held = [(key, p) for key, p in module._parameters.items() if p is not None]
    reads, writes = _widths(module)
    return ModuleNode(
        names=names,
        class_id=classes.setdefault(kind, len(classes)),
        class_name=kind.__name__,
        container=not held and _is_container(module),
        parameters=tuple(
            ParameterShape(key, tuple(p.shape), p.numel() * p.element_size(), tensors.setdefault(id(p), len(tensors)))
            for key, p in held
        ),
        children=tuple((key, numbers[id(child)]) for key, child in module._modules.items() if child is not None),
        inputs=inputs,
        stem=_stem(module),
        masks=masks,
        generates=generates,
        reads=reads,
        writes=writes,
    )


def _is_container(module: nn.Module) -> bool:
    children = [child for child in module._modules.values() if child is not None]
    if isinstance(module, nn.Sequential):
        return any(child._modules for child in children)  # of leaves, it is a small network of its own
    namespace = type(module) is nn.Module  # `group = nn.Module(); group.blocks = ...`
    return isinstance(module, nn.ModuleList | nn.ModuleDict) or (namespace and bool(children))


def _stem(module: nn.Module) -> Feed | None:
    """What this module would read if it stood first; a spectrogram is an image of one channel."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "text"
    if isinstance(module, nn.Conv2d | nn.Conv3d):
        return "audio" if module.in_channels == 1 else "vision"
    return "audio" if isinstance(module, nn.Conv1d) else None


def _widths(module: nn.Module) -> tuple[int | None, int | None]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.in_channels, module.out_channels
    return None, None


@cache
def _class_facts(kind: type[nn.Module]) -> tuple[frozenset[Feed], frozenset[Mask], bool]:
    try:
        arguments = tuple(inspect.signature(kind.forward).parameters)
    except (TypeError, ValueError, AttributeError):  # written in C, scripted, replaced by odd callables: no signature
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
