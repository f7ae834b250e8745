"""When to switch: the rule, its bounds, what it knows of time, and how it is steered; on snapshots made by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from splash_jax.errors import PolicyError
from splash_jax.scheduler import (
    Choice,
    Decision,
    Idle,
    Memory,
    PolicyConfig,
    Quote,
    Run,
    Snapshot,
    Switch,
    decide,
)

PLAIN = PolicyConfig(old=0.0, floor=0.0, dwell_steps=0, max_switches=10**6)  # the bare rule, nothing smoothed


def quote(layout: str, seconds: float, there: float | None = 0.0, back: float = 0.0, **more: Any) -> Quote:
    return Quote(layout, (Choice(seconds),), there=there, back=back, **more)


def snapshot(*quotes: Quote, layout: str = "tp", policy: PolicyConfig = PLAIN, **more: Any) -> Snapshot:
    return Snapshot(**{"step": 0, "time": 0.0, "layout": layout, "quotes": quotes, "policy": policy} | more)


def run(first: Snapshot, steps: int, **each: Any) -> list[Decision]:
    """The same quotes step after step, until a switch or for so many steps."""
    found: list[Decision] = []
    memory = first.memory
    for step in range(steps):
        found.append(decide(replace(first, step=first.step + step, time=first.time + step, memory=memory, **each)))
        memory = found[-1].memory
        if isinstance(found[-1].action, Switch):
            break
    return found


def test_it_stays_where_nothing_is_faster():
    decisions = run(snapshot(quote("tp", 1.0), quote("dp", 1.0), quote("cp", 1.2)), 100)
    assert {d.reason for d in decisions} == {"stays"}
    assert len(decisions) == 100


@pytest.mark.parametrize(("there", "back"), [(1.0, 1.0), (0.0, 2.0), (2.0, 0.0)])
def test_it_switches_when_staying_has_cost_the_way_there_and_back(there, back):
    decisions = run(snapshot(quote("tp", 1.0), quote("dp", 0.875, there, back)), 100)
    assert len(decisions) == 16  # (there + back) / 0.125: only the sum counts
    assert decisions[-1].action == Switch("dp", spread=False, chunk=0)
    assert decisions[-1].reason == "regret"


def test_of_two_faster_layouts_the_one_whose_switch_pays_first_is_chosen():
    near, far = quote("dp", 0.9, 0.1, 0.1), quote("dop", 0.8, 10.0, 10.0)
    assert run(snapshot(quote("tp", 1.0), near, far), 100)[-1].action == Switch("dp", False, 0)


def test_a_switch_pays_back_before_the_next_one():
    """A load that changes sides for ever: at most one switch per there-and-back of what is lost."""
    memory, here, lost, switches = Memory(), "tp", 0.0, 0
    for step in range(3000):
        fast = "dp" if step // 7 % 2 else "tp"
        costs = {name: 0.9 if name == fast else 1.0 for name in ("tp", "dp")}
        quotes = [quote(name, costs[name], 0.5, 0.5) if name != here else quote(name, costs[name]) for name in costs]
        decision = decide(snapshot(*quotes, layout=here, step=step, time=float(step), memory=memory))
        memory = decision.memory
        if isinstance(decision.action, Switch):
            here, switches = decision.action.layout, switches + 1
        lost += costs[here] - 0.9
    assert switches <= lost / 1.0 + 1
    assert switches > 0 or lost < 160  # in one layout half of all steps lose 0.1: 150


def test_noise_alone_never_switches_when_layouts_are_alike():
    """Free switches, equal means: the floor and the smoothing hold it, the paper's margin of 0 would flap."""
    noise = [1.03, 1 / 1.03, 1.1, 1.02, 1 / 1.1, 1 / 1.02]
    memory = Memory()
    for step in range(600):
        quotes = (quote("tp", 1.0), quote("dp", noise[step % len(noise)]))
        decision = decide(snapshot(*quotes, policy=PolicyConfig(), step=step, time=step * 1.0, memory=memory))
        memory = decision.memory
        assert isinstance(decision.action, Run)


def test_switches_per_time_are_bounded_and_have_a_distance():
    policy = replace(PLAIN, dwell_steps=5, max_switches=3, window_seconds=100.0)
    memory, here, at, reasons = Memory(), "tp", [], set()
    for step in range(200):
        costs = {"tp": 1.0, "dp": 1.0} | {here: 2.0}  # wherever it is, the other is faster, and switches are free
        quotes = [quote(name, seconds) for name, seconds in costs.items()]
        decision = decide(snapshot(*quotes, layout=here, step=step, time=float(step), memory=memory, policy=policy))
        memory = decision.memory
        reasons.add(decision.reason)
        if isinstance(decision.action, Switch):
            here = decision.action.layout
            at.append(step)
    assert all(b - a >= 5 for a, b in pairwise(at))
    assert max(sum(t <= s < t + 100 for s in at) for t in range(200)) == 3
    assert {"dwells", "too many switches"} <= reasons


