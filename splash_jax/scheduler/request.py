"""One request from arrival to end, as the host sees it."""

import enum
from dataclasses import dataclass, field

from splash_jax.scheduler.params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


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

    @property
    def known(self) -> int:
        """Tokens whose ids the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def total(self) -> int:
        """Tokens there will be once everything in flight is read."""
        return len(self.prompt_ids) + len(self.output_ids) + self.in_flight

    @property
    def drawn_all(self) -> bool:
        """Whether its last token is drawn or being drawn, or it wants none."""
        return self.score or self.total >= self.max_total

    @property
    def prefilling(self) -> bool:
        """Whether rows other than the last token's are still to be computed."""
        if self.score:
            return self.computed < self.known
        total = self.total
        return self.computed < total - 1 or total == len(self.prompt_ids)

    def ids(self, start: int, stop: int) -> list[int]:
        """Token ids at positions start .. stop - 1, all known."""
        prompt = len(self.prompt_ids)
        if stop <= prompt:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:prompt] + self.output_ids[max(0, start - prompt) : stop - prompt]
