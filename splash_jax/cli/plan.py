"""`splash plan`: what every layout would hold and what every switch would move. No weights, no devices."""

from dataclasses import asdict, replace
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from typer import Option

from splash_jax.cli.process import do_all, prepare_process
from splash_jax.cli.values import (
    byte_size,
    check_targets,
    in_bytes,
    mesh_and_ranks,
    model_path,
    print_table,
    token_counts,
    write_json,
)
from splash_jax.progress import make_console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splash_jax.engine import Blueprint, EngineConfig
    from splash_jax.models.config import ModelConfig
    from splash_jax.ownership import Manifest, SwitchPlan

REFUSED = "refused *"  # the reason stands below the tables


def plan(
    model: Annotated[str, typer.Argument(help="A folder with a config.json, a name in configs/models, or `small`.")],
    num_devices: Annotated[
        int | None, Option("--num-devices", "-T", min=1, help="Ranks of the attention mesh; default: --mesh's.")
    ] = None,
    mesh: Annotated[str | None, Option(metavar="AXES", help="Axes of the ranks, e.g. node=2,chip=4.")] = None,
    layouts: Annotated[bool, Option("--layouts", help="Only layouts: every role, or every pair of roles.")] = False,
    src: Annotated[str | None, Option(help="Only switches from this layout.")] = None,
    dst: Annotated[str | None, Option(help="Only switches to this layout.")] = None,
    tokens: Annotated[str | None, Option(help="Tokens of each live request; default: one request per rank.")] = None,
    max_model_len: Annotated[int | None, Option(help="Context length; default: the model's.")] = None,
    max_num_seqs: Annotated[int, Option(help="Requests that run at once.")] = 16,
    block_size: Annotated[int, Option(help="Tokens per page.")] = 16,
    device_memory_bytes: Annotated[str | None, Option(metavar="SIZE", help="Per rank, e.g. 141G.")] = None,
    dtype: Annotated[str, Option(help="auto, float32 or bfloat16; with --hardware also float8.")] = "auto",
    hardware: Annotated[
        str | None, Option(help="Price it on this: a name in configs/hardware, or a TOML file like those there.")
    ] = None,
    memory_fraction: Annotated[
        float, Option(min=0.001, max=1.0, help="Of a device's memory, for everything (with --hardware).")
    ] = 0.9,
    json: Annotated[Path | None, Option("--json", metavar="FILE", help="Write it as JSON; - is stdout.")] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help="Draw the maps as a PNG (with --hardware).")] = None,
) -> None:
    """Show the bytes of every layout and the plan of every switch between them.

    With --hardware, also what they cost there: the regime map over contexts and batches, walls, and every switch in one
    step and spread over several.
    """
    counts = None if tokens is None else token_counts(tokens)
    budget = None if device_memory_bytes is None else byte_size(device_memory_bytes)
    check_targets(json=json, plot=plot, reads=[hardware])
    if mesh is None and num_devices is None:
        raise typer.BadParameter("give the number of ranks, -T 8, or their axes, --mesh node=2,chip=4.")
    axes, ranks = mesh_and_ranks(mesh, num_devices)
    if hardware is None and plot is not None:
        raise typer.BadParameter("there is no map to draw without --hardware.", param_hint="--plot")
    if hardware is not None:
        if layouts or tokens or src or dst or max_model_len:
            raise typer.BadParameter(
                "prices every role and many batches; leave --layouts, --tokens, --src, --dst and --max-model-len out.",
                param_hint="--hardware",
            )
        _price(
            model, hardware, axes or {"rank": ranks}, dtype=dtype, batch=max_num_seqs, page_size=block_size,
            fraction=memory_fraction, budget=budget, json=json, plot=plot,
        )  # fmt: skip
        return
    prepare_process(ranks)
    from splash_jax.engine import EngineConfig
    from splash_jax.preflight.case import read_model

    config = EngineConfig(
        model=model_path(model), num_devices=ranks, mesh=axes, max_model_len=max_model_len, max_num_seqs=max_num_seqs,
        block_size=block_size, device_memory_bytes=budget, dtype=dtype,
    )  # fmt: skip
    config = replace(config, layouts=_layouts(config, layouts, src, dst))
    drawn = _draw_up_each(config, read_model(str(config.model)))
    example = next(b for b in drawn.values() if not isinstance(b, str))
    if counts and max(counts) > example.shapes.max_model_len:
        raise typer.BadParameter(
            f"a request of {max(counts)} tokens is longer than the context, {example.shapes.max_model_len}.",
            param_hint="--tokens",
        )
    counts = counts or [max(1, example.shapes.max_model_len // 8)] * ranks
    held = {name: b if isinstance(b, str) else _footprint(b) for name, b in drawn.items()}
    plans = {} if layouts else {pair: _plan(drawn, *pair, counts) for pair in _directions(config, src, dst)}
    where = f"{ranks} ranks{f' ({mesh})' if mesh else ''}"
    title = f"{model} on {where}, {example.shapes.dtype}, pages of {block_size} tokens"
    do_all(
        lambda: None if json is None else write_json(json, _as_json(model, ranks, counts, held, plans)),
        lambda: None if str(json) == "-" else _print(make_console(), title, counts, held, plans),
    )


def _price(
    model: str, hardware: str, mesh: "dict[str, int]", *, json: Path | None, plot: Path | None, **settings: Any
) -> None:  # fmt: skip
    from splash_jax.cli.maps import draw_outlook
    from splash_jax.cli.regimes import look_ahead, outlook_json, print_outlook
    from splash_jax.layouts import ROLES

    found = look_ahead(model, hardware, mesh, tuple(ROLES), **settings)
    do_all(
        lambda: None if json is None else write_json(json, outlook_json(found)),
        lambda: None if plot is None else draw_outlook(found, plot),
        lambda: None if str(json) == "-" else print_outlook(make_console(), found),
    )


def _layouts(config: "EngineConfig", every: bool, src: str | None, dst: str | None) -> tuple[str, ...]:
    """The layouts to show: with `every` all that the mesh has, else one role on all axes, and those asked for."""
    from splash_jax.errors import LayoutError
    from splash_jax.layouts import ROLES

    mesh = config.mesh_shape
    if every and config.mesh is not None:
        return tuple(_name(mesh, roles) for roles in product(ROLES, repeat=len(mesh)))
    for name, value in (("--src", src), ("--dst", dst)):
        try:
            config.layout_of(value or "tp")
        except LayoutError as error:
            raise typer.BadParameter(str(error), param_hint=name) from None
    asked = (name for name in (src, dst) if name is not None)
    return tuple(dict.fromkeys((*ROLES, *asked)))


def _name(mesh: "Mapping[str, int]", roles: tuple[str, ...]) -> str:
    return ",".join(f"{axis}={role}" for axis, role in zip(mesh, roles, strict=True))


def _directions(config: "EngineConfig", src: str | None, dst: str | None) -> list[tuple[str, str]]:
    if src is not None and src == dst:
        raise typer.BadParameter(f"--src and --dst are both {src}; a switch needs two layouts.")
    return [(a, b) for a, b in permutations(config.layouts, 2) if src in (None, a) and dst in (None, b)]


def _draw_up_each(config: "EngineConfig", model: "ModelConfig") -> "dict[str, Blueprint | str]":
    """Every layout by itself, so that one that does not fit does not hide the rest. Raises when none fits."""
    from splash_jax.engine import draw_up
    from splash_jax.errors import ConfigError, LayoutError

    drawn: dict[str, Blueprint | str] = {}
    refusal: Exception | None = None
    for name in config.layouts:
        try:
            drawn[name] = draw_up(replace(config, layout=name, layouts=(name,)), model=model)
        except (ConfigError, LayoutError) as error:
            drawn[name], refusal = str(error), error
    if refusal is not None and all(isinstance(b, str) for b in drawn.values()):
        raise refusal
    return drawn


def _footprint(blueprint: "Blueprint") -> dict[str, float]:
    """What a rank holds in a blueprint's only layout, of a token on average, and the tokens of all ranks together."""
    from splash_jax.ownership import footprint

    (layout,) = blueprint.layouts.values()
    pages, size = blueprint.pages[layout], blueprint.shapes.kv.page_size
    held = footprint(blueprint.state, layout, pages=pages, page_size=size)
    apart = layout.owner_groups * layout.position_shares
    token = blueprint.state.kv_per_token * blueprint.state.num_layers
    return asdict(held) | {"tokens": pages * size * apart, "total": held.total, "kv_per_token": token / apart}


def _plan(drawn: "dict[str, Blueprint | str]", src: str, dst: str, counts: list[int]) -> "SwitchPlan | str":
    """The plan of one direction, or why there is none."""
    from splash_jax.errors import SwitchRefused
    from splash_jax.ownership import plan_switch

    before, after = drawn[src], drawn[dst]
    if isinstance(before, str) or isinstance(after, str):
        return f"layout {src if isinstance(before, str) else dst} is refused."
    manifest = _fill(before, counts)
    if isinstance(manifest, str):
        return manifest
    (layout,) = after.layouts.values()
    try:
        return plan_switch(manifest, layout, pages_per_rank=after.pages[layout], state=after.state)
    except SwitchRefused as refusal:
        return str(refusal)


def _fill(blueprint: "Blueprint", counts: list[int]) -> "Manifest | str":
    """Requests of so many tokens each in a blueprint's only layout, or why it cannot hold them."""
    from splash_jax.errors import RequestError
    from splash_jax.kv import filled_pool

    (layout,) = blueprint.layouts.values()
    try:
        return filled_pool(layout, blueprint.shapes.kv, blueprint.pages[layout], counts).manifest()
    except RequestError as refusal:
        return str(refusal)


def _print(
    console: Console,
    title: str,
    counts: list[int],
    layouts: "dict[str, dict[str, float] | str]",
    plans: "dict[tuple[str, str], SwitchPlan | str]",
) -> None:
    refused = {name: held for name, held in layouts.items() if isinstance(held, str)}
    refused |= {
        f"{src} -> {dst}": made
        for (src, dst), made in plans.items()
        if isinstance(made, str) and src not in refused and dst not in refused
    }
    console.print(f"{title}\n", soft_wrap=True)
    print_table(console, _layout_table(layouts))
    console.print(
        "In transit: kept free for a layer on the move. KV: what that and the weights leave of --device-memory-bytes, "
        "or of what an engine on CPU takes by default.\n",
        soft_wrap=True,
    )
    if plans:
        live = f"{len(counts)} requests of {sum(counts):,} tokens live"
        print_table(console, _switch_table(f"Switches with {live}", plans))
        console.print(
            "Pages: in use on the fullest rank / on every rank. Received: by the busiest rank.", soft_wrap=True
        )
    for name, reason in refused.items():
        console.print(f"* {name} refused: {reason}", soft_wrap=True, markup=False)


def _layout_table(layouts: "dict[str, dict[str, float] | str]") -> Table:
    table = Table(title="What a rank holds", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("layout", min_width=max(map(len, layouts)))
    for name in ("projections", "other", "in transit", "KV per token", "KV", "pages", "all ranks' tokens"):
        table.add_column(name, justify="right")
    for name, held in layouts.items():
        if isinstance(held, str):
            table.add_row(name, REFUSED)
        else:
            sizes = [in_bytes(held[key]) for key in ("projections", "common", "transit", "kv_per_token", "kv")]
            table.add_row(name, *sizes, f"{held['pages']:,}", f"{held['tokens']:,}")
    return table


def _switch_table(title: str, plans: "dict[tuple[str, str], SwitchPlan | str]") -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("switch", "weights", "KV", "received", "pages before", "pages after"):
        table.add_column(name, justify="left" if name in ("switch", "weights", "KV") else "right")
    for (src, dst), made in plans.items():
        if isinstance(made, str):
            table.add_row(f"{src} -> {dst}", REFUSED)
        else:
            used = [f"{max(m.pages_used()):,} / {m.pages_per_rank:,}" for m in (made.before, made.after)]
            received = in_bytes(max(made.bytes_per_rank()))
            table.add_row(f"{src} -> {dst}", made.weights.primitive, made.kv.primitive, received, *used)
    return table


def _as_json(
    model: str,
    num_devices: int,
    counts: list[int],
    layouts: "dict[str, dict[str, float] | str]",
    plans: "dict[tuple[str, str], SwitchPlan | str]",
) -> dict[str, Any]:
    return {
        "model": model,
        "num_devices": num_devices,
        "tokens": counts,
        "layouts": {name: {"refused": held} if isinstance(held, str) else held for name, held in layouts.items()},
        "switches": [
            {"src": src, "dst": dst, "refused": made} if isinstance(made, str) else made.summary()
            for (src, dst), made in plans.items()
        ],
    }
