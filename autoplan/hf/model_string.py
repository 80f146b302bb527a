"""MODEL strings: an existing folder, `package.module:builder`, a model type, or a hub id, tried in this order.

Only a config is ever read, never weights. Code that comes with a checkpoint runs only when the user said so.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import transformers
from huggingface_hub import constants
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from autoplan.common.errors import SourceError
from autoplan.common.files.plain import NotPlain, is_folder, read_plain
from autoplan.common.files.rule_files import importable_here
from autoplan.hf.configs import check_config
from autoplan.hf.type_rules import open_fields

_CLOSE = 0.75  # of 600 model types there is always one that is a little like a mistyped name


@dataclass(frozen=True)
class Found:
    """The result of a MODEL string: a module, perhaps with inputs, or a config, perhaps with a class and a folder."""

    module: nn.Module | None = None
    inputs: Mapping[str, Any] | None = None
    config: PretrainedConfig | None = None
    class_name: str | None = None
    where: str = ""


def from_string(text: str, *, trust_remote_code: bool = False) -> Found:
    """Resolve a MODEL string. Raise SourceError that says what was tried."""
    text = text.strip()
    if not text:
        hint = "pass a folder, 'package.module:builder', a model type or a hub id"
        raise SourceError("the model string is empty", hint=hint)
    if is_folder(text):
        folder = Path(text).expanduser()
        path = folder / "config.json"
        if not path.is_file():
            raise SourceError(f"folder {folder} has no config.json", hint="weights are not needed, but its config is")
        data = read_plain(path, NotPlain(error=SourceError, hint="fetch the file again"), repeated=True)
        check_config(data, str(path))
        _refuse_remote_code(data, str(folder), trust_remote_code)
        model_type = data.get("model_type")
        if model_type not in CONFIG_MAPPING and "AutoConfig" not in (data.get("auto_map") or {}):
            if model_type is None:
                raise SourceError(f"{path} names no model_type", hint="fetch the file again, or pass the model itself")
            near = difflib.get_close_matches(str(model_type), list(CONFIG_MAPPING), 3, _CLOSE)
            raise SourceError(
                f"{path} has model_type {model_type!r}, which transformers {transformers.__version__} does not know",
                hint=f"did you mean {', '.join(near)}?" if near else "update transformers, or pass the model itself",
            )
        try:
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
        except Exception as error:  # validation raises a family of its own for each config class
            raise SourceError(f"{folder}/config.json cannot be used: {_said(error)}", hint="fix the config") from error
        return Found(config=config, where=str(folder))
    left, colon, right = text.partition(":")
    if colon and left in CONFIG_MAPPING and hasattr(transformers, right):
        return Found(config=default_config(left), class_name=right)
    if colon and "/" not in left:
        return _from_builder(left, right)
    if text in CONFIG_MAPPING:
        return Found(config=default_config(text))
    if text.startswith(("/", "./", "../", "~")):
        raise SourceError(f"there is no folder {text!r}", hint="pass one with a config.json (weights are not needed)")
    return _from_hub(text, trust_remote_code)


def default_config(model_type: str) -> PretrainedConfig:
    """Return the default config of a model type, completed by rules/defaults.toml where it leaves something open."""
    try:
        return CONFIG_MAPPING[model_type](**copy.deepcopy(open_fields(model_type)))
    except Exception as error:  # a config class may raise anything
        text = f"the default config of model type {model_type!r} cannot be made: {error}"
        raise SourceError(text, hint="pass a folder with a config.json, or a config object") from error


def _from_hub(text: str, trust_remote_code: bool) -> Found:
    """Load a config from the hub; files in its local cache need no network."""
    offline = not _reachable()
    try:
        data, _ = PretrainedConfig.get_config_dict(text, local_files_only=offline)
        check_config(data, f"the config of {text}")
        config = AutoConfig.from_pretrained(text, trust_remote_code=trust_remote_code, local_files_only=offline)
    except SourceError:
        raise
    except Exception as error:  # network, cache, parsing and validation each raise their own family
        if "trust_remote_code" in str(error):
            raise _remote_code_error(text) from error
        near = difflib.get_close_matches(text, list(CONFIG_MAPPING), 3, _CLOSE)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise SourceError(
            f"{text!r} is not a folder, 'package.module:builder', model type or reachable hub model: "
            f"{_said(error).split('. ')[0]}",
            hint=f"{meant}if offline, pass a folder with its config.json (weights are not needed)",
        ) from error
    _refuse_remote_code(config.to_dict(), text, trust_remote_code)
    return Found(config=config, where=text)


def _reachable() -> bool:
    """Return whether the hub's host resolves, which saves half a minute of retries; behind a proxy, return True."""
    if constants.HF_HUB_OFFLINE:
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        return bool(socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443))
    except OSError:
        return False


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _refuse_remote_code(data: Mapping[str, Any], where: str, trust_remote_code: bool) -> None:
    """Raise if a config's classes come with it, unless the user trusts them or transformers has its own."""
    if data.get("auto_map") and not trust_remote_code and data.get("model_type") not in CONFIG_MAPPING:
        raise _remote_code_error(where)


