"""The configurations in tuning.json, as the two forms take them."""

from typing import Any

from pallas_kernels.mla_prefill.expanded import ExpandedConfig
from pallas_kernels.tiles import TileConfig
from pallas_kernels.tuning import entry_for

CONFIGS = {"absorbed": TileConfig, "expanded": ExpandedConfig}


def entry_of(chip: str, form: str, rows: str, heads: int, tile: int) -> dict[str, Any]:
    """The entry of a form for tiles of so many rows: the table's "backend" is the form, its "heads" are `lines_of`.

    Args:
      rows: "fp8", or "plain" for BF16. The expanded form reads keys in BF16 whatever the pool holds.
      heads: per rank.
    """
    kind = "plain" if form == "expanded" else rows
    return entry_for("mla_prefill", chip, form, kind, lines_of(form, heads, tile))


def config_for(chip: str, form: str, rows: str, heads: int, tile: int) -> Any:
    """The configuration of `entry_of`."""
    return CONFIGS[form](**entry_of(chip, form, rows, heads, tile)["config"])


def lines_of(form: str, heads: int, tile: int) -> int:
    """Query lines of a tile that share keys: rows times heads of latents, rows where each head has its own."""
    return tile if form == "expanded" else tile * heads
