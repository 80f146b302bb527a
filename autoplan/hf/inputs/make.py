"""Make example inputs: feeds (named keyword arguments of the forward) that run and reach everything to be planned.

The text pass comes first; models with several towers get one more feed per tower. Inputs are real CPU tensors even for
models on meta; no id is special and no size is 1; the same arguments give the same numbers. They come from the user, a
config with the forward's signature (and `rules/inputs/<type>.toml`), or `capture/derive_inputs.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from autoplan.capture.derive_inputs import Recipe, derive, part_feeds
from autoplan.capture.draw import Draw
from autoplan.capture.dry_run import failure_of, tried
from autoplan.capture.feeding.wants import SIZES
from autoplan.common.errors import CaptureError
from autoplan.common.random_values import working_dtype
from autoplan.hf.inputs.guesses import (
    MODALITIES,
    NAMES,
    Modality,
    bands_of,
    first_that_runs,
    pictures,
    positive_int,
    prompt_feed,
    sounds,
    together,
)
from autoplan.hf.shrink import all_configs
from autoplan.hf.tiny_sizes import is_token_id
from autoplan.hf.type_rules import type_rules

_SAMPLES, _FRAMES = 4000, 128
_TINY = 256  # rows of a vocabulary
_PICTURE = ("pixel_values",)
_AUDIO = ("input_features", "input_values", "audio_values")
_STATES = ("encoder_outputs", "encoder_hidden_states", "cross_attention_states")


def make_feeds(
    model: nn.Module, config: PretrainedConfig, model_type: str, batch: int, length: int, seed: int
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return all feeds of a transformers model, and a note for each that is missing."""
    maker = _Maker(model, config, model_type, batch, length, seed)
    main = maker.main_feed()
    if any(maker.requires(name) and name not in main for name in maker.parameters):
        inputs = maker.tower_alone() or maker.another_way(main)
        inputs = inputs or derive(model, batch, length, seed)  # its error names what fails
        return {"forward": {**inputs, **maker.without_cache()}}, []
    if not main:
        text = f"cannot make inputs for {type(model).__name__}: its main input is {maker.main!r}"
        raise CaptureError(text, hint="pass inputs={argument: tensor} for its forward")
    main = maker.with_what_text_needs(main) if "input_ids" in main else maker.as_it_runs(main)
    name = "text" if "input_ids" in main or "decoder_input_ids" in main else "forward"
    feeds, notes = {name: main}, []
    for feed, modality in maker.prompts(main) if name == "text" else ():
        try:
            feeds[feed] = maker.prompt_feed(feed, modality, main)
        except CaptureError as error:
            notes.append(f"no feed with {modality.argument}: {error.message}; pass one in inputs= to cover it")
    if {"image", "audio"} <= feeds.keys():
        feeds |= together(model, {kind: feeds[kind] for kind in ("image", "audio")})
    # A lone decoder's argument for an encoder's states; whether it reads them shows in a run
    lone = name == "text" and not maker.takes("decoder_input_ids")
    argument = next((states for states in _STATES if lone and maker.takes(states)), None)
    if argument is not None:
        crossed = {**main, argument: maker.encoded()}
        with_states = tried(model, crossed, main)
        if with_states.failure is not None and getattr(config, "is_decoder", True):
            notes.append(f"no feed with {argument}: {str(with_states.failure).splitlines()[0]}")
        elif with_states.failure is None and with_states.used:
            feeds["cross"] = crossed
    if len(maker.configs) > 1 or config.is_encoder_decoder:  # else there is only a text model
        parts, missing = part_feeds(model, feeds, maker.part, (batch, length, seed))
        return {**feeds, **parts}, [*notes, *missing]
    return feeds, notes


