"""Plan a switch as data: what each rank lacks, who sends it, and where everything ends up (Eq. 2 and 3).

A history moves in grains: runs of positions that lie together on a page in both layouts (a whole page when both
deal out whole pages). `apply` carries a plan out on a manifest and is the oracle of the executor on devices.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import numpy as np

from splash_jax.errors import SwitchRefused
from splash_jax.ownership.footprint import StateBytes
from splash_jax.ownership.layout import Layout
from splash_jax.ownership.manifest import Manifest, RequestPages, owner_pages_needed
from splash_jax.ownership.travel import gathers, travel_axes

Pairs = np.ndarray  # i64[n, 2]: source and destination slot, in grains, of each grain that moves


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
    grain = now.kv.grain(now.layout, dst)
    return _Planner(now, dst, pages_per_rank, grain, placed).plan(state)


def plan_between(before: Manifest, after: Manifest, state: StateBytes) -> SwitchPlan:
    """The moves that bring every history of `before` to where `after` wants it, its pages there chosen already.

    Both must hold the same requests with the same number of tokens.
    """
    placed = {name: (request.home, request.num_tokens) for name, request in after.requests.items()}
    grain = before.kv.grain(before.layout, after.layout)
    planner = _Planner(before, after.layout, after.pages_per_rank, grain, placed)
    return planner.plan(state, {name: request.pages for name, request in after.requests.items()})


class _Planner:
    """The working state of one plan."""

    def __init__(
        self, now: Manifest, dst: Layout, pages_per_rank: int, grain: int, placed: dict[str, tuple[int, int]]
    ) -> None:
        self.now, self.dst, self.pages_per_rank, self.grain, self.placed = (
            now,
            dst,
            pages_per_rank,
            grain,
            placed,
        )
        self.per_page = now.kv.page_size // grain
        self.local: list[list[np.ndarray]] = [[] for _ in range(dst.size)]
        self.sent: dict[tuple[int, int], list[np.ndarray]] = {}
        self.load = np.zeros(dst.size, np.int64)  # grains each rank has been asked to send
        still = [name for name in dst.axis_names if name not in travel_axes(now.layout, dst)]
        self.place = [dst.index(rank, still) for rank in range(dst.size)]  # equal where one may send to the other

    def plan(self, state: StateBytes, pages: Mapping[str, Mapping[int, tuple[int, ...]]] | None = None) -> SwitchPlan:
        """The plan with the given destination pages, or with pages of its own choice."""
        if pages is None:
            pages = self._assign_pages()
        for name, request in self.now.requests.items():
            self._move(request, self.placed[name][0], pages[name])
        after = Manifest(
            layout=self.dst,
            kv=self.now.kv,
            pages_per_rank=self.pages_per_rank,
            requests={
                name: RequestPages(home=home, num_tokens=tokens, pages=pages[name])
                for name, (home, tokens) in self.placed.items()
            },
        )
        empty = np.zeros((0, 2), np.int64)
        together = "all_gather" if gathers(self.now.layout, self.dst) else "all_to_all"
        kv = KVMove(
            primitive=together if self.sent else "discard",
            grain=self.grain,
            grain_bytes=self.grain * self.now.kv.bytes_per_token,
            local=tuple(np.concatenate(p) if p else empty for p in self.local),
            sent={pair: np.concatenate(p) for pair, p in sorted(self.sent.items())},
        )
        return SwitchPlan(
            before=self.now,
            after=after,
            weights=weight_move(self.now.layout, self.dst, state),
            kv=kv,
            num_layers=state.num_layers,
        )

    def _grains(self, layout: Layout, home: int, rank: int, num_tokens: int) -> np.ndarray:
        """First position of the grain in each local grain slot of a rank, in local order. i64[n]."""
        lag = layout.lag(home, rank)
        held = self.now.kv.tokens_held(layout, lag, num_tokens)
        starts = np.arange(0, held, self.grain, dtype=np.int64)
        return self.now.kv.positions(layout, lag, starts)

    def _slots(self, pages: tuple[int, ...], count: int) -> np.ndarray:
        """Physical grain slot of each of the first `count` local grains. i64[count]."""
        index = np.arange(count, dtype=np.int64)
        return np.asarray(pages, np.int64)[index // self.per_page] * self.per_page + index % self.per_page

    def _assign_pages(self) -> dict[str, dict[int, tuple[int, ...]]]:
        """Choose every destination page, leaving in place what already has the right content and fits."""
        kept: dict[str, dict[int, list[int]]] = {}
        taken: list[set[int]] = [set() for _ in range(self.dst.size)]
        for name, request in self.now.requests.items():
            home, tokens = self.placed[name]
            kept[name] = {}
            for rank in self.dst.holders(home):
                want = self._grains(self.dst, home, rank, tokens)
                pages = [-1] * math.ceil(len(want) / self.per_page)
                if rank in request.pages:
                    have = self._grains(self.now.layout, request.home, rank, tokens)
                    content = {
                        have[i * self.per_page : (i + 1) * self.per_page].tobytes(): page
                        for i, page in enumerate(request.pages[rank])
                        if page < self.pages_per_rank
                    }
                    for i in range(len(pages)):
                        pages[i] = content.get(want[i * self.per_page : (i + 1) * self.per_page].tobytes(), -1)
                    taken[rank].update(page for page in pages if page >= 0)
                kept[name][rank] = pages
        free = [iter([p for p in range(self.pages_per_rank) if p not in taken[r]]) for r in range(self.dst.size)]
        return {
            name: {
                rank: tuple(page if page >= 0 else next(free[rank]) for page in pages)
                for rank, pages in by_rank.items()
            }
            for name, by_rank in kept.items()
        }

    def _move(self, request: RequestPages, home: int, pages: Mapping[int, tuple[int, ...]]) -> None:
        """Record how every grain of one request reaches every rank that must hold it."""
        where: dict[int, dict[int, int]] = {}  # rank -> grain -> slot, at the source
        for rank, source_pages in request.pages.items():
            grains = self._grains(self.now.layout, request.home, rank, request.num_tokens)
            where[rank] = dict(zip(grains.tolist(), self._slots(source_pages, len(grains)).tolist(), strict=True))
        for rank, target_pages in pages.items():
            want = self._grains(self.dst, home, rank, request.num_tokens)
            slots = self._slots(target_pages, len(want))
            stay: list[tuple[int, int]] = []
            come: dict[int, list[tuple[int, int]]] = {}
            here = where.get(rank, {})
            for grain, slot in zip(want.tolist(), slots.tolist(), strict=True):
                if grain in here:
                    if here[grain] != slot:
                        stay.append((here[grain], slot))
                    continue
                have = (r for r in where if grain in where[r])
                source = min(have, key=lambda r: (self.place[r] != self.place[rank], self.load[r], r))
                self.load[source] += 1  # spread the sending
                come.setdefault(source, []).append((where[source][grain], slot))
            if stay:
                self.local[rank].append(np.asarray(stay, np.int64))
            for source, pairs in come.items():
                self.sent.setdefault((source, rank), []).append(np.asarray(pairs, np.int64))


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
