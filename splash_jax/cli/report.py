"""What the demo says after a run: the cost of each switch, the comparison with a fixed layout, some of the text."""

from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from splash_jax.cli.values import in_bytes, print_table

if TYPE_CHECKING:
    from splash_jax import LLM, RequestOutput
    from splash_jax.cli.scene import Scene
    from splash_jax.engine import StepRecord
    from splash_jax.ownership import SwitchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchCost:
    """One switch of a run. Bytes are what the busiest rank receives, all layers; times are seconds."""

    step: int  # of the run
    src: str
    dst: str
    requests: int  # running while it happened
    weights: str  # primitive
    kv: str  # primitive
    planned_bytes: int  # useful ones, by the plan
    moved_bytes: int  # with padding, read from the compiled programs
    switch_step: float
    same_bucket_step: float | None  # median of the destination's steps of the same shape, none of them a switch
    same_bucket_range: tuple[float, float] | None  # the fastest and the slowest of them
    same_bucket_steps: int  # how many there were


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Two runs of the same requests, compared."""

    requests: int
    tokens: int
    equal: int  # tokens whose ids are equal
    largest: float  # difference of log-probabilities, over the tokens before a request's first unequal one


def switch_costs(llm: "LLM", records: "list[StepRecord]", warm: "list[StepRecord]") -> list[SwitchCost]:
    """The cost of every switch among the records of a run."""
    costs = []
    for i, record in enumerate(records):
        if record.switch is None:
            continue
        same = [
            r.seconds
            for r in [*warm, *records]
            if r.switch is None and (r.layout, r.bucket) == (record.layout, record.bucket)
        ]
        costs.append(
            SwitchCost(
                step=i,
                src=str(record.switch.before.layout),
                dst=record.layout,
                requests=len(record.switch.before.requests),
                weights=record.switch.weights.primitive,
                kv=record.switch.kv.primitive,
                planned_bytes=max(record.switch.bytes_per_rank()),
                moved_bytes=moved_bytes(llm, record.switch),
                switch_step=record.seconds,
                same_bucket_step=median(same) if same else None,
                same_bucket_range=(min(same), max(same)) if same else None,
                same_bucket_steps=len(same),
            )
        )
    return costs


def moved_bytes(llm: "LLM", plan: "SwitchPlan") -> int:
    """Bytes that a rank receives in the collectives of a switch's compiled programs, all layers, padding included."""
    from splash_jax.runtime import SwitchKey, make_maps
    from splash_jax.runtime.collectives import collective_bytes

    route = llm.engine.blueprint.route(plan.before.layout, plan.after.layout)
    if route.moves_nothing:
        return 0
    keys = [SwitchKey(route=route)]
    keys += [SwitchKey(route=route, more=True)] * (len(make_maps(route, plan.kv)) - 1)
    programs = [llm.engine.programs.get(key) for key in keys]
    return plan.num_layers * sum(c.bytes_received for program in programs for c in collective_bytes(program))


def compare(ours: "list[RequestOutput]", theirs: "list[RequestOutput]") -> Proof:
    """Token ids and log-probabilities of two runs of the same requests."""
    equal, largest = 0, 0.0
    for a, b in zip(ours, theirs, strict=True):
        x, y = a.outputs[0], b.outputs[0]
        pairs = list(zip(x.token_ids, y.token_ids, strict=True))
        equal += sum(i == j for i, j in pairs)
        until = next((k for k, (i, j) in enumerate(pairs) if i != j), len(pairs))
        for k in range(until):
            token = x.token_ids[k]
            if x.logprobs and y.logprobs:
                largest = max(largest, abs(x.logprobs[k][token].logprob - y.logprobs[k][token].logprob))
    tokens = sum(len(a.outputs[0].token_ids) for a in ours)
    return Proof(requests=len(ours), tokens=tokens, equal=equal, largest=largest)


