"""Ways to choose a layout, side by side on the same traffic: fixed, by thresholds, by a margin, by the policy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context

import numpy as np

from splash_jax.errors import ConfigError
from splash_jax.ownership import Layout
from splash_jax.scheduler import Decision, PolicyConfig, Run, Snapshot, Switch, decide
from splash_jax.simulate.group import Deployment, Group, Outcome
from splash_jax.simulate.optimum import hindsight
from splash_jax.simulate.traffic import Traffic

# Of live tokens, fitted to Table 4 of arXiv 2609.37626 by hand: the rule a sceptic would use. Below `FEW` requests
# layouts with whole requests on a rank leave ranks idle, and the third serves.
THRESHOLDS = ((92.7e3, "tp"), (1.48e6, "dp"), (5.93e6, "cp"), (float("inf"), "dop"))
FEW, FOR_FEW = 8, "cp"

UNBOUNDED = PolicyConfig(dwell_steps=0, max_switches=10**9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How layouts are chosen: `policy` None stays in `start`."""

    name: str
    start: str
    policy: PolicyConfig | None = None
    thresholds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way on one traffic over all groups. Seconds, except `tokens`; NaN for what is no run."""

    way: str
    seconds: float  # until the last group has served everything
    busy: float  # mean over groups: in steps and switches
    tokens: int  # prompt and output
    first_token_p50: float
    first_token_p99: float
    end_p50: float
    end_p99: float
    switches: int
    switch_seconds: float
    preemptions: int
    refused: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


def ways_of(deployment: Deployment, margins: Sequence[float] = (0.0, 0.05, 0.2)) -> list[Way]:
    """Every layout fixed, thresholds where all their layouts are there, margins, and the policy."""
    names = [str(one) for one in deployment.layouts]
    ways = [Way(name=name, start=name) for name in names]
    if {name for _, name in THRESHOLDS} <= set(names):
        ways.append(Way(name="thresholds", start=names[0], policy=UNBOUNDED, thresholds=True))
    for margin in margins:
        policy = replace(UNBOUNDED, rule="margin", margin=margin)
        ways.append(Way(name=f"margin {margin:.0%}", start=names[0], policy=policy))
    ways.append(Way(name="policy", start=names[0], policy=PolicyConfig()))
    return ways


def by_thresholds(snapshot: Snapshot) -> Decision:
    """A decision by the number of requests and of live tokens alone."""
    target = FOR_FEW if snapshot.requests < FEW else next(name for most, name in THRESHOLDS if snapshot.tokens <= most)
    if snapshot.requests < FEW and snapshot.tokens <= THRESHOLDS[0][0]:
        target = THRESHOLDS[0][1]
    quote = next(quote for quote in snapshot.quotes if quote.layout == target)
    if target == snapshot.layout or quote.refused:
        return Decision(action=Run(0), reason="thresholds", memory=snapshot.memory)
    return Decision(action=Switch(target, False, 0), reason="thresholds", memory=snapshot.memory)


def layout_named(deployment: Deployment, name: str) -> Layout:
    """A layout of the deployment. Raises `ConfigError` for a name it does not have."""
    for layout in deployment.layouts:
        if str(layout) == name:
            return layout
    raise ConfigError(f"layout {name!r} is none of {', '.join(map(str, deployment.layouts))}.")


def run_one(deployment: Deployment, way: Way, traffic: Traffic, *, keep: bool = True) -> Outcome:
    """One group on its traffic."""
    rule = by_thresholds if way.thresholds else decide
    layout = layout_named(deployment, way.start)
    return Group(deployment, layout, way.policy, rule=rule, keep=keep).run(traffic)


def compare(
    deployment: Deployment,
    traffic: Traffic,
    ways: Sequence[Way],
    *,
    groups: int = 1,
    workers: int = 1,
    done: Callable[[Row], None] = lambda row: None,
) -> tuple[list[Row], Mapping[str, Outcome]]:
    """Every way on the traffic, spread over `groups` groups alike; and, with one group, what each run did.

    With one group a last row is the optimum in hindsight: the least time for the loads that the last way met. `done` is
    told of every other row as soon as that way and those before it have ended.
    """
    if groups < 1 or workers < 1:
        raise ConfigError(f"groups ({groups}) and workers ({workers}) must be at least 1.")
    if not len(traffic):
        raise ConfigError("there is no request to serve; give traffic of one at least.")
    sessions = int((traffic.after < 0).sum())  # groups beyond these serve nothing
    parts = [traffic.part(i, groups) for i in range(min(groups, sessions))]
    jobs = [(deployment, way, part, groups == 1) for way in ways for part in parts]
    if workers == 1:
        rows, found = _gather(ways, map(_job, jobs), len(jobs), done)
    else:
        with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn")) as pool:
            rows, found = _gather(ways, pool.map(_job, jobs, chunksize=1), len(jobs), done)
    if groups > 1 or not ways:
        return rows, {}
    outcomes = {way.name: outcome for way, outcome in zip(ways, found, strict=True)}
    last = outcomes[ways[-1].name]
    best, switches, moving = hindsight(deployment, last)
    idle = last.seconds - sum(s.seconds for s in last.stretches)
    nan = float("nan")
    rows.append(
        Row(
            way="hindsight", seconds=best + idle, busy=best, tokens=last.tokens, first_token_p50=nan,
            first_token_p99=nan, end_p50=nan, end_p99=nan, switches=switches, switch_seconds=moving, preemptions=0,
            refused=0,
        )
    )  # fmt: skip
    return rows, outcomes


def _gather(
    ways: Sequence[Way], outcomes: Iterable[Outcome], count: int, done: Callable[[Row], None]
) -> tuple[list[Row], list[Outcome]]:  # fmt: skip
    """Every way's row, told as its last outcome comes, and all `count` outcomes: in order, as many of each way."""
    coming, rows, found = iter(outcomes), [], []
    for way in ways:
        its = list(islice(coming, count // len(ways)))
        rows.append(_row(way.name, its))
        done(rows[-1])
        found += its
    return rows, found


def _job(job: tuple[Deployment, Way, Traffic, bool]) -> Outcome:
    deployment, way, traffic, keep = job
    return run_one(deployment, way, traffic, keep=keep)


def _row(name: str, outcomes: Sequence[Outcome]) -> Row:
    first = np.concatenate([o.first_token - o.arrived for o in outcomes])
    end = np.concatenate([o.end - o.arrived for o in outcomes])
    return Row(
        way=name,
        seconds=max(o.seconds for o in outcomes),
        busy=float(np.mean([o.busy for o in outcomes])),
        tokens=sum(o.tokens for o in outcomes),
        first_token_p50=float(np.median(first)),
        first_token_p99=float(np.quantile(first, 0.99)),
        end_p50=float(np.median(end)),
        end_p99=float(np.quantile(end, 0.99)),
        switches=sum(len(o.switches) for o in outcomes),
        switch_seconds=sum(seconds for o in outcomes for *_, seconds in o.switches),
        preemptions=sum(o.preemptions for o in outcomes),
        refused=sum(o.refused for o in outcomes),
    )
