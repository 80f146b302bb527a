"""Read and write plan files: versioned, executing nothing, checked against the types of `autoplan.values` when read.

A new field in `autoplan.values` needs a default, or old files stop loading. docs/plan-format.md explains the keys.
Format 1, which had strings in place of instructions, is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from autoplan.common.errors import AutoplanError, PlanFileError
from autoplan.common.files.decode import decode, inconsistencies
from autoplan.common.files.plain import NotPlain, is_folder, read_plain, write_whole
from autoplan.common.options import check_argument, check_context_size, check_expert_size, check_ranks
from autoplan.ops import call_record
from autoplan.values import UNKNOWN, Plan, replace
from autoplan.values.plain import plain

FORMAT_VERSION = 2
_REFUSAL = NotPlain("plan file", PlanFileError, "edit the place named above, or make the plan again")
# Those of the contract, in order
_KEYS = ("model", "tp_size", "sequence_parallel", "entries", "replicated", "layers", "proof")
_MORE_KEYS = ("source", "legal_tp", "findings", "communication", "runtime", "obstacles", "made_for")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain dicts, lists, text and numbers: what files hold and `--json` prints."""
    values = {name: plain(getattr(plan, name), brief=name == "runtime") for name in _KEYS + _MORE_KEYS}
    experts = {"ep_size": plan.ep_size} if plan.ep_size > 1 else {}
    experts |= {"cp_size": plan.cp_size} if plan.cp_size > 1 else {}
    fed = {"fed": plain(plan.fed)} if plan.fed else {}
    packed = {"packed": plain(plan.packed, brief=True)} if plan.packed else {}
    flow = {"flow": plain(plan.flow)} if plan.flow else {}
    paths = {"paths": plain(plan.paths, brief=True)} if plan.paths else {}
    return {"autoplan": FORMAT_VERSION, **values, **fed, **experts, **packed, **flow, **paths}


def plan_from_dict(data: Any, where: str = "plan", *, sizes: bool = True) -> Plan:
    """Invert `plan_to_dict`, checking key by key. `sizes`: raise on a layout that does not fit its parameter."""
    if not isinstance(data, dict) or "autoplan" not in data:
        raise PlanFileError(
            f"{where} is not an autoplan plan: it does not begin with `autoplan: {FORMAT_VERSION}`",
            hint="write one with `autoplan plan MODEL --tp N -o plan.yaml` or plan.save(...)",
        )
    version = data["autoplan"]
    if version != FORMAT_VERSION or isinstance(version, bool):
        size = data.get("tp_size")
        hint = f"make it again: `autoplan plan MODEL --tp {size if isinstance(size, int) else 'N'} -o FILE`"
        if isinstance(version, int) and version > FORMAT_VERSION:
            hint = "update autoplan, or make the plan again with this version"
        text = f"{where} has plan format {version!r}; this autoplan reads format {FORMAT_VERSION}"
        raise PlanFileError(text, hint=hint)
    missing = [key for key in _KEYS if key not in data]
    if missing:
        raise PlanFileError(
            f"{where} lacks {', '.join(f'`{key}`' for key in missing)}",
            hint="the file may be truncated; make the plan again, or copy it again",
        )
    data = {**data, "runtime": _with_facts_of_calls(data.get("runtime", {}))}
    plan: Plan = decode(Plan, {key: value for key, value in data.items() if key != "autoplan"}, where)
    try:
        check_ranks("tp_size", plan.tp_size)
        check_expert_size(plan.tp_size, plan.ep_size)
        check_context_size(plan.cp_size, plan.tp_size, plan.ep_size)
    except AutoplanError as error:
        raise PlanFileError(f"{where}: {error.message}", hint=error.hint) from error
    problem = next(inconsistencies(plan, sizes=sizes), None)
    if problem is not None:
        raise PlanFileError(f"{where}.{problem}", hint="edit it, or make the plan again")
    made_for = plan.made_for if plan.made_for.content else replace(plan.made_for, content=UNKNOWN)
    return replace(plan, made_for=made_for)


