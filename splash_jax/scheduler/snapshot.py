"""What a decision about the layout is made from, and what it says: plain data, the same on every process, JSON-able.

Times are seconds, lengths tokens, durations of loads decode steps. Nothing here asks a clock or a device.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from splash_jax.errors import PolicyError
from splash_jax.scheduler.params import plain

RULES = ("regret", "margin", "stay")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The switching rule and its bounds. `dataclasses.replace` it at run time to pin a layout or to allow fewer.

    Raises `PolicyError` for a value that cannot be meant. The defaults hold over two orders of magnitude of switch
    cost and 10 % of noise (`scripts/score_policy.py`): nothing needs to be set.
    """

    rule: str = "regret"  # or "margin", the paper's: switch to whatever leads by `margin`; or "stay"
    pin: str | None = None  # go there and stay, whatever the rule says
    allowed: tuple[str, ...] | None = None  # layouts it may choose; None: all that are quoted
    margin: float = 0.05  # of rule "margin": part of the present step's seconds
    old: float = 0.8  # weight of the past in the exponential mean of the logs of costs; 0 smooths nothing
    floor: float = 0.02  # of a step: least regret that counts, however cheap a switch is
    patience: float = 1.0  # regret that is waited for, in parts of the cost of going there and back
    dwell_steps: int = 4  # no second switch within
    max_switches: int = 20  # in any `window_seconds`
    window_seconds: float = 10.0
    step_seconds: float | None = None  # longest step that prompts may make; chunks are chosen to keep it

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, plain(getattr(self, one.name)))
        if self.rule not in RULES:
            raise PolicyError(f"rule {self.rule!r} is unknown; choose one of {', '.join(RULES)}.")
        for name, least, below in (("margin", 0, 1), ("old", 0, 1), ("floor", 0, 1)):
            value = getattr(self, name)
            if not least <= value < below:
                raise PolicyError(f"{name} must be at least {least} and below {below}, got {value!r}.")
        for name in ("patience", "window_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise PolicyError(f"{name} must be above 0 and finite, got {getattr(self, name)!r}.")
        for name, least in (("dwell_steps", 0), ("max_switches", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise PolicyError(f"{name} must be a whole number of at least {least}, got {value!r}.")
        if self.step_seconds is not None and not self.step_seconds > 0:
            raise PolicyError(f"step_seconds must be above 0, or None for no limit; got {self.step_seconds!r}.")
        if self.allowed is not None and not self.allowed:
            raise PolicyError("allowed is empty; name at least one layout, or None for all.")
        if self.pin is not None and self.allowed is not None and self.pin not in self.allowed:
            raise PolicyError(f"pin {self.pin!r} is not among allowed {', '.join(self.allowed)}; allow it or unpin.")


class Choice(NamedTuple):
    """A step that a layout could run for the present load, with what it would admit."""

    seconds: float  # predicted
    tokens: float = 1.0  # useful tokens of the step: what makes steps of unequal batches comparable
    chunk: int = 0  # most prompt rows of the step; 0: it has none
    longest: float | None = None  # predicted with prompt rows of what it admits, too; None: as `seconds`


class Quote(NamedTuple):
    """What one layout offers. Switches are from the present layout, so its own quote has none."""

    layout: str
    choices: tuple[Choice, ...]  # at least one, unless refused
    refused: str = ""  # why it cannot hold the load or be switched to: names the rank and what it lacks
    there: float | None = 0.0  # seconds that a switch to it within one step adds; None: not offered
    back: float = 0.0  # ... and that the switch back adds, the cheaper way
    there_spread: float | None = None  # seconds that a switch spread over `spread_steps` steps adds; None: not offered
    spread_steps: int = 0

    @property
    def cheapest(self) -> float:
        """Seconds that the switch to it adds, the cheaper way; not a number where none is offered."""
        if self.there is None:
            return math.nan if self.there_spread is None else self.there_spread
        return self.there if self.there_spread is None else min(self.there, self.there_spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the policy remembers from one decision to the next."""

    layout: str = ""  # that it believes to be in; regrets are against this one
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # kind -> layout -> smoothed log of seconds
    load: tuple[int, int] = (0, 0)  # requests and tokens when costs began to be smoothed
    regrets: Mapping[str, float] = field(default_factory=dict)  # layout -> seconds
    switches: tuple[float, ...] = ()  # times of recent switches, oldest first
    last_switch: int | None = None  # step of the latest


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that one decision is made from."""

    step: int  # number of the step that comes next
    time: float  # at which it starts
    layout: str  # the present one
    quotes: tuple[Quote, ...]  # one per layout that programs exist for, the present one among them
    requests: int = 1  # that run
    waiting: int = 0  # that could not be admitted yet
    tokens: int = 0  # of live histories
    prompt_rows: int = 0  # still to be computed, of requests that run
    steps: int = 1  # that this decision is about; more where a caller decides less often than every step
    lasts: float | None = None  # steps until about half of the running requests will have ended; None: not known
    at_most: float | None = None  # steps until all will have ended at the latest, and nothing waits; None: no bound
    distrust: str = ""  # why the quotes are not to be obeyed (see `Residuals`)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    memory: Memory = field(default_factory=Memory)

    @property
    def kind(self) -> str:
        """Steps hide a switch, and rank layouts, differently with and without prompt rows."""
        return "prefill" if self.prompt_rows else "decode"


@dataclass(frozen=True, slots=True)
class Run:
    """Run the next step in the present layout."""

    chunk: int  # most prompt rows of it; 0: it has none


@dataclass(frozen=True, slots=True)
class Switch:
    """Switch to `layout` within the next step, or spread over steps from it on."""

    layout: str
    spread: bool
    chunk: int


@dataclass(frozen=True, slots=True)
class Idle:
    """There is nothing to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, why in a word, and what to remember: hand `memory` to the next snapshot."""

    action: Run | Switch | Idle
    reason: str
    memory: Memory
