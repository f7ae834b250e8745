"""Compile every candidate of a kernel's tuning space for GPUs that are not here, and keep the best in its table.

    python scripts/tune_kernels.py --op mla_decode --chip h200           # prints every candidate, writes nothing
    python scripts/tune_kernels.py --op mla_decode --chip h200 --write   # and puts the best into tuning.json
    python scripts/tune_kernels.py --op gqa_attention --chip b200 --rows bf16-128 --heads 16
    python scripts/tune_kernels.py --chip h200 --keep --write            # compiles the tables of all ops anew

The best spills least. Of those that spill alike and whose accounts expect the least time, within what an account can
tell apart (`search.CLOSE`), it has the most in hand on a multiprocessor, which waits least. What is tried, and what the
account is asked about, stands in `scripts/tuning/`, a file per op. Nothing is timed: on a GPU
`scripts/bench_kernels.py` tells how good the accounts are. Needs XLA's GPU compiler: `pip install -e '.[preflight]'
-c constraints.txt`. Of nvdisasm, which that looks for and reports as missing, nothing here depends.
"""

import argparse
import sys
from typing import Any

import jax
from tuning import OPS
from tuning.search import Point, Space, choose, parts_of, point_of, spilled, table_of, write

from pallas_kernels.compiled import ptxas_version
from pallas_kernels.tuning import table
from splash_jax.errors import TargetError


def known(op: str, chip: str, point: Point) -> dict[str, Any]:
    """The table's configuration without what follows from the compiler and the chip, as `candidates` gives them."""

    def bare(config: dict[str, Any]) -> dict[str, Any]:
        made = {"workers", "fp8_products"}
        return {k: bare(v) if isinstance(v, dict) else v for k, v in config.items() if k not in made}

    entry = next((entry for entry in table(op)[chip] if point_of(entry) == point), None)
    if entry is None:
        raise SystemExit(f"{op}'s table has no entry for {point} on the {chip} to keep: search it without --keep.")
    return bare(entry["config"])


def told(entry: dict[str, Any], seconds: float) -> str:
    """What became of a candidate, in one line."""
    parts = list(parts_of(entry).values())
    listed = {key: "/".join(str(part.get(key, "-")) for part in parts) for key in ("registers", "smem_bytes")}
    blocks, mma = "/".join(str(part["blocks_per_sm"]) for part in parts), parts[0].get("mma", "")
    return (
        f"{listed['registers']:>3} registers, {spilled(entry):5} B spilled, {listed['smem_bytes']:>6} B shared, "
        f"{blocks} per SM, {mma:15} expected {seconds * 1e6:7.1f} us"
    )


def listed(points: list[Point]) -> str:
    """Points by what their heads are of."""
    heads: dict[str, list[str]] = {}
    for backend, rows, count in points:
        heads.setdefault(f"{backend} {rows}", []).append(str(count))
    return "; ".join(f"{name}: {', '.join(counts)}" for name, counts in heads.items())


def search(op: str, chip: str, point: Point, keep: bool) -> dict[str, Any] | None:
    """The best entry of a point, every candidate printed; None where none fits."""
    space: Space = OPS[op]
    head, found = f"{op} {point.backend} {point.rows:5} {point.heads:3}", []
    for config in [known(op, chip, point)] if keep else space.candidates(point.backend, point.heads):
        named = " ".join(f"{name}={value}" for name, value in config.items())
        entry = space.entry_of(chip, *point, config)
        if entry is None:
            print(f"{head}  {named:56} does not fit", flush=True)
            continue
        found.append((entry, space.expected_s(chip, entry)))
        print(f"{head}  {named:56} {told(*found[-1])}", flush=True)
    if not found:
        print(f"{head}  no configuration fits on the {chip}", flush=True)
        return None
    best = choose(space, found)
    print(f"{head}  best: {best['config']}", flush=True)
    return best


def main(arguments: list[str]) -> int:
    """Search, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=list(OPS), nargs="+", help="all without")
    parser.add_argument("--chip", choices=sorted(table("mla_decode")), required=True)
    parser.add_argument("--backend", nargs="+", help="in the words of the op's table; all of it without")
    parser.add_argument("--rows", nargs="+", help="likewise")
    parser.add_argument("--heads", type=int, nargs="+", help="likewise")
    parser.add_argument("--keep", action="store_true", help="compile the table's own configurations only")
    parser.add_argument("--write", action="store_true", help="put the best into tuning.json")
    options = parser.parse_args(arguments)
    jax.config.update("jax_platforms", "cpu")  # the GPU compiler is asked by name; a GPU that happens to be here is not
    asked = {name: getattr(options, name) for name in Point._fields}
    found, missed = {}, False
    there = {op: list(OPS[op].points(options.chip)) for op in options.op or OPS}
    for name, wish in asked.items():
        has = dict.fromkeys(getattr(point, name) for points in there.values() for point in points)
        if odd := [str(value) for value in wish or () if value not in has]:
            told_of_all = ", ".join(map(str, has))
            print(f"no {name} {', '.join(odd)} on the {options.chip}; there are: {told_of_all}", file=sys.stderr)
            return 2
    for op, own in there.items():
        found[op] = [p for p in own if all(wish is None or getattr(p, name) in wish for name, wish in asked.items())]
    if not any(found.values()):
        for op in options.op or ():
            print(f"{op} has no such point on the {options.chip}; it has: {listed(there[op])}", file=sys.stderr)
        if not options.op:
            print(f"no op has such a point on the {options.chip}; --op NAME lists its points", file=sys.stderr)
        return 2
    print(f"{options.chip}, JAX {jax.__version__}, ptxas {ptxas_version()}")
    for op, points in found.items():
        best = [search(op, options.chip, point, options.keep) for point in points]
        missed |= None in best
        if options.write:
            write(options.chip, [entry for entry in best if entry is not None], table_of(op))
    return int(missed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except TargetError as error:
        sys.exit(f"error: {error}")
