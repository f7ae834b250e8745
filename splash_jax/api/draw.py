"""Pictures of who holds what, and of what a switch moves: for notebooks, and as text for terminals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splash_jax.errors import RequestError
from splash_jax.ownership import KVShape, Layout, Manifest, SwitchPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "muted" colours, neighbours far apart: told apart by readers with any colour vision, and in print.
REQUESTS = ("#332288", "#CC6677", "#44AA99", "#DDCC77", "#88CCEE", "#882255", "#117733", "#999933")
PROJECTIONS, NOTHING = "#DDAA33", "#E9E9E9"
HEADS = "heads"
GAP = 1.0  # cells between two blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What every rank holds of one thing. `held_RC`: the share, 0 to 1, that rank R holds of column C."""

    name: str
    colour: str
    held_RC: np.ndarray


def ownership_grid(held: Layout | Manifest) -> list[Block]:
    """The attention projections, a column per head group of the finest cut; then each request, a column per page."""
    if isinstance(held, Layout):
        held = Manifest(
            layout=held, kv=KVShape(page_size=1, interleave=1, bytes_per_token=0), pages_per_rank=0, requests={}
        )
    colours = [REQUESTS[i % len(REQUESTS)] for i in range(len(held.requests))]
    requests = [
        Block(name=name, colour=colour, held_RC=_history(held, name))
        for name, colour in zip(held.requests, colours, strict=True)
    ]
    return [Block(name=HEADS, colour=PROJECTIONS, held_RC=_projections(held.layout)), *requests]


def _projections(layout: Layout) -> np.ndarray:
    shard = np.asarray([layout.index(rank, layout.head_axes) for rank in range(layout.size)])
    return (shard[:, None] == shard[None, :]).astype(float)


