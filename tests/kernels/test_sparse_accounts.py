"""The accounts of sparse attention and of the indexer against sums done by hand."""

import pytest

from pallas_kernels.indexer_topk.account import PASSES, account_logits, account_select
from pallas_kernels.sparse_mla.account import account
from pallas_kernels.tuning import entry_for, table

CHIP = {"chip": "h200", "bytes_per_s": 4.8e12, "flops_per_s": 9.89e14}
CLOCK = 9.89e14 / 132 / 4096


def test_bytes_and_flops_of_sparse_decodes():
    """128 rows of 2,048 tokens under 128 heads: FlashMLA's sparse decode."""
    entry = entry_for("sparse_mla", "h200", "triton", "fp8", 128)
    found = account([2048] * 128, heads=128, latent=512, rotary=64, entry=entry, **CHIP)
    assert found.flops == 2 * 128 * 128 * 2048 * (576 + 512)
    assert found.bytes == 128 * 2048 * (656 + 16) + 128 * 128 * (576 * 2 + 512 * 4 + 4)
    assert found.limit_s == pytest.approx(max(found.bytes / 4.8e12, found.flops / 9.89e14))
    assert 0.05 < found.expected_share <= 1.0


def test_rows_of_a_prompt_share_what_comes_from_hbm_but_not_from_l2():
    entry = entry_for("sparse_mla", "h200", "triton", "plain", 128)
    how = {"heads": 128, "latent": 512, "rotary": 64, "entry": entry} | CHIP
    alone, shared = account([2048] * 1024, **how), account([2048] * 1024, distinct=8192, **how)
    assert alone.bytes - shared.bytes == (2048 * 1024 - 8192) * 1152
    blocks = 128 // entry["config"]["block_heads"]
    assert shared.memory_s == pytest.approx(2048 * 1024 * 1152 * blocks / (32 * 132 * CLOCK))
    assert shared.compute_s == alone.compute_s


def test_bytes_and_flops_of_logits():
    """Four decodes, then a tile of four rows of one sequence: its keys are read once."""
    entry = entry_for("indexer_topk", "h200", "triton", "fp8", 64)
    how = {"heads": 64, "width": 128, "entry": entry} | CHIP
    apart = account_logits([1000] * 4, tile=1, **how)
    tile = account_logits([1000, 1001, 1002, 1003], tile=4, **how)
    assert apart.bytes == 4 * 1000 * (132 + 4) + 4 * 64 * 132
    assert tile.bytes == 1003 * 132 + 4006 * 4 + 4 * 64 * 132
    assert tile.flops == 2 * 64 * 128 * 4006 and tile.limit_s == pytest.approx(tile.bytes / 4.8e12)


def test_long_prompts_are_bound_by_products():
    entry = entry_for("indexer_topk", "h200", "triton", "fp8", 64)
    found = account_logits([65536] * 256, tile=256, heads=64, width=128, entry=entry, **CHIP)
    assert found.limit_s == pytest.approx(found.flops / (2 * 9.89e14)), "the chip's FP8 rate"
    assert found.bound == "compute" and found.expected_share <= 0.5, "float16 products have half of that rate"


def test_a_selection_waits_for_its_longest_chunk():
    entry = entry_for("indexer_topk", "h200", "triton", "fp8", 64)
    how = {"k": 2048, "entry": entry} | CHIP
    one = account_select([32768], columns=32768, **how)
    assert one.bytes == 4 * 32768 + 4 * 2048 and one.flops == 0
    assert one.compute_s == pytest.approx(32768 * (PASSES + 1) * 6 / 128 / CLOCK)
    four = account_select([131072], columns=131072, **how)
    assert four.compute_s == pytest.approx(one.compute_s * (1 + 4 * 2048 / 32768)), "chunks side by side, then 8,192"


@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_every_entry_of_the_tables_has_an_account(chip):
    how = CHIP | {"chip": chip}
    for entry in table("sparse_mla")[chip]:
        found = account([2048] * 64, heads=entry["heads"], latent=512, rotary=64, entry=entry, **how)
        assert 0.02 < found.expected_share <= 1.0, entry
    for entry in table("indexer_topk")[chip]:
        found = account_logits([32768] * 64, tile=16, heads=64, width=128, entry=entry, **how)
        assert 0.1 < found.expected_share <= 1.0, entry
