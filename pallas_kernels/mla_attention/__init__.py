"""Attention of absorbed MLA queries over pages of latent history."""

from pallas_kernels.mla_attention.api import IMPLEMENTATIONS, PageTable, mla_attention

__all__ = ["IMPLEMENTATIONS", "PageTable", "mla_attention"]
