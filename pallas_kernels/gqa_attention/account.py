"""What attention over shared key heads should take, before it is measured."""

from typing import Any

from pallas_kernels.mla_decode.account import Account
from pallas_kernels.tile_account import tile_account


def account(
    *,
    tokens: int,
    pairs: float,
    rows: int,
    tile: int,
    heads: int,
    groups: int,
    width: int,
    chip: str,
    entry: dict[str, Any],
    bytes_per_s: float,
    flops_per_s: float,
) -> Account:
    """The account of `gqa_attention` with 16-bit keys and values of one width.

    Args:
      tokens: of all sequences, whose keys and values cross HBM once.
      pairs: (row, token) that see each other.
      entry: of the tuning table (`tuning.entry_of`): configuration and what the compiler made of it.
      bytes_per_s, flops_per_s: the chip's limits, published or measured.
    """
    lines, token_bytes = entry["config"]["block_lines"], 2 * 2 * width
    programs = groups * -(-tile * (heads // groups) // lines)  # of a tile
    return tile_account(
        chip=chip,
        entry=entry,
        lines=lines,
        columns=width,
        value_width=width,
        token_bytes=token_bytes,
        program_tokens=pairs / tile * programs,
        hbm_bytes=tokens * groups * token_bytes + rows * heads * (2 * width + 4 * width + 4),
        flops=2 * heads * pairs * 2 * width,
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
    )
