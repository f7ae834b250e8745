"""Switching rules against the best choice in hindsight: total seconds over the offline optimum.

    python scripts/score_policy.py --tables tests/data/paper             # 144 settings, 24 seeds: some minutes
    python scripts/score_policy.py --tables tests/data/paper --quick     # some of them, 4 seeds: seconds
    python scripts/score_policy.py --tables tests/data/paper --csv policy.csv

Loads, step costs, estimates and switch costs are those of `policy_settings`. "ours" is `splash_jax.scheduler.decide`
with its defaults, called step by step with the estimates; it knows nothing of what comes, nor the true costs. The other
rules are in `policy_rules`. Ratios are of seconds summed over the seeds of a setting. Named below the table: for every
regime of switch costs, the direction that loses most.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from policy_rules import accumulated_regret, margin, optimum, total
from policy_settings import ESTIMATES, LAYOUTS, SWITCHES, WORKLOADS, Setting, make_loads, make_setting
from rich.box import SIMPLE_HEAD
from rich.table import Table

from splash_jax.cli.process import command
from splash_jax.files import check_target, write_csv
from splash_jax.progress import make_console
from splash_jax.scheduler import Choice, Memory, PolicyConfig, Quote, Snapshot, Switch, decide
from splash_jax.simulate.surface import SURFACES, surface

RULES: dict[str, Callable[[Setting], np.ndarray]] = {
    "margin 0 %": lambda setting: margin(setting, 0.0),
    "margin 5 %": lambda setting: margin(setting, 0.05),
    "margin 10 %": lambda setting: margin(setting, 0.10),
    "margin 20 %": lambda setting: margin(setting, 0.20),
    "regret": lambda setting: accumulated_regret(setting),
    "smoothed regret + floor": lambda setting: accumulated_regret(setting, old=0.8, floor=0.02),
    "ours": lambda setting: decided(setting, PolicyConfig()),
}
QUICK = list(product(SURFACES, ("rollout", "multi_rollout", "bursty"), ("splash", "decode", "restart"), ("10%+5%",)))


def decided(setting: Setting, policy: PolicyConfig) -> np.ndarray:
    """The layouts that `decide` runs in, [S, N]: a snapshot per step, its memory handed on."""
    path = np.empty(setting.seen.shape[:2], int)
    for seed in range(len(path)):
        seen, switch = setting.seen[seed].tolist(), setting.switch[seed].tolist()
        batch, tokens = (
            setting.load.batch[seed].round().astype(int).tolist(),
            setting.load.tokens[seed].astype(int).tolist(),
        )
        here = min(range(len(LAYOUTS)), key=seen[0].__getitem__)
        memory = Memory()
        now = 0.0
        for n, (seconds, costs) in enumerate(zip(seen, switch, strict=True)):
            leave = costs[here]
            quotes = tuple(
                [
                    Quote(name, (Choice(seconds[j]),), "", leave[j], costs[j][here])
                    for j, name in enumerate(LAYOUTS)
                ]
            )  # fmt: skip
            decision = decide(
                Snapshot(
                    step=n,
                    time=now,
                    layout=LAYOUTS[here],
                    quotes=quotes,
                    requests=batch[n],
                    tokens=tokens[n],
                    policy=policy,
                    memory=memory,
                )
            )
            memory = decision.memory
            if type(decision.action) is Switch:
                target = LAYOUTS.index(decision.action.layout)
                now += leave[target]
                here = target
            now += seconds[here]
            path[seed, n] = here
    return path


def score(tables: Path, names: Sequence[tuple[str, str, str, str]], seeds: int, rules: list[str], progress: bool):
    """(setting, rule) -> total over optimum; (switch, rule) -> seconds lost and times taken of every direction."""
    surfaces = {over: surface(tables / "table4_b200.csv", LAYOUTS, over) for over in {name[0] for name in names}}
    ratios: dict[tuple[tuple[str, str, str, str], str], float] = {}
    directions: dict[tuple[str, str], np.ndarray] = {}
    loads = {workload: make_loads(workload, seeds) for workload in {name[1] for name in names}}
    costs = {pair: surfaces[pair[0]](loads[pair[1]].batch, loads[pair[1]].context) for pair in {n[:2] for n in names}}
    for done, name in enumerate(names):
        setting = make_setting(tables, name, loads[name[1]], costs[name[:2]])
        best = optimum(setting).sum()
        for rule in rules:
            path = RULES[rule](setting)
            ratios[name, rule] = float(total(setting, path).sum() / best)
            lost = directions.setdefault((name[2], rule), np.zeros((2, len(LAYOUTS), len(LAYOUTS))))
            lost += _by_direction(setting, path) / best
        if progress:
            sys.stderr.write(f"\r{done + 1} of {len(names)} settings")
            sys.stderr.flush()
    if progress:
        sys.stderr.write("\n")
    return ratios, directions


def _by_direction(setting: Setting, path: np.ndarray) -> np.ndarray:
    """Seconds lost in steps and in switches [2, from, to]. A step in i that j would have run fastest counts at i -> j
    with what it took longer; a switch with what it took."""
    lost = np.zeros((2, len(LAYOUTS), len(LAYOUTS)))
    ran = np.take_along_axis(setting.true, path[..., None], 2)[..., 0]
    np.add.at(lost[0], (path, setting.true.argmin(2)), ran - setting.true.min(2))
    seeds, steps = np.indices(path[:, 1:].shape)
    before, after = path[:, :-1], path[:, 1:]
    np.add.at(lost[1], (before, after), setting.switch[seeds, steps + 1, before, after])
    return lost


def main() -> None:
    args = _arguments()
    check_target(args.csv)
    if args.quick:
        names, seeds = QUICK, 4
    else:
        names, seeds = list(product(SURFACES, WORKLOADS, SWITCHES, ESTIMATES)), args.seeds
    began = time.perf_counter()
    ratios, directions = score(args.tables, names, seeds, list(RULES), progress=sys.stderr.isatty())
    if args.csv is not None:
        columns = ("surface", "workload", "switch", "estimate", "rule", "total_over_optimum")
        told = ((*name, rule, f"{ratio:.6f}") for (name, rule), ratio in ratios.items())
        write_csv(args.csv, columns, (dict(zip(columns, row, strict=True)) for row in told))
    console = make_console(width=max(make_console().width, 112), soft_wrap=True)
    table = Table(title=f"Total time over the offline optimum: {len(names)} settings, {seeds} seeds", box=SIMPLE_HEAD)
    for column in ("rule", "mean", "worst", *ESTIMATES, *SWITCHES):
        table.add_column(column, justify="left" if column == "rule" else "right")
    worsts = []
    for rule in RULES:
        mine = {name: ratios[name, rule] for name in names}
        worst = max(mine, key=mine.__getitem__)
        parts = [[r for n, r in mine.items() if part in n] for part in (*ESTIMATES, *SWITCHES)]
        means = [f"{np.mean(part):.3f}" if part else "-" for part in parts]
        table.add_row(rule, f"{np.mean(list(mine.values())):.4f}", f"{mine[worst]:.4f}", *means)
        worsts.append(f"{rule}: worst with {', '.join(worst)}.")
    console.print(table)
    console.print("\n".join(worsts))
    for switch in dict.fromkeys(name[2] for name in names):
        steps, moves = directions[switch, "ours"] / sum(name[2] == switch for name in names)
        (i, j), (k, m) = (np.unravel_index(part.argmax(), part.shape) for part in (steps, moves))
        console.print(
            f"ours, {switch}: most lost in steps: {LAYOUTS[i]} where {LAYOUTS[j]} was fastest, {steps[i, j]:.2%} of "
            f"the optimum's time; in switches: {LAYOUTS[k]} -> {LAYOUTS[m]}, {moves[k, m]:.2%}."
        )
    console.print(f"{time.perf_counter() - began:.0f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, required=True, help="folder of the paper's tables as CSV")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="18 settings of 4 seeds")
    parser.add_argument("--csv", type=Path, help="write every setting's ratio into this file")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}.")
    needed = ("table4_b200.csv", "table1_b200_switch.csv", "primitive_costs.csv")
    if missing := [name for name in needed if not (args.tables / name).is_file()]:
        parser.error(f"{args.tables} has no {', '.join(missing)}; name the folder of the paper's tables.")
    return args


if __name__ == "__main__":
    with command():
        main()
