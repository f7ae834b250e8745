"""What a kernel of tiles should take, before it is measured: the model of `mla_decode.account`, with L2 beside HBM.

Programs of one tile read the same keys: HBM gives them once, L2 once per program. Blocks of tokens under way hide the
latency of HBM as far as they go (Little's law); of two programs on a multiprocessor one's softmax runs beside the
other's products, and a lone one does them in turn.
"""

from typing import Any

from pallas_kernels.chip import CHIPS
from pallas_kernels.mla_decode.account import EXPONENTIALS_PER_CLOCK, FLOATS_PER_CLOCK, LATENCY_S, RATE, Account

# Of the whole chip. The A100's white paper's; of its successors nothing is published: an assumption, to be measured.
L2_BYTES_PER_CLOCK = 5120


def tile_account(
    *,
    chip: str,
    entry: dict[str, Any],
    lines: int,
    columns: int,
    value_width: int,
    token_bytes: int,
    program_tokens: float,
    hbm_bytes: float,
    flops: float,
    bytes_per_s: float,
    flops_per_s: float,
) -> Account:
    """The account of one kernel.

    Args:
      entry: of a tuning table: configuration and what the compiler made of it.
      lines: of a program.
      columns, value_width: of a key and a value.
      token_bytes: that a program reads of a token.
      program_tokens: tokens that a program reads, summed over all programs.
      hbm_bytes, flops: that have to cross HBM, and to be done.
      bytes_per_s, flops_per_s: the chip's limits, published or measured.
    """
    found, evidence, block = CHIPS[chip], entry["evidence"], entry["config"]["block_tokens"]
    resident = evidence["blocks_per_sm"]
    clock = flops_per_s / found.sms / found.flops_per_clock
    under_way = resident * (entry["config"]["stages"] - 1) * block * token_bytes
    wanted = bytes_per_s * LATENCY_S / found.sms
    memory_s = hbm_bytes / bytes_per_s / min(1.0, under_way / wanted)
    l2_s = program_tokens * token_bytes / (L2_BYTES_PER_CLOCK * clock)
    products = 2 * lines * (columns + value_width) / (found.flops_per_clock * RATE[evidence["mma"]])
    softmax = lines / EXPONENTIALS_PER_CLOCK + lines * value_width / block / FLOATS_PER_CLOCK
    clocks = max(products, softmax) if resident > 1 else products + softmax
    return Account(
        bytes=round(hbm_bytes),
        flops=round(flops),
        limit_s=max(hbm_bytes / bytes_per_s, flops / flops_per_s),
        memory_s=max(memory_s, l2_s),
        compute_s=program_tokens * clocks / (found.sms * clock),
        blocks_per_sm=resident,
        under_way_bytes=under_way,
        wanted_bytes=round(wanted),
    )
