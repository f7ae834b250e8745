"""What of the paper's numbers (arXiv 2609.37626) can be checked: bytes, pools, crossovers and KV limits.

Eq. 1 and 9 are in tests/ownership/test_footprint.py, Eq. 2 and 3 in tests/cost/test_switch.py and
tests/runtime/test_switch_bytes.py, Eq. 4 in tests/cost/test_collectives.py, Eq. 7 in tests/cost/test_exposed.py.
"""

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import brentq

from splash_jax.cost.residency import Cohorts, needed_tokens, nominal_limit
from splash_jax.layouts import make_layout

TABLES = Path(__file__).resolve().parents[1] / "data" / "paper"
LAYOUTS = {name: make_layout(name, {"rank": 8}) for name in ("tp", "dp", "cp", "dop")}
GIB = 2**30

LATENT = 512 + 4 * 4 + 64 * 2  # FP8, four FP32 scales, rotary key in BF16
INDEXER = 128 + 4  # FP8, one FP32 scale
ROW = LATENT + INDEXER


def read(name: str) -> list[dict[str, str]]:
    with (TABLES / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_kv_bytes_per_token():
    assert (LATENT, INDEXER, ROW) == (656, 132, 788)
    assert {layers: layers * ROW for layers in (61, 78)} == {61: 48_068, 78: 61_464}


@pytest.mark.parametrize("row", [r for r in read("table3_kv_pools.csv") if r["device"] != "DCU"], ids=str)
def test_pools_of_table_3(row):
    """Bytes of GLM-5.3's 78 layers per token and rank, and one more page of 64, give the printed GiB."""
    layout = LAYOUTS[{"DP": "dp"}.get(row["layout"], row["layout"].lower())]
    distinct = int(row["distinct_tokens"])
    per_rank = distinct // (layout.owner_groups * layout.position_shares)
    assert per_rank * layout.owner_groups * layout.position_shares == distinct and per_rank % 64 == 0
    gib = (per_rank + 64) * 78 * ROW / GIB
    assert gib == pytest.approx(float(row["gib_card"]), abs=0.0051)
    assert 8 * gib == pytest.approx(float(row["gib_group"]), abs=0.0051)


def a(x: float) -> float:
    return 0.05 * x + 1.2 * x / (x + 8)


TAU = {  # Eq. 11: an assumed law, in units of the input length over 1024, relative
    "tp": lambda x: 0.40 + 0.25 * x + max(0.0, 0.15 - 0.0625 * x),
    "dp": lambda x: 2.45 + a(x),
    "cp": lambda x: 2.55 + 0.05 * x + max(0.0, 3.40 - 0.025 * x),
    "dop": lambda x: 0.45 + a(x) + max(0.0, 4.80 - 0.35 * a(x)),
}


@pytest.mark.parametrize(
    ("limit", "crossovers"),
    [
        (60_288, (14.0757, 95.7029, 197.1188)),
        (77_493, (14.0757 * 77_493 / 60_288, 123.0, 253.4)),
        (37_698, (8.8, 59.8, 123.3)),
    ],
    ids=["DCU", "B200", "H200"],
)
def test_crossovers_of_eq_11_and_12(limit, crossovers):
    """tp/dp, dp/cp and cp/dop; other platforms scale the length by their TP limits."""
    scale = limit / 60_288
    for (left, right), expected in zip((("tp", "dp"), ("dp", "cp"), ("cp", "dop")), crossovers, strict=True):
        gap = lambda x, left=left, right=right: TAU[left](x / scale) - TAU[right](x / scale)  # noqa: E731
        found = brentq(gap, 0.7 * expected, 1.3 * expected)
        assert found == pytest.approx(expected, abs=0.06 if scale != 1 else 5e-5)


def dcu_pools() -> dict[str, float]:
    """52.8 GiB per rank for projections (24 GiB whole) and histories of 64 KiB per token."""
    return {
        name: (52.8 - 24 / layout.head_shards) * GIB / (64 * 1024) for name, layout in LAYOUTS.items()
    }  # fmt: skip


H200_POOLS = {"tp": 1_000_832, "dp": 686_144, "cp": 724_736, "dop": 948_352}


@pytest.mark.parametrize(
    ("batch", "pools", "limits"),
    [
        (16, dcu_pools(), {"tp": 60_288, "dp": 238_180, "cp": 282_254, "dop": 412_417}),
        (32, H200_POOLS, {"tp": 37_698, "dp": 180_157, "cp": 222_952, "dop": 249_321}),
        (16, {"tp": 1_045_312}, {"tp": 77_493}),
    ],
    ids=["DCU", "H200", "B200"],
)
def test_the_nine_kv_limits(batch, pools, limits):
    """99 % of 200,000 cohorts fit; Figures 1, 6 and 7 print them in units of 1,024 tokens."""
    cohorts = Cohorts.draw(batch)
    found = {name: nominal_limit(LAYOUTS[name], pool, cohorts) for name, pool in pools.items()}
    assert found == {name: pytest.approx(limit, abs=50) for name, limit in limits.items()}


def test_a_limit_is_the_last_length_that_fits():
    cohorts = Cohorts.draw(9, cohorts=500)
    for layout in LAYOUTS.values():
        limit = nominal_limit(layout, 100_000, cohorts)
        share = [(needed_tokens(layout, cohorts.tokens(n)) <= 100_000).mean() for n in (limit, limit + 1)]
        assert share[1] < 0.99 <= share[0]
    assert nominal_limit(LAYOUTS["tp"], 1000, cohorts) == 0


def test_the_fullest_rank_of_uneven_owners():
    tokens = np.arange(1, 10)[None]
    assert [int(needed_tokens(one, tokens)[0]) for one in LAYOUTS.values()] == [45, 10, 6, 10]
