"""What sparse attention should take, written down before it is measured: `mla_decode`'s account, and what differs.

The kernel is the same, so are its products. Beside the rows themselves a token costs the words that say where it lies.
A prompt's rows select much the same tokens: those come from HBM once and from L2 after, and every block of heads reads
them anew, so that L2 can be what holds it. As there, the share is one that cannot be exceeded.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pallas_kernels.chip import CHIPS
from pallas_kernels.formats import fp8_row_bytes
from pallas_kernels.mla_decode.account import Account
from pallas_kernels.mla_decode.account import account as account_dense

WORDS = 4  # of 4 bytes a token: its position and its page read, its place written and read
L2_BYTES_PER_CLOCK = 32  # to one SM with all of them reading: an assumption, to be measured


def account(
    counts: Sequence[int],
    *,
    heads: int,
    latent: int,
    rotary: int,
    chip: str,
    entry: dict[str, Any],
    bytes_per_s: float,
    flops_per_s: float,
    distinct: int | None = None,
) -> Account:
    """The account of `sparse_mla` over rows with `counts` selected tokens.

    Args:
      entry: of the tuning table: configuration and what the compiler made of it.
      bytes_per_s, flops_per_s: the chip's limits, published or measured.
      distinct: tokens that any row selects, as of a prompt; None where no two rows share one.
    """
    dense = account_dense(
        counts, heads=heads, latent=latent, rotary=rotary, chip=chip, entry=entry, bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
    )  # fmt: skip
    row_bytes = fp8_row_bytes(latent, rotary) if entry["rows"] == "fp8" else 2 * (latent + rotary)
    tokens = sum(counts)
    moved = dense.bytes + 4 * WORDS * tokens
    if distinct is not None:
        moved -= (tokens - distinct) * row_bytes
    clock = flops_per_s / CHIPS[chip].sms / CHIPS[chip].flops_per_clock
    head_blocks = -(-heads // entry["config"]["block_heads"])
    by_l2 = tokens * row_bytes * head_blocks / (L2_BYTES_PER_CLOCK * CHIPS[chip].sms * clock)
    by_hbm = moved / bytes_per_s / min(1.0, dense.under_way_bytes / dense.wanted_bytes)
    return replace(
        dense,
        bytes=moved,
        limit_s=max(moved / bytes_per_s, dense.flops / flops_per_s),
        memory_s=max(by_hbm, by_l2),
    )
