"""`splash preflight`: compile a model for GPUs that are not here, and read memory, collectives and overlap."""

import os
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer import Option

from splash_jax.cli.process import do_all
from splash_jax.cli.values import check_targets, in_bytes, in_ms, print_table, write_json
from splash_jax.progress import make_console, progress_report

if TYPE_CHECKING:
    from splash_jax.preflight import Report

NOTES = (
    "pages: what programs are compiled for: as many as fit, or as the batch needs. tokens: distinct, on all ranks.",
    "moved: received by the busiest rank for one layer, as compiled for this batch. engine: with an engine's padding.",
    "overlap: share of moved with the layer's compute between start and done; beside: share of that compute.",
    "peak, bound: of a rank during the switch, as compiled and by Eq. 5. exposed: Eq. 7, from published peaks.",
    "spread: what shows if a few layers move in each of so many decode steps, with the source's compute.",
)


def preflight(
    model: Annotated[str, typer.Argument(help="A name in configs/models, or a folder with a config.json.")],
    hardware: Annotated[str, Option(help="A name in configs/hardware, or a TOML file like those there.")] = "h200",
    num_devices: Annotated[int, Option("--num-devices", "-T", min=1, help="GPUs of the group, all on one host.")] = 8,
    batch: Annotated[int, Option(min=1, help="Requests that are live at a switch.")] = 16,
    context: Annotated[int, Option(min=1, help="Tokens of each.")] = 131072,
    prefill_tokens: Annotated[int, Option(min=1, help="Prompt tokens of a prefill step.")] = 8192,
    layouts: Annotated[str | None, Option(help="Some layouts only, e.g. tp,dp.")] = None,
    kinds: Annotated[str | None, Option(help="Compile some kinds of layers only: dense or moe.")] = None,
    block_size: Annotated[int, Option(min=1, help="Tokens per page.")] = 64,
    memory_fraction: Annotated[float, Option(min=0.001, max=1.0, help="Of a GPU's memory, for everything.")] = 0.9,
    dtype: Annotated[str, Option(help="auto, float32 or bfloat16.")] = "auto",
    attention_backend: Annotated[str, Option(help="gpu: Pallas kernels. xla. auto: as an engine there.")] = "xla",
    json: Annotated[Path | None, Option("--json", metavar="FILE", help="Write it as JSON; - is stdout.")] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help="Draw what lies beside each transfer, as a PNG.")] = None,
) -> None:
    """Compile every step and switch for GPUs that are not here, and say what would happen on them."""
    check_targets(json=json, plot=plot, reads=[hardware])
    os.environ["JAX_PLATFORMS"] = "cpu"  # the GPU compiler is asked by name; a GPU that happens to be here is not
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # without a device the compiler has much to say about tuning
    from splash_jax.cost import load_hardware
    from splash_jax.layouts import ROLES
    from splash_jax.preflight import compile_case, draw_case, make_report

    chosen = tuple(ROLES) if layouts is None else tuple(dict.fromkeys(x.strip() for x in layouts.split(",")))
    case = draw_case(
        model, load_hardware(hardware), num_devices=num_devices, layouts=chosen, batch=batch, context=context,
        prefill_tokens=prefill_tokens, block_size=block_size, memory_fraction=memory_fraction, dtype=dtype,
        attention_backend=attention_backend,
        kinds=() if kinds is None else tuple(kinds.split(",")),
    )  # fmt: skip
    if plot is not None and len(chosen) == 1:
        raise typer.BadParameter("draws switches; name two layouts or more.", param_hint="--plot")
    began = perf_counter()
    with progress_report() as progress:
        facts = compile_case(case, progress)
    report = make_report(case, facts, perf_counter() - began)
    do_all(
        lambda: None if json is None else write_json(json, report.as_json()),
        lambda: None if plot is None else _draw(report, plot),
        lambda: None if str(json) == "-" else print_report(make_console(), report),
    )


