"""Rotary frequencies and long-context scales, as transformers computes them. Plain float64 numpy."""

import math
from dataclasses import dataclass
from typing import Literal, final

import numpy as np


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """A rotary embedding. The fields after `type` matter to yarn only; a default rope has factor 1."""

    theta: float
    interleave: bool  # True: pairs are (0, 1), (2, 3), ...; False: (0, d/2), (1, d/2 + 1), ...
    type: Literal["default", "yarn"]
    factor: float
    beta_fast: float
    beta_slow: float
    mscale: float | None  # None and 0 both mean absent
    mscale_all_dim: float | None
    original_max_position: int  # context length before the extension


def inv_freq(rope: RopeConfig, dim: int) -> np.ndarray:
    """Angle per position of every rotary pair: f64[dim / 2]. `dim` is the rotary width, qk_rope_head_dim.

    Yarn keeps the fast pairs, divides the slow ones by the factor, and ramps between the two pairs that turn
    `beta_fast` and `beta_slow` times over the original context; the ramp's ends are floored and ceiled.
    """
    pair = np.arange(dim // 2, dtype=np.float64)
    plain = rope.theta ** (-2.0 * pair / dim)
    if rope.type == "default":
        return plain
    low = max(math.floor(_pair_turning(rope, rope.beta_fast, dim)), 0)
    high = min(math.ceil(_pair_turning(rope, rope.beta_slow, dim)), dim - 1)
    width = high - low or 0.001  # a ramp without width is a step
    ramp = np.clip((pair - low) / width, 0.0, 1.0)
    return plain * (1.0 - ramp) + plain / rope.factor * ramp


def rope_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: m(mscale) / m(mscale_all_dim), or m(1) unless both are given.

    1 for a default rope. With only one of the two given, transformers ignores it and so do we; DeepSeek's own
    code would use it. No release has only one.
    """
    if rope.type == "default":
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return yarn_scale(rope, rope.mscale) / yarn_scale(rope, rope.mscale_all_dim)
    return yarn_scale(rope, 1.0)


def yarn_scale(rope: RopeConfig, mscale: float) -> float:
    """m(mscale) = 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(rope.factor) + 1.0


def _pair_turning(rope: RopeConfig, turns: float, dim: int) -> float:
    """The (fractional) pair that turns `turns` times over the original context."""
    return dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
