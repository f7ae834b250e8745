"""Attention of absorbed MLA queries over the tokens selected for each row, BF16 or FP8: DeepSeek's sparse attention."""

from pallas_kernels.sparse_mla.api import IMPLEMENTATIONS, config_for, plan_sparse, sparse_mla

__all__ = ["IMPLEMENTATIONS", "config_for", "plan_sparse", "sparse_mla"]