def _draw(report: "Report", plot: Path) -> None:
    from splash_jax.cli.lanes import draw_lanes

    if not draw_lanes(report, plot):
        typer.echo("no switch between these layouts transfers anything: nothing is drawn.", err=True)


def print_report(console: Console, report: "Report") -> None:
    """Tables of layouts, of their collectives, of switches, and how long it all took to compile."""
    case = report.case
    console.print(
        f"{case.name} on {case.layouts[0].size} x {case.hardware.name}, {case.shapes.dtype}: {case.batch} requests of "
        f"{case.context:,} tokens, prefill steps of {case.prefill_tokens:,} tokens\n",
        soft_wrap=True,
    )
    for table in (*_layouts(report), _collectives(report), *_switches(report)):
        print_table(console, table)
    for note in NOTES:
        console.print(f"  {note}", soft_wrap=True)
    for layout in report.layouts:
        if not layout.fits:
            lack, budget = in_bytes(layout.lacks_bytes), in_bytes(case.budget)
            console.print(
                f"* {layout.layout}: the batch does not fit; of {budget} per rank {lack} lack.", soft_wrap=True
            )
    slowest = max(report.facts, key=lambda key: report.facts[key].seconds)
    console.print(
        f"{len(report.facts)} programs compiled in {report.seconds:.0f} s; the slowest, {slowest}, took "
        f"{report.facts[slowest].seconds:.1f} s.",
        soft_wrap=True,
    )


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


def _layouts(report: "Report") -> list[Table]:
    held = _table(
        "What a rank holds", ("layout",), ("projections", "other weights", "KV", "KV, all ranks", "temporaries")
    )
    room = _table("What that is room for", ("layout",), ("pages", "tokens", "decode compute", "prefill compute"))
    for x in report.layouts:
        name = x.layout if x.fits else f"{x.layout} *"
        sizes = (x.projections_bytes, x.common_bytes, x.kv_bytes, x.kv_group_bytes, max(x.temporary_bytes.values()))
        held.add_row(name, *map(in_bytes, sizes))
        times = (in_ms(x.step_ms[step] / 1e3) for step in x.step_ms)
        room.add_row(name, f"{x.pages:,}", f"{x.distinct_tokens:,}", *times)
    return [held, room]


def _collectives(report: "Report") -> Table:
    table = _table("Collectives of a layer (bytes that a rank receives)", ("layout", "layer", "decode", "prefill"), ())
    for x in report.layouts:
        for kind in x.collectives["decode"]:
            cells = [
                "\n".join(f"{c['kind']} {in_bytes(c['bytes'])}" for c in x.collectives[step][kind])
                for step in ("decode", "prefill")
            ]
            table.add_row(x.layout, kind, *cells)
    return table


def _switches(report: "Report") -> list[Table]:
    moved = _table(
        "What a switch moves for one layer",
        ("switch", "weights", "KV"),
        ("planned", "moved", "engine", "overlap", "beside"),
    )
    costs = _table("What a switch costs", ("switch",), ("peak", "bound", "decode", "prefill", "spread"))
    for x in report.switches:
        name = f"{x.src} -> {x.dst}"
        sizes = map(in_bytes, (x.planned_bytes, x.compiled_bytes, x.engine_bytes))
        shares = ("-" if share is None else f"{100 * share:.1f} %" for share in (x.overlapped_share, x.computing_share))
        moved.add_row(name, x.primitives["weights"], x.primitives["kv"], *sizes, *shares)
        if x.compiled_bytes:
            times = [f"+{in_ms(x.exposed_ms / 1e3)}", f"+{in_ms(x.exposed_ms_prefill / 1e3)}"]
            times.append(f"+{in_ms(x.spread['exposed_ms'] / 1e3)} in {x.spread['steps']}")
        else:
            times = ["0", "0", "-"]
        costs.add_row(name if x.fits else f"{name} *", in_bytes(x.peak_bytes), in_bytes(x.bound_bytes), *times)
    return [moved, costs]
