"""One history kept in two page pools: while a switch is spread over steps, some layers run in either layout. No jax."""

from collections.abc import Mapping

from splash_jax.kv.pool import PagePool
from splash_jax.ownership import Layout


class TwinPool:
    """Two pools that hold the same requests, of the layout that layers leave and of the one they go to.

    To a scheduler it is one pool: the ranks of `src`, then those of `dst`. Homes are ranks of either.
    """

    def __init__(self, src: PagePool, dst: PagePool) -> None:
        self.src, self.dst = src, dst

    @property
    def layouts(self) -> tuple[Layout, ...]:
        return (self.src.layout, self.dst.layout)

    @property
    def layout(self) -> Layout:
        """The layout that all layers will run in."""
        return self.dst.layout

    def home(self, name: str) -> int:
        return self.dst.home(name)

    def homes(self, name: str) -> tuple[int, ...]:
        """The home of a request in each of `layouts`."""
        return (self.src.home(name), self.dst.home(name))

    def add(self, name: str, home: int) -> None:
        self.src.add(name, home)
        self.dst.add(name, home)

    def holders(self, name: str) -> list[int]:
        return self.src.holders(name) + [self.src.layout.size + rank for rank in self.dst.holders(name)]

    def growth(self, name: str, num_tokens: int) -> list[tuple[int, int]]:
        first = self.src.layout.size
        there = [(first + rank, need) for rank, need in self.dst.growth(name, num_tokens)]
        return self.src.growth(name, num_tokens) + there

    def requests_held(self) -> list[int]:
        return self.src.requests_held() + self.dst.requests_held()

    def shortfall(self, name: str, num_tokens: int) -> int:
        return max(self.src.shortfall(name, num_tokens), self.dst.shortfall(name, num_tokens))

    def grow(self, name: str, num_tokens: int) -> None:
        self.src.grow(name, num_tokens)
        self.dst.grow(name, num_tokens)

    def has_all(self, wanted: Mapping[str, int]) -> bool:
        return self.src.has_all(wanted) and self.dst.has_all(wanted)

    def grow_all(self, wanted: Mapping[str, int]) -> bool:
        return self.dst.has_all(wanted) and self.src.grow_all(wanted) and self.dst.grow_all(wanted)

    def release(self, name: str) -> None:
        self.src.release(name)
        self.dst.release(name)

    def free_pages(self) -> list[int]:
        return self.src.free_pages() + self.dst.free_pages()
