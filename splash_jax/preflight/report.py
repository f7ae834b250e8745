"""What the compiled programs of a case say, beside what its plans and the paper's equations say."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from splash_jax.cost import cheapest_spread, compute_seconds, exposed_seconds, transfer_seconds
from splash_jax.ownership import Layout, footprint
from splash_jax.preflight.case import STEPS, Case
from splash_jax.preflight.programs import Facts
from splash_jax.preflight.work import layer_work
from splash_jax.runtime import Route, StepKey, SwitchKey
from splash_jax.runtime.keys import Key
from splash_jax.runtime.schedule import Scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """One layout. Bytes are of one rank unless named otherwise."""

    layout: str
    projections_bytes: int  # all layers (Eq. 1)
    common_bytes: int
    kv_bytes: int  # all pages, all layers
    kv_group_bytes: int  # of all ranks
    pages: int
    pages_needed: int  # by the batch, on the fullest rank
    distinct_tokens: int  # that all ranks hold together
    fits: bool  # whether the batch does
    lacks_bytes: int
    temporary_bytes: dict[str, int]  # per step, of its largest program
    step_ms: dict[str, float]  # rooflines of all layers' compute, exchanges left out
    collectives: dict[str, dict[str, list[dict[str, Any]]]]  # step -> layer kind -> in order


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchReport:
    """One directed switch. Bytes moved are received by the busiest rank for one layer."""

    src: str
    dst: str
    primitives: dict[str, str]  # of weights and of KV
    planned_bytes: int
    compiled_bytes: int
    padding_bytes: int
    engine_bytes: int  # what an engine's route, with room for any batch, would move
    overlapped_share: float | None  # the worst program's; None where nothing is transferred
    computing_share: float | None  # of a layer's compute lines, those beside its transfer; the worst program's
    waits: bool  # whether some transfer waits for compute of the layer beside it
    peak_bytes: int  # Eq. 5: of a rank, all layers
    bound_bytes: int
    fits: bool  # whether the peak is below the budget
    transfer_ms: float  # of one layer
    exposed_ms: float  # Eq. 7 in the decode step
    exposed_ms_prefill: float  # Eq. 7 in the prefill step
    spread: dict[
        str, float
    ]  # over decode steps: steps, layers_per_step, exposed_ms (compute of the source) of the cheapest


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole preflight."""

    case: Case
    facts: Mapping[Key, Facts]
    layouts: tuple[LayoutReport, ...]
    switches: tuple[SwitchReport, ...]
    seconds: float  # the compilation took, by the clock

    def as_json(self) -> dict[str, Any]:
        case = self.case
        return {
            "model": case.name,
            "hardware": case.hardware.name,
            "num_devices": case.layouts[0].size,
            "dtype": case.shapes.dtype,
            "batch": case.batch,
            "context": case.context,
            "prefill_tokens": case.prefill_tokens,
            "block_size": case.shapes.kv.page_size,
            "num_layers": case.model.num_layers,
            "budget_bytes": case.budget,
            "programs": len(self.facts),
            "compile_seconds": round(self.seconds, 1),
            "layouts": [asdict(layout) for layout in self.layouts],
            "switches": [asdict(switch) for switch in self.switches],
        }


def make_report(case: Case, facts: Mapping[Key, Facts], seconds: float) -> Report:
    """Read a case's compiled programs."""
    layouts = tuple(_layout(case, facts, layout) for layout in case.layouts)
    switches = tuple(_switch(case, facts, src, dst) for src, dst in case.switches)
    return Report(case=case, facts=facts, layouts=layouts, switches=switches, seconds=seconds)


def layer_seconds(case: Case, layout: Layout, step: str) -> list[float]:
    """Every layer's compute in a step, exchanges left out: the links are busy then, so nothing hides behind them."""
    work = {kind: layer_work(case, layout, step, kind) for kind in dict.fromkeys(case.kinds)}
    return [sum(compute_seconds(stage, case.hardware) for stage in work[kind].values()) for kind in case.kinds]


def _layout(case: Case, facts: Mapping[Key, Facts], layout: Layout) -> LayoutReport:
    pages, size = case.pages(layout), case.shapes.kv.page_size
    held = footprint(case.state, layout, pages=pages, page_size=size)
    own = {k: f for k, f in facts.items() if isinstance(k, StepKey) and k.layout == layout}
    of = {step: {k.part: f for k, f in own.items() if k.bucket == case.buckets[layout][step]} for step in STEPS}
    return LayoutReport(
        layout=str(layout),
        projections_bytes=held.projections,
        common_bytes=held.common,
        kv_bytes=held.kv,
        kv_group_bytes=held.kv * layout.size,
        pages=pages,
        pages_needed=case.needed[layout],
        distinct_tokens=pages * size * layout.owner_groups * layout.position_shares,
        fits=case.lacks(layout) == 0,
        lacks_bytes=case.lacks(layout),
        temporary_bytes={
            step: max(f.temporaries for f in (*of[step].values(), *_ends(case, facts, step))) for step in STEPS
        },
        step_ms={step: 1e3 * sum(layer_seconds(case, layout, step)) for step in STEPS},
        collectives={
            step: {kind: [_told(c) for c in of[step][kind].schedule.collectives] for kind in case.compiled_kinds}
            for step in STEPS
        },
    )


