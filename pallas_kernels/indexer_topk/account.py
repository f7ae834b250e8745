"""What the indexer should take, written down before it is measured. Two launches or three, one after another.

* Logits: keys cross HBM once per sequence, and come from L2 once for the rows that share a program; a logit is 4 bytes
  written. Products run at the rate of their instruction; beside them go a maximum and a product for every head of a
  logit, and the conversion of FP8 keys where they are multiplied as float16.
* Selection: every pass looks at every logit of a chunk, which lies in L1 after the first: a load, three comparisons and
  three sums. How many passes it takes depends on the numbers.

Barriers, launches and latencies are left out, as in `mla_decode`'s account.
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels.chip import CHIPS
from pallas_kernels.formats import fp8_row_bytes
from pallas_kernels.mla_decode.account import FLOATS_PER_CLOCK, LATENCY_S, RATE, Account
from pallas_kernels.sparse_mla.account import L2_BYTES_PER_CLOCK

CONVERSIONS_PER_CLOCK = 64  # of one SM, two FP8 numbers each
LOADS_PER_CLOCK = 32  # of one SM, from L1
PASSES = 12  # of normal numbers in rows of 32,768, about; 16 at most
OPERATIONS = 6  # of a pass, per logit


def account_logits(
    lengths: Sequence[int],
    *,
    tile: int,
    heads: int,
    width: int,
    chip: str,
    entry: dict[str, Any],
    bytes_per_s: float,
    flops_per_s: float,
) -> Account:
    """The account of the logits of rows that see `lengths` tokens, every `tile` of one sequence.

    Args:
      entry: of the tuning table: configuration and what the compiler made of it.
      bytes_per_s, flops_per_s: the chip's limits, the latter of BF16: of FP8 keys it is twice that.
    """
    fp8, config = entry["rows"] == "fp8", entry["config"]["logits"]
    evidence = entry["evidence"]["logits" if tile > 1 else "logits_decode"]
    row_bytes = fp8_row_bytes(width, 0) if fp8 else 2 * width
    rows = min(config["rows"], tile)
    seen = sum(lengths)
    keys = sum(max(lengths[i : i + tile]) for i in range(0, len(lengths), tile))
    moved = keys * row_bytes + 4 * seen + len(lengths) * heads * (width * (1 if fp8 else 2) + 4)
    flops = 2 * heads * width * seen
    peak = flops_per_s * (2 if fp8 else 1)

    chip_now, resident = CHIPS[chip], evidence["blocks_per_sm"]
    clock = flops_per_s / chip_now.sms / chip_now.flops_per_clock
    under_way = resident * (config["stages"] - 1) * config["block_tokens"] * row_bytes
    wanted = bytes_per_s * LATENCY_S / chip_now.sms
    by_l2 = seen / rows * row_bytes / (L2_BYTES_PER_CLOCK * chip_now.sms * clock)
    memory_s = max(moved / bytes_per_s / min(1.0, under_way / wanted), by_l2)

    rate = chip_now.flops_per_clock * RATE[evidence["mma"]] * (2 if fp8 and config["fp8_products"] else 1)
    products = 2 * max(16, heads) * width / rate
    beside = 2 * max(16, heads) / FLOATS_PER_CLOCK
    if fp8 and not config["fp8_products"]:
        beside += width / 2 / CONVERSIONS_PER_CLOCK / rows
    clocks = max(products, beside) if resident > 1 else products + beside
    return Account(
        bytes=moved,
        flops=flops,
        limit_s=max(moved / bytes_per_s, flops / peak),
        memory_s=memory_s,
        compute_s=seen * clocks / (chip_now.sms * clock),
        blocks_per_sm=resident,
        under_way_bytes=under_way,
        wanted_bytes=round(wanted),
    )


def account_select(
    lengths: Sequence[int],
    *,
    columns: int,
    k: int,
    chip: str,
    entry: dict[str, Any],
    bytes_per_s: float,
    flops_per_s: float,
) -> Account:
    """The account of the selection from f32[rows, columns]. Its limit is to read every logit once; it has no FLOPs."""
    config, evidence = entry["config"]["select"], entry["evidence"]["select"]
    chip_now, resident = CHIPS[chip], evidence["blocks_per_sm"]
    clock = flops_per_s / chip_now.sms / chip_now.flops_per_clock
    chunk = max(config["chunk"], 2 * k)
    chunks = [min(chunk, n - begin) for n in lengths for begin in range(0, n, chunk)]
    merged = [-(-n // chunk) * k for n in lengths] if columns > chunk else []
    per_logit = (PASSES + 1) * max(OPERATIONS / FLOATS_PER_CLOCK, 1 / LOADS_PER_CLOCK)
    # One chunk on every SM at a time, at least: few rows leave SMs idle.
    clocks = sum(max(sum(sizes) / chip_now.sms, max(sizes, default=0)) * per_logit for sizes in (chunks, merged))
    moved = 4 * sum(lengths) + 16 * sum(merged) + 4 * k * len(lengths)
    under_way = 4 * resident * config["block"]
    wanted = bytes_per_s * LATENCY_S / chip_now.sms
    return Account(
        bytes=moved,
        flops=0,
        limit_s=moved / bytes_per_s,
        memory_s=moved / bytes_per_s / min(1.0, under_way / wanted),
        compute_s=clocks / clock,
        blocks_per_sm=resident,
        under_way_bytes=under_way,
        wanted_bytes=round(wanted),
    )
