"""Plan a switch as data: what each rank lacks, who sends it, and where everything ends up (Eq. 2 and 3).

`apply` carries a plan out on arrays and is the oracle of the executor on devices.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from splash_jax.errors import SwitchRefused
from splash_jax.ownership.footprint import StateBytes
from splash_jax.ownership.layout import Layout
from splash_jax.ownership.manifest import Manifest, RequestPages, owner_pages_needed
from splash_jax.ownership.moves import Mover, PageTable, Pairs, Placed
from splash_jax.ownership.travel import gathers


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMove:
    """What happens to one layer's attention projections: cut over some axes, then gathered over others."""

    gather_axes: tuple[str, ...]
    slice_axes: tuple[str, ...]
    bytes_per_rank: int  # received by each rank for one layer

    @property
    def primitive(self) -> str:
        if self.gather_axes:
            return "all_gather"
        return "discard" if self.slice_axes else "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMove:
    """What happens to one layer's histories. Slots count grains: page * grains_per_page + index in the page."""

    primitive: str  # "discard", "all_gather" or "all_to_all"
    grain: int  # tokens
    grain_bytes: int
    local: tuple[Pairs, ...]  # per rank: grains that stay on it but change their slot
    sent: Mapping[tuple[int, int], Pairs] = field(default_factory=dict)  # (source, destination rank) -> grains

    def bytes_received(self, num_ranks: int) -> list[int]:
        """Bytes each rank receives for one layer, padding not counted."""
        received = [0] * num_ranks
        for (_, destination), pairs in self.sent.items():
            received[destination] += len(pairs) * self.grain_bytes
        return received

    @property
    def busiest_pair(self) -> int:
        """Most grains that one rank sends to one other."""
        return max((len(pairs) for pairs in self.sent.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlan:
    """One switch, complete: `after` is the manifest once it is carried out."""

    before: Manifest
    after: Manifest
    weights: WeightMove
    kv: KVMove
    num_layers: int

    def bytes_per_rank(self) -> list[int]:
        """Bytes each rank receives over the network in the whole switch."""
        kv = self.kv.bytes_received(self.before.layout.size)
        return [self.num_layers * (self.weights.bytes_per_rank + received) for received in kv]

    def summary(self) -> dict[str, object]:
        """The plan in words and bytes, ready for JSON. The moves themselves are counted, not listed."""
        kv_received = self.kv.bytes_received(self.before.layout.size)
        return {
            "src": str(self.before.layout),
            "dst": str(self.after.layout),
            "num_layers": self.num_layers,
            "weights": asdict(self.weights) | {"primitive": self.weights.primitive},
            "kv": {
                "primitive": self.kv.primitive,
                "grain_tokens": self.kv.grain,
                "bytes_per_layer_per_rank": kv_received,
                "grains_moved": sum(len(p) for p in self.kv.sent.values()),
                "grains_relocated": sum(len(p) for p in self.kv.local),
            },
            "requests": len(self.before.requests),
            "pages_per_rank": [self.before.pages_per_rank, self.after.pages_per_rank],
            "pages_used": [self.before.pages_used(), self.after.pages_used()],
            "bytes_per_rank": self.bytes_per_rank(),
        }


def plan_switch(
    now: Manifest,
    dst: Layout,
    *,
    pages_per_rank: int,
    state: StateBytes,
    homes: Mapping[str, int] | None = None,
) -> SwitchPlan:
    """Plan the switch of everything in `now` to `dst` with `pages_per_rank` pages there.

    `homes` re-homes requests (name -> rank); the rest stay at home. Raises `SwitchRefused`, naming the rank and the
    bytes it lacks, when the destination cannot hold the live histories (Eq. 6).
    """
    placed = {
        name: (request.home if homes is None else homes.get(name, request.home), request.num_tokens)
        for name, request in now.requests.items()
    }
    need = owner_pages_needed(now.kv, dst, placed)
    page_bytes = now.kv.page_size * now.kv.bytes_per_token * state.num_layers
    for rank, pages in enumerate(need):
        if pages > pages_per_rank:
            lack = (pages - pages_per_rank) * page_bytes
            raise SwitchRefused(
                f"switch {now.layout} -> {dst} does not fit: rank {rank} needs {pages} pages and has "
                f"{pages_per_rank}, it lacks {lack} bytes. Finish or abort requests, or raise device_memory_bytes."
            )
    return _plan(now, dst, pages_per_rank, placed, state)


def plan_between(before: Manifest, after: Manifest, state: StateBytes) -> SwitchPlan:
    """The moves that bring every history of `before` to where `after` wants it, its pages there chosen already.

    Both must hold the same requests with the same number of tokens.
    """
    placed = {name: (request.home, request.num_tokens) for name, request in after.requests.items()}
    pages = {name: request.pages for name, request in after.requests.items()}
    return _plan(before, after.layout, after.pages_per_rank, placed, state, pages)


def _plan(
    now: Manifest, dst: Layout, pages_per_rank: int, placed: Placed, state: StateBytes, pages: PageTable | None = None
) -> SwitchPlan:
    """The plan with the given destination pages, or with pages of its own choice."""
    mover = Mover(now, dst, placed)
    pages = mover.assign_pages(pages_per_rank) if pages is None else pages
    moves = mover.moves(pages)
    after = Manifest(
        layout=dst,
        kv=now.kv,
        pages_per_rank=pages_per_rank,
        requests={
            name: RequestPages(home=home, num_tokens=tokens, pages=pages[name])
            for name, (home, tokens) in placed.items()
        },
    )
    together = "all_gather" if gathers(now.layout, dst) else "all_to_all"
    kv = KVMove(
        primitive=together if moves.sent else "discard",
        grain=mover.grain,
        grain_bytes=mover.grain * now.kv.bytes_per_token,
        local=moves.local,
        sent=moves.sent,
    )
    return SwitchPlan(
        before=now, after=after, weights=weight_move(now.layout, dst, state), kv=kv, num_layers=state.num_layers
    )


def weight_move(src: Layout, dst: Layout, state: StateBytes) -> WeightMove:
    """What one layer's projections need between two layouts of the same mesh (Eq. 3): what both hold stays."""
    gather = tuple(name for name in src.head_axes if name not in dst.head_axes)
    cut = tuple(name for name in dst.head_axes if name not in src.head_axes)
    both = src.head_shards * math.prod(axis.size for axis in src.axes if axis.name in cut)
    wanted, kept = state.projections // dst.head_shards, state.projections // both
    return WeightMove(gather_axes=gather, slice_axes=cut, bytes_per_rank=wanted - kept)


def apply(plan: SwitchPlan, slots: list[np.ndarray]) -> list[np.ndarray]:
    """Carry the KV moves out on one array per rank, [grains, ...]; new grains nobody wrote are left at zero.

    The oracle of the device executor: what it returns for a layer's pool is what the devices must hold.
    """
    per_page = plan.before.kv.page_size // plan.kv.grain
    size = plan.after.pages_per_rank * per_page
    arrived = []
    for rank, old in enumerate(slots):
        new = np.zeros((size, *old.shape[1:]), old.dtype)
        keep = min(size, len(old))
        new[:keep] = old[:keep]
        pairs = plan.kv.local[rank]
        new[pairs[:, 1]] = old[pairs[:, 0]]
        arrived.append(new)
    for (source, destination), pairs in plan.kv.sent.items():
        arrived[destination][pairs[:, 1]] = slots[source][pairs[:, 0]]
    return arrived
