"""Resolve what the user passed to a `Source`, which gives the module (the user's, or one on meta from a config) and a
tiny clone with random numbers. What was passed stays untouched, and so do random number generators."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.export import ExportedProgram
from transformers import PretrainedConfig, PreTrainedModel

from autoplan.capture.called import with_shapes
from autoplan.capture.copies import copied
from autoplan.capture.derive_inputs import Recipe, recipe_for
from autoplan.capture.known_values import integer_attributes
from autoplan.common.errors import AutoplanError, SourceError
from autoplan.common.nested import flatten_tensors, own_argument
from autoplan.common.options import check_argument
from autoplan.common.random_values import BUILDING, cast_numbers, fill_meta, randomise, untouched_randomness
from autoplan.hf.adapters import settings_of, wrap
from autoplan.hf.configs import DTYPES, check_config, limited_modules, settled_dtype, stored_as
from autoplan.hf.inputs.make import arguments_of, core_of, users_feeds
from autoplan.hf.model_string import from_string, transformers_class
from autoplan.hf.quantised.weights import quantised_weights, refuse_packed_by_others
from autoplan.hf.shrink import all_configs, tiny_config
from autoplan.hf.tiny_sizes import leaves_single_units, parts_units
from autoplan.hf.type_rules import class_name_of
from autoplan.values import IntegerEdit, LocalExperts, Runtime
from autoplan.values.quantised import PackedWeight

Model: TypeAlias = nn.Module | PretrainedConfig | ExportedProgram | str

# Exceptions of model classes that cannot be built from their config.
CANNOT_BUILD: tuple[type[Exception], ...] = (ValueError, TypeError, AttributeError, RuntimeError, LookupError)
CANNOT_BUILD += (ArithmeticError, AssertionError, MemoryError, ImportError)

_SMALL = 30_000_000  # most parameters of a module that is its own tiny clone
_RUNS_IN_SECONDS = 60_000_000
_LARGEST_PICTURE = 384  # most pixels per side for a clone on the CPU


@dataclass(frozen=True)
class Source:
    """A model before anything was done with it. `name` is its name in the plan."""

    name: str
    model_type: str = ""
    config: PretrainedConfig | None = None
    inputs: Mapping[str, Any] | None = None
    model_class: type[nn.Module] | None = None
    given: nn.Module | None = None
    shrink: str = "all"  # what a tiny clone shrinks in the config (see shrink.tiny_config)
    ranks: tuple[int, int] | None = None  # ranks of the plan, and of a tiny clone's trial
    dtype_origin: str = "from the model"  # where the dtype of weights comes from

    def module(self) -> nn.Module:
        """Return the user's module, untouched, or one built on meta from the config, in eval mode."""
        if self.given is not None:
            return self.given
        assert self.config is not None and self.model_class is not None
        with torch.device("meta"):
            return _build(self.model_class, copy.deepcopy(self.config), None).eval()

    def packed(self, module: nn.Module) -> tuple[PackedWeight, ...]:
        """Return the packed weights of `module` in a checkpoint, if the config says that it is quantised."""
        return quantised_weights(self._own_config, module)

    @property
    def _own_config(self) -> PretrainedConfig | None:
        """The config, of the model inside where peft wraps one."""
        model: Any = self.given
        return model.get_base_model().config if self.config is None and self._adapted else self.config

    def stored_as(self, weights: str) -> Source:
        """Return the same model from a checkpoint with weights stored as a dtype, or in a quantised format."""
        config, origin = settled_dtype(stored_as(self.config if self.given is None else None, weights), "")
        if weights in DTYPES:
            origin = "as asked"
        elif getattr(self.config, "dtype", None) is not None:  # of what is not quantised
            origin = self.dtype_origin
        return replace(self, config=config, dtype_origin=origin)

    @property
    def own_clone(self) -> bool:
        """Return whether the tiny clone is the module itself, since no config describes it."""
        return not self._described_by_config and self._small

    def leaves_single_units(self, ranks: int) -> bool:
        """Return whether one of so many ranks holds a single head or expert, or shares one, as far as configs tell."""
        return any(leaves_single_units(vars(section), ranks) for section in self._sections())

    def parts_units(self, ranks: int) -> bool:
        """Return whether heads are not divisible by so many ranks, as far as configs tell."""
        return any(parts_units(vars(section), ranks) for section in self._sections())

    def _sections(self) -> list[PretrainedConfig]:
        config = self._own_config
        return [] if config is None else all_configs(config)

    def tiny(
        self, variant: int = 0, dtype: torch.dtype = torch.float64, seed: int = 0, experts: str | None = "eager",
        attention: str | None = None,
    ) -> nn.Module:  # fmt: skip
        """Return a real tiny clone on the CPU in eval mode, with random numbers everywhere, the same for the same
        arguments.

        `variant=1` has other sizes where a config has them; `experts` and `attention` choose transformers'
        implementations.
        """
        if self._described_by_config:
            model = self._tiny_from_config(variant, dtype, experts, attention)
        elif self._small:
            assert self.given is not None
            model = copied(self.given)
            on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
            model = fill_meta(model, seed) if on_meta else model.cpu()
            cast_numbers(model, dtype)
        elif self._adapted:
            # A clone of the base model, with adapters like those of the user's model.
            given: Any = self.given
            kind = type(given.get_base_model())
            base = Source(_qualname(kind), self.model_type, self._own_config, model_class=kind, ranks=self.ranks)
            model = wrap(base._tiny_from_config(variant, dtype, experts, attention), settings_of(given) or {})
            cast_numbers(model, dtype)
        else:
            raise SourceError(
                f"{self.name} has {_count(self.module()):,} parameters and no config to shrink",
                hint=f"pass a transformers config, or a builder of the same model with at most {_SMALL:,} parameters",
            )
        randomise(model, seed)
        return model.eval()

    def _tiny_from_config(
        self, variant: int, dtype: torch.dtype, experts: str | None, attention: str | None
    ) -> PreTrainedModel:
        assert self.config is not None and self.model_class is not None
        config = tiny_config(self.config, variant, self.shrink, self.ranks)
        for part in all_configs(config):
            if experts is not None:
                part._experts_implementation = experts
            part.dtype = torch.float32  # so that tables made while building are as exact as the library makes them
        with torch.device("cpu"):
            model = _build(self.model_class, config, attention)
        cast_numbers(model, dtype)
        for part in all_configs(model.config):
            part.dtype = dtype
        return model

    def ever_larger(self) -> Iterator[Source]:
        """Yield this source, then ones whose clones are shrunk less (sizes may depend on each other in unknown
        ways)."""
        yield self
        if self._described_by_config and self.shrink == "all":
            yield replace(self, shrink="related")
        # The longest side of an image that any part of the config gives.
        images = [getattr(section, "image_size", 0) for section in self._sections()]
        sides = (side for size in images for side in (size if isinstance(size, list | tuple) else (size,)))
        longest = max((side for side in sides if isinstance(side, int)), default=0)
        if not self._described_by_config or longest > _LARGEST_PICTURE:
            return
        for shrink in ("depth", "nothing"):
            larger = replace(self, shrink=shrink)
            try:
                with torch.device("meta"):
                    assert larger.config is not None and larger.model_class is not None
                    size = _count(_build(larger.model_class, tiny_config(larger.config, 0, shrink), None))
            except SourceError:
                continue
            if size <= _RUNS_IN_SECONDS:
                yield larger

    @cached_property
    def recipe(self) -> Recipe | None:
        """The inputs of an unfamiliar module, searched for once; None if the user or a config gives them."""
        if self.given is None or self.inputs is not None or self.config is not None or core_of(self.given) is not None:
            return None
        return recipe_for(self.given)

    @cached_property
    def _adapted(self) -> bool:
        model: Any = self.given
        wraps = model is not None and settings_of(model) is not None
        return wraps and isinstance(model.get_base_model(), PreTrainedModel)

    @cached_property
    def _small(self) -> bool:
        return self.given is not None and _count(self.given) <= _SMALL

    @cached_property
    def _described_by_config(self) -> bool:
        """Return whether the config describes the module, which the user may have changed (adapters, cut layers)."""
        if self.config is None or self.model_class is None:
            return False
        if self.given is None:
            return True
        try:
            with torch.device("meta"):
                twin = _build(self.model_class, copy.deepcopy(self.config), None)
        except (SourceError, TypeError):
            return False
        return _shapes(twin) == _shapes(self.given)


