"""How a request wants its tokens: names, meanings and defaults are vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass

from splash_jax.errors import RequestError

MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # a temperature below is 0: dividing by it would only overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a request.

    Raises `RequestError`, naming the value and the range, for anything that cannot be meant.
    """

    n: int = 1  # samples of the prompt
    temperature: float = 1.0  # 0, or less than 1e-5: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: a fresh one; sample i of a seed is the same in every run
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: until the context is full
    min_tokens: int = 0  # no end of sequence and no stop token before
    logprobs: int | None = None  # of the model itself, before any setting: the drawn token's and this many more
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._whole("n", 1, 1024)
        self._number("temperature", 0.0, 100.0)
        self._number("top_p", 0.0, 1.0, above=True)
        self._whole("top_k", -1, 2**31 - 1)
        self._number("min_p", 0.0, 1.0)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._number("repetition_penalty", 0.01, 100.0)
        if self.max_tokens is not None:
            self._whole("max_tokens", 1, 2**31 - 1)
        self._whole("min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}.")
        if self.logprobs is not None:
            self._whole("logprobs", 0, MAX_LOGPROBS)
        if self.seed is not None:
            self._whole("seed", 0, 2**63 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Sequence):
                raise RequestError(f"{name} must be a list, got {value!r}.")
        if any(not isinstance(text, str) or not text for text in self.stop_strings):
            raise RequestError(f"stop must be non-empty text, got {self.stop!r}.")
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < 2**31 for i in self.stop_token_ids or ()):
            raise RequestError(f"stop_token_ids must be token ids of 0 or more, got {self.stop_token_ids!r}.")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def penalised(self) -> bool:
        """Whether drawing needs the counts of earlier tokens."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    def _whole(self, name: str, least: int, most: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise RequestError(f"{name} must be a whole number from {least} to {most}, got {value!r}.")

    def _number(self, name: str, least: float, most: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not least <= value <= most or (above and value == least):
            raise RequestError(
                f"{name} must be {'above' if above else 'from'} {least} {'and at most' if above else 'to'} {most}, "
                f"got {value!r}."
            )
