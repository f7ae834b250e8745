"""Eq. 7 and spreading, by hand and as laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splash_jax.cost import exposed_seconds, spread_over_steps

layers = st.integers(1, 12).flatmap(
    lambda n: st.tuples(*(st.lists(st.floats(0, 10, allow_subnormal=False), min_size=n, max_size=n) for _ in range(2)))
)


def test_the_first_transfer_shows_whole_and_the_rest_where_they_outlast_compute():
    assert exposed_seconds([3.0, 3.0, 5.0], [4.0, 2.0, 9.0]) == 3.0 + 0.0 + 3.0


def test_the_papers_own_numbers():
    """B200, DP to TP: 3.471 ms a layer. A step of 2.2 s over 78 layers hides all but the first, one of 35 ms cannot."""
    moving = [3.471e-3] * 78
    assert exposed_seconds(moving, [2.2 / 78] * 78) == pytest.approx(3.471e-3)
    assert exposed_seconds(moving, [35e-3 / 78] * 78) == pytest.approx(78 * 3.471e-3 - 77 / 78 * 35e-3)


@given(layers)
def test_exposure_lies_between_the_first_transfer_and_all_of_them(case):
    transfer, compute = case
    shown = exposed_seconds(transfer, compute)
    assert transfer[0] <= shown <= sum(transfer) * (1 + 1e-12) + 1e-12


@given(layers, st.integers(1, 12))
def test_spreading_further_never_shows_more(case, k):
    transfer, compute = case
    spread = spread_over_steps(transfer, compute, k)
    assert spread.steps == -(-len(transfer) // k) + 1
    assert spread.exposed_worst <= spread.exposed_total <= sum(transfer) + 1e-9
    whole = spread_over_steps(transfer, compute, len(transfer))
    assert whole.steps == 2 and whole.exposed_total == pytest.approx(sum(transfer))
    assert spread.exposed_total <= whole.exposed_total + 1e-9


def test_spreading_by_hand():
    spread = spread_over_steps([4.0, 4.0, 4.0], [1.0, 2.0, 2.0], 2)
    # Layers 0 and 1 move beside layer 2, layer 2 beside layers 0 and 1.
    assert (spread.steps, spread.exposed_total, spread.exposed_worst) == (3, 7.0, 6.0)


def test_what_does_not_match_is_refused():
    with pytest.raises(ValueError, match="2 transfers and 1 computes"):
        exposed_seconds([1.0, 1.0], [1.0])
    with pytest.raises(ValueError, match="0 transfers"):
        exposed_seconds([], [])
    with pytest.raises(ValueError, match="layers_per_step must be at least 1, got 0"):
        spread_over_steps([1.0], [1.0], 0)