def print_decisions(console: Console, llm: "LLM", steps: int) -> None:
    """What the policy decided in the last `steps` steps: every switch, and what it predicted of each layout then."""
    from splash_jax.scheduler import Switch, explain

    pilot = llm.engine.pilot
    if pilot is None:
        return
    asked = list(pilot.decisions)[-steps:]
    names = [quote.layout for quote in asked[-1][0].quotes] if asked else []
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "switch", "running", "tokens", "why", *names):
        table.add_column(name, justify="left" if name in ("switch", "why") else "right")
    for snapshot, decision in asked:
        if isinstance(decision.action, Switch):
            seconds = [quote["seconds"] for quote in explain(snapshot, decision).values()]
            predicted = ["no room" if one is None else f"{one * 1e3:.0f} ms" for one in seconds]
            table.add_row(
                str(snapshot.step - asked[0][0].step), f"{snapshot.layout} -> {decision.action.layout}",
                str(snapshot.requests), str(snapshot.tokens), decision.reason, *predicted,
            )  # fmt: skip
    console.print("\nWhat the policy decided, and the step it predicted for each layout at that moment\n")
    if table.row_count:
        print_table(console, table)
    else:
        console.print(f"  it stayed in {llm.layout}: nothing else was predicted to be worth a switch.")
    console.print(f"  by the profile of {pilot.hardware.name}, corrected by the steps measured so far.")
    if why := pilot.observer.residuals.distrust():
        console.print(f"  The profile is not obeyed: {why}")


def print_switches(console: Console, costs: list[SwitchCost], place: str) -> None:
    """What each switch did, in bytes, then in time."""
    table = Table(
        title="What the switches moved (received by the busiest rank, all layers)",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for name in ("step", "switch", "running", "weights", "KV", "planned", "moved"):
        table.add_column(name, justify="left" if name in ("switch", "weights", "KV") else "right")
    for c in costs:
        sizes = in_bytes(c.planned_bytes), in_bytes(c.moved_bytes)
        table.add_row(str(c.step), f"{c.src} -> {c.dst}", str(c.requests), c.weights, c.kv, *sizes)
    console.print()
    print_table(console, table)
    for note in (
        "planned: useful bytes, by the plan. moved: with padding, read from the compiled program.",
        "discard: a rank already holds all it needs. keep: the projections stay as they are.",
    ):
        console.print(f"  {note}", soft_wrap=True)
    table = Table(title="What the switches cost", title_justify="left", box=SIMPLE_HEAD)
    for name in ("step", "switch", "switch step", "same-bucket step", "added"):
        table.add_column(name, justify="left" if name == "switch" else "right")
    for c in costs:
        usual, added = "-", "-"
        if c.same_bucket_step is not None and c.same_bucket_range is not None:
            low, high = (t * 1e3 for t in c.same_bucket_range)
            usual = f"{c.same_bucket_step * 1e3:.0f} ms ({low:.0f} to {high:.0f})"
            added = f"{(c.switch_step - c.same_bucket_step) * 1e3:+.0f} ms"
        table.add_row(str(c.step), f"{c.src} -> {c.dst}", f"{c.switch_step * 1e3:.0f} ms", usual, added)
    console.print()
    print_table(console, table)
    notes = (
        f"{place}.",
        "same-bucket step: median (fastest to slowest) of the destination's other steps of that shape, warm-up too.",
        "Each switch is timed once, after a warm-up: what it adds is known no better than those steps vary.",
    )
    for note in notes:
        console.print(f"  {note}", soft_wrap=True)


def print_proof(console: Console, proof: Proof, fixed: str) -> None:
    """The comparison, in one sentence each."""
    verdict = "all equal" if proof.equal == proof.tokens else f"{proof.tokens - proof.equal} DIFFER"
    console.print()
    console.print(f"Token ids, live run against fixed {fixed}: {proof.equal:,} of {proof.tokens:,} equal ({verdict}).")
    console.print(f"Largest difference of a token's log-probability: {proof.largest:.1e} (float32).")


def print_texts(console: Console, llm: "LLM", scene: "Scene", outputs: "list[RequestOutput]") -> None:
    """The longest answer to a question and the longest continuation, up to their first end of text."""
    tokenizer, ends = llm.engine.tokenizer, llm.engine.model.eos_token_ids
    half = len(outputs) // 2
    texts = [list(takewhile(lambda token: token not in ends, o.outputs[0].token_ids)) for o in outputs]
    console.print("\nWritten across the switches by the model (a small one makes things up):")
    for group in (range(half), range(half, len(outputs))):
        best = max(group, key=lambda i: len(texts[i]))
        text = tokenizer.decode(texts[best]) if tokenizer else ""
        cut = " ..." if len(texts[best]) == len(outputs[best].outputs[0].token_ids) else ""
        console.print(f"  {scene.prompts[best]} | {' '.join(text.split())}{cut}", markup=False, soft_wrap=True)
