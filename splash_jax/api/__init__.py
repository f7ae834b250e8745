"""What people call: offline generation and its results."""

from splash_jax.api.llm import LLM
from splash_jax.api.outputs import CompletionOutput, Logprob, RequestOutput
from splash_jax.scheduler import SamplingParams

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
