"""Every setting at its extremes: what follows has a bound, or is refused with the value and the next step.

Bounds are on shapes and on the number of programs, which are what compiling takes: no clock is asked.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax import small_model
from splash_jax.cost import Hardware, load_hardware
from splash_jax.engine import Blueprint, EngineConfig
from splash_jax.engine.build import draw_up
from splash_jax.engine.limits import MOST_PAGE_NUMBERS, MOST_PROGRAMS, MOST_ROWS
from splash_jax.errors import ConfigError, LayoutError, PolicyError
from splash_jax.layouts import ROLES
from splash_jax.preflight.case import draw_case
from splash_jax.runtime.transfer import MOST_CHUNKS, Route, in_chunks, map_widths
from splash_jax.scheduler import PolicyConfig

HUGE = 10**9
TWO_AXES = {"a": 2, "b": 2}
EVERY_PAIR = tuple(f"a={a},b={b}" for a in ROLES for b in ROLES)


def drawn(**settings: Any) -> Blueprint:
    return draw_up(EngineConfig(**{"model": small_model(), "num_devices": 4} | settings))


def is_bounded(blueprint: Blueprint) -> None:
    """Rows, page numbers, chunks, map entries and programs."""
    for layout, buckets in blueprint.buckets.items():
        assert buckets[-1].rows * layout.owner_groups <= MOST_ROWS
        assert buckets[-1].sequences * blueprint.shapes.table_width(layout) * layout.size <= MOST_PAGE_NUMBERS
    for src, dst in blueprint.directions():
        route = blueprint.route(src, dst)
        assert route.chunks <= MOST_CHUNKS
        grains = max(blueprint.pages.values()) * route.per_page
        assert sum(map_widths(route)) <= 4 * (route.group + 1) * (grains + MOST_CHUNKS)
    if blueprint.config.compile_ahead:
        assert len(set(blueprint.keys())) <= MOST_PROGRAMS


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"transfer_bytes": HUGE},
        {"block_size": 1},
        {"block_size": 2048},
        {"block_size": 7},
        {"block_size": 2048, "cp_interleave": 1},
        {"prefill_tile": 1},
        {"prefill_tile": 2048},
        {"prefill_tile": 1, "max_num_batched_tokens": HUGE},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": HUGE},
        {"max_num_seqs": 1},
        {"max_num_seqs": 10_000},
        {"max_num_seqs": 10_000, "decode_buckets": tuple(range(1, 10_001)), "compile_ahead": False},
        {"decode_buckets": (1,) * 10_000},
        {"switch_modes": ("spread",), "spread_layers": HUGE, "spread_parts": 64},
        {"switch_modes": ("spread",), "spread_parts": 1},
        {"switch_modes": ("splash",) * 10_000},
        {"reserve_bytes": 10**18},
        {"max_model_len": 1},
        {"device_memory_bytes": 10**11},
        {"num_devices": 1},
        {"num_devices": 4, "mesh": {"one": 1, "four": 4}},
        {"num_devices": 4, "mesh": {**{f"axis{i}": 1 for i in range(15)}, "four": 4}, "layouts": ("tp", "dp")},
        {"num_devices": 4, "mesh": TWO_AXES, "layout": EVERY_PAIR[0], "layouts": EVERY_PAIR},
        {"layouts": ("tp", "dp") * 5000},
        {"directions": (("tp", "dp"), ("dp", "tp")) * 5000},
        {"seed": 2**63 - 1},
    ],
    ids=lambda settings: ", ".join(f"{k}={str(v)[:24]}" for k, v in settings.items()) or "defaults",
)
def test_what_extreme_settings_make_has_a_bound(settings):
    is_bounded(drawn(**settings))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transfer_bytes": 1}, "transfer_bytes 1 is less than a switch can keep to .*: give at least 30720"),
        ({"max_num_seqs": HUGE}, "1000000000 requests that run at once, .* 1048576. Lower max_num_seqs"),
        (
            {"max_num_seqs": 10**6},
            "name up to 512004096 pages of 16 tokens .* 134217728. Lower max_num_seqs or",
        ),
        (
            {"max_num_seqs": HUGE, "max_num_batched_tokens": HUGE},
            "1000000000 prompt tokens a step .* rows in layout",
        ),
        (
            {"max_num_seqs": 10_000, "decode_buckets": tuple(range(1, 10_001))},
            "more than 16384 programs .* for 4 layouts, 12 directions and 10000 decode_buckets: name fewer, or set",
        ),
        ({"spread_parts": HUGE}, "spread_parts is 1000000000; a layer moves in 64 parts at most"),
        ({"reserve_bytes": 10**18, "device_memory_bytes": 10**9}, "does not fit: .* Raise device_memory_bytes"),
        ({"block_size": HUGE}, "block_size 1000000000 is more than the model's context of 2048"),
        ({"prefill_tile": HUGE}, "prefill_tile 1000000000 is more than the model's context of 2048"),
        ({"max_model_len": HUGE}, "max_model_len 1000000000 is more than the model's context of 2048"),
        ({"cp_interleave": HUGE}, "cp_interleave 1000000000 must divide block_size 16"),
        ({"device_memory_bytes": 1}, "does not fit: 1 bytes per rank lack .* Raise device_memory_bytes"),
        ({"device_memory_bytes": 10**18}, "more than the 1073741824 tokens that can be numbered. Lower device_memory"),
        ({"num_devices": HUGE}, "at most 16 axes and 1024 ranks, not 1 and 1000000000; give fewer num_devices"),
        (
            {"mesh": {**{f"axis{i}": 1 for i in range(1000)}, "four": 4}},
            "at most 16 axes and 1024 ranks, not 1001 and 4; .* leave axes of size 1 out",
        ),
        ({"seed": 2**63}, "seed must be below 2..63, as a request's own is; got 9223372036854775808"),
    ],
    ids=lambda value: ", ".join(f"{k}={str(v)[:24]}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_would_not_end_is_refused_with_the_value_and_the_next_step(settings, words):
    with pytest.raises((ConfigError, LayoutError), match=words):
        drawn(**settings)


def test_the_least_that_is_named_serves_and_moves_no_more():
    """Padding of chunks is less than one chunk; and whoever asks for less is told, one byte below as well."""
    whole, cut = drawn(), drawn(transfer_bytes=30_720)
    for pair in whole.directions():
        plain, route = whole.route(*pair), cut.route(*pair)
        assert plain.sends <= route.sends < plain.sends + max(1, route.sends // route.chunks)
        received = route.sends // route.chunks * route.group * route.grain * cut.shapes.kv.bytes_per_token
        assert received <= 30_720
    with pytest.raises(ConfigError, match=r"transfer_bytes 30719 is less than .*: give at least 30720"):
        drawn(transfer_bytes=30_719)


@cache
def any_route() -> Route:
    blueprint = drawn()
    return blueprint.route(blueprint.layouts["cp"], blueprint.layouts["dp"])


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(-1, 10**9))
def test_chunks_are_no_more_than_grains_and_pad_less_than_one(sends, relocated, chunks):
    route = in_chunks(replace(any_route(), sends=sends, locals=relocated), chunks)
    assert 1 <= route.chunks <= max(1, min(MOST_CHUNKS, chunks, sends or relocated))
    assert route.sends % route.chunks == route.locals % route.chunks == 0
    assert sends <= route.sends < sends + max(1, route.sends // route.chunks)
    assert relocated <= route.locals < relocated + route.chunks
    asked = -(-(sends or relocated) // max(1, min(chunks, MOST_CHUNKS)))
    assert (route.sends or route.locals) // route.chunks <= asked


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": HUGE}, "1000000000 requests that run at once"),
        ({"prefill_tokens": HUGE}, "1000000000 prompt tokens a step"),
        ({"context": HUGE}, "context 1000000000 is more than the model's 163840 tokens"),
        ({"block_size": HUGE}, "block_size 1000000000 is more than the model's context 163840"),
        ({"num_devices": HUGE}, "at most 16 axes and 1024 ranks, not 1 and 1000000000"),
    ],
    ids=str,
)
def test_cases_of_a_preflight_are_bounded_too(changes, words):
    chip: Hardware = load_hardware("h200")
    settings: dict[str, Any] = {
        "num_devices": 8, "layouts": ("tp", "dp", "tp"), "batch": 4, "context": 4096, "prefill_tokens": 512,
        "block_size": 64, "memory_fraction": 0.9,
    }  # fmt: skip
    assert [str(one) for one in draw_case("deepseek-v3.2", chip, **settings).layouts] == ["tp", "dp"]
    with pytest.raises((ConfigError, LayoutError), match=words):
        draw_case("deepseek-v3.2", chip, **settings | changes)


@pytest.mark.parametrize("name", ["patience", "window_seconds"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_policy_waits_for_a_finite_time(name, value):
    with pytest.raises(PolicyError, match=f"{name} must be above 0 and finite, got"):
        PolicyConfig(**{name: value})
    PolicyConfig(**{name: 1e300})
