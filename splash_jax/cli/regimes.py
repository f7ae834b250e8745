"""`splash plan --hardware`: capacity, regime maps, walls, and what switches cost, from the cost model. No devices."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from splash_jax.cli.plots import BANDS
from splash_jax.cli.values import in_bytes, in_ms, print_table

if TYPE_CHECKING:
    from splash_jax.cost import Capacity, StepModel, SwitchModel
    from splash_jax.cost.regimes import BreakEven, RegimeMap, Wall
    from splash_jax.cost.switch import SwitchQuote
    from splash_jax.ownership import Layout, StateBytes

TEN_MILLION = 10_000_000
CONTEXTS = (*(1024 * 2**i for i in range(14)), TEN_MILLION)  # 1K to 8M, and ten million
BATCHES = tuple(2**i for i in range(11))
SWITCHED = (16_384, 131_072, 1_048_576, TEN_MILLION)
ROWS = (1, 512)  # of each request in a step: decode, and a chunk of a prompt
ONE_LINE = 112  # columns that the cells of what a switch adds need; with fewer they have two lines
ROWS_TOLD = f"steps of one row of each request (decode), and of {ROWS[1]} (chunks of prompts)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a model would do on a kind of hardware, in every layout."""

    model: str
    hardware: str
    dtype: str
    budget: int  # bytes per rank
    batch: int
    state: "StateBytes"
    steps: "StepModel"
    switches: "SwitchModel"
    capacities: "dict[Layout, Capacity]"
    refused: dict[str, str]  # layout -> why it has no room
    trained: int  # the context that the model was made for
    maps: "dict[int, RegimeMap]"  # by new rows per request: one is decode, more a chunk of a prompt
    walls: "dict[Layout, tuple[list[Wall], list[Wall]]]"  # as the batch grows, as the context grows
    even: "list[BreakEven]"
    pair: "tuple[Layout, Layout]"  # of `even`: the layout that exchanges and the one that keeps projections whole
    costs: "dict[tuple[Layout, Layout], list[SwitchQuote]]"  # in decode steps, at contexts SWITCHED
    costs_beside_prompts: "dict[tuple[Layout, Layout], list[SwitchQuote]]"  # in steps of ROWS[1] rows of each request


def look_ahead(
    model: str, hardware: str, mesh: dict[str, int], names: Sequence[str], *, dtype: str, batch: int, page_size: int,
    fraction: float, budget: int | None,
) -> Outlook:  # fmt: skip
    """Price everything. Raises ConfigError for a model that cannot be served, and for one that fits in no layout."""
    from splash_jax.cost import ServedModel, StepModel, SwitchModel, load_hardware
    from splash_jax.cost.regimes import break_even, regime_map, switch_costs, wall_order
    from splash_jax.cost.served import FLOAT8
    from splash_jax.errors import ConfigError
    from splash_jax.layouts import make_layout
    from splash_jax.layouts.specs import check_heads
    from splash_jax.models.config import serving_dtype
    from splash_jax.ownership import KVShape
    from splash_jax.runtime import state_bytes

    cfg, chip = _model(model, int(np.prod(list(mesh.values())))), load_hardware(hardware)
    layouts = [make_layout(name, mesh) for name in names]
    check_heads(layouts[0], cfg.num_heads)
    asked = serving_dtype(cfg, dtype)
    served, stored = ServedModel.of(cfg, asked), "float8_e4m3fn" if asked == FLOAT8 else asked
    kv = KVShape(page_size=page_size, interleave=page_size, bytes_per_token=served.kv_bytes_per_token)
    state = state_bytes(cfg, stored, layouts[0].size, kv)
    room = int(chip.hbm_bytes * fraction) if budget is None else budget
    capacities, refused = {}, {}
    for layout in layouts:
        try:
            capacities[layout] = room_in(state, layout, page_size=page_size, budget=room, dtype=dtype)
        except ConfigError as error:
            refused[str(layout)] = str(error)
    if not capacities:
        raise ConfigError(next(iter(refused.values())))
    steps = StepModel(served, layouts, chip)
    switches = SwitchModel(steps)
    context = 131_072
    walls = {
        one: (
            wall_order(steps, one, capacities.get(one), context=context),
            wall_order(steps, one, capacities.get(one), batch=batch),
        )
        for one in layouts
    }
    pair = _exchange_pair(mesh)
    steps_of_pair = StepModel(steps.model, pair, chip)
    room_of_pair = {
        one: room_in(state, one, page_size=page_size, budget=room, dtype=dtype)
        for one in pair
        if str(one) not in refused
    }
    return Outlook(
        model=model, hardware=chip.name, dtype=FLOAT8 if dtype == FLOAT8 else stored,
        budget=room, batch=batch, state=state, steps=steps,
        switches=switches, capacities=capacities, refused=refused, trained=cfg.max_position_embeddings,
        maps={rows: regime_map(steps, capacities, CONTEXTS, BATCHES, rows) for rows in ROWS}, walls=walls, pair=pair,
        even=[break_even(steps_of_pair, room_of_pair, *pair, context) for context in SWITCHED],
        costs=switch_costs(switches, batch, SWITCHED),
        costs_beside_prompts=switch_costs(switches, batch, SWITCHED, ROWS[1]),
    )  # fmt: skip