def _history(manifest: Manifest, name: str) -> np.ndarray:
    layout, kv, request = manifest.layout, manifest.kv, manifest.requests[name]
    columns = -(-request.num_tokens // kv.page_size)
    tokens = np.bincount(np.arange(request.num_tokens) // kv.page_size, minlength=columns)
    held = np.zeros((layout.size, columns))
    for rank, pages in request.pages.items():
        lag = layout.lag(request.home, rank)
        local = np.arange(min(kv.tokens_held(layout, lag, request.num_tokens), len(pages) * kv.page_size))
        positions = kv.positions(layout, lag, local)
        held[rank] = np.bincount(positions // kv.page_size, minlength=columns) / tokens
    return held


def ownership_text(held: Layout | Manifest) -> str:
    """The grid as text, a line per rank: █ it holds the column, ▒ a part of it, · nothing; then its pages in use."""
    blocks = ownership_grid(held)
    layout, used = (held, None) if isinstance(held, Layout) else (held.layout, held.pages_used())
    margin = max(len(str(layout)), len(f"rank {layout.size - 1}"))
    widths = [max(len(block.name), block.held_RC.shape[1]) for block in blocks]
    head = [str(layout).ljust(margin), *(b.name.ljust(w) for b, w in zip(blocks, widths, strict=True))]
    lines = [[*head, *([] if used is None else ["pages"])]]
    for rank in range(layout.size):
        cells = ["".join("·" if x == 0 else "█" if x == 1 else "▒" for x in block.held_RC[rank]) for block in blocks]
        end = [] if used is None else [f"{used[rank]:5}"]
        row = [f"rank {rank}".ljust(margin), *(c.ljust(w) for c, w in zip(cells, widths, strict=True)), *end]
        lines.append(row)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def draw_ownership(*held: Layout | Manifest, titles: Sequence[str] = (), columns: int = 2) -> "Figure":
    """The grids side by side, `columns` in a row. A column of a request is a page: filled cells are pages in use.

    A cell that a rank holds a part of (positions dealt out finer than pages) is filled up to that part. Raises
    `RequestError` where there is nothing to draw.
    """
    if not held:
        raise RequestError("there is nothing to draw; give a layout or a manifest, or several.")
    from matplotlib.figure import Figure

    columns = max(1, min(columns, len(held)))
    rows = -(-len(held) // columns)
    figure = Figure(figsize=(6.2 * columns, 0.4 + 2.75 * rows), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06, hspace=0.06)  # type: ignore[union-attr, call-arg]
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    names = titles or [str(one if isinstance(one, Layout) else one.layout) for one in held]
    for axes, one, title in zip(panels, held, names, strict=False):
        _panel(axes, one, title)
    for axes in panels[len(held) :]:
        axes.set_axis_off()
    return figure


def _panel(axes: "Axes", held: Layout | Manifest, title: str) -> None:
    size = held.size if isinstance(held, Layout) else held.layout.size
    left = 0.0
    for block in ownership_grid(held):
        _cells(axes, block, left)
        left += max(block.held_RC.shape[1], 0.6 * len(block.name)) + GAP  # room for the name
    if isinstance(held, Manifest):
        left += 1.4
        axes.text(left, -0.12, "pages", ha="right", va="bottom", fontsize=9)
        for rank, pages in enumerate(held.pages_used()):
            axes.text(left, rank + 0.5, str(pages), ha="right", va="center", fontsize=9)
    axes.set(xlim=(0, left), ylim=(size, -0.75))
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_yticks(np.arange(size) + 0.5, [f"rank {rank}" for rank in range(size)], fontsize=9)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _cells(axes: "Axes", block: Block, left: float) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    ranks, columns = block.held_RC.shape
    empty = [Rectangle((left + c + 0.06, r + 0.06), 0.88, 0.88) for r in range(ranks) for c in range(columns)]
    full = [
        Rectangle((left + c + 0.06, r + 0.06 + 0.88 * (1 - share)), 0.88, 0.88 * share)
        for r, row in enumerate(block.held_RC.tolist())
        for c, share in enumerate(row)
        if share > 0
    ]
    axes.add_collection(PatchCollection(empty, facecolor=NOTHING, linewidth=0))
    axes.add_collection(PatchCollection(full, facecolor=block.colour, linewidth=0, label=block.name))
    axes.text(left, -0.12, block.name, ha="left", va="bottom", fontsize=9)


def plan_text(plan: SwitchPlan) -> str:
    """What a switch does, in a few lines: the primitives, what goes from which rank to which, the bytes received."""
    size, weights, kv = plan.before.layout.size, plan.weights, plan.kv
    ranks, stay = range(size), sum(map(len, kv.local))
    gathered = f", {weights.bytes_per_rank:,} bytes per layer to every rank" if weights.bytes_per_rank else ""
    lines = [
        f"{plan.before.layout} -> {plan.after.layout}: {len(plan.before.requests)} requests, {plan.num_layers} layers",
        f"projections  {weights.primitive}{gathered}",
    ]
    if kv.sent:
        moved = sum(map(len, kv.sent.values()))
        lines += [
            f"history      {kv.primitive}, {moved} x {kv.grain} tokens of {kv.grain_bytes:,} bytes per layer",
            f"             from rank (down) to rank (across), in {kv.grain} tokens:",
        ]
        width = max(3, len(str(kv.busiest_pair)) + 1, len(str(size)) + 1)
        margin = " " * 13
        lines.append(margin + " " * 3 + "".join(f"{rank:{width}}" for rank in ranks))
        for source in ranks:
            counts = [len(kv.sent.get((source, destination), ())) for destination in ranks]
            lines.append(f"{margin}{source:3}" + "".join(f"{count or '·':>{width}}" for count in counts))
    else:
        lines.append(f"history      {kv.primitive}, nothing leaves its rank")
    if stay:
        lines.append(f"             {stay} x {kv.grain} tokens change their page without leaving their rank")
    received = plan.bytes_per_rank()
    each = f"{received[0]:,} each" if len(set(received)) == 1 else ", ".join(f"{count:,}" for count in received)
    lines.append(f"received     {each} (bytes per rank, all layers)")
    return "\n".join(lines)
