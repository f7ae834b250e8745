"""The policy at the wheel of an engine: before every step it says which layout the step runs in.

The engine asks `steer` for a decision and tells `expect` and `observe` what steps were to take and took, which corrects
the estimates. What the policy remembers is here; the decisions themselves are pure (`splash_jax.scheduler.decide`).
Nothing that goes wrong in here ends a request: it is told once, and the engine stays in its layout.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from splash_jax.configs import config_names
from splash_jax.cost import Hardware, Load, Room, ServedModel, StepModel, load_hardware
from splash_jax.engine.build import Blueprint
from splash_jax.engine.config import EngineConfig
from splash_jax.engine.platform import prepare_platform, start_devices
from splash_jax.errors import ConfigError
from splash_jax.kv import PagePool
from splash_jax.ownership import SwitchPlan
from splash_jax.runtime import SwitchMode
from splash_jax.scheduler import (
    Decision,
    Idle,
    Memory,
    ModelCosts,
    Observer,
    PolicyConfig,
    Request,
    Run,
    Schedule,
    Scheduler,
    Snapshot,
    Switch,
    chunk_sizes,
    decide,
    explain,
    log_line,
)

log = logging.getLogger("splash_jax")

KEPT = 4096  # decisions that `decisions` holds, the latest


class Expected(NamedTuple):
    """What the hardware profile says of a dispatched step."""

    layout: str
    kind: str
    seconds: float


class Pilot:
    """Decides for one engine. `policy` may be replaced at run time, to pin a layout or to allow fewer."""

    def __init__(self, blueprint: Blueprint, hardware: Hardware) -> None:
        config = blueprint.config
        self.hardware, self._spelled_out = hardware, config.spelled_out
        self.policy = config.policy
        self.decisions: deque[tuple[Snapshot, Decision]] = deque(maxlen=KEPT)
        self._costs = ModelCosts(
            step_model(blueprint, hardware), modes=config.switch_modes, spread_layers=config.spread_layers
        )
        largest = {layout: buckets[-1] for layout, buckets in blueprint.buckets.items()}
        rows = max(layout.owner_groups * bucket.tiles * bucket.tile for layout, bucket in largest.items())
        tile = next(iter(largest.values())).tile
        room = Room(blueprint.shapes.kv, blueprint.pages)
        self.observer = Observer(
            costs=self._costs, room=room, slots=config.max_num_seqs, chunks=chunk_sizes(rows, tile),
            directions=frozenset(blueprint.directions()),
        )  # fmt: skip
        self.chunk: int | None = None  # most prompt rows of a step, until another is decided on
        self._memory = Memory()
        self._log = None if config.decision_log is None else log_path(config.decision_log)
        if self._log is not None:
            self._log.write_text("", encoding="utf-8")

    @property
    def policy(self) -> PolicyConfig:
        """The rule and its bounds, as they were given."""
        return self._given

    @policy.setter
    def policy(self, policy: PolicyConfig) -> None:
        pin = None if policy.pin is None else self._spelled_out(policy.pin)
        allowed = None if policy.allowed is None else tuple(map(self._spelled_out, policy.allowed))
        self._given, self._policy = policy, replace(policy, pin=pin, allowed=allowed)  # as quotes name layouts
        self._warned = False

    def steer(self, scheduler: Scheduler, pool: PagePool, step: int) -> Decision:
        """The decision about step number `step`, which comes next. To stay, where none can be made."""
        decision = Decision(action=Run(0), reason="policy failed", memory=self._memory)
        with self.going_on():
            snapshot = self.observer.snapshot(
                scheduler, pool, step=step, time=time.monotonic(), policy=self._policy, memory=self._memory
            )
            decision = decide(snapshot)
            self._memory = decision.memory
            self.decisions.append((snapshot, decision))
            if not isinstance(decision.action, Idle) and decision.action.chunk:
                self.chunk = decision.action.chunk
            if isinstance(decision.action, Switch):
                log.info("switch %s -> %s: %s", pool.layout, decision.action.layout, explain(snapshot, decision))
            self._write(snapshot, decision)
        return decision

    def _write(self, snapshot: Snapshot, decision: Decision) -> None:
        if self._log is None:
            return
        try:
            with self._log.open("a", encoding="utf-8") as file:
                print(log_line(snapshot, decision), file=file)
        except OSError as error:
            log.warning("decisions are no longer written to %s: %s.", self._log, error.strerror)
            self._log = None

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Around what may fail without harm to any request: the first failure under a policy is told."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                log.warning("the policy failed, and the engine stays in its layout while it does: %r", error)
            self._warned = True

    def mode(self, switch: Switch) -> SwitchMode:
        """How a switch that the policy asks for is made: as it was quoted."""
        return SwitchMode.SPREAD if switch.spread else SwitchMode(self._costs.at_once)

    def told(self, future: "Future[SwitchPlan]") -> None:
        """What became of a switch that the policy asked for."""
        if not future.cancelled() and (refusal := future.exception()) is not None:
            log.warning("the policy's switch was not made: %s", refusal)

    def expect(self, schedule: Schedule, pool: PagePool) -> Expected | None:
        """What the profile says of a step, uncorrected; None for one without rows."""
        expected = None
        with self.going_on():
            if schedule.chunks:
                load = _load(schedule, pool)
                kind = "prefill" if (load.new_rows > 1).any() else "decode"
                expected = Expected(str(pool.layout), kind, self._costs.step_seconds(load)[pool.layout])
        return expected

    def observe(self, expected: Expected, seconds: float) -> None:
        """A step whose results were read, and what it took."""
        with self.going_on():
            self.observer.residuals = self.observer.residuals.observe(*expected, seconds)

    def finished(self, request: Request) -> None:
        """A request that drew its last token, or was cut off. One that draws none says nothing of lengths."""
        if request.score:
            return
        with self.going_on():
            length = request.finish_reason != "stop"
            self.observer.lifetimes = self.observer.lifetimes.finished(len(request.output_ids), length)


def _load(schedule: Schedule, pool: PagePool) -> Load:
    rows = np.array([chunk.rows for chunk in schedule.chunks], np.int64)
    context = np.array([chunk.start for chunk in schedule.chunks], np.int64) + rows
    return Load(context, rows, np.array([pool.home(chunk.request.name) for chunk in schedule.chunks], np.int64))


def step_model(blueprint: Blueprint, hardware: Hardware) -> StepModel:
    """The cost model of an engine's steps, padded to its buckets."""
    served = ServedModel.of(blueprint.model, blueprint.shapes.dtype)
    return StepModel(served, list(blueprint.layouts.values()), hardware, blueprint.buckets)


def log_path(path: str | Path) -> Path:
    """The file that decisions are to be written into, wherever the process goes later.

    Raises `ConfigError` where that cannot be.
    """
    made = Path(os.path.expanduser(path)).absolute()
    try:
        made.open("a", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(
            f"decision_log {str(path)!r} cannot be written: {error.strerror}. Name a file in a folder that is there "
            f"and may be written into."
        ) from error
    return made


def profile_of(config: EngineConfig) -> Hardware:
    """The hardware profile that an engine's settings name, or that of the devices that are here.

    Raises `ConfigError` where there is none.
    """
    if config.hardware is not None:
        return load_hardware(config.hardware)
    prepare_platform(config.num_devices)
    start_devices()
    return own_hardware(jax.devices()[0])


def own_hardware(device: Any) -> Hardware:
    """The profile of the kind of device that is here. Raises `ConfigError` where none has its name."""
    kind = device.device_kind.lower()
    known = config_names("hardware")
    found = [name for name in known if device.platform == name or name in kind.replace("-", " ").split()]
    if not found:
        raise ConfigError(
            f"no hardware profile is named for {device.device_kind!r}; there are {', '.join(known)}. Run `splash "
            f"calibrate` and give its file as hardware."
        )
    return load_hardware(found[0])
