"""SPLASH for JAX: serving whose attention layout is live state (arXiv 2609.37626)."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splash_jax.api import LLM, CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "small_model"]
__version__ = "0.1.0"


def small_model() -> Path:
    """The directory of the embedded small model: a checkpoint like any other."""
    return Path(__file__).parent / "assets" / "small"


def __getattr__(name: str) -> Any:
    """Load the interface at first use, so that importing a pure room of this package loads no jax."""
    if name in __all__:
        import splash_jax.api

        return getattr(splash_jax.api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
