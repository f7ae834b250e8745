"""How much a rank computes and receives in each stage of a step, as counts that are linear in a few loads.

A stage is FLOPs, memory traffic and messages per unit of each load of `LOADS`, so that one product of matrices prices
every layout at once. Stages follow one another (Eq. 10): nothing of one hides behind another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from splash_jax.cost.collectives import (
    Message,
    attention_messages,
    carried_groups,
    embedding_messages,
    feed_forward_messages,
    head_messages,
    kernel_heads,
)
from splash_jax.cost.roofline import Work
from splash_jax.cost.served import ServedModel
from splash_jax.ownership import Layout

# What the busiest rank has in a step. Counts are linear in these.
LOADS = (
    "one",  # 1: weights are read whatever the load
    "rows",  # rows of the fullest owner group, R: static shapes give every group as many
    "drawn",  # rows of the fullest owner group that a token is drawn from
    "all_rows",  # real rows of all groups: experts leave padding out
    "tokens",  # context tokens of the fullest owner group
    "pairs",  # its query-key pairs
    "touched",  # expected routed experts of a layer that some row chose, of all ranks
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of one layer (or of a step's ends): counts per unit of each load. Mappings from names in LOADS."""

    name: str
    flops: dict[str, float] = field(default_factory=dict)
    hbm_bytes: dict[str, float] = field(default_factory=dict)  # read
    per: str = "rows"  # what `messages` are counted per
    messages: Sequence[Message] = ()
    attention: bool = False  # whether it runs at attention's own rates

    def work(self, loads: dict[str, float]) -> Work:
        """What a rank computes under given loads."""
        return Work(flops=_dot(self.flops, loads), hbm_bytes=_dot(self.hbm_bytes, loads))


def _dot(counts: dict[str, float], loads: dict[str, float]) -> float:
    return sum(count * loads[name] for name, count in counts.items())


def loads(
    model: ServedModel, *, rows: float, drawn: float, all_rows: float, tokens: float, pairs: float
) -> dict[str, float]:
    """The loads by name; see `LOADS`."""
    touched = float(touched_experts(model, all_rows))
    return {
        "one": 1.0, "rows": rows, "drawn": drawn, "all_rows": all_rows, "tokens": tokens, "pairs": pairs,
        "touched": touched,
    }  # fmt: skip


def touched_experts(model: ServedModel, rows: float | np.ndarray) -> np.ndarray:
    """Routed experts that some of `rows` rows chose, if they choose evenly and independently."""
    m = model.sizes
    if not m.num_experts:
        return np.zeros_like(rows, dtype=float)
    return m.num_experts * (1 - (1 - m.num_experts_per_tok / m.num_experts) ** np.asarray(rows, float))


def layer_stages(model: ServedModel, layout: Layout, kind: str) -> list[Stage]:
    """The stages of one layer of a kind, in order, named as the scopes of its programs."""
    rest = _mlp(model, layout) if kind == "dense" else _experts(model, layout)
    return [_projections(model, layout), _kernel(model, layout), rest]


def end_stages(model: ServedModel, layout: Layout) -> list[Stage]:
    """What a step does beside its layers: the embedding, and the head for the rows that are drawn."""
    m = model.sizes
    head = m.hidden_size * m.vocab_size / layout.size
    return [
        Stage(name="embed", messages=embedding_messages(model, layout)),
        Stage(
            name="head",
            flops={"drawn": 2 * head * layout.owner_groups},
            hbm_bytes={"one": head * model.weight_bytes},
            per="drawn",
            messages=head_messages(model, layout),
        ),
    ]


def _projections(model: ServedModel, layout: Layout) -> Stage:
    """Q-A and KV-A whole on every rank; Q-B, KV-B and O whole or split by head. Exchanges around the kernel."""
    weights = model.whole_projection_weights + model.placed_projection_weights / layout.head_shards
    return Stage(
        name="projections",
        flops={"rows": 2 * weights * carried_groups(layout)},
        hbm_bytes={"one": weights * model.weight_bytes},
        messages=attention_messages(model, layout),
    )


def _kernel(model: ServedModel, layout: Layout) -> Stage:
    """Absorbed attention of a rank's heads over its share of positions. A history is read once in a step."""
    per_pair = 2 * (model.query_width + model.value_width) * kernel_heads(model, layout) / layout.position_shares
    return Stage(
        name="kernel",
        flops={"pairs": per_pair},
        hbm_bytes={"tokens": model.kv_bytes_per_token / layout.position_shares},
        attention=True,
    )


def _gated(model: ServedModel, layout: Layout, width: int) -> tuple[float, float]:
    """FLOPs per row of an owner group, and bytes, of a gated MLP whose width is cut over all ranks."""
    weights = 3 * model.sizes.hidden_size * width / layout.size
    return 2 * weights * layout.owner_groups, weights * model.weight_bytes


def _mlp(model: ServedModel, layout: Layout) -> Stage:
    flops, weights = _gated(model, layout, model.sizes.intermediate_size)
    return Stage(
        name="mlp", flops={"rows": flops}, hbm_bytes={"one": weights}, messages=feed_forward_messages(model, layout)
    )


def _experts(model: ServedModel, layout: Layout) -> Stage:
    """Routed experts, whole on one rank each, chosen evenly; the shared ones cut over all ranks."""
    m = model.sizes
    flops, weights = _gated(model, layout, m.num_shared_experts * m.moe_intermediate_size)
    expert = 3 * m.hidden_size * m.moe_intermediate_size / layout.size
    return Stage(
        name="experts",
        flops={"rows": flops, "all_rows": 2 * m.num_experts_per_tok * expert},
        hbm_bytes={"one": weights, "touched": expert * model.weight_bytes},
        messages=feed_forward_messages(model, layout),
    )
