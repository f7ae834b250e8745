"""The prefill kernels' part of bench_kernels.py: MLA in both forms, and shared key heads in decode and prefill.

Every case is one sequence's last rows (or a decode row of each of several sequences), checked on the last few of them
against the reference. What is timed of MLA begins with the queries as the model projects them and ends with outputs in
the heads' own width, so that the forms compare.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from bench_timing import expectation

import pallas_kernels.gqa_attention.account as gqa
import pallas_kernels.mla_prefill.account as mla
from pallas_kernels.chip import this_chip
from pallas_kernels.gqa_attention import gqa_attention
from pallas_kernels.gqa_attention.tuning import entry_of as gqa_entry
from pallas_kernels.mla_decode import pack_fp8
from pallas_kernels.mla_prefill import ExpandedConfig, TileConfig, mla_prefill
from pallas_kernels.mla_prefill.tuning import entry_of as mla_entry
from splash_jax.cost import load_hardware

PAGE, CHECKED = 64, 16  # rows that the reference has room for
SMALL = TileConfig(block_lines=16, block_tokens=16, warps=4, stages=2, workers=8)
SMALL_EXPANDED = ExpandedConfig(block_rows=16, block_tokens=16, warps=4, stages=2, chunk_tokens=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """The last `rows` rows of one history of `keys` tokens, under MLA."""

    rows: int
    keys: int
    tile: int
    heads: int
    form: str
    fp8: bool = False

    def __str__(self) -> str:
        pool = "FP8" if self.fp8 else "BF16"
        return f"{self.rows} of {self.keys}, {self.heads} heads, tiles of {self.tile}, {pool}"

    def call(self, latent: int, rotary: int, nope: int, value: int) -> mla.Call:
        """As the account takes it."""
        return mla.Call(
            rows=self.rows, sequences=1, keys=self.keys, tile=self.tile, heads=self.heads, latent=latent,
            rotary=rotary, nope=nope, value=value, fp8=self.fp8,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The last `rows` rows of each of `sequences` histories of `keys` tokens; tiles of all of a sequence's rows."""

    sequences: int
    rows: int
    keys: int
    tile: int
    heads: int
    groups: int
    width: int

    def __str__(self) -> str:
        rows = "decode" if self.rows == 1 else f"{self.rows} of each"
        return f"{self.sequences} x {self.keys}, {rows}, {self.heads}/{self.groups} heads of {self.width}"

    def sums(self) -> dict[str, Any]:
        """As the account takes it."""
        pairs = self.sequences * self.rows * (self.keys - (self.rows - 1) / 2)
        return {"tokens": self.sequences * self.keys, "pairs": pairs, "rows": self.sequences * self.rows,
                "tile": self.tile, "heads": self.heads, "groups": self.groups, "width": self.width}  # fmt: skip


# 16 heads per rank are DeepSeek-V3 split over 8 ranks; tiles of 16 are what the engine cuts prompts into.
CASES: list[Prefill | Shared] = [
    *(
        Prefill(rows=2048, keys=keys, tile=tile, heads=16, form=form, fp8=fp8)
        for keys in (2048, 16384)
        for tile, form, fp8 in (
            (16, "absorbed", False), (128, "absorbed", False), (128, "absorbed", True), (128, "expanded", False)
        )
    ),
    Shared(sequences=64, rows=1, keys=8192, tile=1, heads=64, groups=8, width=128),
    Shared(sequences=4, rows=512, keys=8192, tile=16, heads=64, groups=8, width=128),
]  # fmt: skip
DRY: list[Prefill | Shared] = [
    Prefill(rows=16, keys=40, tile=16, heads=2, form="absorbed"),
    Prefill(rows=16, keys=40, tile=16, heads=2, form="expanded", fp8=True),
    Shared(sequences=2, rows=1, keys=40, tile=1, heads=4, groups=2, width=16),
]


def prefill_rows(dry: bool, seconds_of: Callable[[list[Callable[[], Any]]], float]) -> Iterator[dict[str, Any]]:
    """One row per case; `seconds_of` times calls that take turns."""
    for case in DRY if dry else CASES:
        run, check, found = _prefill(case, dry) if isinstance(case, Prefill) else _shared(case, dry)
        (out, lse), (want, want_lse) = run[0](), check()
        error = max(
            float(jnp.max(jnp.abs(got[-len(wanted) :] - wanted) / (1 + jnp.abs(wanted))))
            for got, wanted in ((out, want), (lse, want_lse))
        )
        name = f"mla_prefill {case.form}" if isinstance(case, Prefill) else "gqa_attention"
        yield {"kernel": name, "shape": str(case), "seconds": seconds_of(run), "error": error} | found


