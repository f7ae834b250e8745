"""Prefill attention of MLA over pages of latent history, BF16 or FP8: absorbed, or with keys and values per head."""

from pallas_kernels.mla_prefill.api import BACKENDS, FORMS, mla_prefill
from pallas_kernels.mla_prefill.expanded import ExpandedConfig
from pallas_kernels.tiles import TileConfig

__all__ = ["BACKENDS", "FORMS", "ExpandedConfig", "TileConfig", "mla_prefill"]
