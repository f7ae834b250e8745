"""Attention of absorbed MLA queries over pages of latent history."""

from pallas_kernels.mla_attention.api import IMPLEMENTATIONS, mla_attention
from pallas_kernels.mla_attention.heads import HeadWeights
from pallas_kernels.mla_attention.table import PageTable

__all__ = ["IMPLEMENTATIONS", "HeadWeights", "PageTable", "mla_attention"]
