"""Ways side by side: clocks from tables and from the cost model, hindsight, and a fleet."""

from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from splash_jax.cost import Load
from splash_jax.errors import ConfigError
from splash_jax.layouts import make_layout
from splash_jax.ownership import Layout
from splash_jax.scheduler import PolicyConfig
from splash_jax.simulate import (
    Group,
    Row,
    TableCosts,
    TableScale,
    Traffic,
    Way,
    compare,
    hindsight,
    run_one,
    traffic,
    ways_of,
)
from splash_jax.simulate.surface import surface
from tests.simulate.conftest import HandCosts, make_deployment

TABLE = Path(__file__).resolve().parent.parent / "data" / "paper" / "table4_b200.csv"
NAMES = ("tp", "cp", "dp", "dop")


def drain(requests: int = 40):
    return traffic.rollout(np.random.default_rng(1), requests, median=60, most=500, prompts=(10, 100), rounds=2)


def test_every_way_serves_the_same_tokens_and_hindsight_is_the_least():
    deployment = make_deployment()
    rows, outcomes = compare(deployment, drain(), ways_of(deployment))
    assert [row.way for row in rows] == [
        "tp", "cp", "dp", "dop", "thresholds", "margin 0%", "margin 5%", "margin 20%", "policy", "hindsight"
    ]  # fmt: skip
    assert len({row.tokens for row in rows}) == 1
    took = {row.way: row.seconds for row in rows}
    assert took["hindsight"] <= took["policy"] + 1e-9
    # its loads are the policy's, priced at other steps of a stretch than those of a fixed layout
    assert took["hindsight"] <= min(took[name] for name in NAMES) * (1 + 2e-6)
    assert took["policy"] <= 1.02 * min(took[name] for name in NAMES)
    assert {name: rows[i].switches for i, name in enumerate(NAMES)} == dict.fromkeys(NAMES, 0)
    assert outcomes["policy"].switches


class UnevenPrompts(HandCosts):
    """tp shares a prompt's rows among four ranks, dp leaves them to their owner, but draws faster."""

    def step_seconds(self, load: Load) -> dict[Layout, float]:
        prompt_rows = np.bincount(load.home, np.where(load.new_rows > 1, load.new_rows, 0), 4)
        steps = (2e-3 + 3e-4 * prompt_rows.sum() / 4, 1.0, 1.2e-3 + 3e-4 * prompt_rows.max(initial=0), 1.0)
        return {one: float(seconds) for one, seconds in zip(self.layouts, steps, strict=True)}


def test_the_policy_counts_the_prompts_that_each_finished_request_makes_room_for():
    """No snapshot shows one: each begins and ends within the step that admits it."""
    deployment = replace(make_deployment(), costs=UnevenPrompts(make_deployment().layouts, 2e-3))
    n = 400
    output = np.random.default_rng(0).integers(10, 40, n)
    queue = Traffic(
        arrival=np.zeros(n), prompt=np.full(n, 30), output=output, limit=output, after=np.full(n, -1)
    )  # fmt: skip
    rows, outcomes = compare(
        deployment, queue, [way for way in ways_of(deployment) if way.name in ("tp", "dp", "policy")]
    )
    took = {row.way: row.seconds for row in rows}
    assert took["dp"] > 1.2 * took["tp"]
    assert took["policy"] <= 1.01 * took["tp"]
    assert outcomes["policy"].decisions > 20


def test_hindsight_is_the_least_over_all_paths():
    deployment = make_deployment(switch=0.3)
    done = Group(deployment, deployment.layouts[0], PolicyConfig()).run(drain(6))
    done.loads, done.stretches = done.loads[:5], done.stretches[:5]
    best = np.inf
    for path in np.ndindex(*(4,) * 5):
        seconds = sum(s.costs[at] * s.steps for s, at in zip(done.stretches, path, strict=True))
        best = min(best, seconds + 0.3 * sum(a != b for a, b in pairwise(path)))
    assert hindsight(deployment, done)[0] == pytest.approx(best)