def _ends(case: Case, facts: Mapping[Key, Facts], step: str) -> list[Facts]:
    """Embedding and head, compiled in the first layout only."""
    bucket = case.buckets[case.layouts[0]][step]
    ends = ("embed", "head")
    return [f for k, f in facts.items() if isinstance(k, StepKey) and k.part in ends and k.bucket == bucket]


def _told(scheduled: Scheduled) -> dict[str, Any]:
    collective = scheduled.collective
    return {"kind": collective.kind, "bytes": collective.bytes_received, "async": scheduled.asynchronous}


def _switch(case: Case, facts: Mapping[Key, Facts], src: Layout, dst: Layout) -> SwitchReport:
    plan, route = case.switches[src, dst]
    planned = plan.weights.bytes_per_rank + max(plan.kv.bytes_received(src.size))
    mine = {k: f for k, f in facts.items() if isinstance(k, SwitchKey) and k.route == route}
    schedules = [f.schedule for f in mine.values()]
    compiled = max((s.transfer_bytes for s in schedules), default=0)
    beside = [f.schedule for k, f in mine.items() if k.kind is not None]
    shares = [s.overlapped_share for s in beside if s.overlapped_share is not None]
    computing = [
        sum(c.collective.bytes_received * len(c.beside) for c in s.transfers) / s.transfer_bytes / len(s.compute)
        for s in beside
        if s.transfer_bytes
    ]
    peak, bound = _memory(case, facts, src, dst, mine)
    messages = max((len(s.transfers) for s in schedules), default=0)
    moving = [transfer_seconds(compiled, messages, case.hardware)] * case.model.num_layers
    computes = {step: layer_seconds(case, dst, step) for step in STEPS}
    return SwitchReport(
        src=str(src),
        dst=str(dst),
        primitives={"weights": plan.weights.primitive, "kv": plan.kv.primitive},
        planned_bytes=planned,
        compiled_bytes=compiled,
        padding_bytes=compiled - planned,
        engine_bytes=_route_bytes(case, case.engine_route(src, dst)),
        overlapped_share=min(shares, default=None),
        computing_share=min(computing, default=None),
        waits=any(c.needs for s in schedules for c in s.transfers),
        peak_bytes=peak,
        bound_bytes=bound,
        fits=peak + case.reserve <= case.budget,
        transfer_ms=1e3 * moving[0],
        exposed_ms=1e3 * exposed_seconds(moving, computes["decode"]),
        exposed_ms_prefill=1e3 * exposed_seconds(moving, computes["prefill"]),
        spread=_cheapest_spread(moving, layer_seconds(case, src, "decode")),
    )


def _route_bytes(case: Case, route: Route) -> int:
    """Bytes that every rank receives for one layer on a route, whatever a plan fills it with."""
    grain = route.grain * case.shapes.kv.bytes_per_token
    return route.weights.bytes_per_rank + route.sends * grain * (route.group - 1)


def _memory(
    case: Case, facts: Mapping[Key, Facts], src: Layout, dst: Layout, mine: Mapping[SwitchKey, Facts]
) -> tuple[int, int]:
    """Bytes of a rank at the peak of a switch, as compiled, and the bound of Eq. 5: the larger of the two states, one
    layer in transit, and what an ordinary step of the destination needs for temporaries.
    """
    size, layers = case.shapes.kv.page_size, case.model.num_layers
    before, after = (footprint(case.state, x, pages=case.pages(x), page_size=size) for x in (src, dst))
    hold = max(f.common + f.projections + f.kv for f in (before, after))
    growth = max(0, (after.projections + after.kv) // layers - (before.projections + before.kv) // layers)
    peak = bound = hold
    for key, found in mine.items():
        usual = 0
        if key.kind is not None and key.bucket is not None:
            step = StepKey(part=key.kind, layout=dst, bucket=key.bucket, pages=case.pages(dst))
            usual = facts[step].temporaries
        peak = max(peak, hold + found.grown - growth)
        bound = max(bound, hold + max(before.transit, after.transit) + usual)
    return peak, bound


def _cheapest_spread(moving: list[float], compute: list[float]) -> dict[str, float]:
    k, spread = cheapest_spread(moving, compute)
    return {"steps": spread.steps, "layers_per_step": k, "exposed_ms": 1e3 * spread.exposed_total}
