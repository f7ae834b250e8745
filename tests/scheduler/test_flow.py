"""Prompts on their way in: as many per token as of late, a burst forgotten, and the steps that they fill."""

import pytest

from splash_jax.scheduler.flow import STEPS, Flow


def fed(each: list[tuple[int, int, int, int]]) -> Flow:
    flow = Flow()
    for counts in each:
        flow = flow.after(*counts)
    return flow


def test_nothing_seen_or_nothing_begun_is_no_flow():
    assert Flow().steps(8, 128, 1) is None
    assert fed([(1, 0, 0, 0), (64, 0, 0, 640)]).steps(8, 128, 1) is None
    assert fed([(1, 1, 100, 10)]).steps(0, 128, 1) is None


def test_a_steady_flow_is_its_mean_whether_it_is_counted_often_or_seldom():
    often = fed([(1, i % 4 == 0, 100 * (i % 4 == 0), 10) for i in range(401)])
    seldom = fed([(16, 4, 400, 160)] * 25)
    for flow in (often, seldom):
        assert flow.per_token == pytest.approx(0.025, rel=0.05)
        assert flow.steps(20, 128, 1) == (pytest.approx(0.5, rel=0.05), 100, (100,))


def test_a_burst_is_forgotten_as_soon_as_it_has_been_over_for_a_while():
    burst = fed([(1, 16, 1600, 0)] * 8)
    assert burst.per_token == 1 and burst.steps(128, 4096, 1) == (pytest.approx(128 / 40), 100, (100,) * 40)
    after = burst.after(10, 0, 0, 1280)
    assert after.per_token == pytest.approx(1 / 1280)
    assert after.after(100 * STEPS, 0, 0, 128 * 100 * STEPS).steps(128, 4096, 1) is None


@pytest.mark.parametrize(
    ("room", "groups", "wanted"),
    [
        (1000, 1, (0.4, 1000, (1000,))),  # a step each, for the 4 requests that each draw 10 tokens
        (500, 1, (0.8, 500, (750,))),  # two, the second of which sees the first one's rows
        (125, 1, (3.2, 125, (562,))),  # eight, one after another: a step of draws waits for 3.2 of them
        (125, 8, (1.6, 125, (312, 812))),  # ... or of two requests at a time: 8 of 10 + 8 steps of each of 4 have some
    ],
)
def test_prompts_longer_than_a_step_take_several(room, groups, wanted):
    flow = fed([(1, 1, 1000, 10)])
    weight, *rest = flow.steps(4, room, groups)
    assert (pytest.approx(weight), *rest) == wanted


def test_homes_that_fall_by_chance_leave_some_ranks_without_a_prompt():
    flow = fed([(1, 64, 64_000, 64)])
    assert len(flow.steps(16, 1000, 8).contexts) == 5, "8 prompts at once meet 5 of 8 ranks"
    assert len(flow.steps(16, 1000, 1).contexts) == 1
