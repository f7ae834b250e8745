"""The serving loop: scheduler, page pool and device programs brought together."""

from splash_jax.engine.build import Blueprint, draw_up
from splash_jax.engine.config import EngineConfig
from splash_jax.engine.engine import Engine
from splash_jax.engine.records import Records, StepRecord

__all__ = ["Blueprint", "Engine", "EngineConfig", "Records", "StepRecord", "draw_up"]
