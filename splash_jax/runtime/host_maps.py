"""The memory maps of this process. XLA:CPU takes a few for every kernel, and where none are left LLVM crashes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from splash_jax.errors import ConfigError

MAPS, LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
SPARE = 2000  # for threads, buffers and libraries that come later


@dataclass(frozen=True)
class MemoryMaps:
    """How many there were before compiling began, and how many Linux allows."""

    began: int
    limit: int

    @classmethod
    def of_process(cls) -> Self | None:
        """As they are now; None where the system does not say."""
        try:
            return cls(_count(), int(LIMIT.read_text()))
        except (OSError, ValueError):
            return None

    def check(self, done: int, programs: int) -> None:
        """Raise `ConfigError` if `programs`, of which `done` are compiled, will need more than there are."""
        each = (_count() - self.began) / done
        needed = round(self.began + each * programs)
        if needed + SPARE > self.limit:
            raise ConfigError(
                f"{programs} programs need about {needed:,} memory maps ({each:.0f} each) and vm.max_map_count allows "
                f"{self.limit:,}: name fewer layouts or directions, fewer decode_buckets, or raise vm.max_map_count."
            )


def _count() -> int:
    with MAPS.open("rb") as lines:
        return sum(1 for _ in lines)