def room_in(state: "StateBytes", layout: "Layout", *, page_size: int, budget: int, dtype: str) -> "Capacity":
    """What `budget` bytes per rank hold. Raises ConfigError where not a page fits, with the dtype that may."""
    from splash_jax.cost import capacity
    from splash_jax.cost.served import FLOAT8
    from splash_jax.errors import ConfigError

    try:
        return capacity(state, layout, page_size=page_size, budget=budget)
    except ConfigError as error:
        smaller = "" if dtype == FLOAT8 else f" --dtype {FLOAT8} has smaller weights."
        raise ConfigError(f"{error}{smaller}") from None


def _model(name: str, ranks: int) -> Any:
    """A model's config by name or folder; an unsuitable one is refused with what still works."""
    import splash_jax
    from splash_jax.cost.suitable import why_unsuitable
    from splash_jax.errors import ConfigError
    from splash_jax.files import read_text
    from splash_jax.preflight.case import read_model

    if name == "small":
        return read_model(str(splash_jax.small_model()))
    file = Path(name) / "config.json"
    if file.is_file():
        try:
            config = json.loads(read_text(file))
        except (ConfigError, ValueError):
            config = {}  # the model's own reader says what is wrong with it
        if isinstance(config, dict) and (reason := why_unsuitable(config, ranks)):
            raise ConfigError(f"{file}: {reason}")
    return read_model(name)


def _exchange_pair(mesh: dict[str, int]) -> "tuple[Layout, Layout]":
    """Of the layouts whose histories have owners, the one that splits projections and the one that keeps them whole."""
    from splash_jax.layouts import ROLES, make_layout
    from splash_jax.ownership import History, Placement, Projections

    def owned(projections: Projections) -> "Layout":
        cell = Placement(projections, History.REQUEST)
        return make_layout(next(name for name, role in ROLES.items() if role.placement == cell), mesh)

    return owned(Projections.SPLIT), owned(Projections.WHOLE)


def print_outlook(console: Console, found: Outlook) -> None:
    """Everything as tables."""
    count = found.steps.ranks
    console.print(
        f"{found.model} on {count} x {found.hardware}, {found.dtype}, {in_bytes(found.budget)} per rank in all\n",
        soft_wrap=True,
    )
    apart = " / " if console.width >= ONE_LINE else "\n"
    for table in (_room(found), *_maps(found), _walls(found), _even(found), _costs(found, apart)):
        print_table(console, table)
    exchanging, _ = found.pair
    console.print(
        f"Maps: {ROWS_TOLD}; + where the second best takes 10 % longer.\n"
        f"Contexts above {found.trained:,} tokens are more than the model was made for.\n"
        "Walls: what takes longest from there on, as the batch grows at 128K of context, and as the context grows.\n"
        f"{exchanging}: from so many requests on, its exchange takes longer than reading what a rank does not hold; "
        "gain: throughput with as many requests as each holds.\n"
        f"Switches: {found.batch} requests, in one decode step (Eq. 7) / spread over several. x: the batch does not "
        "fit before or after; counted all the same.",
        soft_wrap=True,
    )
    for name, reason in found.refused.items():
        console.print(f"* {name} refused: {reason}", soft_wrap=True, markup=False)


