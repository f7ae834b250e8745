"""The account of a kernel against sums done by hand, and the chips against the descriptions the compiler is given."""

import re

import pytest

from pallas_kernels.chip import CHIPS
from pallas_kernels.mla_decode.account import account, shared_clocks
from pallas_kernels.mla_decode.api import order_of
from pallas_kernels.tuning import entry_for, table
from splash_jax.cost import load_hardware

DEEPSEEK = {"latent": 512, "rotary": 64, "chip": "h200", "bytes_per_s": 4.8e12, "flops_per_s": 9.89e14}


def test_bytes_and_flops_of_a_decode():
    """128 rows of 4,096 tokens under 128 heads: FlashMLA's compute-bound shape."""
    found = account([4096] * 128, heads=128, entry=entry_for("mla_decode", "h200", "hopper", "plain", 128), **DEEPSEEK)
    assert found.flops == 2 * 128 * 128 * 4096 * (576 + 512)
    assert found.bytes == 128 * 4096 * 1152 + 128 * 128 * (576 * 2 + 512 * 4 + 4)
    assert found.limit_s == pytest.approx(found.flops / 9.89e14)
    assert found.bound == "compute"
    # Of 64 heads and 64 tokens shared memory takes a little longer than the products, and they longer than the leader.
    products, shared = 2 * 64 * 64 * (576 + 512) / 4096, shared_clocks(latent=512, rotary=64, block=64)
    assert shared == (2 * (64 + 64) * 576 + 2 * 64 * 512 + 2 * 64 * 576 + 4 * 64 * 64) / 128
    assert shared > products > 2 * 64 * 64 * (576 + 256) / 4096 + 64 * 64 / 16 + 64 * 256 / 128
    assert found.expected_share == pytest.approx(products / shared)


def test_fp8_rows_of_many_heads_are_bound_by_their_conversion():
    """Three conversions for each of 512 values, anew for every 64 heads."""
    entry = entry_for("mla_decode", "h200", "hopper", "fp8", 128)
    found = account([4096] * 128, heads=128, entry=entry, **DEEPSEEK)
    assert found.bytes == 128 * 4096 * 656 + 128 * 128 * (576 * 2 + 512 * 4 + 4)
    assert found.bound == "compute"
    assert found.expected_share == pytest.approx(2 * 64 * 64 * (576 + 512) / 4096 / (3 * 64 * 512 / 32))


@pytest.mark.parametrize("rate", [16, 32, 64])
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_fp8_goes_where_its_account_with_conversions_is_shorter(heads, rate, monkeypatch):
    """Triton's come before its products, or beside those of another program on the multiprocessor."""
    monkeypatch.setitem(account.__globals__, "CONVERSIONS_PER_CLOCK", rate)
    hopper, triton = (
        account([4096] * 64, heads=heads, entry=entry_for("mla_decode", "h200", backend, "fp8", heads), **DEEPSEEK)
        for backend in ("hopper", "triton")
    )
    both = max(triton.expected_s, triton.conversions_s)
    took = both if triton.blocks_per_sm > 1 else triton.expected_s + triton.conversions_s
    assert (hopper.expected_s < 0.999 * took) == (order_of("h200", heads, fp8=True)[0] == "hopper")


def test_a_pair_of_programs_on_blackwell_makes_the_logits_twice():
    chip = DEEPSEEK | {"chip": "b200", "bytes_per_s": 8e12, "flops_per_s": 2.25e15}
    entry = entry_for("mla_decode", "b200", "blackwell", "plain", 128)
    found = account([4096] * 128, heads=128, entry=entry, **chip)
    assert found.bound == "compute" and found.limit_s == pytest.approx(found.bytes / 8e12)
    assert found.compute_s == pytest.approx(found.flops / 2.25e15 * (2 * 576 + 512) / (576 + 512))
    assert found.under_way_bytes == 64 * 256 * 2 + 7 * 64 * 64 * 2, "one block of kept columns, and all tiles but one"
    assert account([4096] * 128, heads=64, entry=entry, **chip).compute_s == found.compute_s, "half of it is padding"


