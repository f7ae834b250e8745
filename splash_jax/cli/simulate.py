"""`splash simulate`: traffic against a clock, every way to choose a layout side by side. No weights, no devices."""

import os
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer import Option

from splash_jax.cli.process import do_all
from splash_jax.cli.values import byte_size, check_targets, print_table
from splash_jax.files import write_csv, written
from splash_jax.progress import make_console

if TYPE_CHECKING:
    from splash_jax.simulate import Deployment, Row, Traffic

TRAFFIC = "rollout, rollouts, alternating, agents, azure:FILE, mooncake:FILE or servegen:FILE"


def simulate(
    model: Annotated[str, typer.Argument(help="A name in configs/models, or a folder with a config.json.")],
    traffic: Annotated[str, Option(help=f"{TRAFFIC}.")] = "rollout",
    requests: Annotated[int, Option(min=1, help="Of the fleet; of a trace, the first so many.")] = 256,
    hardware: Annotated[str, Option(help="A name in configs/hardware, or a TOML file like those there.")] = "b200",
    num_devices: Annotated[int, Option("--num-devices", "-T", min=1, help="Ranks of a group.")] = 8,
    groups: Annotated[int, Option(min=1, help="Groups of the fleet, all alike.")] = 1,
    workers: Annotated[int, Option(min=1, help="Processes that groups are spread over.")] = 1,
    layouts: Annotated[str, Option(help="Layouts that programs would exist for.")] = "tp,dp,cp,dop",
    ways: Annotated[str | None, Option(help="Some ways only, e.g. tp,policy.")] = None,
    table: Annotated[
        Path | None, Option(help="Measured throughput (CSV) as the clock, instead of the cost model.")
    ] = None,
    decode_step: Annotated[float, Option(help="With --table: mean seconds of a decode step.")] = 0.035,
    switch_seconds: Annotated[float, Option(help="With --table: seconds that a switch adds.")] = 0.01,
    max_num_seqs: Annotated[int, Option(min=1, help="Requests that run at once in a group.")] = 256,
    prefill_tokens: Annotated[int, Option(min=1, help="Prompt tokens of a step.")] = 8192,
    block_size: Annotated[int, Option(min=1, help="Tokens per page.")] = 64,
    memory_fraction: Annotated[float, Option(min=0.001, max=1.0, help="Of a rank's memory, for everything.")] = 0.9,
    device_memory_bytes: Annotated[
        str | None, Option(metavar="SIZE", help="Per rank, e.g. 141G, instead of that fraction.")
    ] = None,
    dtype: Annotated[str, Option(help="auto, float32, bfloat16 or float8.")] = "auto",
    every: Annotated[int, Option(min=1, help="Steps between two decisions, and between two prices.")] = 64,
    speed: Annotated[float, Option(help="Of a trace: 2 is twice as fast.")] = 1.0,
    seed: Annotated[int, Option(min=0, help="Of drawn traffic.")] = 0,
    out: Annotated[Path | None, Option("--csv", metavar="FILE", help="Write the table as CSV.")] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help="Draw the last way's run as a PNG; one group.")] = None,
    log: Annotated[Path | None, Option(metavar="FILE", help="Write the policy's decisions; one group.")] = None,
) -> None:
    """Serve traffic against a clock: fixed layouts, thresholds, margins, the policy, and the best in hindsight."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    if groups > 1 and (plot is not None or log is not None):
        raise typer.BadParameter("a fleet has no one run to draw or log; leave --groups at 1.", param_hint="--plot")
    budget = None if device_memory_bytes is None else byte_size(device_memory_bytes)
    check_targets(csv=out, plot=plot, log=log, reads=[table, hardware, traffic.partition(":")[2]])
    from splash_jax.simulate import compare, ways_of

    deployment = _deployment(
        model, hardware, num_devices, layouts, max_num_seqs, prefill_tokens, block_size, memory_fraction, budget, dtype,
        every, table, decode_step, switch_seconds,
    )  # fmt: skip
    load = _traffic(traffic, requests, seed, speed)
    longest = int((load.prompt + load.output).max())
    console = make_console()
    if longest > deployment.longest:
        console.print(
            f"requests are cut to {deployment.longest:,} tokens, what one alone may have in every layout; the longest "
            f"had {longest:,}.",
            soft_wrap=True,
        )
        load = load.shortened(deployment.longest)
    chosen = _ways(ways, [way.name for way in ways_of(deployment)])
    selected = [way for way in ways_of(deployment) if way.name in chosen]
    began = perf_counter()

    def tell(row: "Row") -> None:
        message = f"{row.way}: {row.seconds:,.1f} s of traffic served, {perf_counter() - began:,.1f} s after the start"
        typer.echo(message, err=True)

    rows, outcomes = compare(deployment, load, selected, groups=groups, workers=workers, done=tell)
    clock = f"{hardware} by the cost model" if table is None else f"{table.name}, decode steps of {decode_step} s"
    title = f"{model} on {groups} x {num_devices} ranks: {len(load):,} requests of {traffic}; clock: {clock}"
    from splash_jax.cli.simulate_plot import draw

    do_all(
        lambda: None if out is None else write_rows(out, rows),
        lambda: None if log is None else _write_log(log, deployment, load),
        lambda: None if plot is None else draw(deployment, rows, outcomes, plot, title),
        lambda: _print(console, title, rows, groups),
    )


def _print(console: Console, title: str, rows: "list[Row]", groups: int) -> None:
    console.print(f"{title}\n", soft_wrap=True)
    print_table(console, _table(rows))
    if groups == 1:
        console.print("hindsight: the least time for the loads that the last way met; it is no run.", soft_wrap=True)


def _ways(asked: str | None, there: list[str]) -> list[str]:
    if asked is None:
        return there
    chosen = [name.strip() for name in asked.split(",")]
    if strange := [name for name in chosen if name not in there]:
        raise typer.BadParameter(f"no way {', '.join(strange)}; there are: {', '.join(there)}.", param_hint="--ways")
    return chosen


def _traffic(name: str, requests: int, seed: int, speed: float) -> "Traffic":
    import numpy as np

    from splash_jax.simulate import traffic

    rng = np.random.default_rng(seed)
    kind, _, path = name.partition(":")
    drawn = {
        "rollout": lambda: traffic.rollout(rng, requests),
        "rollouts": lambda: traffic.rollout(rng, requests, rounds=4),
        "alternating": lambda: traffic.alternating(rng, requests),
        "agents": lambda: traffic.agents(rng, requests),
    }
    traces = {
        "azure": lambda: traffic.azure(Path(path), requests, speed),
        "mooncake": lambda: traffic.mooncake(Path(path), requests, speed),
        "servegen": lambda: traffic.servegen(Path(path), rng, requests),
    }
    if kind in traces and path:
        return traces[kind]()
    if kind not in drawn or path:
        raise typer.BadParameter(f"no traffic {name!r}; choose {TRAFFIC}.", param_hint="--traffic")
    return drawn[kind]()


def _deployment(
    model: str, hardware: str, num_devices: int, layouts: str, slots: int, prefill_tokens: int, block_size: int,
    memory_fraction: float, budget: int | None, dtype: str, every: int, table: Path | None, decode_step: float,
    switch_seconds: float,
) -> "Deployment":  # fmt: skip
    from splash_jax.cli.regimes import room_in
    from splash_jax.cost import ServedModel, StepModel, load_hardware
    from splash_jax.cost.served import FLOAT8
    from splash_jax.layouts import make_layout
    from splash_jax.layouts.specs import check_heads
    from splash_jax.models.config import serving_dtype
    from splash_jax.ownership import KVShape
    from splash_jax.preflight.case import read_model
    from splash_jax.runtime import state_bytes
    from splash_jax.scheduler import ModelCosts
    from splash_jax.simulate import Deployment, TableCosts, TableScale, buckets_of

    cfg, chip = read_model(model), load_hardware(hardware)
    names = dict.fromkeys(name.strip() for name in layouts.split(","))
    made = tuple(make_layout(name, {"rank": num_devices}) for name in names)
    check_heads(made[0], cfg.num_heads)
    asked = serving_dtype(cfg, dtype)
    served, stored = ServedModel.of(cfg, asked), "float8_e4m3fn" if asked == FLOAT8 else asked
    kv = KVShape(page_size=block_size, interleave=block_size, bytes_per_token=served.kv_bytes_per_token)
    state = state_bytes(cfg, stored, num_devices, kv)
    room = int(chip.hbm_bytes * memory_fraction) if budget is None else budget
    pages = {one: room_in(state, one, page_size=block_size, budget=room, dtype=dtype).pages for one in made}
    buckets = buckets_of(made, slots, prefill_tokens, 64)
    if table is None:
        costs = ModelCosts(StepModel(served, made, chip))
    else:
        costs = TableCosts(table, made, TableScale(decode_step=decode_step, switch=switch_seconds))
    return Deployment(
        layouts=made, pages=pages, kv=kv, state=state, buckets=buckets, slots=slots, costs=costs, every=every
    )


def _table(rows: "list[Row]") -> Table:
    best = min(row.seconds for row in rows)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("way")
    for name in ("seconds", "x best", "tokens/s", "first token p50", "p99", "end p50", "p99", "switches", "s in them",
                 "preempted"):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        times = (row.first_token_p50, row.first_token_p99, row.end_p50, row.end_p99)
        table.add_row(
            row.way, f"{row.seconds:,.1f}", f"{row.seconds / best:.3f}", f"{row.tokens_per_second:,.0f}",
            *("-" if time != time else f"{time:,.2f}" for time in times), f"{row.switches}",
            f"{row.switch_seconds:.2f}", f"{row.preemptions}",
        )  # fmt: skip
    return table


def write_rows(target: Path, rows: "list[Row]") -> None:
    """The table as CSV: a line per way, seconds and counts."""
    told = [asdict(row) | {"tokens_per_second": row.tokens_per_second} for row in rows]
    write_csv(target, told[0], told)


def _write_log(target: Path, deployment: "Deployment", load: "Traffic") -> None:
    from splash_jax.scheduler import PolicyConfig
    from splash_jax.simulate import Group

    with written(target) as made, made.open("w", encoding="utf-8") as lines:
        Group(deployment, deployment.layouts[0], PolicyConfig(), log=lines).run(load)
