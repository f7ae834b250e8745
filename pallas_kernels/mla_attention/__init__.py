"""Attention of absorbed MLA queries over pages of latent history."""

from pallas_kernels.mla_attention.api import IMPLEMENTATIONS, mla_attention
from pallas_kernels.mla_attention.table import PageTable

__all__ = ["IMPLEMENTATIONS", "PageTable", "mla_attention"]
