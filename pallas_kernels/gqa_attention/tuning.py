"""The configurations in tuning.json, as the kernel takes them."""

from typing import Any

from pallas_kernels.tiles import TileConfig
from pallas_kernels.tuning import entry_for


def entry_of(chip: str, width: int, lines: int) -> dict[str, Any]:
    """The entry for key heads of `width` columns and so many query lines of each in a tile.

    The table's "rows" are "bf16-64" or "bf16-128" by the width, its "heads" the lines.
    """
    return entry_for("gqa_attention", chip, "triton", f"bf16-{width}", lines)


def config_for(chip: str, width: int, lines: int) -> TileConfig:
    """The configuration of `entry_of`."""
    return TileConfig(**entry_of(chip, width, lines)["config"])