def _pages(sequences: int, keys: int) -> np.ndarray:
    """Pages of every sequence, scattered over the pool."""
    width = -(-keys // PAGE)
    return np.random.default_rng(1).permutation(sequences * width).reshape(sequences, width).astype(np.int32)


def _normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    make = jax.jit(lambda key: (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16))
    return make(jax.random.key(seed))


def _prefill(case: Prefill, dry: bool) -> tuple[list[Callable[[], Any]], Callable[[], Any], dict[str, Any]]:
    latent, rotary, nope, value = (128, 16, 16, 16) if dry else (512, 64, 128, 128)
    pages = _pages(1, case.keys)
    pools = [_normal(i, pages.size, PAGE, latent + rotary) for i in range(2)]
    if case.fp8:
        pools = [jax.jit(partial(pack_fp8, latent=latent))(pool) for pool in pools]
    q = _normal(9, case.rows, case.heads, nope + rotary, scale=(nope + rotary) ** -0.5)
    w_uk = _normal(10, case.heads, latent, nope, scale=latent**-0.5)
    w_uv = _normal(11, case.heads, value, latent, scale=latent**-0.5)
    seen = np.arange(case.keys - case.rows, case.keys, dtype=np.int32) + 1
    tiles = case.rows // case.tile
    how: dict[str, Any] = {"form": case.form, "backend": "triton", "interpret": dry, "value_width": latent}
    if dry:
        how["config"] = SMALL if case.form == "absorbed" else SMALL_EXPANDED
    timed = jax.jit(partial(mla_prefill, tile=case.tile, **how))
    run = [
        partial(timed, q, pool, pages, seen, sequence=np.zeros(tiles, np.int32), w_uk=w_uk, w_uv=w_uv) for pool in pools
    ]
    oracle = jax.jit(partial(mla_prefill, tile=CHECKED, value_width=latent, backend="ref"))
    check = partial(oracle, q[-CHECKED:], pools[0], pages, seen[-CHECKED:], w_uk=w_uk, w_uv=w_uv)
    call, chip = case.call(latent, rotary, nope, value), this_chip()
    asked = mla.phases(call, case.form)
    found: dict[str, Any] = {
        "bytes": round(sum(phase.bytes for phase in asked)), "flops": round(sum(phase.flops for phase in asked))
    }  # fmt: skip
    if chip is not None and chip.name in mla.FLOPS_PER_BYTE:
        hardware = load_hardware(chip.name)
        made = max(asked[0].flops / hardware.bf16_flops_per_s, asked[0].bytes / hardware.hbm_bytes_per_s)
        found["expected_seconds"] = made + _account(case, chip.name).expected_s
    return run, check, found


def _shared(case: Shared, dry: bool) -> tuple[list[Callable[[], Any]], Callable[[], Any], dict[str, Any]]:
    own = _pages(case.sequences, case.keys)
    shape = (own.size, PAGE, case.groups, case.width)
    pools = [(_normal(2 * i, *shape), _normal(2 * i + 1, *shape)) for i in range(2)]
    pages = np.repeat(own, case.rows // case.tile, 0)
    q = _normal(9, case.sequences * case.rows, case.heads, case.width, scale=case.width**-0.5)
    seen = np.tile(np.arange(case.keys - case.rows, case.keys, dtype=np.int32) + 1, case.sequences)
    how: dict[str, Any] = {"config": SMALL} if dry else {}
    timed = jax.jit(partial(gqa_attention, tile=case.tile, backend="triton", interpret=dry, **how))
    run = [partial(timed, q, *pool, pages, seen) for pool in pools]
    last = min(CHECKED, case.sequences) if case.rows == 1 else CHECKED
    tile = 1 if case.rows == 1 else CHECKED
    oracle = jax.jit(partial(gqa_attention, tile=tile, backend="ref"))
    check = partial(oracle, q[-last:], *pools[0], pages[-(last // tile) :], seen[-last:])
    sums, chip = case.sums(), this_chip()
    found: dict[str, Any] = {
        "bytes": sums["tokens"] * case.groups * 4 * case.width, 
        "flops": round(4 * case.heads * sums["pairs"] * case.width)
    }  # fmt: skip
    if chip is not None and chip.name in mla.FLOPS_PER_BYTE:
        found["expected_seconds"] = _account(case, chip.name).expected_s
    return run, check, found


def _account(case: Prefill | Shared, chip: str) -> Any:
    hardware = load_hardware(chip)
    limits: dict[str, Any] = {"bytes_per_s": hardware.hbm_bytes_per_s, "flops_per_s": hardware.bf16_flops_per_s}
    if isinstance(case, Prefill):
        entry = mla_entry(chip, case.form, "fp8" if case.fp8 else "plain", case.heads, case.tile)
        return mla.account(case.call(512, 64, 128, 128), case.form, chip=chip, entry=entry, **limits)
    entry = gqa_entry(chip, case.width, case.tile * case.heads // case.groups)
    return gqa.account(**case.sums(), chip=chip, entry=entry, **limits)


def expected_prefill(chip: str) -> Iterator[str]:
    """What the account expects of every case's attention kernel on a chip, at its published limits."""
    for case in CASES:
        name = f"mla_prefill {case.form}" if isinstance(case, Prefill) else "gqa_attention"
        yield expectation(f"  {name}", str(case), _account(case, chip))
