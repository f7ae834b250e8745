"""How well the cost model chooses layouts on a table of measured throughput, beside rules a sceptic would use.

    python scripts/score_cost_model.py tests/data/paper/table4_b200.csv --hold-out
    python scripts/score_cost_model.py tests/data/paper/table5_dcu.csv --form-from tests/data/paper/table4_b200.csv

TABLE has columns input_len, B and one per layout (1000 tokens/s, 1,024 output tokens per request). What is printed: the
share of rows where the fastest layout was chosen, and the mean and the worst share of its throughput that was lost.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table as Printed

from splash_jax.cli.process import command
from splash_jax.cost import tables
from splash_jax.files import check_target, write_text
from splash_jax.layouts import make_layout
from splash_jax.progress import make_console

ORDER, FEW = ("tp", "dp", "cp", "dop"), "cp"


def scores(table: tables.Table, rules: dict[str, tables.Rule], held_out: bool) -> dict[str, dict[str, tables.Score]]:
    """Every rule's score in sample and, where asked for, with each position held out."""
    found = {}
    for name, rule in rules.items():
        found[name] = {"in sample": tables.score(table, rule(table, table))}
        if held_out:
            found[name]["held out"] = tables.score(table, tables.hold_out(table, rule))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--form-from", type=Path, help="start from the constants fitted to this table, scaled")
    parser.add_argument("--hold-out", action="store_true", help="also score each position with it left out of the fit")
    parser.add_argument("-T", "--ranks", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write scores and constants here")
    options = parser.parse_args()
    check_target(options.json)
    report(options)


def report(options: argparse.Namespace) -> None:
    table = tables.read_table(options.table)
    layouts = {name: make_layout(name, {"rank": options.ranks}) for name in table.layouts}
    guess = None
    if options.form_from is not None:
        source = tables.read_table(options.form_from)
        guess = tables.fit_table(source, {name: make_layout(name, {"rank": options.ranks}) for name in source.layouts})
    rules = {f"always {name}": tables.always(name) for name in table.layouts}
    rules["nearest neighbour"] = tables.nearest_neighbour
    if set(ORDER) <= set(table.layouts):
        rules["three thresholds"] = tables.thresholds(ORDER, FEW)
    rules["cost model"] = tables.cost_model(layouts, guess)
    found = scores(table, rules, options.hold_out)
    constants = tables.fit_table(table, layouts, guess)
    errors = np.log(tables.price(table, layouts, constants) / table.seconds)
    errors -= errors.mean(1, keepdims=True)

    title = f"{options.table.name}: {len(table)} rows"
    if options.form_from is not None:
        title += f", form from {options.form_from.name}"
    printed = Printed(title=title, title_justify="left", box=SIMPLE_HEAD)
    printed.add_column("rule", no_wrap=True)
    for when in next(iter(found.values())):
        for name in ("agrees", "regret", "worst"):
            printed.add_column(f"{name}\n{when}", justify="right", no_wrap=True)
    for name, by_time in found.items():
        cells = [f"{100 * x:.2f} %" for s in by_time.values() for x in (s.agreement, s.mean_regret, s.worst_regret)]
        printed.add_row(name, *cells)
    if options.json is not None:
        scored = {name: {when: asdict(s) for when, s in by_time.items()} for name, by_time in found.items()}
        write_text(options.json, json.dumps({"scores": scored, "constants": asdict(constants)}, indent=1) + "\n")
    console = make_console(width=None if sys.stdout.isatty() else 110)
    console.print(printed)
    console.print(
        f"  Ratios between layouts are off by {100 * errors.std():.1f} % (r.m.s.). Constants (seconds, millions"
    )
    console.print("  of tokens): " + ", ".join(f"{k} {v:.3g}" for k, v in asdict(constants).items()), soft_wrap=True)


if __name__ == "__main__":
    with command():
        main()
