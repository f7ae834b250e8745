"""Requests that arrive: drawn, or read from public traces. Lengths in tokens, times in seconds."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from splash_jax.errors import ConfigError
from splash_jax.fields import csv_rows, stamp, tokens
from splash_jax.fields import number as _number
from splash_jax.files import open_text

T = TypeVar("T")

MOST_REQUESTS = 10**7  # that are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests in order of arrival. All arrays [N].

    `after[i]` is the request whose end request i follows by `arrival[i]` seconds, as the next turn of a session does;
    -1: it arrives at `arrival[i]`.
    """

    arrival: np.ndarray  # f64
    prompt: np.ndarray  # i64, at least 1
    output: np.ndarray  # i64, at least 1: tokens it will draw, which no policy sees
    limit: np.ndarray  # i64: its max_tokens, which the scheduler sees
    after: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        n = len(self.arrival)
        if not len(self.after):
            object.__setattr__(self, "after", np.full(n, -1, np.int64))
        if any(len(getattr(self, name)) != n for name in ("prompt", "output", "limit", "after")):
            raise ConfigError(f"traffic of {n} arrivals has arrays of other lengths.")
        if n and not (self.prompt.min() >= 1 and self.output.min() >= 1 and (self.output <= self.limit).all()):
            raise ConfigError("traffic needs prompts and outputs of at least 1 token, and outputs within their limits.")
        if n and not (np.isfinite(self.arrival).all() and self.arrival.min() >= 0):
            raise ConfigError("traffic needs arrivals at finite times of 0 or later.")
        if (self.after >= np.arange(n)).any():
            raise ConfigError("a request may only follow one that stands before it.")

    def __len__(self) -> int:
        return len(self.arrival)

    def part(self, index: int, of: int) -> "Traffic":
        """Every `of`-th session, from `index` on: what one group of a fleet serves."""
        session = np.arange(len(self))
        for i in np.flatnonzero(self.after >= 0):
            session[i] = session[self.after[i]]
        first = np.flatnonzero(self.after < 0)
        number = np.zeros(len(self), np.int64)
        number[first] = np.arange(len(first))
        mine = np.flatnonzero(number[session] % of == index)
        place = np.full(len(self) + 1, -1, np.int64)
        place[mine] = np.arange(len(mine))
        return Traffic(
            arrival=self.arrival[mine], prompt=self.prompt[mine], output=self.output[mine], limit=self.limit[mine],
            after=place[self.after[mine]],
        )  # fmt: skip

    def shortened(self, longest: int) -> "Traffic":
        """With prompts and outputs cut so that none is longer than `longest` tokens in all."""
        prompt = np.minimum(self.prompt, longest - 1)
        output = np.minimum(self.output, longest - prompt)
        limit = np.minimum(self.limit, longest - prompt)
        return Traffic(arrival=self.arrival, prompt=prompt, output=output, limit=limit, after=self.after)


