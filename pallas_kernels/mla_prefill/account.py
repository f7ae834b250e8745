"""What a prefill should take, before it is measured, and so which form of it is cheaper.

A call is phases, one after another, and a phase takes the longest of what it asks of the chip: its FLOPs, its bytes of
HBM, and its bytes of L2, which every program reads its keys through. Both forms are charged from the queries as the
model projects them to outputs in the heads' own width:

* absorbed: queries into latent space and outputs out of it, 2 C (N + V) FLOPs per row and head; then 2 (2 C + E) per
  row, head and key. The keys are read once per block of lines, of all heads.
* expanded: keys and values per head, 2 C (N + V) FLOPs per key and head, written and read back; then 2 (N + E + V) per
  row, head and key.

Per key the second saves 2 (2 C - N - V) for every row that sees it, and pays 2 C (N + V): at DeepSeek-V3's widths it is
ahead by FLOPs from 171 rows on, and with no history but the rows themselves always, for then there are as many keys to
expand as rows to absorb. A program makes keys in chunks, and counts whole ones.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp

from pallas_kernels.chip import CHIPS
from pallas_kernels.formats import fp8_row_bytes
from pallas_kernels.mla_decode.account import RATE, Account
from pallas_kernels.tile_account import L2_BYTES_PER_CLOCK, tile_account

# The tensor cores' BF16 rate over HBM's, by data sheets: their ratio is all that the choice of a form needs.
FLOPS_PER_BYTE = {"h100": 9.89e14 / 3.35e12, "h200": 9.89e14 / 4.8e12, "b200": 2.25e15 / 7.67232e12}
FORMS = ("absorbed", "expanded")
LINES = 64  # that a program of the absorbed form takes at most, and wgmma and tcgen05 at least
ROWS = 128  # of one head, that a program of the expanded form takes at most


class Phase(NamedTuple):
    """What one kernel asks of a chip."""

    flops: Any  # that are issued, padding included, over the rate of their instruction
    bytes: Any  # that cross HBM
    l2_bytes: Any  # that programs read

    def clocks(self, chip: str, flops_per_byte: float) -> float:
        """Of the chip, at the rate of its tensor cores."""
        return max(self._asked(chip, flops_per_byte))

    def traced_clocks(self, chip: str, flops_per_byte: float) -> jax.Array:
        """`clocks` of numbers that a program finds at run time. f32[]."""
        return jnp.stack([jnp.asarray(x, jnp.float32) for x in self._asked(chip, flops_per_byte)]).max()

    def _asked(self, chip: str, flops_per_byte: float) -> tuple[float, ...]:
        per_clock = CHIPS[chip].sms * CHIPS[chip].flops_per_clock
        return self.flops / per_clock, self.bytes * flops_per_byte / per_clock, self.l2_bytes / L2_BYTES_PER_CLOCK


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Prompt rows of `sequences` of one length: the last rows of histories of `keys` tokens each."""

    rows: int  # of all sequences
    sequences: int
    keys: int  # of one sequence, its rows among them
    tile: int
    heads: int
    latent: int
    rotary: int
    nope: int
    value: int
    fp8: bool

    @property
    def pairs(self) -> float:
        """(row, key) that see each other."""
        each = self.rows / self.sequences
        return self.rows * (max(self.keys, each) - (each - 1) / 2)

    @property
    def row_bytes(self) -> int:
        """Of a token's latent row."""
        return fp8_row_bytes(self.latent, self.rotary) if self.fp8 else 2 * (self.latent + self.rotary)

    @property
    def projection_flops(self) -> int:
        """Of one token and all its heads, between latents and the heads' own keys and values."""
        return 2 * self.heads * self.latent * (self.nope + self.value)


def rate_of(lines: int) -> float:
    """Of the tensor cores' rate: products of fewer than LINES lines are mma.sync's."""
    return RATE["mma.sync"] if lines < LINES else 1.0


def block_of(lines: int) -> int:
    """Lines of a program that has so many to choose among: what a tensor core's product takes, up to LINES."""
    return min(LINES, max(16, 1 << (lines - 1).bit_length()))


