"""Corrections by measured steps, and how long requests go on."""

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.errors import PolicyError
from splash_jax.scheduler import Lifetimes, Residuals
from splash_jax.scheduler.lifetimes import FOREVER
from splash_jax.scheduler.residuals import ENOUGH, FAR, MOST


def seen(ratio: float, steps: int, layout: str = "tp", start: Residuals | None = None) -> Residuals:
    found = start or Residuals()
    for _ in range(steps):
        found = found.observe(layout, "decode", 1.0, ratio)
    return found


def test_a_factor_goes_to_what_is_measured():
    assert Residuals().factor("tp", "decode") == 1
    assert seen(1.3, 200).factor("tp", "decode") == pytest.approx(1.3, rel=1e-6)
    assert seen(0.8, 500, start=seen(1.3, 200)).factor("tp", "decode") == pytest.approx(0.8, rel=0.01)


def test_a_layout_that_never_ran_gets_what_all_have_in_common():
    found = seen(1.2, 100, "dp", seen(1.2, 100, "tp"))
    assert found.factor("cp", "decode") == pytest.approx(1.2, rel=1e-6)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=80))
def test_a_factor_never_leaves_its_bounds(ratios):
    found = Residuals()
    for ratio in ratios:
        found = found.observe("tp", "decode", 1.0, ratio)
        assert 1 / MOST <= found.factor("tp", "decode") <= MOST


@pytest.mark.parametrize("ratio", [FAR * 1.2, 1 / FAR / 1.2])
def test_a_profile_that_is_far_off_is_reported_once(ratio, caplog):
    with caplog.at_level(logging.WARNING):
        found = seen(ratio, ENOUGH - 1)
        assert found.distrust() == "" and not caplog.records
        found = seen(ratio, 50, start=found)
    assert len(caplog.records) == 1
    assert f"decode steps in tp take {ratio:.2g} times what the hardware profile predicts" in found.distrust()
    assert "calibrate" in found.distrust()
    assert seen(1.5, 100).distrust() == ""


@pytest.mark.parametrize("measured", [0.0, -1.0, math.nan, math.inf])
def test_times_that_no_step_takes_are_refused(measured):
    with pytest.raises(PolicyError, match=r"a step in tp was predicted 1\.0 s and measured"):
        Residuals().observe("tp", "decode", 1.0, measured)


def test_without_experience_only_the_limits_say_when_requests_end():
    known = Lifetimes()
    assert known.until_half([5, 5, 5, 5], [100, 200, 300, 400]) == 200
    assert known.until_half([5, 5], [FOREVER, FOREVER]) is None
    assert known.until_half([], []) is None


def test_lengths_seen_say_how_long_the_rest_lasts():
    rng = np.random.default_rng(0)
    known = Lifetimes()
    for length in rng.exponential(1000, 2000).astype(int) + 1:
        known = known.finished(int(length), by_length=False)
    fresh = known.until_half([1] * 100, [FOREVER] * 100)
    assert fresh is not None and 600 <= fresh <= 1100  # ln 2 x 1000 = 693, on a grid of half octaves
    old = known.until_half([2000] * 100, [FOREVER] * 100)
    assert old is not None and 500 <= old <= 1500  # an exponential does not age
    capped = known.until_half([1] * 100, [64] * 100)
    assert capped is not None and capped <= 64


def test_requests_that_still_run_count_as_long():
    """Of heavy-tailed lengths the short ones end first: those alone would say that everything ends soon."""
    known = Lifetimes()
    for _ in range(40):
        known = known.finished(100, by_length=False)
    running = [5000] * 40
    assert known.until_half(running, [FOREVER] * 40) is None  # nobody was seen to end beyond
    limits = known.until_half(running, [1000] * 40)
    assert limits is not None and limits <= 1024