def rollout(rng: np.random.Generator, requests: int, *, median: float = 24_000, sigma: float = 1.1,
            most: int = 500_000, prompts: tuple[int, int] = (1024, 8192), rounds: int = 1) -> Traffic:  # fmt: skip
    """An RL rollout: all requests at once, heavy-tailed lengths, and nothing more until the last has ended.

    `rounds` follow each other: the next begins with the end of the longest. The last has fewer requests where they do
    not divide.
    """
    _check(requests, rounds=rounds)
    per = -(-requests // rounds)
    output = np.clip(rng.lognormal(np.log(median), sigma, per * rounds), 1, most).astype(np.int64)
    prompt = rng.integers(prompts[0], prompts[1] + 1, per * rounds)
    after = np.full(per * rounds, -1, np.int64)
    for turn in range(1, rounds):
        before = slice((turn - 1) * per, turn * per)
        after[turn * per : (turn + 1) * per] = before.start + int((prompt + output)[before].argmax())
    return Traffic(
        arrival=np.zeros(requests), prompt=prompt[:requests], output=output[:requests],
        limit=np.full(requests, most, np.int64), after=after[:requests],
    )  # fmt: skip


def alternating(rng: np.random.Generator, requests: int, *, period: float = 60.0, rate: float = 8.0) -> Traffic:
    """Chat and documents by turns: half a period of many short requests, half a period of few long ones."""
    _check(requests)
    if not 1 <= period * rate < np.inf:
        raise ConfigError(f"{rate} requests a second make {period * rate} in a period of {period} s; give at least 1.")
    found: list[tuple[float, int, int]] = []
    start, short = 0.0, True
    while len(found) < requests:
        gap = 1 / rate if short else 8 / rate
        times = start + np.cumsum(rng.exponential(gap, int(period / gap)))
        for time in times[times < start + period / 2]:
            low, high = (128, 2048) if short else (32_768, 131_072)
            found.append((float(time), int(rng.integers(low, high)), int(rng.lognormal(5.5, 0.8)) + 1))
        start, short = start + period / 2, not short
    arrival, prompt, output = (np.array(column) for column in zip(*found[:requests], strict=True))
    return Traffic(arrival=arrival, prompt=prompt, output=output, limit=np.maximum(output, 4096))


def agents(rng: np.random.Generator, requests: int, *, turns: int = 12, rate: float = 0.5) -> Traffic:
    """Sessions whose prompt is all that was said before: it grows from turn to turn, with pauses for tools."""
    _check(requests, turns=turns)
    if not 0 < rate < np.inf:
        raise ConfigError(f"sessions begin at a rate above 0 a second, not {rate}.")
    sessions = -(-requests // turns)
    starts = np.cumsum(rng.exponential(1 / rate, sessions))
    arrival, prompt, output, after = (np.zeros((turns, sessions), kind) for kind in (float, int, int, int))
    spoken = rng.integers(2_000, 12_000, sessions)
    for turn in range(turns):
        arrival[turn] = starts if turn == 0 else rng.exponential(2.0, sessions)
        prompt[turn] = spoken
        output[turn] = rng.lognormal(5.5, 1.0, sessions).astype(int) + 1
        after[turn] = -1 if turn == 0 else np.arange(sessions) + (turn - 1) * sessions
        spoken = spoken + output[turn] + rng.integers(100, 6_000, sessions)
    flat = [column.ravel()[:requests] for column in (arrival, prompt, output, after)]
    limit = np.maximum(flat[2], 8192)
    return Traffic(arrival=flat[0], prompt=flat[1], output=flat[2], limit=limit, after=flat[3])


def azure(path: Path, requests: int | None = None, speed: float = 1.0) -> Traffic:
    """A trace of Azure/AzurePublicDataset: a CSV with TIMESTAMP, ContextTokens and GeneratedTokens.

    Times that name no zone are UTC. A request of 0 tokens has 1 here, in this trace and in every other.
    """
    times, prompt, output = [], [], []
    start: int | None = None
    for number, row in csv_rows(path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        with _at(path, number):
            whole, fraction = _read(stamp, row, "TIMESTAMP")
            start = whole if start is None else start
            times.append(whole - start + fraction)  # from the first on: a float has few digits left for 1.7e9 seconds
            prompt.append(_read(tokens, row, "ContextTokens"))
            output.append(_read(tokens, row, "GeneratedTokens"))
        if requests is not None and len(times) == requests:
            break
    return _trace(path, times, prompt, output, speed)


def mooncake(path: Path, requests: int | None = None, speed: float = 1.0) -> Traffic:
    """A trace of kvcache-ai/Mooncake: lines of JSON with timestamp (ms), input_length and output_length.

    Prefixes that requests share (hash_ids) are not shared here: every prompt is computed whole.
    """
    times, prompt, output = [], [], []
    with open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            with _at(path, number):
                row = json.loads(line)
                times.append(_read(_number, row, "timestamp") / 1e3)
                prompt.append(_read(tokens, row, "input_length"))
                output.append(_read(tokens, row, "output_length"))
            if requests is not None and len(times) == requests:
                break
    return _trace(path, times, prompt, output, speed)


def servegen(path: Path, rng: np.random.Generator, requests: int, *, rate: float | None = None) -> Traffic:
    """Lengths drawn from binned distributions of alibaba/ServeGen: kind (input or output), tokens_up_to, probability.

    `rate` requests per second arrive at random; None: all at once, as a rollout.
    """
    _check(requests)
    bins: dict[str, list[tuple[float, float]]] = {"input": [(0.0, 0.0)], "output": [(0.0, 0.0)]}
    for number, row in csv_rows(path, ("kind", "tokens_up_to", "probability")):
        with _at(path, number):
            kind = _read(str.strip, row, "kind")
            if kind not in bins:
                raise ValueError(f"kind is {kind!r}; write input or output.")
            up_to, part = float(_read(tokens, row, "tokens_up_to")), _read(_number, row, "probability")
            if up_to <= bins[kind][-1][0]:
                raise ValueError(f"tokens_up_to is {up_to:.0f}, and {bins[kind][-1][0]:.0f} before it; sort the bins.")
            if part < 0:
                raise ValueError(f"probability is {part}; write 0 or more.")
            bins[kind].append((up_to, part))
    drawn = []
    for kind, found in bins.items():
        up_to, part = (np.array(column) for column in zip(*found, strict=True))
        if not part.sum() > 0:
            raise ConfigError(f"{path} has no lengths of kind {kind}; give it bins whose probabilities add up.")
        share = np.cumsum(part) / part.sum()
        drawn.append(np.interp(rng.random(requests), share, up_to).astype(np.int64) + 1)
    prompt, output = drawn
    arrival = np.zeros(requests) if rate is None else np.cumsum(rng.exponential(1 / rate, requests))
    return Traffic(arrival=arrival, prompt=prompt, output=output, limit=np.full(requests, output.max()))


def _check(requests: int, **counts: int) -> None:
    for name, count in {"requests": requests, **counts}.items():
        if not 1 <= count <= MOST_REQUESTS:
            raise ConfigError(f"{name} must be 1 to {MOST_REQUESTS}, got {count}.")


def _trace(path: Path, times: Sequence[float], prompt: Sequence[int], output: Sequence[int], speed: float) -> Traffic:
    if not times:
        raise ConfigError(f"{path} has no requests.")
    if not 0 < speed < math.inf:
        raise ConfigError(f"speed is {speed}; a trace runs at a speed above 0, 2 is twice as fast.")
    order = np.argsort(np.array(times), kind="stable")
    arrival = (np.array(times)[order] - min(times)) / speed
    drawn = np.maximum(np.array(output, np.int64)[order], 1)
    limit = np.full(len(drawn), drawn.max())
    return Traffic(arrival=arrival, prompt=np.maximum(np.array(prompt, np.int64)[order], 1), output=drawn, limit=limit)


def _read(kind: Callable[[Any], T], row: Any, name: str) -> T:
    """A field of a row. Raises ValueError where the row has none such, or it is not of its kind."""
    if not isinstance(row, dict) or name not in row:
        raise ValueError(f"there is no {name}; every line has one.")
    try:
        return kind(row[name])
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


@contextmanager
def _at(path: Path, number: int) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError) as error:  # of JSON that is none, too
        raise ConfigError(f"{path}: line {number}: {error}") from error
