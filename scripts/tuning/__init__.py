"""The tuning spaces of `tune_kernels.py`: a file per op, each of which says what may be tried and what it is worth.

To add an op: write its file, with what `search.Space` asks for, and add its line to `OPS`.
"""

from tuning import gqa_attention, indexer_topk, mla_decode, mla_prefill, sparse_mla
from tuning.search import Space

OPS: dict[str, Space] = {
    "mla_decode": mla_decode,
    "mla_prefill": mla_prefill,
    "gqa_attention": gqa_attention,
    "sparse_mla": sparse_mla,
    "indexer_topk": indexer_topk,
}
