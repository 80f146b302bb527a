"""Plans kept in a folder: a plan that was made once for this model, this code and these arguments is read from a file.

The problem: planning records a run and tries the plan on simulated ranks, seconds to minutes, and a job starts many
times. A plan may only be read from a file if nothing that it depends on has changed. So the name of the file is a hash
of all of that: the config and the plain attributes of every module, names and shapes of tensors, the source of the
model's own package, the arguments, the rules, the code of autoplan, the versions of torch and transformers. Any change
gives another name, so a stale plan is never found. A file that is damaged, or does not fit the model, is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import read_plain, write_whole
from autoplan.common.files.rule_files import rules_folders
from autoplan.common.options import check_argument
from autoplan.common.requirements import installed_versions
from autoplan.decide.written_plans.plan_file import plan_from_dict, plan_to_dict
from autoplan.decide.written_plans.read import load_plans
from autoplan.execute.fits import VERSIONED, model_hash
from autoplan.execute.tensor_parallel import check_matches
from autoplan.values import Plan
from autoplan.values.plan import digest
from autoplan.version import __version__

VARIABLE = "AUTOPLAN_CACHE"
_WORDS = ("auto", "inferred", "handwritten", "hf")  # sources that need no further data


def place_of(
    folder: str | os.PathLike[str] | None, module: nn.Module, name: str, asked: Mapping[str, Any]
) -> Path | None:
    """Return the file for the plan of a model with this `name` under these arguments; None if the plan is not kept.

    `folder` defaults to the one that the environment names. Nothing is kept if an argument is not plain data (example
    inputs, style objects, a function that makes a plan), since a change could not be noticed.
    """
    if folder is not None:
        check_argument("cache", folder, (str, os.PathLike), "pass the path of a folder")
    named = folder if folder is not None else os.environ.get(VARIABLE)
    if not named or not _all_plain(asked):
        return None
    try:
        Path(named).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutoplanError(
            f"cannot write plans to {named}: {error.strerror}", hint=f"set another folder by cache= or {VARIABLE}"
        ) from error
    description = json.dumps([name, *_said(module, asked)], sort_keys=True, default=repr)
    key = hashlib.sha256(description.encode()).hexdigest()[:24]
    return Path(named) / f"{re.sub(r'[^A-Za-z0-9]+', '-', type(module).__name__)}-{key}.json"


def kept_plan(place: Path | None, module: nn.Module) -> Plan | None:
    """Return the plan in a file, if it exists, is undamaged and fits."""
    if place is None or not place.is_file():
        return None
    try:
        data = read_plain(place, notation="json")
        if not isinstance(data, dict) or data.get("sha256") != _hash(data.get("plan")):
            return None
        plan = plan_from_dict(data["plan"], str(place))
        if digest(plan) != plan.made_for.content or plan.made_for.model != model_hash(module):
            return None
        check_matches(module, plan)
    except (OSError, AutoplanError):  # unreadable, no JSON, no plan: make it again
        return None
    return plan


def keep_plan(place: Path | None, plan: Plan) -> None:
    """Write a plan atomically: other ranks and other jobs may read meanwhile.

    A plan whose trial was skipped is not kept: next time it may run.
    """
    if place is not None and plan.proof.trial.outcome != "skipped":
        data = plan_to_dict(plan)
        write_whole(place, json.dumps({"sha256": _hash(data), "plan": data}, ensure_ascii=False) + "\n")


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _all_plain(asked: Mapping[str, Any]) -> bool:
    source, overrides = asked.get("source"), asked.get("overrides")
    written = [mapping for mapping in (source, overrides) if isinstance(mapping, Mapping)]
    lines = [part for mapping in written for line in mapping.items() for part in line]
    words = isinstance(source, Mapping) or source in _WORDS
    return words and asked.get("inputs") is None and all(isinstance(part, str) for part in lines)


def _said(module: nn.Module, asked: Mapping[str, Any]) -> Iterator[Any]:
    yield [__version__, installed_versions(), sys.version_info[:2], _own_code()]
    yield {name: value for name, value in asked.items() if name != "inputs"}
    yield [[path.name, _of_files(sorted(path.rglob("*.toml")))] for path in rules_folders()]
    yield repr(load_plans())
    yield _of_model(module)


def _of_model(module: nn.Module) -> Any:
    config = conventions().config_of(module)
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [
        model_hash(module),
        config.to_dict() if config is not None else None,
        [(name, str(type(part)), part.training) for name, part in module.named_modules()],
        [(name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors],
        _of_files(_sources(module)),
    ]


def _sources(module: nn.Module) -> list[Path]:
    """Return the loaded files of the packages that the model's classes come from."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - set(VERSIONED)
    loaded = [part for name, part in list(sys.modules.items()) if name.partition(".")[0] in packages]
    files = {Path(str(part.__file__)) for part in loaded if getattr(part, "__file__", None)}
    return sorted(path for path in files if path.is_file())


def _of_files(paths: Iterable[Path]) -> list[tuple[str, str]]:
    hashes = []
    for path in paths:
        stat = path.stat()
        hashes.append((path.name, _of_file(path, stat.st_mtime_ns, stat.st_size)))
    return hashes


@lru_cache(maxsize=4096)
def _of_file(path: Path, changed: int, size: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


@lru_cache(maxsize=1)
def _own_code() -> str:
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(json.dumps(_of_files(files)).encode()).hexdigest()
