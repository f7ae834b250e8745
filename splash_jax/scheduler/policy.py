"""When to switch, and to which layout: `decide`, a pure function of a snapshot.

The rule is the work function algorithm for metrical task systems (Borodin, Linial, Saks 1992) on smoothed estimates.
For every other layout j it keeps a regret: by how many seconds the steps so far, ending in j, could have been done
faster than ending in the present layout, switches counted. It moves by (present step - step in j) with every step and
is kept within +-d, where d is half the cost of going there and back, plus a floor. At +d, staying has cost a whole way
there and back since j last looked as bad as it can: switch. Costs that differ by direction enter by their sum, so two
layouts cannot chase each other over a cheap direction.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from splash_jax.errors import PolicyError
from splash_jax.scheduler.snapshot import Choice, Decision, Idle, Memory, Quote, Run, Snapshot, Switch

LEAP = 1.5  # a load that has changed by so much is another load
CLEARLY = 4.0  # a predicted saving of so many times there and back is worth half the patience


def decide(snapshot: Snapshot) -> Decision:
    """What to do next. Pure: equal snapshots give equal decisions, on every process and in a replay.

    Raises `PolicyError` for a snapshot that contradicts itself.
    """
    s, policy = snapshot, snapshot.policy
    if not s.requests and not s.waiting:
        return Decision(action=Idle(), reason="idle", memory=s.memory)
    quotes = _checked(s)
    limit = policy.step_seconds
    best = {name: best_choice(quote.choices, limit) for name, quote in quotes.items() if not quote.refused}
    choices = {name: c for name, c in best.items() if policy.allowed is None or name in policy.allowed}
    memory, ahead = _remember(s, quotes, best)
    pick = _choose(s, quotes, choices, memory, ahead)
    if pick.layout == s.layout:
        choice = best.get(s.layout)
        return Decision(action=Run(choice.chunk if choice else 0), reason=pick.reason, memory=memory)
    action = Switch(pick.layout, pick.spread, choices[pick.layout].chunk)
    return Decision(action=action, reason=pick.reason, memory=_switched(s, memory, pick.layout))


class _Pick(NamedTuple):
    layout: str  # to be in
    reason: str
    spread: bool = False


def _checked(s: Snapshot) -> dict[str, Quote]:
    quotes = {quote.layout: quote for quote in s.quotes}
    if s.layout not in quotes or len(quotes) < len(s.quotes):
        raise PolicyError(
            f"step {s.step} is in layout {s.layout!r} and quotes are of {', '.join(q.layout for q in s.quotes)}; "
            f"quote each layout once, the present one too."
        )
    for quote in s.quotes:
        if not quote.refused and not quote.choices:
            raise PolicyError(f"{quote.layout} is neither refused nor has a step to choose at step {s.step}.")
        if not quote.cheapest >= 0 or not quote.back >= 0:
            raise PolicyError(
                f"a switch from {s.layout} to {quote.layout} takes {quote.cheapest} s and back {quote.back} s at step "
                f"{s.step}; both must be 0 or more."
            )
    return quotes


def best_choice(choices: tuple[Choice, ...], limit: float | None) -> Choice:
    """The largest chunk within the limit: prompts are work in any case. Without one, the shortest step."""
    if len(choices) == 1:
        return choices[0]
    longest = [c.seconds if c.longest is None else c.longest for c in choices]
    most = math.inf if limit is None else max(limit, min(longest))
    within = [c for c, seconds in zip(choices, longest, strict=True) if seconds <= most]
    return max(within, key=lambda c: (c.chunk, -c.seconds / c.tokens))


def _remember(s: Snapshot, quotes: dict[str, Quote], best: dict[str, Choice]) -> tuple[Memory, dict[str, float]]:
    """The memory brought up to this step, and by how much staying is slower than each layout, in seconds per step."""
    memory, present = s.memory, best.get(s.layout)
    if present is None:  # nothing to compare with: what the regrets were against is gone
        return Memory(switches=memory.switches, last_switch=memory.last_switch), {}
    leapt = _leapt(s, memory)
    kinds: Mapping[str, Mapping[str, float]] = {} if leapt else memory.costs
    before: Mapping[str, float] = kinds.get(s.kind, {})
    old = s.policy.old if s.steps == 1 else s.policy.old**s.steps
    raw = {}
    for name, choice in best.items():
        if not (choice.seconds > 0 and choice.tokens > 0):
            raise PolicyError(f"{name} is quoted {choice.seconds} s for {choice.tokens} tokens at step {s.step}.")
        raw[name] = math.log(choice.seconds / choice.tokens)
    now = raw[s.layout]
    smooth = old * before.get(s.layout, now) + (1 - old) * now
    costs = {s.layout: smooth}
    ahead, regrets, stale = {}, {}, memory.layout != s.layout
    for name, cost in raw.items():
        if name == s.layout:
            continue
        # a layout that was refused before starts from where it stands beside the present one
        past = before.get(name)
        costs[name] = smooth + cost - now if past is None else old * past + (1 - old) * cost
        ahead[name] = present.seconds * (1 - math.exp(costs[name] - smooth))
        far = _half_way(s, quotes[name], present.seconds)
        regret = -far if stale else memory.regrets.get(name, -far)
        regrets[name] = min(max(regret, -far), far) + s.steps * ahead[name]
    remembered = Memory(
        layout=s.layout, costs={**kinds, s.kind: costs},
        load=(s.requests, s.tokens) if leapt or not before else memory.load, regrets=regrets, switches=memory.switches,
        last_switch=memory.last_switch,
    )  # fmt: skip
    return remembered, ahead


def _leapt(s: Snapshot, memory: Memory) -> bool:
    """Whether the load is another than that which costs were smoothed over: what was true there says nothing here."""
    requests, tokens = memory.load
    return not (
        requests <= LEAP * s.requests and s.requests <= LEAP * requests
        and tokens <= LEAP * s.tokens and s.tokens <= LEAP * tokens
    )  # fmt: skip


def _half_way(s: Snapshot, quote: Quote, step: float) -> float:
    """d of the module's docstring: half of there and back, scaled by patience, and the floor."""
    return s.policy.patience * (quote.cheapest + quote.back) / 2 + s.policy.floor * step