def _remote_code_error(where: str) -> SourceError:
    return SourceError(
        f"{where} ships its own modeling code, which is not run by default",
        hint="read that code, then pass trust_remote_code=True (--trust-remote-code)",
    )


def _from_builder(module_name: str, function_name: str) -> Found:
    """Call `package.module:builder` without arguments; modules of the working directory can be imported."""
    builder = f"{module_name}:{function_name}"
    result = _call_of_user(module_name, function_name, builder)
    module, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, nn.Module):
        hint = "a builder returns an nn.Module, or (module, inputs) with inputs as keyword arguments of its forward"
        raise SourceError(f"{builder}() returned {type(module).__name__}", hint=hint)
    if inputs is not None and not isinstance(inputs, Mapping):
        text = f"{builder}() returned a {type(inputs).__name__} as inputs"
        raise SourceError(text, hint="return a dict: argument name -> tensor")
    return Found(module=module, inputs=inputs)


def inputs_from_string(text: str) -> Mapping[str, Any]:
    """Call `package.module:function`, which returns example arguments of a model's forward by name."""
    module_name, _, function_name = text.strip().partition(":")
    if not module_name or not function_name:
        hint = "name a function that returns {argument of the forward: tensor}; it is called without arguments"
        raise SourceError(f"--inputs {text!r} is not 'package.module:function'", hint=hint)
    inputs = _call_of_user(module_name, function_name, text)
    if not isinstance(inputs, Mapping):
        raise SourceError(f"{text}() returned {type(inputs).__name__}", hint="return a dict: argument name -> tensor")
    return inputs


def _call_of_user(module_name: str, function_name: str, what: str) -> Any:
    """Import a function of the user's and call it without arguments."""
    try:
        with importable_here():
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise SourceError(
            f"{what}: importing {module_name!r} raised {type(error).__name__}: {error}",
            hint=f"write '{module_name[:-3].replace('/', '.')}:{function_name}'"
            if module_name.endswith(".py")
            else "write 'package.module:function'; the module must be importable from here",
        ) from error
    builder: Any = module
    for part in function_name.split("."):
        builder = getattr(builder, part, None)
    if not callable(builder):
        if builder is not None:
            raise SourceError(f"{what} is a {type(builder).__name__}", hint="pass the name of a function")
        near = difflib.get_close_matches(function_name, [n for n in vars(module) if not n.startswith("_")], 3)
        hint = f"did you mean {', '.join(near)}?" if near else "pass the name of a function of that module"
        raise SourceError(f"{what}: {module_name} has no function {function_name!r}", hint=hint)
    try:
        return builder()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        text = f"{what}() raised {type(error).__name__}: {error}"
        raise SourceError(text, hint="it is called without arguments") from error


def transformers_class(name: str, config: PretrainedConfig, where: str, trust_remote_code: bool) -> type:
    """Return the model class of that name, from transformers or, if trusted, from the code next to the config."""
    cls = getattr(transformers, name, None)
    if isinstance(cls, type):
        return cls
    references = getattr(config, "auto_map", None) or {}
    reference = next((r for r in references.values() if isinstance(r, str) and r.endswith(f".{name}")), None)
    if reference is None:
        text = f"transformers {transformers.__version__} has no class {name!r} (architectures[0] of the config)"
        raise SourceError(text, hint="fix `architectures`, or build the model under torch.device('meta') and pass it")
    if not trust_remote_code:
        raise _remote_code_error(where or name)
    try:
        return get_class_from_dynamic_module(reference, where or config.name_or_path or "")
    except Exception as error:  # fetching and importing someone's code may raise anything
        text = f"{reference} of {where} cannot be imported: {type(error).__name__}: {error}"
        raise SourceError(text, hint="install what it imports, or update it for this transformers version") from error
