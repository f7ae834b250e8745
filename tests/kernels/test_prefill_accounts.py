"""The accounts of prefill against sums done by hand, and the rules that follow from them."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.chip import CHIPS
from pallas_kernels.gqa_attention.account import account as gqa
from pallas_kernels.mla_decode.account import RATE
from pallas_kernels.mla_prefill.account import (
    FLOPS_PER_BYTE,
    FORMS,
    Call,
    account,
    cheaper_form,
    expansion_pays,
    phases,
    tiles_or_rows,
)
from pallas_kernels.mla_prefill.expanded import ExpandedConfig, tokens_made
from pallas_kernels.tile_account import L2_BYTES_PER_CLOCK
from pallas_kernels.tuning import table
from splash_jax.cost import load_hardware

# 2,048 prompt rows at the end of 16,384 tokens of DeepSeek-V3, 16 heads per rank.
CALL = Call(
    rows=2048, sequences=1, keys=16384, tile=128, heads=16, latent=512, rotary=64, nope=128, value=128, fp8=False
)


def test_pairs_are_a_triangle_and_a_rectangle():
    assert replace(CALL, rows=4, keys=4).pairs == 1 + 2 + 3 + 4
    assert replace(CALL, rows=4, keys=10).pairs == 7 + 8 + 9 + 10
    assert replace(CALL, rows=8, sequences=2, keys=10).pairs == 2 * (7 + 8 + 9 + 10)


def test_what_the_forms_ask_of_a_chip():
    project, attend = phases(CALL, "absorbed")
    assert project.flops == 2048 * 16 * 2 * 512 * 256
    assert attend.flops == CALL.pairs * 16 * 2 * (576 + 512), "128 rows of 16 heads fill their blocks of 64 lines"
    assert attend.l2_bytes == CALL.pairs / 128 * (128 * 16 / 64) * 1152
    make, attend = phases(CALL, "expanded")
    assert make.flops == 16384 * 16 * 2 * 512 * 256
    assert attend.flops == CALL.pairs * 16 * 2 * (192 + 128)
    assert attend.l2_bytes == CALL.pairs / 128 * 16 * 2 * (192 + 128)
    few = phases(replace(CALL, tile=16), "expanded")[-1]
    assert few.flops == pytest.approx(attend.flops / RATE["mma.sync"]), "16 rows of one head fill no wgmma"


def test_the_longest_of_three_holds_a_phase():
    phase, per_clock = phases(CALL, "absorbed")[-1], 132 * 4096
    assert phase.clocks("h200", 200) == phase.flops / per_clock
    assert phase._replace(bytes=1e12).clocks("h200", 200) == 1e12 * 200 / per_clock
    assert phase._replace(l2_bytes=1e13).clocks("h200", 200) == 1e13 / L2_BYTES_PER_CLOCK


@pytest.mark.parametrize("chip", FLOPS_PER_BYTE)
def test_the_rule_has_the_data_sheets_ratio(chip):
    if chip == "h100":  # configs/hardware has none: NVIDIA's data sheet of the SXM part
        flops_per_s, bytes_per_s = 9.89e14, 3.35e12
    else:
        hardware = load_hardware(chip)
        flops_per_s, bytes_per_s = hardware.bf16_flops_per_s, hardware.hbm_bytes_per_s
    assert FLOPS_PER_BYTE[chip] == pytest.approx(flops_per_s / bytes_per_s)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_cheaper_form_follows_the_rows_that_share_a_history(chip):
    few = replace(CALL, rows=16, tile=16, keys=65536)
    assert cheaper_form(few, chip) == "absorbed", "few rows do not pay for making the keys of a long history"
    assert cheaper_form(replace(CALL, keys=65536), chip) == "expanded"
    assert cheaper_form(replace(CALL, keys=2048), chip) == "expanded", "as many keys are made as rows absorbed"
    many = replace(CALL, keys=1 << 20)
    turn = next(
        n for n in range(16, 4096, 16) if cheaper_form(replace(many, rows=n, tile=min(n, 128)), chip) == "expanded"
    )
    assert 100 < turn < 400, "FLOPs alone would say 171"
    assert cheaper_form(CALL, None) == "absorbed"


def test_a_short_prompt_does_not_pay_for_a_chunk_of_keys():
    """Of 128 new tokens a program makes as many keys as of 4,096."""
    config = ExpandedConfig(block_rows=128, block_tokens=128, warps=8, stages=2, chunk_tokens=4096)
    for kept, pays in ((128, False), (4096, True)):
        call, made = replace(CALL, rows=kept, keys=kept, tile=128), tokens_made(jnp.asarray([kept, 0]), config)
        assert float(made) == 4096
        assert bool(expansion_pays(call, "h200", jnp.float32(call.pairs), made)) == pays
    assert float(tokens_made(jnp.asarray([129, 3968]), config)) == 8192, "a block that is begun is made whole"


@pytest.mark.parametrize("chip", FLOPS_PER_BYTE)
def test_a_program_decides_as_the_rule_does(chip):
    """In float32 and at run time: the same form for every call that is not within a thousandth of level."""
    decide, both = jax.jit(expansion_pays, static_argnums=(0, 1)), set()
    for rows, keys, sequences, heads in product((16, 160, 2048), (256, 131072), (1, 4), (16, 128)):
        call = replace(CALL, rows=rows, keys=keys, sequences=sequences, heads=heads, tile=min(rows, 128))
        clocks = [sum(p.clocks(chip, FLOPS_PER_BYTE[chip]) for p in phases(call, form)) for form in FORMS]
        if abs(clocks[0] / clocks[1] - 1) > 1e-3:
            pays = bool(decide(call, chip, jnp.float32(call.pairs), jnp.float32(sequences * keys)))
            assert pays == (cheaper_form(call, chip) == "expanded"), call
            both.add(pays)
    assert both == {True, False}


@pytest.mark.parametrize("chip", CHIPS)
def test_rows_of_a_tile_go_together_unless_there_is_one(chip):
    assert tiles_or_rows(replace(CALL, tile=1), chip) == "rows"
    for heads in (16, 32, 64, 100, 128):
        for tile in (2, 16, 32):
            assert tiles_or_rows(replace(CALL, heads=heads, tile=tile), chip) == "tiles"


@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_every_entry_of_the_table_has_an_account(chip):
    hardware = load_hardware(chip)
    for entry in table("mla_prefill")[chip]:
        call = replace(CALL, fp8=entry["rows"] == "fp8", tile=min(entry["heads"], 128))
        found = account(
            call, entry["backend"], chip=chip, entry=entry,
            bytes_per_s=hardware.hbm_bytes_per_s, flops_per_s=hardware.bf16_flops_per_s,
        )  # fmt: skip
        width = 576 + 512 if entry["backend"] == "absorbed" else 192 + 128
        assert found.flops == 2 * 16 * round(call.pairs) * width
        assert found.limit_s == pytest.approx(found.flops / hardware.bf16_flops_per_s), "prefill is bound by compute"
        assert 0.2 < found.expected_share <= 1.0, entry


@pytest.mark.parametrize("chip", ["h200", "b200"])
def test_shared_key_heads_have_an_account(chip):
    hardware = load_hardware(chip)
    limits = {"bytes_per_s": hardware.hbm_bytes_per_s, "flops_per_s": hardware.bf16_flops_per_s}
    for entry in table("gqa_attention")[chip]:
        width, rows = int(entry["rows"].removeprefix("bf16-")), max(1, entry["heads"] // 8)
        call = {"tokens": 64 * 8192, "pairs": 64 * 8192 * rows, "rows": 64 * rows, "tile": rows, "heads": 64}
        found = gqa(**call, groups=8, width=width, chip=chip, entry=entry, **limits)
        assert found.bytes == 64 * 8192 * 8 * 2 * width * 2 + 64 * rows * 64 * (6 * width + 4)
        assert found.flops == 2 * 64 * call["pairs"] * 2 * width
        assert rows > 1 or found.bound == "memory"
        assert 0.2 < found.expected_share <= 1.0, entry
