"""How much a rank computes in one layer of a step: FLOPs and memory traffic, counted from the model and the layout.

Counts are balanced: every rank is given its even share of rows, tokens and experts.
"""

import math

from splash_jax.cost import Work
from splash_jax.layouts import ROLES
from splash_jax.ownership import History, Layout, Projections
from splash_jax.preflight.case import Case


def layer_work(case: Case, layout: Layout, step: str, kind: str) -> dict[str, Work]:
    """The stages of one layer of a step, by the named scope that its programs give them."""
    prompt = case.prefill_tokens if step == "prefill" else 0
    attention = _projections(case, layout, case.batch + prompt), _kernel(case, layout, prompt)
    rows = case.batch + prompt
    rest = {"dense": ("mlp", _mlp(case, rows, case.model.intermediate_size)), "moe": ("experts", _experts(case, rows))}
    name, feed_forward = rest[kind]
    return {"projections": attention[0], "kernel": attention[1], name: feed_forward}


def _width(case: Case) -> int:
    return 2 if case.shapes.dtype == "bfloat16" else 4


def _projections(case: Case, layout: Layout, rows: int) -> Work:
    """Q-A and KV-A whole on every rank; Q-B, KV-B and O whole or split by head."""
    m = case.model
    here = rows / math.prod(axis.size for axis in layout.axes if ROLES[axis.role].shards_rows)
    r = m.q_lora_rank or m.hidden_size
    down = m.hidden_size * (m.kv_lora_rank + m.qk_rope_head_dim + (m.q_lora_rank or 0))
    per_head = r * (m.qk_nope_head_dim + m.qk_rope_head_dim)
    per_head += m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim) + m.v_head_dim * m.hidden_size
    weights = down + m.num_heads * per_head / layout.head_shards
    return Work(flops=2 * here * weights, hbm_bytes=weights * _width(case))


def _kernel(case: Case, layout: Layout, prompt: int) -> Work:
    """Absorbed attention. A prompt's rows see half of the context on average; a history is read once in a step."""
    m = case.model
    row = 2 * m.kv_lora_rank + m.qk_rope_head_dim
    shared = math.prod(
        axis.size
        for axis in layout.axes
        if not (axis.placement.projections is Projections.WHOLE and axis.placement.history is History.ALL)
    )
    pairs = (case.batch * case.context + prompt * case.context / 2) * m.num_heads / shared
    tokens = case.batch * case.context / (layout.owner_groups * layout.position_shares)
    return Work(flops=2 * pairs * row, hbm_bytes=tokens * case.shapes.kv.bytes_per_token)


def _mlp(case: Case, rows: int, width: int) -> Work:
    """A gated MLP whose width is cut over all ranks."""
    weights = 3 * case.model.hidden_size * width / case.layouts[0].size
    return Work(flops=2 * rows * weights, hbm_bytes=weights * _width(case))


def _experts(case: Case, rows: int) -> Work:
    """Routed experts, chosen evenly and independently, and the shared ones."""
    m, ranks = case.model, case.layouts[0].size
    expert = 3 * m.hidden_size * m.moe_intermediate_size
    touched = m.num_experts / ranks * (1 - (1 - m.num_experts_per_tok / m.num_experts) ** rows)
    shared = _mlp(case, rows, m.num_shared_experts * m.moe_intermediate_size)
    return Work(
        flops=2 * rows * m.num_experts_per_tok / ranks * expert + shared.flops,
        hbm_bytes=touched * expert * _width(case) + shared.hbm_bytes,
    )
