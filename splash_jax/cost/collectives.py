"""Every collective that a layer's program runs, and what it brings to a rank, from the placement of each axis.

The order and the shapes are those of `splash_jax.layouts.compose`; `tests/cost/test_collectives.py` compares them with
compiled programs. Rows lie as [owner groups carried..., R, ...], R the same for every group (programs have static
shapes), so every count here is per row of a group.
"""

from dataclasses import dataclass

from splash_jax.cost.served import ServedModel
from splash_jax.ownership import Axis, History, Layout, Projections

FLOAT = 4  # bytes: partial softmaxes are merged, and logits exchanged, in float32


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of a layer."""

    kind: str  # as XLA calls it
    group_size: int
    received: float  # bytes that a rank receives for each row of an owner group


def carries_own_rows(axis: Axis) -> bool:
    """Whether a rank carries only its own requests' rows along this axis: no head of theirs is elsewhere."""
    return axis.placement.projections is Projections.WHOLE and axis.placement.history is History.REQUEST


def carried_groups(layout: Layout) -> int:
    """Owner groups whose rows a rank carries between layers."""
    own = 1
    for axis in layout.axes:
        own *= axis.size if carries_own_rows(axis) else 1
    return layout.owner_groups // own


def kernel_heads(model: ServedModel, layout: Layout) -> int:
    """Heads in a rank's attention kernel: its own, and those that an exchange brings."""
    return model.sizes.num_heads // layout.kernel_shards


def attention_messages(model: ServedModel, layout: Layout) -> list[Message]:
    """Collectives of one layer's attention, in order."""
    split = Projections.SPLIT
    a, found = model.activation_bytes, []
    heads, groups = model.sizes.num_heads // layout.head_shards, carried_groups(layout)
    outside_first = sorted(layout.axes, key=lambda axis: axis.name in layout.owner_axes)
    for axis in reversed(outside_first):  # queries on their way to the kernel
        n = axis.size
        if axis.placement.projections is not split:
            continue
        if axis.placement.history is History.REQUEST:  # rows of all owners here become all heads of own rows
            found.append(_all_to_all(n, groups * heads * model.query_width * a))
            groups, heads = groups // n, heads * n
        elif axis.placement.history is History.POSITION:
            heads *= n
            found.append(_all_gather(n, groups * heads * model.query_width * a))
    for axis in outside_first:  # parts of one history are merged: the largest log-sum-exp, then outputs and weights
        if axis.placement.history is History.POSITION:
            n = axis.size
            found.append(_all_reduce(n, groups * heads * FLOAT))
            both = groups * heads * (model.value_width + 1) * FLOAT
            if axis.placement.projections is split:
                found.append(_reduce_scatter(n, both / n))
                heads //= n
            else:
                found.append(_all_reduce(n, both))
    for axis in outside_first:  # outputs on their way back
        if axis.placement.projections is split and axis.placement.history is History.REQUEST:
            found.append(_all_to_all(axis.size, groups * heads * model.value_width * a))
            groups, heads = groups * axis.size, heads // axis.size
    if layout.head_shards > 1:
        found.append(_all_reduce(layout.head_shards, groups * model.sizes.hidden_size * a))
    return _real(found)


def feed_forward_messages(model: ServedModel, layout: Layout) -> list[Message]:
    """Collectives of one dense or expert layer, in order: rows are gathered, what ranks computed is summed."""
    row = model.sizes.hidden_size * model.activation_bytes
    return _real([*_gather_rows(layout, row), *_sum_rows(layout, row)])


def embedding_messages(model: ServedModel, layout: Layout) -> list[Message]:
    """Collectives of the embedding, whose table is cut over all ranks."""
    return _real(_sum_rows(layout, model.sizes.hidden_size * model.activation_bytes))


def head_messages(model: ServedModel, layout: Layout) -> list[Message]:
    """Collectives of the head, per row of an owner group that is drawn."""
    m, total = model.sizes, layout.owner_groups
    gathered = _gather_rows(layout, m.hidden_size * model.activation_bytes)
    logits = _all_to_all(layout.size, total * m.vocab_size * FLOAT / layout.size)
    return _real([*gathered, logits, _all_gather(layout.size, total * 2 * FLOAT)])


def _gather_rows(layout: Layout, row_bytes: float) -> list[Message]:
    groups, found = carried_groups(layout), []
    for axis in sorted(layout.axes, key=lambda axis: axis.name in layout.owner_axes):
        if carries_own_rows(axis):
            groups *= axis.size
            found.append(_all_gather(axis.size, groups * row_bytes))
    return found


def _sum_rows(layout: Layout, row_bytes: float) -> list[Message]:
    groups, found, replicating = layout.owner_groups, [], 1
    for axis in sorted(layout.axes, key=lambda axis: axis.name in layout.owner_axes):
        if carries_own_rows(axis):
            groups //= axis.size
            found.append(_reduce_scatter(axis.size, groups * row_bytes))
        else:
            replicating *= axis.size
    return [*found, _all_reduce(replicating, groups * row_bytes)]


def _real(found: list[Message]) -> list[Message]:
    return [message for message in found if message.group_size > 1]


# Bytes received for a result of `result` bytes on a rank (as `splash_jax.runtime.collectives.RECEIVED`).


def _all_to_all(n: int, result: float) -> Message:
    return Message("all-to-all", n, result * (1 - 1 / n))


def _all_gather(n: int, result: float) -> Message:
    return Message("all-gather", n, result * (1 - 1 / n))


def _all_reduce(n: int, result: float) -> Message:
    return Message("all-reduce", n, 2 * result * (1 - 1 / n))


def _reduce_scatter(n: int, result: float) -> Message:
    return Message("reduce-scatter", n, result * (n - 1))