def test_a_pin_and_the_allowed_set_rule_at_run_time():
    quotes = (quote("tp", 1.0), quote("dp", 5.0, 1.0, 1.0), quote("cp", 0.1, 0.0, 0.0))
    pinned = decide(snapshot(*quotes, policy=replace(PLAIN, pin="dp")))
    assert (pinned.action, pinned.reason) == (Switch("dp", False, 0), "pinned")
    stays = decide(snapshot(*quotes, policy=replace(PLAIN, pin="tp")))
    assert (stays.action, stays.reason) == (Run(0), "pinned")
    away = decide(snapshot(*quotes, policy=replace(PLAIN, allowed=("dp", "cp"))))
    assert (away.action, away.reason) == (Switch("cp", False, 0), "not allowed")
    kept = run(snapshot(*quotes, policy=replace(PLAIN, allowed=("tp", "dp"))), 50)
    assert all(isinstance(d.action, Run) for d in kept)  # cp would be faster, dp is not


def test_what_does_not_fit_is_not_chosen_and_not_obeyed_as_a_pin():
    refused = Quote("dp", (), "rank 3 lacks 12 pages")
    assert decide(snapshot(quote("tp", 1.0), refused)).reason == "stays"
    pinned = decide(snapshot(quote("tp", 1.0), refused, policy=replace(PLAIN, pin="dp")))
    assert (pinned.action, pinned.reason) == (Run(0), "pin refused")
    leave = decide(snapshot(Quote("tp", (), "no room for what waits"), quote("dp", 1.0), quote("cp", 0.5)))
    assert (leave.action, leave.reason) == (Switch("cp", False, 0), "refused")
    assert decide(snapshot(Quote("tp", (), "full"), refused)).reason == "nothing else fits"


def test_a_layout_that_admits_more_is_credited_for_it():
    """A longer step with twice the requests does more per second."""
    small = Quote("tp", (Choice(1.0, tokens=8.0),))
    large = Quote("dop", (Choice(1.2, tokens=16.0),), there=0.5, back=0.5)
    decisions = run(snapshot(small, large), 20)
    assert decisions[-1].action == Switch("dop", False, 0)
    assert len(decisions) == 3  # 0.4 s per step against 1 s


def test_the_chunk_is_the_largest_worth_of_work_within_the_limit():
    chunks = (Choice(1.0, 110.0, chunk=100), Choice(1.5, 210.0, chunk=200), Choice(2.5, 410.0, chunk=400))
    for limit, chunk in ((None, 400), (2.0, 200), (0.5, 100)):
        policy = replace(PLAIN, step_seconds=limit)
        decision = decide(snapshot(Quote("tp", chunks), policy=policy, prompt_rows=1000))
        assert decision.action == Run(chunk)


def test_a_short_rest_is_not_switched_for():
    there = quote("dp", 0.5, 10.0, 0.0)
    assert run(snapshot(quote("tp", 1.0), there, at_most=15), 100)[-1].reason == "too short"  # 7.5 s saved at most
    assert isinstance(run(snapshot(quote("tp", 1.0), there, at_most=30), 100)[-1].action, Switch)


def test_an_advantage_known_to_last_is_taken_sooner():
    there = quote("dp", 0.5, 5.0, 5.0)
    assert len(run(snapshot(quote("tp", 1.0), there), 100)) == 20
    assert len(run(snapshot(quote("tp", 1.0), there, lasts=1000.0), 100)) == 10
    assert len(run(snapshot(quote("tp", 1.0), there, lasts=10.0), 100)) == 20


def test_a_switch_falls_into_the_steps_that_hide_it():
    """Prompts every fourth step: less regret is due there, so there it is made, without waiting for one."""
    slow, dear, cheap = quote("tp", 1.0), quote("dp", 0.95, 4.0, 4.0), quote("dp", 0.95, 0.5, 0.5)
    memory = Memory()
    for step in range(100):
        prompts = step % 4 == 3
        decision = decide(
            snapshot(slow, cheap if prompts else dear, step=step, prompt_rows=64 * prompts, memory=memory)
        )
        memory = decision.memory
        if isinstance(decision.action, Switch):
            break
    assert isinstance(decision.action, Switch) and prompts
    assert step < 79  # where decode steps alone, of 0.05 s lost each, would have led to it