def test_a_way_is_told_before_the_next_begins(monkeypatch):
    deployment = make_deployment()
    events: list[str] = []

    def run_and_note(deployment, way, load, *, keep):
        events.append(f"{way.name} begins")
        return run_one(deployment, way, load, keep=keep)

    monkeypatch.setattr(import_module("splash_jax.simulate.compare"), "run_one", run_and_note)
    ways = [Way(name=name, start=name) for name in ("dp", "tp")]
    rows, _ = compare(deployment, drain(), ways, done=lambda row: events.append(f"{row.way} told"))
    assert events == ["dp begins", "dp told", "tp begins", "tp told"]
    assert [row.way for row in rows] == ["dp", "tp", "hindsight"]


@pytest.mark.slow  # starts processes
def test_a_fleet_over_processes_does_what_its_groups_do_alone():
    deployment = make_deployment()
    ways = [Way(name="dp", start="dp"), Way(name="policy", start="tp", policy=PolicyConfig())]
    requests = traffic.agents(np.random.default_rng(0), 60, turns=3, rate=5.0).shortened(2000)
    alone, _ = compare(deployment, requests, ways, groups=3, workers=1)
    told: list[Row] = []
    spread, _ = compare(deployment, requests, ways, groups=3, workers=2, done=told.append)
    assert alone == spread == told
    assert [row.way for row in alone] == ["dp", "policy"]
    assert alone[0].tokens == int((requests.prompt + requests.output).sum())


def test_a_table_answers_as_measured_and_its_scale_is_the_mean():
    layouts = tuple(make_layout(name, {"rank": 8}) for name in NAMES)
    costs = TableCosts(TABLE, layouts, TableScale(decode_step=0.04))
    for batch, context, fastest in ((16, 16_384, "dp"), (256, 131_072, "dop"), (4, 131_072, "cp"), (16, 1024, "tp")):
        seconds = costs.step_seconds(Load.balanced(batch, context, 8))
        assert str(min(seconds, key=seconds.__getitem__)) == fastest
        assert np.mean(list(seconds.values())) == pytest.approx(0.04, rel=0.02)
    mixed = costs.step_seconds(Load(np.array([4096, 4096]), np.array([1, 1024]), np.array([0, 1])))
    plain = costs.step_seconds(Load(np.array([4096, 4096]), np.array([1, 1]), np.array([0, 1])))
    assert all(mixed[one] > plain[one] for one in layouts)


@pytest.mark.parametrize("over", ["BxL", "B,L"])
def test_outside_of_what_was_measured_the_nearest_load_answers(over):
    relative = surface(TABLE, NAMES, over)
    batch, context = np.array([16.0, 16.0, 16.0]), np.array([1024.0, 600.0, 100.0])
    near, out, far = relative(batch, context)
    assert near == pytest.approx(out, rel=0.02) and out == pytest.approx(far, rel=0.02)
    assert relative(batch, context).mean(1) == pytest.approx(1.0)


def test_tables_and_fleets_that_cannot_be_meant_are_refused(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("input_len,B,tp,cp\n1024,1,1.0,2.0\n2048,2,1.0,2.0\n")
    with pytest.raises(ConfigError, match=r"has tp, cp; it lacks dp, dop. Leave these out"):
        surface(path, NAMES)
    layouts = tuple(make_layout(name, {"rank": 8}) for name in NAMES)
    with pytest.raises(ConfigError, match=r"decode_step is 0 s; give seconds, decode_step above 0"):
        TableCosts(TABLE, layouts, TableScale(decode_step=0))
    with pytest.raises(ConfigError, match=r"switch is inf s; give seconds"):
        TableCosts(TABLE, layouts, TableScale(switch=np.inf))
    deployment = make_deployment()
    with pytest.raises(ConfigError, match=r"groups \(0\) and workers \(1\) must be at least 1"):
        compare(deployment, drain(), ways_of(deployment), groups=0)
    with pytest.raises(ConfigError, match="there is no request to serve; give traffic of one at least"):
        compare(deployment, drain().part(10**5, 10**6), ways_of(deployment))
    with pytest.raises(ConfigError, match="layout 'rep' is none of tp, cp, dp, dop"):
        compare(deployment, drain(), [Way(name="rep", start="rep")])
