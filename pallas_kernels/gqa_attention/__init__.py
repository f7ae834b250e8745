"""Attention of query rows over pages of keys that groups of query heads share: decode, and prefill by tiles."""

from pallas_kernels.gqa_attention.api import BACKENDS, gqa_attention
from pallas_kernels.tiles import TileConfig

__all__ = ["BACKENDS", "TileConfig", "gqa_attention"]
