"""One program of a switch as two lanes in time: the order is the compiled schedule's, the durations are Eq. 7's."""

from dataclasses import dataclass

from splash_jax.cost import compute_seconds, transfer_seconds
from splash_jax.preflight.case import Case
from splash_jax.preflight.work import layer_work
from splash_jax.runtime import SwitchKey
from splash_jax.runtime.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that takes from `start` to `end`, in seconds."""

    lane: str  # "compute" or "communication"
    what: str  # a stage of the layer, "exchange" or "transfer"
    start: float
    end: float


def timeline(case: Case, key: SwitchKey, step: str, schedule: Schedule) -> list[Bar]:
    """The lanes of the program that moves one layer beside a layer of kind `key.kind`.

    The lines of a stage share its roofline evenly. The links carry one collective at a time.
    """
    seconds = _line_seconds(case, key, step, schedule)
    starts = {c.start: c for c in schedule.collectives}
    dones = {c.done: c for c in schedule.collectives if c.asynchronous}
    ends: dict[int, float] = {}
    bars: list[Bar] = []
    now = link = 0.0
    for i in range(len(schedule.order)):
        if i in dones:
            now = max(now, ends[dones[i].start])
        elif i in starts:
            c = starts[i]
            begin = max(now, link)
            link = ends[i] = begin + transfer_seconds(c.collective.bytes_received, 1, case.hardware)
            now = now if c.asynchronous else link
            what = "transfer" if c.moves else "exchange"
            bars.append(Bar(lane="communication", what=what, start=begin, end=link))
        elif i in seconds:
            what, length = seconds[i]
            bars.append(Bar(lane="compute", what=what, start=now, end=now + length))
            now += length
    return _merged(bars)


def _line_seconds(case: Case, key: SwitchKey, step: str, schedule: Schedule) -> dict[int, tuple[str, float]]:
    """Stage and seconds of every line that computes for the layer."""
    if key.kind is None:
        return {}
    work = layer_work(case, key.route.dst, step, key.kind)
    cost = {name: compute_seconds(stage, case.hardware) for name, stage in work.items()}
    feed_forward = next(name for name in cost if name not in ("projections", "kernel"))
    stages = {"attention": cost["projections"] + cost["kernel"], feed_forward: cost[feed_forward]}
    lines = {i: stage for i, scope in schedule.compute.items() for stage in stages if f"/{stage}/" in f"/{scope}/"}
    counts = {stage: sum(s == stage for s in lines.values()) for stage in stages}
    return {i: (stage, stages[stage] / counts[stage]) for i, stage in lines.items()}


def _merged(bars: list[Bar]) -> list[Bar]:
    """Bars in each lane, those that follow one another without a gap and are of one thing made one."""
    merged: list[Bar] = []
    for lane in ("compute", "communication"):
        last: Bar | None = None
        for bar in sorted((b for b in bars if b.lane == lane), key=lambda b: b.start):
            if last is not None and last.what == bar.what and bar.start <= last.end * (1 + 1e-9) and lane == "compute":
                last = Bar(lane=lane, what=bar.what, start=last.start, end=bar.end)
                merged[-1] = last
            else:
                last = bar
                merged.append(bar)
    return merged
