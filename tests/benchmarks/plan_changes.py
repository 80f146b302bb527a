"""Which plans does a change of the code change? Plans of tiny clones of whole mappings, saved and compared.

    python tests/benchmarks/plan_changes.py write BEFORE causal_lm [seq2seq ...] [--only llama ...]
    ... change the code ...
    python tests/benchmarks/plan_changes.py write AFTER causal_lm
    python tests/benchmarks/plan_changes.py compare BEFORE AFTER

`write` makes one file for each architecture: its plan for two ranks with and without sequence parallelism. `compare`
prints what differs beyond words: plans in format 1 (hooks, heads, scoped calls) and in format 2 (instructions by class)
are both translated into common words first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

RANKS = 2
KINDS = {"tp": False, "sp": True}

# ------------------------------------------------------------------------------------------------ making plans


def _plans_of(pair: tuple[str, str]) -> tuple[tuple[str, str], dict[str, Any]]:
    import logging
    import warnings

    import torch
    import transformers

    from autoplan.check.verify.clone import clone_of
    from autoplan.common.errors import AutoplanError
    from autoplan.common.options import Wish
    from autoplan.hf.source import resolve
    from autoplan.planning import draft_plan

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    try:
        clone = clone_of(resolve(":".join(pair)))
        source = resolve(clone.model, inputs=clone.feeds)
        wishes = {kind: Wish(RANKS, sequence_parallel=cut) for kind, cut in KINDS.items()}
        return pair, {kind: draft_plan(source, wish).plan.to_dict() for kind, wish in wishes.items()}
    except AutoplanError as error:
        return pair, {"error": f"{type(error).__name__}: {error}"[:400]}


def write(folder: Path, mappings: list[str], only: list[str]) -> None:
    from autoplan.hf.type_rules import architectures

    folder.mkdir(parents=True, exist_ok=True)
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["torch", "transformers", "autoplan.api"])
    for mapping in mappings:
        start = time.time()
        pairs = [pair for pair in architectures(mapping) if not only or pair[0] in only]
        with processes.Pool(1, maxtasksperchild=8) as pool:  # a fresh process now and then: models leave memory behind
            for (model_type, _), plans in pool.imap(_plans_of, pairs):
                (folder / f"{mapping}.{model_type}.json").write_text(json.dumps(plans))
        print(f"{mapping}: {len(pairs)} architectures in {time.time() - start:.0f} s", flush=True)


# ------------------------------------------------------------------------------------------------ common words

_ACTIONS = {
    "AllReduceGradient": "copy",
    "AllReduce": "reduce",
    "MeanOverRanks": "mean",
    "ScaleGradient": "scale",
    "AllGather": "gather",
    "ScatterSequence": "scatter",
    "AllGatherSequence": "gather_whole",
    "AllGatherSequenceSumGradient": "gather_sum",
    "ReduceScatterSequence": "reduce_scatter",
    "NoteShard": "share",
    "WithholdPartial": "withhold",
    "JoinPartial": "join",
    "ParallelBlock": "block",
}
_CALLS = {
    "RewriteCall": None,
    "EqualPieces": None,
    "DrawOnShards": None,
    "SumCall": "sum",
    "MeanCall": "mean",
    "NormCall": "norm",
    "VarianceCall": "spread",
    "LengthCall": "length",
    "EmbeddingCall": "embedding",
    "RowCall": "row",
    "GatherCall": "gather",
    "AttentionCall": "attention",
}
_OF_ANY_CALL = ("do", "pattern", "site", "arguments", "copies", "cuts", "sometimes")
_ABOUT_THE_PLAN = ("autoplan", "runtime", "made_for", "proof", "findings")
_SAID = ("reason", "why", "roles", "reduces")  # words, and what came in beside them


def common(plan: dict[str, Any]) -> dict[str, list[Any]]:
    """A plan of either format, part by part, in the words of format 1."""
    runtime = plan["runtime"]
    parts = {key: _items(value) for key, value in plan.items() if key not in _ABOUT_THE_PLAN}
    parts |= {key: _items(value) for key, value in runtime.items() if key not in ("instructions", *_OLD)}
    for part in _OLD:
        parts[part] = [_without_defaults(item) for item in runtime.get(part, ())]
    for instruction in runtime.get("instructions", ()):
        part, item = _translated(instruction)
        parts[part].append(_without_defaults(item))
    parts["scoped"] = [_site_apart(item) for item in parts["scoped"]]
    return parts


_OLD = ("edits", "hooks", "heads", "scoped", "experts")


def _items(value: Any) -> list[Any]:
    items = value if isinstance(value, list) else [value]
    return [{k: v for k, v in one.items() if k not in _SAID} if isinstance(one, dict) else one for one in items]


def _without_defaults(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if value not in (None, [], "", False)}


def _translated(one: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """An instruction as the part of the old format that it was in, and as it was written there."""
    kind, rest = one["do"], {key: value for key, value in one.items() if key != "do"}
    if kind in _ACTIONS:
        sequence = rest.pop("sequence", None)
        layout = {"layout": sequence["name"] + "*" * sequence.get("flattened", False)} if sequence else {}
        return "hooks", {"side": "input", "path": [], **rest, **layout, "action": _ACTIONS[kind]}
    if kind == "IntegerEdit":
        holder = rest.pop("holder", "")
        return "edits", {**rest, "attribute": f"{holder}.{rest['attribute']}" if holder else rest["attribute"]}
    if kind == "VocabularyTable":
        head = {"kind": "embedding", "size": rest["rows"], "dim": 0, "outputs": [rest["path"]]}
        return "heads", {"pattern": rest["pattern"], **head}
    if kind == "SplitLogits":
        return "heads", {**{k: v for k, v in rest.items() if k != "columns"}, "kind": "logits", "size": rest["columns"]}
    if kind in _CALLS:
        return "scoped", _call(kind, one)
    return "experts", rest


def _call(kind: str, one: dict[str, Any]) -> dict[str, Any]:
    site = one["site"]
    marks = "".join(f"{mark}{site[key]}" for mark, key in (("#", "time"), ("@", "dims"), ("!", "width")) if key in site)
    details = [[key, value] for key, value in one.items() if key not in _OF_ANY_CALL]
    details += [["random", "split"]] if kind == "DrawOnShards" else []
    details += [["sometimes", True]] if one.get("sometimes") else []
    return {
        "pattern": one["pattern"],
        "place": site["place"] + marks.replace("@-1", "@"),
        "name": site["function"],
        "arguments": [[a["path"], [a["passed"], a["wanted"]]] for a in one.get("arguments", ())],
        "copies": one.get("copies", []),
        "reduce": _CALLS[kind],
        "cuts": [[cut["output"], cut["dim"], cut["layout"]] for cut in one.get("cuts", ())],
        "details": details,
    }


def _site_apart(item: dict[str, Any]) -> dict[str, Any]:
    """Details are looked up by name: their order says nothing."""
    return item | {"details": sorted(item.get("details", ()), key=str)}


# ------------------------------------------------------------------------------------------------ comparing


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What two files of one architecture say differently."""
    if "error" in before or "error" in after:
        old, new = before.get("error", "a plan"), after.get("error", "a plan")
        return [] if old == new else [f"{old} → {new}"]
    found = []
    for kind in KINDS:
        old, new = common(before[kind]), common(after[kind])
        for part in dict.fromkeys([*old, *new]):
            mine, its = old.get(part, []), new.get(part, [])
            gone = [item for item in mine if item not in its]
            come = [item for item in its if item not in mine]
            found += [f"{kind} {part} - {json.dumps(item)}" for item in gone]
            found += [f"{kind} {part} + {json.dumps(item)}" for item in come]
            if not gone and not come and mine != its:
                found.append(f"{kind} {part}: the same in another order")
    return found


def compare(before: Path, after: Path) -> int:
    names = [path.name for path in sorted(after.glob("*.json")) if (before / path.name).exists()]
    changed = 0
    for name in names:
        found = differences(*(json.loads((folder / name).read_text()) for folder in (before, after)))
        changed += bool(found)
        for line in found:
            print(f"{name.removesuffix('.json')}: {line[:400]}")
    print(f"{len(names)} architectures compared, {changed} with other plans")
    return 1 if changed or not names else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("mappings", nargs="+")
    writing.add_argument("--only", nargs="*", default=[])
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        write(given.folder, given.mappings, given.only)
        return 0
    return compare(given.before, given.after)


if __name__ == "__main__":
    sys.exit(main())