def resolve(model: Model, *, trust_remote_code: bool = False, inputs: Mapping[str, Any] | None = None) -> Source:
    """Return the source of `model`. Raise SourceError, with what was tried, if no model can be built from it."""
    if inputs is not None:
        check_argument("inputs", inputs, Mapping, "pass a mapping: argument of the forward -> example")
        inputs = _on_the_cpu(inputs)
    check_argument("trust_remote_code", trust_remote_code, bool, "choose True or False")
    if isinstance(model, str):
        target = from_string(model, trust_remote_code=trust_remote_code)
        if target.module is not None:
            return _from_module(target.module, inputs if inputs is not None else _on_the_cpu(target.inputs))
        assert target.config is not None
        return _from_config(target.config, inputs, trust_remote_code, target.class_name, target.where)
    if isinstance(model, PretrainedConfig):
        return _from_config(model, inputs, trust_remote_code)
    if isinstance(model, ExportedProgram):
        module = model.module()
        if inputs is None and model.example_inputs is not None:
            args, kwargs = model.example_inputs
            inputs = _on_the_cpu(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        return _from_module(module, inputs)
    if isinstance(model, nn.Module):
        return _from_module(model, inputs)
    raise SourceError(
        f"a model is an nn.Module, a transformers config, an exported program or a string, not {type(model).__name__}",
        hint="pass the model itself, its config, a folder, 'package.module:builder', a model type, or a hub id",
    )


def _on_the_cpu(inputs: Any) -> Any:
    """Move examples off a GPU, since what they are passed to is a copy of the model on the CPU or without storage."""
    if all(tensor.device.type in ("cpu", "meta") for _, tensor in flatten_tensors(inputs)):
        return inputs

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().requires_grad_(value.requires_grad)
        return own_argument(value, moved)

    return moved(dict(inputs))


def _from_module(module: nn.Module, inputs: Mapping[str, Any] | None) -> Source:
    cls = type(module)
    refuse_packed_by_others(module)
    module = with_shapes(module, users_feeds(inputs, arguments_of(module)) if inputs is not None else None)
    config = module.config if isinstance(module, PreTrainedModel) else None
    model_type = (config.model_type or "") if config is not None else ""
    return Source(_qualname(cls), model_type, config, inputs, cls, module)


def _from_config(
    config: PretrainedConfig, inputs: Mapping[str, Any] | None, trust_remote_code: bool, class_name: str | None = None,
    where: str = "",
) -> Source:  # fmt: skip
    """Return a source whose class comes from the string, else the config, else the first auto class of its type."""
    check_config(config.to_dict(), where or type(config).__name__)
    model_type = config.model_type or ""
    name = class_name or (config.architectures or [None])[0] or class_name_of(model_type)
    if name is None:
        raise SourceError(
            f"{type(config).__name__} (model type {model_type!r}) names no class: `architectures` is empty and "
            "no auto mapping has this type",
            hint="set config.architectures, or pass the model itself, built under torch.device('meta')",
        )
    cls = transformers_class(name, config, where, trust_remote_code)
    wanted = getattr(cls, "config_class", None)
    if isinstance(wanted, type) and not isinstance(config, wanted):  # the class is a part of a larger model
        config = next((section for section in all_configs(config) if isinstance(section, wanted)), config)
    config, origin = settled_dtype(config, where)
    kind = config.model_type or model_type
    return Source(_qualname(cls), kind, config, inputs, model_class=cls, dtype_origin=origin)


def _build(cls: type, config: PretrainedConfig, attention: str | None) -> Any:
    """Build from a config, which may be changed."""
    keywords = {"attn_implementation": attention} if attention else {}
    try:
        with BUILDING, untouched_randomness(0), limited_modules(cls.__name__):
            return cls._from_config(config, **keywords)  # type: ignore[attr-defined]
    except SourceError:
        raise
    except CANNOT_BUILD as error:
        text = f"{cls.__name__} cannot be built from its config: {type(error).__name__}: {error}"
        raise SourceError(text, hint="fix the config, or build the model yourself and pass it") from error


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}