@pytest.mark.parametrize("rate", [16, 32, 64, 1024])
def test_fp8_of_128_heads_goes_to_the_pair_at_any_rate_of_conversion(rate, monkeypatch):
    """Two programs convert as often as Triton's two blocks of 64 heads, which do it before their products."""
    monkeypatch.setitem(account.__globals__, "CONVERSIONS_PER_CLOCK", rate)
    chip = DEEPSEEK | {"chip": "b200", "bytes_per_s": 8e12, "flops_per_s": 2.25e15}
    pair, triton = (
        account([4096] * 64, heads=128, entry=entry_for("mla_decode", "b200", backend, "fp8", 128), **chip)
        for backend in order_of("b200", 128, fp8=True)[:2]
    )
    assert pair.conversions_s == pytest.approx(64 * 64 * 2 * 3 * 64 * 512 / rate / (2.25e15 / 8192))
    assert pair.conversions_s == pytest.approx(triton.conversions_s)
    assert pair.conversions_s <= pair.expected_s < triton.compute_s + triton.conversions_s
    assert pair.under_way_bytes == 2 * 64 * 656 // 2, "two blocks, half of which the neighbour asks for"


def test_few_heads_are_bound_by_memory():
    found = account([8192] * 32, heads=16, entry=entry_for("mla_decode", "h200", "triton", "fp8", 16), **DEEPSEEK)
    assert found.bound == "memory" and found.limit_s == pytest.approx(found.bytes / 4.8e12)
    assert found.under_way_bytes == 2 * 2 * 32 * 656 and found.wanted_bytes == round(4.8e12 * 8e-7 / 132)
    assert found.expected_share == pytest.approx(1.0), "84 kB under way are more than the 29 kB that it takes"


def test_a_shallow_pipeline_is_held_by_latency():
    entry = entry_for("mla_decode", "h200", "triton", "fp8", 16)
    shallow = entry | {"config": entry["config"] | {"stages": 2}, "evidence": entry["evidence"] | {"blocks_per_sm": 1}}
    found = account([8192] * 32, heads=16, entry=shallow, **DEEPSEEK)
    assert found.expected_share == pytest.approx(32 * 656 / (4.8e12 * 8e-7 / 132))


@pytest.mark.parametrize("chip", table("mla_decode"))
def test_every_entry_of_the_table_has_an_account(chip):
    hardware = load_hardware(chip)
    for entry in table("mla_decode")[chip]:
        found = account(
            [4096] * 64, heads=entry["heads"], latent=512, rotary=64, chip=chip, entry=entry,
            bytes_per_s=hardware.hbm_bytes_per_s, flops_per_s=hardware.bf16_flops_per_s,
        )  # fmt: skip
        assert 0.2 < found.expected_share <= 1.0, entry


@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_chips_are_what_the_compiler_is_told(chip):
    hardware, known = load_hardware(chip), CHIPS[chip]
    text = hardware.target.read_text(encoding="utf-8")
    told = {key: int(value) for key, value in re.findall(r"(\w+): (\d+)\s*$", text, re.MULTILINE)}
    assert known.sms == told["core_count"]
    assert known.registers_per_sm == told["registers_per_core_limit"]
    assert known.threads_per_sm == told["threads_per_core_limit"]
    assert known.smem_per_block == told["shared_memory_per_block_optin"]
    assert known.smem_per_sm == told["shared_memory_per_core"]
    clock = hardware.bf16_flops_per_s / known.sms / known.flops_per_clock
    assert 1.5e9 < clock < 2.1e9, "the data sheet's rate at some boost clock"


def test_blocks_share_an_sm_as_far_as_the_scarcest_goes():
    chip = CHIPS["h200"]
    assert chip.blocks_resident(registers=255, smem=1000, threads=256) == 1  # 256 threads of 256 registers
    assert chip.blocks_resident(registers=32, smem=100_000, threads=128) == 2
    assert chip.blocks_resident(registers=32, smem=0, threads=1024) == 2
    assert chip.blocks_resident(registers=16, smem=0, threads=32) == 32
    assert chip.blocks_resident(registers=16, smem=chip.smem_per_block + 1, threads=32) == 0
