"""One request from arrival to end, as the host sees it."""

import enum
from dataclasses import dataclass, field

from splash_jax.scheduler.params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Rows(enum.Enum):
    PROMPT = "prompt"  # of known tokens, still to be computed before one can be drawn or the score is done
    DRAW = "draw"  # its last drawn token's alone, which draws the next
    NONE = "none"  # its last token is drawn or being drawn, or it wants none


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt and one of its samples.

    `computed` counts the tokens whose history is stored or being stored by a dispatched step; `in_flight` the tokens
    that a dispatched step draws and nobody has read yet.
    """

    name: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    sample: int = 0
    score: bool = False  # wants the logits of its prompt instead of new tokens
    stop_ids: frozenset[int] = frozenset()
    max_total: int = 0  # tokens at which it ends by length
    status: Status = Status.WAITING
    slot: int = -1
    computed: int = 0
    in_flight: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None
    error: str | None = None
    preemptions: int = 0
    told: bool = False  # whether the log has said what it waits for

    @property
    def prompt_only(self) -> int:
        """Tokens of the prompt without those that are output of an earlier request."""
        return len(self.prompt_ids) - self.params.resumed_tokens

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def total(self) -> int:
        """Tokens there will be once everything in flight is read."""
        return len(self.prompt_ids) + len(self.output_ids) + self.in_flight

    @property
    def rows(self) -> Rows:
        """What rows of it the next step may have."""
        prompt = len(self.prompt_ids)
        total = prompt + len(self.output_ids) + self.in_flight  # not `self.total`: everybody is asked in every step
        if self.score:
            return Rows.PROMPT if self.computed < self.known else Rows.NONE
        if self.computed < total - 1 or total == prompt:
            return Rows.PROMPT
        return Rows.NONE if total >= self.max_total else Rows.DRAW

    def ids(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start .. stop - 1, all known."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:prompt] + self.output_ids[max(0, start - prompt) : stop - prompt]
