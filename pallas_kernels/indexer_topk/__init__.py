"""The lightning indexer of DeepSeek's sparse attention: logits of cheap heads, and the exact k best tokens of a row."""

from pallas_kernels.indexer_topk.api import IMPLEMENTATIONS, config_for, indexer_topk, quantize_queries, top_k
from pallas_kernels.indexer_topk.topk import SelectConfig
from pallas_kernels.indexer_topk.triton import LogitsConfig, TritonConfig

__all__ = [
    "IMPLEMENTATIONS",
    "LogitsConfig",
    "SelectConfig",
    "TritonConfig",
    "config_for",
    "indexer_topk",
    "quantize_queries",
    "top_k",
]
