"""A group against a clock: many steps at once are the same steps, the pool's and the scheduler's laws hold."""

import io
from dataclasses import replace

import numpy as np
import pytest

from splash_jax.errors import ConfigError
from splash_jax.scheduler import PolicyConfig, replay
from splash_jax.simulate import Group, Traffic, layout_named, traffic
from tests.simulate.conftest import ROLES, make_deployment


def some_traffic(kind: str, seed: int = 0) -> Traffic:
    rng = np.random.default_rng(seed)
    if kind == "rollout":
        return traffic.rollout(rng, 40, median=60, most=400, prompts=(10, 100), rounds=2)
    n = 60
    output = rng.integers(1, 120, n)
    after = np.where(np.arange(n) % 3 == 2, np.arange(n) - 1, -1)
    gaps = rng.exponential(0.02, n)
    arrival = np.where(after < 0, np.cumsum(gaps), gaps)
    return Traffic(arrival=arrival, prompt=rng.integers(1, 300, n), output=output, limit=output + 50, after=after)


@pytest.mark.parametrize("kind", ["rollout", "sessions"])
@pytest.mark.parametrize("pages", [400, 60])
@pytest.mark.parametrize("way", [*ROLES, "policy"])
def test_many_steps_at_once_equal_the_same_steps_one_by_one(kind, pages, way):
    deployment = make_deployment(pages)
    policy = PolicyConfig(dwell_steps=0) if way == "policy" else None
    start = layout_named(deployment, "tp" if way == "policy" else way)
    requests = some_traffic(kind)
    one, many = (Group(deployment, start, policy, jump=jump).run(requests) for jump in (False, True))
    assert np.array_equal(one.end, many.end) and np.array_equal(one.first_token, many.first_token)
    assert one.stretches == many.stretches
    assert (one.busy, one.seconds, one.switches) == (many.busy, many.seconds, many.switches)
    assert (one.preemptions, one.refused, one.tokens) == (many.preemptions, many.refused, many.tokens)
    assert np.isfinite(one.end).all()
    if way == "policy":
        assert one.switches
    elif pages == 60 and way == "tp":
        assert one.preemptions > 0  # where every rank holds everything, pages do run out


def test_every_request_draws_what_it_was_to_and_time_is_accounted_for(deployment):
    requests = some_traffic("sessions")
    done = Group(deployment, deployment.layouts[2]).run(requests)
    assert done.tokens == int((requests.prompt + requests.output).sum())
    assert done.busy == pytest.approx(sum(s.seconds for s in done.stretches))
    assert (done.first_token > done.arrived).all() and (done.end >= done.first_token).all()
    followers = np.flatnonzero(requests.after >= 0)
    assert done.arrived[followers] == pytest.approx(done.end[requests.after[followers]] + requests.arrival[followers])


def test_a_price_every_few_steps_is_close_to_a_price_in_every_step():
    requests = some_traffic("rollout")
    coarse, fine = (
        Group(make_deployment(every=every), make_deployment().layouts[0]).run(requests).seconds for every in (16, 1)
    )
    assert coarse == pytest.approx(fine, rel=5e-3)


def test_a_layout_with_more_room_admits_more():
    requests = some_traffic("rollout")
    waited = {}
    for name in ("tp", "dp"):
        deployment = make_deployment(pages=60)
        done = Group(deployment, layout_named(deployment, name)).run(requests)
        waited[name] = max(s.waiting for s in done.stretches)
    assert waited["dp"] < waited["tp"]


def test_the_log_of_a_run_replays(deployment):
    log = io.StringIO()
    group = Group(deployment, deployment.layouts[0], PolicyConfig(), log=log)
    done = group.run(some_traffic("sessions"))
    lines = log.getvalue().splitlines()
    assert len(list(replay(lines))) == done.decisions > 0


def test_a_pin_set_while_it_runs_is_obeyed(deployment):
    group = Group(deployment, deployment.layouts[0], PolicyConfig())
    group.policy = replace(PolicyConfig(), pin="dp")
    done = group.run(some_traffic("sessions"))
    assert [dst for _, _, dst, _ in done.switches] == ["dp"]


def test_a_request_that_no_layout_could_hold_is_refused(deployment):
    long = Traffic(arrival=np.zeros(1), prompt=np.array([9000]), output=np.array([1]), limit=np.array([1]))
    with pytest.raises(ConfigError, match="request 0 has 9001 tokens and one alone may have 6384 in every layout"):
        Group(deployment, deployment.layouts[0]).run(long)
    with pytest.raises(ConfigError, match="every must be at least 1 step, got 0"):
        make_deployment(every=0)
    with pytest.raises(ConfigError, match="a group runs 1 to 1048576 requests at once, not 1000000000"):
        make_deployment(slots=10**9)


@pytest.mark.parametrize("jump", [False, True])
def test_prompts_come_in_chunks_that_keep_a_step_short(deployment, jump):
    prompts = Traffic(
        arrival=np.array([0.0, 0.2, 0.25]), prompt=np.array([300, 900, 40]), output=np.array([200, 20, 60]),
        limit=np.array([200, 20, 60]),
    )  # fmt: skip
    longest = {}
    for limit in (None, 0.02):
        group = Group(deployment, deployment.layouts[0], PolicyConfig(pin="tp", step_seconds=limit), jump=jump)
        longest[limit] = max(s.costs[0] for s in group.run(prompts).stretches)
    assert longest[0.02] <= 0.02 < 0.04 < longest[None]