def _qualname(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


# The attribute of an experts' module that counts its experts: on a tiny clone, with other sizes, only one attribute
# equals the number of matrices in the stack.


def without_namesakes(source: Source, runtime: Runtime, classes: dict[str, str]) -> Runtime:
    """Drop edits of attributes that only happen to equal the number of experts, as far as a clone shows."""
    counts = {site.pattern: site.experts for site in runtime.of(LocalExperts)}
    counting = [edit for edit in runtime.of(IntegerEdit) if counts.get(edit.pattern) == edit.old]
    edits = Counter(edit.pattern for edit in counting)
    unclear = {classes[pattern] for pattern, edited in edits.items() if edited > 1}
    if not unclear:
        return runtime
    try:
        clone = source.tiny()
    except AutoplanError:
        return runtime
    attributes: dict[str, set[str]] = {}  # those that equal the length of the stack, in the first module of the class
    for name in unclear:
        module = next((module for module in clone.modules() if type(module).__name__ == name), None)
        stacks = [] if module is None else [p for p in module.parameters(recurse=False) if p.dim() > 2]
        integers = integer_attributes(module) if module is not None and stacks else {}
        if equal := {attribute for attribute, value in integers.items() if value == stacks[0].shape[0]}:
            attributes[name] = equal
    namesakes = [edit for edit in counting if edit.name not in attributes.get(classes[edit.pattern], (edit.name,))]
    return replace(runtime, instructions=tuple(i for i in runtime.instructions if i not in namesakes))
