"""How a request wants its tokens: names, meanings and defaults are vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from splash_jax.errors import RequestError

MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # a temperature below is 0: dividing by it would only overflow


def plain(value: Any) -> Any:
    """The Python value of a scalar of numpy or JAX, or of an array of no dimensions; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a request. Scalars of numpy and JAX are taken as the Python values they hold.

    A request never grows beyond the context: `max_tokens` is cut where prompt and output fill `max_model_len`, and the
    request ends there with finish_reason "length", as with vLLM's `LLM`.

    To go on with a request that was interrupted, send its prompt with the output so far behind it, and `resumed_tokens`
    says how many of these tokens are that output. Then a `seed` draws what it would have drawn without the interruption
    (sample i of it only as sample i: `Engine.add_request(sample=i)`), penalties count them as output, and so does
    `min_tokens`. `max_tokens`, the result's tokens and its text are of new tokens only, and `stop` strings are looked
    for in new text only: one that begins in the resumed output is not found.

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
    max_tokens: int | None = 16  # new tokens; None: until the context is full
    min_tokens: int = 0  # no end of sequence and no stop token before
    logprobs: int | None = None  # of the model itself, before any setting: the drawn token's and this many more
    skip_special_tokens: bool = True
    resumed_tokens: int = 0  # the prompt's last tokens that are output of an earlier, interrupted request

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, plain(getattr(self, one.name)))
        object.__setattr__(self, "stop_token_ids", _plain_list(self.stop_token_ids))
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
        self._whole("resumed_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens + self.resumed_tokens:
            resumed = f" and resumed_tokens {self.resumed_tokens}" if self.resumed_tokens else ""
            raise RequestError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}{resumed}.")
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


def _plain_list(values: Any) -> Any:
    """A list, tuple or array of one dimension with Python values; anything else as it is."""
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        return values.tolist()
    return type(values)(map(plain, values)) if type(values) in (list, tuple) else values
