"""Results of requests, in vLLM's shape."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of one token under the model itself, before any sampling setting. Natural logarithm."""

    logprob: float
    rank: int | None = None  # 1: the most likely; None where the token is not among those asked for
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample of one prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None
    logprobs: tuple[dict[int, Logprob], ...] | None  # per token: id -> its value, the drawn one always among them
    finish_reason: str | None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One prompt and its samples."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: str | None = None
    num_preemptions: int = 0
    finished: bool = True