def _table(title: str, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left")
    return table


def tokens(count: int) -> str:
    """A number of tokens as people say it."""
    if count >= 1 << 20:
        return f"{count / 1e6:.3g}M" if count % (1 << 20) else f"{count >> 20}M"
    return f"{count >> 10}K" if count >= 1024 else str(count)


def _room(found: Outlook) -> Table:
    from splash_jax.ownership.footprint import projection_bytes

    names = (
        "layout",
        "projections",
        "other weights",
        "KV per token",
        "pages",
        "all ranks' tokens",
        f"longest x{found.batch}",
    )
    table = _table("What a rank holds", names)
    row = found.state.kv_per_token * found.state.num_layers
    for layout in found.steps.layouts:
        held = found.capacities.get(layout)
        sizes = [
            projection_bytes(found.state, layout),
            found.state.common,
            row / layout.owner_groups / layout.position_shares,
        ]
        room = ("refused *", "", "") if held is None else (
            f"{held.pages:,}", f"{held.tokens:,}", f"{held.longest(found.batch, layout):,}"
        )  # fmt: skip
        table.add_row(str(layout), *map(in_bytes, sizes), *room)
    return table


def _maps(found: Outlook) -> list[Table]:
    return [_map(made, "decode" if rows == 1 else f"{rows} rows each") for rows, made in found.maps.items()]


def _map(made: "RegimeMap", what: str) -> Table:
    table = _table(f"Fastest layout that fits, by context and requests: {what}", ("context", *map(str, made.batches)))
    fastest, lead = made.fastest, made.lead
    for i, context in enumerate(made.contexts.tolist()):
        cells = []
        for j in range(len(made.batches)):
            k = int(fastest[i, j])
            if k < 0:
                cells.append(Text("·", style="dim"))
            else:
                name = str(made.layouts[k])
                cells.append(Text(name + ("+" if lead[i, j] > 0.1 else " "), style=f"black on {colour(name)}"))
        table.add_row(tokens(context), *cells)
    return table


def colour(layout: str) -> str:
    """The colour of a layout's regime; a mix of roles has that of none."""
    return BANDS.get(layout, "#DDDDDD")


def _walls(found: Outlook) -> Table:
    table = _table("Walls", ("layout", "requests of 128K", f"context of {found.batch} requests"))
    for layout, (batch, context) in found.walls.items():
        told = [
            ", ".join(f"{w.resource} from {say(w.at)}" for w in walls)
            for walls, say in ((batch, str), (context, tokens))
        ]
        table.add_row(str(layout), *(text.replace("KV capacity from", "full at") for text in told))
    return table


def _even(found: Outlook) -> Table:
    exchanging, whole = map(str, found.pair)
    table = _table(
        f"When the exchange of {exchanging} outweighs the memory it returns",
        ("context", "step slower from", f"fit in {exchanging}", f"fit in {whole}", "gain when full"),
    )
    for one in found.even:
        slower = "never" if one.slower_from is None else f"{one.slower_from:,}"
        gain = "-" if np.isnan(one.gain) else f"{100 * one.gain:+.1f} %" if np.isfinite(one.gain) else "only one fits"
        table.add_row(tokens(one.context), slower, *(f"{n:,}" for n in one.requests), gain)
    return table


def _costs(found: Outlook, apart: str) -> Table:
    table = _table("What a switch adds", ("switch", *map(tokens, SWITCHED)))
    for (src, dst), quotes in found.costs.items():
        cells = []
        for context, quote in zip(SWITCHED, quotes, strict=True):
            told = f"{in_ms(quote.exposed)}{apart}{in_ms(quote.spread.exposed_total)} in {quote.spread.steps}"
            cells.append(("0" if quote.exposed == 0 else told) + (" " if fits_both(found, src, dst, context) else "x"))
        table.add_row(f"{src} -> {dst}", *cells)
    return table


def fits_both(found: Outlook, src: "Layout", dst: "Layout", context: int) -> bool:
    """Whether the batch of the outlook, of this context, fits before and after a switch."""
    return all(
        one in found.capacities and found.capacities[one].longest(found.batch, one) >= context for one in (src, dst)
    )


def outlook_json(found: Outlook) -> dict[str, Any]:
    """Everything as data."""
    names = [str(one) for one in found.steps.layouts]
    return {
        "model": found.model, "hardware": found.hardware, "dtype": found.dtype, "num_devices": found.steps.ranks,
        "budget_bytes": found.budget, "batch": found.batch,
        "layouts": {
            str(one): {"pages": c.pages, "tokens": c.tokens, "longest": c.longest(found.batch, one)}
            for one, c in found.capacities.items()
        },
        "refused": found.refused,
        "maps": {
            rows: {
                "layouts": names, "contexts": made.contexts.tolist(), "batches": made.batches.tolist(),
                "fastest": made.fastest.tolist(), "seconds": made.seconds.tolist(), "fits": made.fits.tolist(),
            }
            for rows, made in found.maps.items()
        },
        "walls": {
            str(one): {"batch": [asdict(w) for w in batch], "context": [asdict(w) for w in context]}
            for one, (batch, context) in found.walls.items()
        },
        "exchange": [asdict(one) | {"gain": one.gain if np.isfinite(one.gain) else None} for one in found.even],
        "switches": [
            {"src": str(src), "dst": str(dst), "context": context, "fits": fits_both(found, src, dst, context)}
            | asdict(quote)
            for (src, dst), quotes in found.costs.items()
            for context, quote in zip(SWITCHED, quotes, strict=True)
        ],
    }  # fmt: skip