def _with_facts_of_calls(runtime: Any) -> Any:
    """Return a runtime whose calls have the facts about their functions: older files left these to the reader."""
    instructions = runtime.get("instructions") if isinstance(runtime, dict) else None
    if not isinstance(instructions, list):
        return runtime
    return {
        **runtime,
        "instructions": [
            _known_of(instruction) | instruction if isinstance(instruction, dict) else instruction
            for instruction in instructions
        ],
    }


def _known_of(instruction: dict[str, Any]) -> dict[str, Any]:
    site = instruction.get("site")
    function = site.get("function") if isinstance(site, dict) else None
    record = call_record(function if isinstance(function, str) else "")
    match instruction.get("do"):
        case "LengthCall":
            return {"divides": record.divides}
        case "NormCall" if record.statistics:
            return {"statistics": record.statistics}
        case "CellCall" if record.recurrent is not None:
            return {"gates": record.recurrent.gates, "states": record.recurrent.states}
    return {}


def names_plan_file(name: str | PathLike[str]) -> bool:
    """Return whether this is the name of a plan file, existing or not, rather than of a model."""
    return Path(name).suffix.lower() in _WRITERS and not is_folder(name)


def check_suffix(path: str | PathLike[str]) -> None:
    """Raise if no plan file can have this name: now, rather than after the plan is made."""
    _writer_for(Path(path))


def save_plan(plan: Plan, path: str | PathLike[str]) -> None:
    """Write `plan` to `path`, as YAML or JSON by its suffix."""
    check_argument("the plan file", path, (str, PathLike), "pass its path")
    target = Path(path)
    write_whole(target, _writer_for(target)(plan_to_dict(plan)), PlanFileError)


def load_plan(path: str | PathLike[str]) -> Plan:
    """Read a plan file. Nothing in it is executed."""
    return _loaded(path, sizes=True)


def load_edited(path: str | PathLike[str]) -> Plan:
    """Read a plan file for an audit, which tells which of its layouts do not fit the model."""
    return _loaded(path, sizes=False)


def _loaded(path: str | PathLike[str], *, sizes: bool) -> Plan:
    check_argument("the plan file", path, (str, PathLike), "pass its path")
    source = Path(path)
    _writer_for(source)  # raises if no plan file can have this name
    return plan_from_dict(read_plain(source, _REFUSAL), f"plan file {source}", sizes=sizes)


# The two notations


class _Dumper(yaml.SafeDumper):
    """Dumps readable YAML: whatever fits on one line is put on one line, and there are no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        flat = all(not isinstance(item, (list, dict)) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flat or _is_short(sequence))

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        return super().represent_mapping(tag, mapping, flow_style=_is_short(mapping))


# Line breaks of every kind (YAML knows more than \n) survive only as escapes.
_TEXT = "tag:yaml.org,2002:str"
_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar(_TEXT, text, None if text.isprintable() else '"')
)


def _is_short(value: Any) -> bool:
    return len(str(value)) <= 120 - 16  # room for indentation and the key


def _write_yaml(data: dict[str, Any]) -> str:
    return str(yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True))


_WRITERS: dict[str, Callable[[dict[str, Any]], str]] = {
    ".yaml": _write_yaml,
    ".yml": _write_yaml,
    ".json": lambda data: json.dumps(data, indent=2, ensure_ascii=False) + "\n",
}


def _writer_for(path: Path) -> Callable[[dict[str, Any]], str]:
    """Return the function that writes a file of this name."""
    if path.suffix.lower() not in _WRITERS:
        raise PlanFileError(
            f"{path}: plan files end in .yaml, .yml or .json, not {path.suffix or 'no suffix'!r}",
            hint=f"rename it, for example to {path.stem or 'plan'}.yaml",
        )
    return _WRITERS[path.suffix.lower()]
