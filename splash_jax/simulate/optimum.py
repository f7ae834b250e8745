"""The best that could have been done with the loads of a run, known in hindsight."""

import numpy as np

from splash_jax.cost import Room
from splash_jax.simulate.group import Deployment, Outcome

BLOCKS = 1000  # times at which it may switch: as many stretches as there are, or this many, evenly


def hindsight(deployment: Deployment, outcome: Outcome) -> tuple[float, int, float]:
    """Least seconds for the stretches of a run: dynamic programming over layouts with the same prices.

    Returns the seconds, the switches it makes and their seconds. It is no bound where another layout would have
    admitted more: its loads are those of the run. A layout that could not hold a block's first load is left out there.
    """
    loads = outcome.loads
    if not loads:
        return 0.0, 0, 0.0
    room, layouts = Room(deployment.kv, deployment.pages), deployment.layouts
    at = np.unique(np.linspace(0, len(loads) - 1, min(BLOCKS, len(loads))).astype(int))
    starts = [loads[i][0] for i in at]
    ends = [*starts[1:], len(outcome.stretches)]
    best = np.zeros(len(layouts))
    count, moving = np.zeros(len(layouts), int), np.zeros(len(layouts))
    for block, (start, end) in enumerate(zip(starts, ends, strict=True)):
        load = loads[at[block]][1]
        cost = sum(np.array(s.costs) * s.steps for s in outcome.stretches[start:end])
        lacks = room.lacks(load)
        cost = np.where([lacks[one] > 0 for one in layouts], np.inf, cost)
        if block:
            switch = np.zeros((len(layouts), len(layouts)))
            for i, src in enumerate(layouts):
                quotes = deployment.costs.switch_seconds(src, load)
                switch[i] = [0.0 if dst == src else quotes[dst].cheapest for dst in layouts]
            came = (best[:, None] + switch).argmin(0)
            here = np.arange(len(layouts))
            best = best[came] + switch[came, here]
            count, moving = count[came] + (came != here), moving[came] + switch[came, here]
        best = best + cost
    end = int(best.argmin())
    if outcome.busy < best[end]:  # it switched between blocks, or while nothing ran and a switch was free
        return outcome.busy, len(outcome.switches), sum(seconds for *_, seconds in outcome.switches)
    return float(best[end]), int(count[end]), float(moving[end])
