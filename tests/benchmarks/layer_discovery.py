"""Are the blocks of every architecture found? Structure alone: nothing is run, no weights, two minutes.

    python tests/benchmarks/layer_discovery.py [--mapping causal_lm] [--only llama] [--renamed] [--all]

Every architecture of five transformers mappings is built on the meta device from its default config (tiny, where that
does not build), and what `autoplan.layers` finds is held against the model and its config: the law is in
`tests/helpers/layer_law.py`. A line for each that differs (`--all`: for each); exit code 1 if any does. `--renamed`
also renames sources.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from layer_law import LEAST, Found, examined

from autoplan.hf.type_rules import architectures

MAPPINGS = ("causal_lm", "image_text", "seq2seq", "masked_lm", "speech")


def line(found: Found) -> str:
    if found.problem:
        return f"{found.name}: not built: {found.problem}"
    said = ", ".join(f"{stack.name} {len(stack.fqns)} ({stack.kind})" for stack in found.stacks)
    parts = [f"{found.coverage:.1%}" + "".join(f" [{n:,} in {where}]" for where, n in found.outside.items()), said]
    if found.counts:
        parts.append("counts that differ: " + ", ".join(f"{key} {count}" for key, count in found.counts.items()))
    if found.otherwise:
        parts.append("counted otherwise: " + ", ".join(f"{key} {count}" for key, count in found.otherwise.items()))
    if found.unrenamed:
        parts.append(f"no renamed copy: {found.unrenamed}")
    return f"{found.name}: " + "; ".join(filter(None, [*parts, found.blind]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mapping", action="append", help="only this mapping; repeatable")
    parser.add_argument("--only", action="append", help="only this model type; repeatable")
    parser.add_argument("--renamed", action="store_true", help="also copies of the source with other names")
    parser.add_argument("--all", action="store_true", help="a line for each, not only where something differs")
    given = parser.parse_args()
    start, worst = time.perf_counter(), 0
    for mapping in given.mapping or MAPPINGS:
        rows = []
        for model_type, class_name in architectures(mapping):
            if not given.only or model_type in given.only:
                rows.append(examined(model_type, class_name, given.renamed))
                if given.all or rows[-1].otherwise or rows[-1].unrenamed or not rows[-1].fine:
                    print("  " + line(rows[-1]), flush=True)
        built = [row for row in rows if not row.problem]
        low = sum(row.coverage < LEAST for row in built)
        counts = sum(bool(row.counts) for row in built)
        blind = sum(bool(row.blind) for row in built)
        worst += low + counts + blind
        copies = f", {sum(not row.unrenamed for row in built)} of them in renamed copies too" if given.renamed else ""
        print(f"{mapping}: {len(built)} of {len(rows)} built; {len(built) - low} with {LEAST:.0%} or more of the "
              f"repeated parameters in blocks; counts as in the config: {len(built) - counts}; the same without names: "
              f"{len(built) - blind}{copies}", flush=True)  # fmt: skip
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 1 if worst else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    sys.exit(main())