class _Maker:
    """Makes the inputs of one model, from what its config and signature say."""

    def __init__(self, model: nn.Module, config: PretrainedConfig, model_type: str, batch: int, length: int, seed: int):
        self.model, self.config, self.model_type = model, config, model_type
        self.batch, self.length, self.seed = batch, length, seed
        self.parameters = inspect.signature(model.forward).parameters
        self.main = getattr(model, "main_input_name", "input_ids")
        self.configs = all_configs(config)
        self.draw = Draw(seed, working_dtype(model))

    def takes(self, name: str) -> bool:
        return name in self.parameters

    def requires(self, name: str) -> bool:
        p = self.parameters.get(name)
        return p is not None and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL) and p.default is p.empty

    def ids(self, length: int | None = None) -> torch.Tensor:
        """Return ordinary tokens: below the size of every vocabulary, and not special."""
        vocab = getattr(self.config.get_text_config(), "vocab_size", None)
        special: set[int] = set()
        for name, value in (pair for config in self.configs for pair in vars(config).items()):
            if is_token_id(name):
                special.update([value] if isinstance(value, int) else (x for x in value or () if isinstance(x, int)))
        tiny = isinstance(vocab, int) and vocab <= _TINY  # a clone's: ids must reach each rank's rows of the table
        top = min(vocab, vocab if tiny else 100) if isinstance(vocab, int) else 100
        allowed = [i for i in range(min(20, top // (16 if tiny else 2)), top) if i not in special] or list(range(top))
        return self.draw.spread(allowed, (self.batch, length or self.length))

    def main_feed(self) -> dict[str, Any]:
        """Return the text pass if there is one, else the model's main input."""
        feed: dict[str, Any] = {}
        speech_only = self.main in _AUDIO and (self.config.is_encoder_decoder or not self.takes("input_ids"))
        if self.takes("input_ids") and not speech_only:
            feed["input_ids"] = self.ids()
        if speech_only and self.takes(self.main):
            feed[self.main] = self.sound()
        if self.takes("pixel_values") and ("input_ids" not in feed or self.requires("pixel_values")):
            feed["pixel_values"] = self.picture()
        if self.takes("decoder_input_ids"):
            feed["decoder_input_ids"] = self.ids(length=self.length - 1 if self.length > 4 else self.length)
        feed.update(self.from_rules())
        feed.update(self.without_cache())
        dropped = [n for n, rule in type_rules(self.model_type).inputs.items() if rule.get("drop")]
        return {name: value for name, value in feed.items() if name not in dropped}

    def tower_alone(self) -> dict[str, Any] | None:
        """Return a vision tower's own inputs: patches, as its first argument, with their grid."""
        first = next(iter(self.parameters))
        for picture in pictures(self.config, self.config, self.takes, self.draw, self.batch):
            feed = {first if name == "pixel_values" else name: value for name, value in picture.items()}
            if len(feed) > 1 and failure_of(self.model, feed) is None:
                return feed
        return None

    def with_what_text_needs(self, main: dict[str, Any]) -> dict[str, Any]:
        """Return the text pass with images or sounds, for models that compare these and need both at once."""
        others = [name for name in (*_PICTURE, *_AUDIO, "bbox") if self.takes(name) and name not in main]
        alone = any(isinstance(getattr(self.config, token, None), int) for m in MODALITIES for token in m.tokens)
        if not others or alone or failure_of(self.model, main) is None:
            return main
        for name in others:
            value = self.picture() if name in _PICTURE else self.sound(name)
            if failure_of(self.model, {**main, name: value}) is None:
                return {**main, name: value}
        return self.another_way(main) or main

    def as_it_runs(self, main: dict[str, Any]) -> dict[str, Any]:
        """Return the feed, or one with images and sounds of other usual shapes if the model does not run on it."""
        runs = not any(name in main for name in NAMES) or failure_of(self.model, main) is None
        return main if runs else self.another_way(main) or main

    def another_way(self, main: dict[str, Any]) -> dict[str, Any] | None:
        """Return the feed with other shapes or more arguments such that the model runs; None if there is none."""
        if any(self.requires(name) and name not in main and name not in NAMES for name in self.parameters):
            return None
        picture, sizes = self.picture().shape[1:], (self.batch, self.length)
        return first_that_runs(self.model, main, self.configs, picture, sizes, self.takes, self.requires, self.draw)

    def from_rules(self) -> dict[str, Any]:
        """Return the arguments that the type's rule file describes."""
        variable = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        rules = type_rules(self.model_type).inputs.items()
        return self.described({n: r for n, r in rules if not r.get("drop") and (self.takes(n) or variable)})

    def described(self, rules: Mapping[str, Any]) -> dict[str, Any]:
        fields = {"batch": self.batch, "length": self.length, "config": self.config, "model": self.model}
        return {name: self.draw.described(rule, fields) for name, rule in rules.items()}

    def sound(self, name: str = "") -> torch.Tensor:
        """Return a spectrogram or a waveform."""
        if (name or self.main) != "input_features":
            return self.draw.normal((self.batch, _SAMPLES))
        return self.draw.normal((self.batch, _FRAMES, bands_of(self.configs)[0]))

    def encoded(self) -> torch.Tensor:
        """Return an encoder's output, of a sequence that differs from the text in length."""
        width = positive_int(self.config.get_text_config(), "hidden_size") or 16
        return self.draw.normal((self.batch, min(self.length, _FRAMES) + 2, width))

    def prompts(self, main: Mapping[str, Any]) -> Iterator[tuple[str, Modality]]:
        """Yield what can be put into a prompt: as the type's rule file says, then what else the forward takes."""
        described = type_rules(self.model_type).prompts
        remaining = {modality.name: modality for modality in MODALITIES}
        for feed in described:
            kind = feed.split("_")[0]  # "image_wide" is another form of an image
            yield feed, next((m for m in MODALITIES if m.name == kind), Modality(kind, kind))
            remaining.pop(kind, None)
        for modality in remaining.values():
            if self.takes(modality.argument) and modality.argument not in main:
                yield modality.name, modality

    def prompt_feed(self, feed: str, modality: Modality, main: Mapping[str, Any]) -> dict[str, Any]:
        """Return the text pass with an image, a sound or a video in its prompts."""
        others = {name: value for name, value in main.items() if name not in ("input_ids", "use_cache")}
        guesses = ({**others, **inputs} for inputs in self._given(feed, modality))
        result = prompt_feed(modality, self.model, self.config, self.ids(), guesses, self.takes)
        return {**result, **self.without_cache()}

    def _given(self, feed: str, modality: Modality) -> Iterator[dict[str, Any]]:
        """Yield inputs for the tower: as the type's rule file says, else guesses."""
        described = type_rules(self.model_type).prompts.get(feed)
        if described is not None:
            yield self.described(described)
        elif modality.name == "image":
            vision = next((c for c in self.configs if hasattr(c, "patch_size")), self.config)
            yield from pictures(self.config, vision, self.takes, self.draw, self.batch)
        elif modality.name == "audio":
            yield from sounds(self.configs, self.takes, self.draw, self.batch)

    def part(self, name: str, part: nn.Module) -> dict[str, Any] | None:
        """Return inputs for a submodule called alone: from the type's rule file, or images for a vision tower."""
        for path, described in type_rules(self.model_type).parts.items():
            if f".{name}".endswith(f".{path}"):
                return self.described(described)
        config = getattr(part, "config", None)
        if not isinstance(config, PretrainedConfig) or config is self.config:
            return None
        return _Maker(part, config, config.model_type, self.batch, self.length, self.seed).tower_alone()

    def without_cache(self) -> dict[str, Any]:
        """Return the argument that turns the cache off, which is better than a change of the config."""
        variable = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())  # passed on to inner models
        passed_on = variable and self.takes("input_ids") and hasattr(self.config.get_text_config(), "use_cache")
        return {"use_cache": False} if self.takes("use_cache") or passed_on else {}

    def picture(self) -> torch.Tensor:
        """Return pixels in the size that the vision config gives."""
        vision = next((c for c in self.configs if getattr(c, "image_size", None)), None)
        size = getattr(vision, "image_size", 64)
        height, width = size[-2:] if isinstance(size, list | tuple) else (size, size)
        channels = positive_int(vision, "num_channels") or positive_int(vision, "in_channels") or 3
        return self.draw.normal((self.batch, channels, height, width))


@dataclass(frozen=True)
class Feeds:
    """Keyword arguments by feed, and a note for each that is missing. `others`: the same calls in other sizes."""

    feeds: dict[str, dict[str, Any]]
    notes: tuple[str, ...] = ()
    others: Mapping[str, dict[str, Any]] = field(default_factory=dict)


def make_inputs(
    model: nn.Module,
    *,
    config: PretrainedConfig | None = None,
    model_type: str = "",
    inputs: Mapping[str, Any] | None = None,
    batch: int = 2,
    length: int = 10,
    seed: int = 0,
    recipe: Recipe | None = None,
) -> Feeds:
    """Return the feeds for `model(**kwargs)`, with notes. Raise CaptureError if not even one can be made.

    The user's inputs are taken at any size. A `recipe` has inputs of the usual sizes and of one other choice; the
    latter is used for all other sizes.
    """
    if inputs is not None:
        return Feeds(users_feeds(inputs, arguments_of(model)))
    core = core_of(model)
    config = config or (core.config if core is not None else None)
    if config is not None:
        feeds, notes = make_feeds(core or model, config, model_type or config.model_type or "", batch, length, seed)
        return Feeds(feeds, tuple(notes))
    if recipe is None:
        return Feeds({"forward": derive(model, batch, length, seed)})
    usual = (batch, length) == (SIZES["batch"], SIZES["length"])
    others = recipe.draw(model, seed, other=usual) if recipe.other is not None else {}
    return Feeds(recipe.draw(model, seed, other=not usual), others=others)


def core_of(model: nn.Module) -> PreTrainedModel | None:
    """Return the transformers model that `model` is, or wraps: it holds all parameters and is called the same way."""
    if isinstance(model, PreTrainedModel):
        return model
    core = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if core is None or {id(p) for p in core.parameters()} != {id(p) for p in model.parameters()}:
        return None
    taken = inspect.signature(model.forward).parameters.values()
    passes_on = any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken)
    return core if passes_on or core.main_input_name in {parameter.name for parameter in taken} else None


def arguments_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the forward's arguments."""
    return frozenset(inspect.signature(model.forward).parameters)


def users_feeds(inputs: Mapping[str, Any], arguments: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """Return `{argument: value}` as one feed, `{feed: {argument: value}}` as several. A dict is an argument if the
    forward has one of its name.

    A feed with the key "@module" calls that submodule in place of the model (`capture/called.py`).
    """
    if not isinstance(inputs, Mapping) or not inputs:
        hint = "pass {argument: tensor}, or {feed name: {argument: tensor}}"
        raise CaptureError(f"inputs= is {'empty' if isinstance(inputs, Mapping) else type(inputs).__name__}", hint=hint)
    for wrong in (name for name in inputs if not isinstance(name, str)):
        raise CaptureError(f"inputs= has the key {wrong!r}", hint="keys are names of forward's arguments")
    if all(isinstance(value, Mapping) for value in inputs.values()) and not all(name in arguments for name in inputs):
        return {feed: dict(keywords) for feed, keywords in inputs.items()}
    return {"forward": dict(inputs)}
