"""Errors a user can meet. Each message names the values that clash and the next step."""

from typing import Any


class SplashError(Exception):
    """Base of every error this package raises on purpose.

    `outputs` holds what `LLM.generate` completed all the same, where a switch it was asked for could not be made.
    """

    outputs: list[Any] | None = None


class LayoutError(SplashError, ValueError):
    """A layout that is unknown, or that this model or mesh cannot hold."""


class ConfigError(SplashError, ValueError):
    """A model or engine setting that cannot be served."""


class CheckpointError(SplashError, ValueError):
    """A checkpoint file that is damaged, incomplete or of another architecture."""


class RequestError(SplashError, ValueError):
    """A request that can never be served: nothing was queued."""


class SwitchRefused(SplashError, RuntimeError):
    """A switch that does not fit or could not be prepared; nothing has changed."""


class PolicyError(SplashError, ValueError):
    """A setting of the switching policy that cannot be meant, or a snapshot or log that contradicts itself."""


class ProgramMissing(SplashError, RuntimeError):
    """A step asked for a program that was not compiled ahead of serving."""


class TargetError(SplashError, RuntimeError):
    """A machine that programs cannot be compiled for here: what is missing is not in the model or its settings."""


class EngineFailed(SplashError, RuntimeError):
    """A step of this engine raised in its middle: what it left cannot be trusted, and every request has ended."""


class BoundsError(SplashError, RuntimeError):
    """An index of a step or a switch lies outside what it points into; found by `debug_checks`, before anything ran."""


class PoolCorrupt(SplashError, RuntimeError):
    """Page accounting contradicts itself: a bug in the engine, never in a request."""