def test_a_switch_is_spread_where_that_shows_less():
    cheap = quote("dp", 0.5, 4.0, 0.0, there_spread=0.1, spread_steps=4)
    assert run(snapshot(quote("tp", 1.0), cheap), 100)[-1].action == Switch("dp", True, 0)
    slow = quote("dp", 0.5, 4.0, 0.0, there_spread=3.9, spread_steps=60)
    assert run(snapshot(quote("tp", 1.0), slow), 100)[-1].action == Switch("dp", False, 0)


@pytest.mark.parametrize("rule", [{"rule": "regret"}, {"rule": "margin"}, {"pin": "dp"}, {"allowed": ("dp",)}])
def test_a_switch_that_is_offered_in_one_way_is_made_in_it(rule):
    policy = replace(PLAIN, **rule)
    for ways, spread in (({"there": None, "there_spread": 0.3, "spread_steps": 9}, True), ({"there": 0.3}, False)):
        there = Quote("dp", (Choice(0.5),), back=0.3, **ways)
        assert run(snapshot(quote("tp", 1.0), there, policy=policy), 9)[-1].action == Switch("dp", spread, 0)


def test_prefill_and_decode_steps_are_remembered_apart():
    policy = replace(PolicyConfig(), floor=0.0)
    memory = decide(snapshot(quote("tp", 1.0), quote("dp", 2.0), policy=policy)).memory
    mixed = snapshot(quote("tp", 30.0), quote("dp", 20.0, 50.0), policy=policy, prompt_rows=512, memory=memory)
    assert set(decide(mixed).memory.costs) == {"decode", "prefill"}
    assert decide(mixed).memory.costs["decode"] == memory.costs["decode"]


def test_a_switch_made_elsewhere_or_refused_starts_the_regrets_anew():
    first = run(snapshot(quote("tp", 1.0), quote("dp", 0.875, 1.0, 1.0)), 100)[-1]
    assert isinstance(first.action, Switch)
    refused = snapshot(quote("tp", 1.0), quote("dp", 0.875, 1.0, 1.0), memory=first.memory, step=50, time=50.0)
    assert len(run(refused, 100)) == 16  # still in tp: the whole way again


def test_nothing_to_do_is_idle_and_a_rule_that_stays_stays():
    quotes = (quote("tp", 9.0), quote("dp", 1.0))
    assert decide(snapshot(*quotes, requests=0)).action == Idle()
    assert decide(snapshot(*quotes, policy=replace(PLAIN, rule="stay"))).reason == "stays"
    assert decide(snapshot(*quotes, distrust="decode steps in tp take 9 times ...")).reason == "distrust"


def test_the_margin_rule_goes_wherever_leads_by_it():
    policy = replace(PLAIN, rule="margin", margin=0.1)
    assert decide(snapshot(quote("tp", 1.0), quote("dp", 0.95, 9.0), policy=policy)).reason == "stays"
    decision = decide(snapshot(quote("tp", 1.0), quote("dp", 0.85, 9.0), policy=policy))
    assert (decision.action, decision.reason) == (Switch("dp", False, 0), "margin")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rule": "best"}, "rule 'best' is unknown; choose one of regret, margin, stay"),
        ({"margin": 1.0}, "margin must be at least 0 and below 1, got 1.0"),
        ({"old": -0.1}, "old must be at least 0"),
        ({"floor": float("nan")}, "floor must be at least 0"),
        ({"patience": 0.0}, "patience must be above 0"),
        ({"max_switches": 0}, "max_switches must be a whole number of at least 1, got 0"),
        ({"dwell_steps": True}, "dwell_steps must be a whole number"),
        ({"step_seconds": 0.0}, "step_seconds must be above 0, or None"),
        ({"allowed": ()}, "allowed is empty; name at least one layout"),
        ({"pin": "dp", "allowed": ("tp",)}, "pin 'dp' is not among allowed tp"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, words):
    with pytest.raises(PolicyError, match=words.replace("(", r"\(")):
        PolicyConfig(**settings)


@pytest.mark.parametrize(
    ("quotes", "words"),
    [
        ((quote("dp", 1.0),), "is in layout 'tp' and quotes are of dp; quote each layout once"),
        ((quote("tp", 1.0), quote("tp", 1.0)), "quote each layout once"),
        ((quote("tp", 1.0), Quote("dp", ())), "dp is neither refused nor has a step to choose"),
        ((quote("tp", 1.0), quote("dp", 1.0, -1.0)), "a switch from tp to dp takes -1.0 s"),
        ((quote("tp", 1.0), quote("dp", 1.0, None)), "a switch from tp to dp takes nan s"),
        ((quote("tp", 1.0), quote("dp", 0.0)), "dp is quoted 0.0 s for 1.0 tokens"),
        ((quote("tp", float("nan")),), "tp is quoted nan s"),
    ],
)
def test_snapshots_that_contradict_themselves_are_refused(quotes, words):
    with pytest.raises(PolicyError, match=words):
        decide(snapshot(*quotes))
