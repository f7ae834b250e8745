"""The 144 settings that switching rules are compared in: loads, true step costs, estimates and switch costs as arrays.

A setting is a surface, a workload, a regime of switch costs and a quality of estimates. Axes: S seeds, N steps,
L layouts (in the order of `LAYOUTS`). Times in seconds.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from splash_jax.simulate.surface import SURFACES

LAYOUTS = ("tp", "cp", "dp", "dop")
STEPS = 1600
ESTIMATES = {"exact": (0.0, 0.0), "3%+3%": (0.03, 0.03), "10%+5%": (0.10, 0.05)}  # noise per step, smooth bias
WORKLOADS = ("rollout", "rollout_tail", "long_rollout", "multi_rollout", "hover", "bursty")
SWITCHES = ("splash", "blocking", "decode", "restart")
STEP_SECONDS = {"splash": 2.0, "blocking": 2.0, "decode": 0.035, "restart": 2.0}
SWITCH_TOKENS = 16 * 262_144  # live tokens at which Table 1 and the primitives' costs were measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs in every step: requests and their mean live context in tokens. Both [S, N]."""

    batch: np.ndarray
    context: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        return self.batch * self.context


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting, ready to run."""

    name: tuple[str, str, str, str]  # surface, workload, switch, estimate
    load: Load
    true: np.ndarray  # [S, N, L] seconds of a step
    seen: np.ndarray  # [S, N, L] seconds as a rule estimates them
    switch: np.ndarray  # [S, N, L, L] seconds of a switch from -> to before step n
    step_seconds: float  # mean over layouts


def make_load(workload: str, rng: np.random.Generator, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Batch and mean live context of every step of one seed, both [N]."""
    if workload == "rollout":
        return _rollout(rng, steps, _short_prompts(rng), _lengths(rng, 24_000, 1.1, 500_000), by_work=True)
    if workload == "rollout_tail":
        return _rollout(rng, steps, _short_prompts(rng), _lengths(rng, 24_000, 1.1, 500_000), by_work=False)
    if workload == "long_rollout":
        prompts = rng.choice([49_152, 65_536, 98_304], 256)
        return _rollout(rng, steps, prompts, _lengths(rng, 16_000, 1.0, 120_000), by_work=True)
    if workload == "multi_rollout":
        parts = [make_load("rollout", rng, steps // 4) for _ in range(4)]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    if workload == "hover":
        centre, batch = rng.choice([1.48e6, 5.93e6]), rng.choice([16, 32, 64])
        log_tokens = np.empty(steps)
        away = 0.0
        for i in range(steps):
            away = 0.97 * away + rng.normal(0, 0.12)
            log_tokens[i] = np.log(centre) + away
        return np.full(steps, float(batch)), np.exp(log_tokens) / batch
    if workload == "bursty":
        batch, context = np.empty(steps), np.empty(steps)
        at = 0
        while at < steps:
            until = at + int(rng.integers(5, 61))
            batch[at:until], context[at:until] = 2 ** rng.uniform(2, 7.5), 2 ** rng.uniform(13, 18)
            at = until
        return batch, context
    raise ValueError(f"workload {workload!r} is none of {', '.join(WORKLOADS)}.")


def _short_prompts(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(1024, 8193, 256)


def _lengths(rng: np.random.Generator, median: float, sigma: float, most: int) -> np.ndarray:
    return np.clip(rng.lognormal(np.log(median), sigma, 256), 1, most).astype(int)


def _rollout(rng, steps, prompts, lengths, *, by_work):
    """A batch that drains: every request alive until its response is as long as drawn, `steps` looks at it."""
    order = np.argsort(lengths)
    lengths, prompts = lengths[order], prompts[order].astype(float)
    alive_after = len(lengths) - np.arange(len(lengths) + 1)
    if by_work:
        edges = np.concatenate([[0], lengths])
        work = np.concatenate([[0], np.cumsum(np.diff(edges) * alive_after[:-1])])
        position = np.interp((np.arange(steps) + 0.5) / steps * work[-1], work, edges)
    else:
        position = (np.arange(steps) + 0.5) / steps * lengths[-1]
    first = np.searchsorted(lengths, position, side="right").clip(max=len(lengths) - 1)
    alive = len(lengths) - first
    prompt_sum = np.cumsum(prompts[::-1])[::-1][first]
    return alive.astype(float), prompt_sum / alive + position


def switch_parts(folder: Path, switch: str) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a switch that are there at any load, and those at `SWITCH_TOKENS`: both [from, to]."""
    weights, kv = np.zeros((4, 4)), np.zeros((4, 4))
    if switch == "restart":
        return 30.0 * (1 - np.eye(4)), kv
    index = {layout.upper(): i for i, layout in enumerate(LAYOUTS)}
    if switch == "decode":
        with (folder / "primitive_costs.csv").open(encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                if row["device"] == "B200":
                    at = index[row["src"]], index[row["dst"]]
                    weights[at] = float(row["weights_ms_per_layer"]) / 1e3
                    kv[at] = float(row["kv_ms_per_layer"]) / 1e3
        return weights, kv
    column = {"splash": "dT_splash_p50", "blocking": "dT_block_p50"}[switch]
    whole = np.zeros((4, 4))
    with (folder / "table1_b200_switch.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            whole[index[row["src"]], index[row["dst"]]] = float(row[column]) / 1e3
    into_everything = index["TP"]
    for (src, dst), seconds in np.ndenumerate(whole):
        names = {LAYOUTS[src].upper(), LAYOUTS[dst].upper()}
        moves_kv = dst == into_everything or ("CP" in names and "TP" not in names)
        if not moves_kv:
            weights[src, dst] = seconds
        else:
            if (src, dst) == (index["DOP"], index["CP"]):  # the one direction that moves both
                weights[src, dst] = whole[index["DOP"], index["DP"]]
            kv[src, dst] = seconds - weights[src, dst]
    return weights, kv


def switch_seconds(switch: str, weights: np.ndarray, kv: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Seconds that a switch adds at so many live tokens [..]: [.., from, to]."""
    moving = weights + kv * (tokens / SWITCH_TOKENS)[..., None, None]
    if switch != "decode":
        return moving
    layers = 78
    return moving + (layers - 1) * np.maximum(0, moving - STEP_SECONDS[switch] / layers)


def bias(rng: np.random.Generator, load_xy: np.ndarray, size: float) -> np.ndarray:
    """A smooth random error in logs, of standard deviation `size`: one wave over (log s, log B) per layout. [N, L]"""
    angle, phase = rng.uniform(0, 2 * np.pi, (2, len(LAYOUTS)))
    length = rng.uniform(3, 6, len(LAYOUTS))  # e-folds of load per wave
    along = load_xy @ np.stack([np.cos(angle), np.sin(angle)])
    return size * np.sqrt(2) * np.sin(2 * np.pi * along / length + phase)


def make_loads(workload: str, seeds: int) -> Load:
    """The loads of every seed, the same for every surface, regime and rule."""
    made = [make_load(workload, np.random.default_rng([seed, WORKLOADS.index(workload)])) for seed in range(seeds)]
    return Load(batch=np.array([batch for batch, _ in made]), context=np.array([context for _, context in made]))


def make_setting(tables: Path, name: tuple[str, str, str, str], load: Load, relative: np.ndarray) -> Setting:
    """Everything a rule meets in one setting; `relative` are the surface's costs at the load [S, N, L]."""
    over, workload, switch, estimate = name
    noise, smooth = ESTIMATES[estimate]
    step = STEP_SECONDS[switch]
    errors = []
    for seed, (batch, context) in enumerate(zip(load.batch, load.context, strict=True)):
        rng = np.random.default_rng([seed, WORKLOADS.index(workload), SURFACES.index(over), 7])
        error = rng.normal(0, 1, (len(batch), len(LAYOUTS))) * noise
        errors.append(error + bias(rng, np.stack([np.log(context), np.log(batch)], 1), smooth))
    true = relative * step
    weights, kv = switch_parts(tables, switch)
    return Setting(
        name=name, load=load, true=true, seen=true * np.exp(np.array(errors)),
        switch=switch_seconds(switch, weights, kv, load.tokens), step_seconds=step,
    )  # fmt: skip