def phases(call: Call, form: str, pairs: Any = None, tokens: Any = None) -> list[Phase]:
    """What a call asks, kernel by kernel. `pairs` and `tokens`, in floats, stand for those that `call` itself has."""
    H, R = call.heads, call.rows
    pairs = call.pairs if pairs is None else pairs
    tokens = float(call.sequences * call.keys) if tokens is None else tokens
    own, latents = call.nope + call.rotary, call.latent + call.rotary
    weights = 2.0 * H * call.latent * (call.nope + call.value)
    if form == "absorbed":
        block = block_of(call.tile * H)
        blocks = -(-call.tile * H // block)  # per tile
        attended = pairs / call.tile * blocks * block * 2 * (latents + call.latent) / rate_of(block)
        project_bytes = weights + R * H * (2 * own + 2 * latents + 4 * call.latent + 4 * call.value)
        return [
            Phase(float(R * call.projection_flops), project_bytes, 0.0),
            Phase(
                attended,
                tokens * call.row_bytes + float(R * H * (2 * latents + 4 * call.latent + 4)),
                pairs / call.tile * blocks * call.row_bytes,
            ),
        ]
    rows = min(ROWS, call.tile)  # of a program
    attended = pairs * H * 2 * (own + call.value) / rate_of(rows)
    made = 2 * tokens * (H * (call.nope + call.value) + call.rotary)
    return [
        Phase(tokens * call.projection_flops, weights + tokens * call.row_bytes + made, 0.0),
        Phase(
            attended,
            made + float(R * H * (2 * own + 8 * call.value + 8)),
            pairs / rows * H * 2 * (own + call.value),
        ),
    ]


def cheaper_form(call: Call, chip: str | None) -> str:
    """The form whose phases take fewer clocks; absorbed where the chip is unknown or the two are level."""
    if chip is None:
        return "absorbed"
    clocks = {form: sum(phase.clocks(chip, FLOPS_PER_BYTE[chip]) for phase in phases(call, form)) for form in FORMS}
    return min(clocks, key=clocks.__getitem__)


def expansion_pays(call: Call, chip: str, pairs: jax.Array, tokens: jax.Array) -> jax.Array:
    """`cheaper_form` at run time, bool[]: `pairs` f32[] of rows and keys, and `tokens` f32[] whose keys are made."""
    absorbed, expanded = (
        sum(phase.traced_clocks(chip, FLOPS_PER_BYTE[chip]) for phase in phases(call, form, pairs, tokens))
        for form in FORMS
    )
    return jnp.asarray(expanded < absorbed)


def tiles_or_rows(call: Call, chip: str) -> str:
    """Whether rows of a tile are cheaper together ("tiles", `mla_prefill`) or each for itself ("rows", `mla_decode`).

    With 64 heads and more, products and reads through L2 are level, for a row's own heads fill a program; a tile then
    still writes its page table and merges its parts once, so level is "tiles". With fewer, rows share what they read.
    """
    if call.tile == 1:
        return "rows"  # the kernel for it
    together, apart = (
        phases(each, "absorbed")[-1].clocks(chip, FLOPS_PER_BYTE[chip]) for each in (call, replace(call, tile=1))
    )
    return "tiles" if together <= apart else "rows"


def account(
    call: Call, form: str, *, chip: str, entry: dict[str, Any], bytes_per_s: float, flops_per_s: float
) -> Account:
    """The account of the attention kernel of one form; projections and the making of keys are XLA's and left out.

    Args:
      entry: of the tuning table: configuration and what the compiler made of it.
      bytes_per_s, flops_per_s: the chip's limits, published or measured.
    """
    phase, absorbed = phases(call, form)[-1], form == "absorbed"
    lines = entry["config"]["block_lines"] if absorbed else min(entry["config"]["block_rows"], call.tile)
    columns, value = (call.latent + call.rotary, call.latent) if absorbed else (call.nope + call.rotary, call.value)
    programs = -(-call.tile * call.heads // lines)  # of a tile; each of its heads has its own in the expanded form
    return tile_account(
        chip=chip,
        entry=entry,
        lines=lines,
        columns=columns,
        value_width=value,
        token_bytes=call.row_bytes if absorbed else 2 * (columns + value),
        program_tokens=call.pairs / call.tile * programs,
        hbm_bytes=phase.bytes,
        flops=2 * call.heads * call.pairs * (columns + value),
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
    )
