"""Which page of which rank holds what: the host half of the paged KV store. No jax."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from splash_jax.errors import PoolCorrupt, RequestError
from splash_jax.ownership import KVShape, Layout, Manifest, RequestPages, lags_of_holders


class PagePool:
    """Pages of every rank under one layout.

    Every page of a rank is in exactly one of: free | held by one request. `check` says so or raises.
    """

    def __init__(self, layout: Layout, kv: KVShape, pages_per_rank: int) -> None:
        self.layout, self.kv, self.pages_per_rank = layout, kv, pages_per_rank
        self._lags = lags_of_holders(layout)
        # no holder needs a further page before the next multiple of so many tokens
        self._boundary = kv.page_size if layout.position_shares == 1 else kv.interleave
        self._free = [list(range(pages_per_rank - 1, -1, -1)) for _ in range(layout.size)]
        self._pages: dict[str, dict[int, list[int]]] = {}
        self._home: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._until: dict[str, int] = {}  # tokens that the pages of every holder have room for
        self._at_home = [0] * layout.size  # requests

    @classmethod
    def adopt(cls, manifest: Manifest) -> "PagePool":
        """The pool that a manifest describes, as after a switch."""
        pool = cls(manifest.layout, manifest.kv, manifest.pages_per_rank)
        for name, request in manifest.requests.items():
            if not 0 <= request.home < pool.layout.size:
                raise PoolCorrupt(f"request {name!r} is at home on rank {request.home} of {pool.layout.size}.")
            pool._home[name] = request.home
            pool._at_home[request.home] += 1
            pool._set_tokens(name, request.num_tokens)
            pool._pages[name] = {rank: list(pages) for rank, pages in request.pages.items()}
        for rank in range(pool.layout.size):
            held, free = pool._held(rank), np.ones(pool.pages_per_rank, bool)
            free[held[(held >= 0) & (held < len(free))]] = False
            pool._free[rank] = np.flatnonzero(free)[::-1].tolist()
        pool.check()
        return pool

    def __contains__(self, name: str) -> bool:
        return name in self._home

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return (self.layout,)

    def home(self, name: str) -> int:
        return self._home[name]

    def homes(self, name: str) -> tuple[int, ...]:
        """The home of a request in each of `layouts`."""
        return (self._home[name],)

    def num_tokens(self, name: str) -> int:
        return self._tokens[name]

    def pages(self, name: str, rank: int) -> list[int]:
        """Pages of a request on a rank, in order of position; empty where the rank holds none of it."""
        return self._pages[name].get(rank, [])

    def add(self, name: str, home: int) -> None:
        """Begin an empty history whose home is rank `home`."""
        if name in self._home:
            raise PoolCorrupt(f"request {name!r} is already in the pool.")
        self._home[name] = home
        self._at_home[home] += 1
        self._set_tokens(name, 0)
        self._pages[name] = {rank: [] for rank in self._lags[home]}

    def holders(self, name: str) -> list[int]:
        """Ranks that hold some of a request's history, or will once it is long enough."""
        return list(self._pages[name])

    def growth(self, name: str, num_tokens: int) -> list[tuple[int, int]]:
        """Further pages each holder needs for `num_tokens` tokens: (rank, pages); 0 or less where it has enough."""
        lags = self._lags[self._home[name]]
        wanted = {lag: self.kv.pages_held(self.layout, lag, num_tokens) for lag in set(lags.values())}
        return [(rank, wanted[lags[rank]] - len(pages)) for rank, pages in self._pages[name].items()]

    def requests_held(self) -> list[int]:
        """Of every rank: requests of which it holds some, or will."""
        held = [0] * self.layout.size
        for lags, count in zip(self._lags, self._at_home, strict=True):
            for rank in lags:
                held[rank] += count
        return held

    def shortfall(self, name: str, num_tokens: int) -> int:
        """Pages that lack, on the worst rank, for a request to grow to `num_tokens`; 0 when it can."""
        if num_tokens <= self._until[name]:
            return 0
        return max(0, *(need - len(self._free[rank]) for rank, need in self.growth(name, num_tokens)))

    def grow(self, name: str, num_tokens: int) -> None:
        """Take the pages for `num_tokens` tokens. Raises `PoolCorrupt` when they are not there: ask first."""
        if num_tokens > self._until[name]:
            growth = self.growth(name, num_tokens)
            if any(need > len(self._free[rank]) for rank, need in growth):
                raise PoolCorrupt(f"request {name!r} cannot grow to {num_tokens} tokens: pages lack.")
            for rank, need in growth:
                if need > 0:
                    free = self._free[rank]
                    self._pages[name][rank] += free[: -need - 1 : -1]
                    del free[-need:]
            self._set_tokens(name, num_tokens)
        elif num_tokens > self._tokens[name]:
            self._tokens[name] = num_tokens

    def grow_all(self, wanted: Mapping[str, int]) -> bool:
        """`grow` every request to so many tokens; False, and none grown, where pages lack for some."""
        if not self.has_all(wanted):
            return False
        for name, tokens in wanted.items():
            if tokens > self._until[name]:
                self.grow(name, tokens)
            elif tokens > self._tokens[name]:
                self._tokens[name] = tokens
        return True

    def has_all(self, wanted: Mapping[str, int]) -> bool:
        """Whether there are pages for every request to grow to so many tokens."""
        until, need = self._until, [0] * self.layout.size
        for name, tokens in wanted.items():
            if tokens > until[name]:
                for rank, more in self.growth(name, tokens):
                    need[rank] += max(0, more)
        return all(more <= len(free) for more, free in zip(need, self._free, strict=True))

    def _set_tokens(self, name: str, num_tokens: int) -> None:
        self._tokens[name] = num_tokens
        self._until[name] = -(-num_tokens // self._boundary) * self._boundary

    def release(self, name: str) -> None:
        """Give back every page of a request."""
        for rank, pages in self._pages.pop(name).items():
            self._free[rank].extend(pages)
        self._at_home[self._home[name]] -= 1
        del self._home[name], self._tokens[name], self._until[name]

    def free_pages(self) -> list[int]:
        """Free pages of each rank."""
        return [len(free) for free in self._free]

    def manifest(self) -> Manifest:
        """What is stored now, as data."""
        return Manifest(
            layout=self.layout,
            kv=self.kv,
            pages_per_rank=self.pages_per_rank,
            requests={
                name: RequestPages(
                    home=self._home[name],
                    num_tokens=self._tokens[name],
                    pages={rank: tuple(pages) for rank, pages in by_rank.items()},
                )
                for name, by_rank in self._pages.items()
            },
        )

    def check(self, live: Iterable[str] | None = None) -> None:
        """Raise `PoolCorrupt` unless every page is free or held exactly once, and (if given) only by `live`."""
        for rank, free in enumerate(self._free):
            held = self._held(rank)
            every = np.append(held, np.array(free, np.int64))
            outside = (every < 0) | (every >= self.pages_per_rank)
            if outside.any() or (np.bincount(every, minlength=self.pages_per_rank) != 1).any():
                raise PoolCorrupt(
                    f"rank {rank}: {len(free)} free + {len(held)} held pages are not the {self.pages_per_rank} of the "
                    f"pool, each once."
                )
        if live is not None and (stray := set(self._home) - set(live)):
            raise PoolCorrupt(f"pages are held for requests that are gone: {sorted(stray)[:8]}.")

    def _held(self, rank: int) -> np.ndarray:
        """Pages that requests hold on a rank. i64[pages]."""
        return np.array([page for pages in self._pages.values() for page in pages.get(rank, ())], np.int64)


def filled_pool(layout: Layout, kv: KVShape, pages_per_rank: int, tokens: Sequence[int]) -> PagePool:
    """A pool of requests "0", "1", ... that hold so many tokens each, owners dealt round-robin.

    Raises `RequestError` where they do not fit.
    """
    pool = PagePool(layout, kv, pages_per_rank)
    for i, count in enumerate(tokens):
        pool.add(str(i), i % layout.size)
        if lack := pool.shortfall(str(i), count):
            raise RequestError(
                f"layout {layout} has {pages_per_rank:,} pages of {kv.page_size} tokens per rank: request {i} of "
                f"{len(tokens)}, of {count:,} tokens, lacks {lack:,}. Give it more memory, or fewer tokens."
            )
        pool.grow(str(i), count)
    return pool
