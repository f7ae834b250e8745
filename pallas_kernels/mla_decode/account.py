"""What a decode should take, written down before it is measured: bytes and FLOPs over the chip's limits, and the share
that the kernel's shape lets it reach.

The model, for one configuration on one chip:

* memory: a block's rows come from HBM once for all its head blocks (L2 serves the others). By Little's law a chip needs
  bandwidth times latency under way; a program has `stages - 1` blocks under way while it computes on one.
* compute: the products that are issued, padding and repeats included, at the rate of their instruction; the softmax (an
  exponential per logit, a product per output column and block) runs beside them where two warpgroups or two programs
  share a multiprocessor, and after them where not.
  The Hopper kernel is also held by what it reads and writes in shared memory and by its leader's own products and
  softmax. A warpgroup that makes BF16 of FP8 rows holds its kernel by their conversion.
* the slower of the two.

Left out are launches, the start and merge of items, address arithmetic, barriers and the latency of products that wait
for each other; of Triton's and Blackwell's programs also L2 and shared memory, and of Triton's conversions, which every
block of heads makes anew: `conversions_s` has them for whoever compares. The share is one that cannot be exceeded, and
does not rank backends that come near each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from pallas_kernels.chip import CHIPS
from pallas_kernels.formats import fp8_row_bytes
from pallas_kernels.mla_decode.fp8_rows import BLOCKS_AHEAD
from pallas_kernels.mla_decode.mosaic import COLUMNS, TOKENS

LATENCY_S = 8e-7  # of HBM under load: an assumption, to be measured
EXPONENTIALS_PER_CLOCK = 16  # of one SM's special function units
FLOATS_PER_CLOCK = 128  # products of one SM's float32 units
SHARED_BYTES_PER_CLOCK = 128  # of one SM
# Of one SM, where a value takes three: to float16, to float32 and, scaled, to BF16. An assumption, to be measured: what
# FlashMLA's account of 50 clocks for 512 values comes to. The CUDA programming guide's rate is twice that.
CONVERSIONS_PER_CLOCK = 32
# Of the dense tensor-core rate. mma.sync on Hopper and later is an assumption; the others are that rate's own.
RATE = {"wgmma.mma_async": 1.0, "tcgen05.mma": 1.0, "mma.sync": 0.6}
# Warp-specialised kernels, and how many heads a program of theirs takes at a time.
SPECIALISED = {"hopper": 64, "blackwell": 128}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Seconds, bytes and FLOPs of one call on one GPU."""

    bytes: int  # that have to cross HBM: rows and queries in, outputs out
    flops: int  # that have to be done
    limit_s: float  # the larger of bytes and FLOPs over the chip's limits
    memory_s: float  # with what the kernel keeps under way
    compute_s: float  # with what it issues
    blocks_per_sm: int
    under_way_bytes: int  # on one SM
    wanted_bytes: int  # on one SM, by Little's law
    conversions_s: float = 0.0  # of a decode's FP8 rows, wherever they are made anew; in `compute_s` but for Triton

    @property
    def expected_s(self) -> float:
        """The slower of memory and compute."""
        return max(self.memory_s, self.compute_s)

    @property
    def expected_share(self) -> float:
        """Of the limit."""
        return self.limit_s / self.expected_s

    @property
    def bound(self) -> str:
        """What holds it."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def account(
    held: Sequence[int],
    *,
    heads: int,
    latent: int,
    rotary: int,
    chip: str,
    entry: dict[str, Any],
    bytes_per_s: float,
    flops_per_s: float,
) -> Account:
    """The account of `mla_decode` over histories of `held` tokens.

    Args:
      entry: of the tuning table (`entry_for`): configuration and what the compiler made of it.
      bytes_per_s, flops_per_s: the chip's limits, published or measured.
    """
    config, evidence, backend = entry["config"], entry["evidence"], entry["backend"]
    apart = backend in SPECIALISED
    block = TOKENS if apart else config["block_tokens"]
    block_heads = SPECIALISED[backend] if apart else config["block_heads"]
    head_blocks = -(-heads // block_heads)
    columns = latent + rotary
    row_bytes = fp8_row_bytes(latent, rotary) if entry["rows"] == "fp8" else 2 * columns
    tokens, blocks = sum(held), sum(-(-n // block) for n in held)
    sms, resident = CHIPS[chip].sms, evidence["blocks_per_sm"]
    moved = tokens * row_bytes + len(held) * heads * (2 * columns + 4 * latent + 4)
    flops = 2 * heads * tokens * (columns + latent)

    ahead = (config["stages"] - 1) * block * row_bytes
    fp8 = entry["rows"] == "fp8"
    programs = 2 if backend == "blackwell" else 1  # of a block of heads
    if apart and fp8:  # what is asked for through L2, by every program that takes the row
        ahead = BLOCKS_AHEAD * block * row_bytes // (programs * head_blocks)
    elif backend == "blackwell":  # of the kept half one block waits for its values and one is multiplied; and tiles
        ahead = (config["stages"] - 2) * block * latent + (config["tiles"] - 1) * 2 * block * COLUMNS
    under_way = resident * ahead
    wanted = bytes_per_s * LATENCY_S / sms
    memory_s = moved / bytes_per_s / min(1.0, under_way / wanted)

    clock = flops_per_s / sms / CHIPS[chip].flops_per_clock
    issued = 2 * block_heads * block * (programs * columns + latent)  # logits by both programs of a pair
    products = issued / (CHIPS[chip].flops_per_clock * RATE[evidence["mma"]])
    softmax = programs * block_heads * block / EXPONENTIALS_PER_CLOCK + block_heads * latent / FLOATS_PER_CLOCK
    clocks = max(products, softmax) if apart or resident > 1 else products + softmax
    if backend == "hopper":
        leader = 2 * block_heads * block * (columns + latent / 2) / CHIPS[chip].flops_per_clock
        leader += block_heads * block / EXPONENTIALS_PER_CLOCK + block_heads * latent / 2 / FLOATS_PER_CLOCK
        clocks = max(clocks, leader, shared_clocks(latent=latent, rotary=rotary, block=block))
    conversions = programs * 3 * block * latent / CONVERSIONS_PER_CLOCK if fp8 else 0.0
    if apart:
        clocks = max(clocks, conversions)
    compute_s, conversions_s = (blocks * head_blocks * x / (sms * clock) for x in (clocks, conversions))
    return Account(
        bytes=moved,
        flops=flops,
        limit_s=max(moved / bytes_per_s, flops / flops_per_s),
        memory_s=memory_s,
        compute_s=compute_s,
        blocks_per_sm=resident,
        under_way_bytes=under_way,
        wanted_bytes=round(wanted),
        conversions_s=conversions_s,
    )


def shared_clocks(*, latent: int, rotary: int, block: int, heads: int = 64) -> float:
    """Clocks that shared memory takes for one block of the Hopper kernel.

    A product of 64 rows of queries and a block's keys reads both anew. The leader has its probabilities in registers,
    the follower reads them.
    """
    columns = latent + rotary
    logits = 2 * (heads + block) * columns  # queries and keys
    values = 2 * block * latent
    arriving = 2 * block * columns
    handed = 2 * 2 * heads * block  # probabilities, written and read
    return (logits + values + arriving + handed) / SHARED_BYTES_PER_CLOCK