def _choose(
    s: Snapshot, quotes: dict[str, Quote], choices: dict[str, Choice], memory: Memory, ahead: dict[str, float]
) -> _Pick:
    """The layout to be in, and why."""
    policy, here = s.policy, s.layout
    if policy.pin is not None:
        if policy.pin == here:
            return _Pick(here, "pinned")
        if policy.pin in choices:
            return _Pick(policy.pin, "pinned", _spread(quotes[policy.pin], 0.0))
        return _Pick(here, "pin refused")
    if here not in choices:
        if not choices:
            return _Pick(here, "nothing else fits")
        reason = "refused" if quotes[here].refused else "not allowed"
        target = min(choices, key=lambda name: (choices[name].seconds / choices[name].tokens, name))
        return _Pick(target, reason, _spread(quotes[target], 0.0))
    if s.distrust or policy.rule == "stay":
        return _Pick(here, "distrust" if s.distrust else "stays")
    if policy.rule == "margin":
        target = min(choices, key=lambda name: (choices[name].seconds / choices[name].tokens, name != here, name))
        leads = choices[target].seconds * choices[here].tokens < (1 - policy.margin) * (
            choices[here].seconds * choices[target].tokens
        )
        reason = "margin"
    else:
        target, reason = _most_regretted(s, quotes, choices, memory, ahead)
        leads = target != here
    if not leads:
        return _Pick(here, "stays" if reason == "margin" else reason)
    if memory.last_switch is not None and s.step - memory.last_switch < policy.dwell_steps:
        return _Pick(here, "dwells")
    if sum(s.time - t < policy.window_seconds for t in memory.switches) >= policy.max_switches:
        return _Pick(here, "too many switches")
    return _Pick(target, reason, _spread(quotes[target], ahead[target]))


def _most_regretted(
    s: Snapshot, quotes: dict[str, Quote], choices: dict[str, Choice], memory: Memory, ahead: dict[str, float]
) -> tuple[str, str]:
    """The layout whose regret exceeds what it takes by most; the present one where none does."""
    step, found, most, reason = choices[s.layout].seconds, s.layout, 0.0, "stays"
    for name, regret in memory.regrets.items():
        if name not in choices or ahead[name] <= 0:
            continue
        quote = quotes[name]
        far = _half_way(s, quote, step)
        needed = far
        if s.lasts is not None:
            saved, both = ahead[name] * s.lasts, quote.cheapest + quote.back
            if saved > CLEARLY * both:
                needed = 0.0
        if s.at_most is not None and ahead[name] * s.at_most <= quote.cheapest:
            reason = "too short" if found == s.layout and regret >= needed else reason
            continue
        excess = regret - needed
        if excess >= 0 and (found == s.layout or excess > most):
            found, most, reason = name, excess, "regret"
    return found, reason


def _spread_cost(quote: Quote, ahead: float) -> float:
    """A spread switch runs in the destination by half, on average, while it lasts."""
    assert quote.there_spread is not None
    return quote.there_spread + ahead * quote.spread_steps / 2


def _spread(quote: Quote, ahead: float) -> bool:
    if quote.there is None or quote.there_spread is None:
        return quote.there is None
    return _spread_cost(quote, ahead) < quote.there


def _switched(s: Snapshot, memory: Memory, target: str) -> Memory:
    """Regrets against the new layout; a switch that is then refused shows as another layout than remembered."""
    base = memory.regrets.get(target, 0.0)
    regrets = {name: regret - base for name, regret in memory.regrets.items() if name != target}
    if memory.layout == s.layout:
        regrets[s.layout] = -base
    recent = tuple(t for t in memory.switches if s.time - t < s.policy.window_seconds)
    return Memory(
        layout=target,
        costs=memory.costs,
        load=memory.load,
        regrets=regrets,
        switches=(*recent, s.time),
        last_switch=s.step,
    )
