"""Prompts on their way in: a rate that follows arrivals and forgets a burst."""

import pytest

from splash_jax.scheduler.flow import STEPS, Flow


def fed(each: list[tuple[int, int, int]]) -> Flow:
    flow = Flow()
    for steps, prompts, rows in each:
        flow = flow.after(steps, prompts, rows)
    return flow


def test_nothing_seen_or_nothing_begun_is_no_flow():
    assert Flow().steps(128, 1024) is None
    assert fed([(1, 0, 0), (64, 0, 0)]).steps(128, 1024) is None


def test_a_steady_rate_is_the_mean_whether_it_is_counted_often_or_seldom():
    often = fed([(1, i % 4 == 0, 100 * (i % 4 == 0)) for i in range(400)])
    seldom = fed([(16, 4, 400)] * 25)
    for flow in (often, seldom):
        assert flow.rate == pytest.approx(0.25, rel=0.05) and flow.rows == pytest.approx(100)
        assert flow.steps(128, 1024) == (pytest.approx(0.25, rel=0.05), 1, 100, flow.rate)


def test_a_burst_is_forgotten_as_soon_as_it_has_been_over_for_a_while():
    burst = fed([(1, 16, 1600)] * 8)
    assert burst.steps(128, 4096) == (1.0, 16, 100, 16.0)
    after = burst.after(10, 0, 0)
    assert after.steps(128, 4096) == (pytest.approx(0.1), 1, 100, pytest.approx(0.1))
    much_later = after.after(100 * STEPS, 0, 0)
    assert much_later.steps(128, 4096) is None or much_later.steps(128, 4096).share < 1e-3


@pytest.mark.parametrize(
    ("room", "most", "wanted"),
    [
        (1000, 8000, (0.5, 1, 1000, 0.5)),  # one step each
        (500, 4000, (1.0, 1, 500, 1.0)),  # two
        (300, 2400, (1.0, 2, 250, 2.0)),  # four, of two prompts at once
        (300, 250, (1.0, 1, 250, 2.0)),  # where a step holds no more
    ],
)
def test_prompts_longer_than_a_step_take_several(room, most, wanted):
    flow = fed([(2, 1, 1000)])
    assert flow.steps(room, most) == wanted
