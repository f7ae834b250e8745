"""The configurations in tuning.json, as the two forms take them."""

from typing import Any

from pallas_kernels.mla_prefill.expanded import ExpandedConfig
from pallas_kernels.tiles import TileConfig
from pallas_kernels.tuning import entry_for

CONFIGS = {"absorbed": TileConfig, "expanded": ExpandedConfig}


def config_for(chip: str, form: str, rows: str, heads: int, tile: int) -> Any:
    """The configuration of the entry for `lines_of` the tile: the table's "backend" is the form, its "heads" the lines.

    Args:
      rows: "fp8", or "plain" for BF16.
      heads: per rank.
    """
    return CONFIGS[form](**entry_for("mla_prefill", chip, form, rows, lines_of(form, heads, tile))["config"])


def lines_of(form: str, heads: int, tile: int) -> int:
    """Query lines of a tile that share keys: rows times heads of latents, rows where each head has its own."""
    return tile if form == "expanded" else tile * heads
