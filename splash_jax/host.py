"""What this process may use of its machine: memory and processors, by the limits of groups and users. Imports no jax.

The machine itself shows more than a container, a batch job or a shell may have, and who takes more is killed.
"""

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# Which file of a group holds its limit: version 2 of control groups, version 1.
_MEMORY = ("memory.max", "memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes of memory, or threads: what may be had in all, what this process has of it, and whose limit it is."""

    limit: int
    used: int
    whose: str

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)


def memory(root: Path = _ROOT) -> Room:
    """The least room that any limit leaves this process.

    Looked at are the machine, the memory limits of the process's control groups and of all groups above them, and
    `ulimit`'s of address space and data. What this process has already counts as used: of memory its pages that no file
    backs, of address space all of it. What others in its groups use is not counted: they may end, and file caches go.
    """
    status = _fields(root)
    sizes = (status.get(key, "0").split()[0] for key in ("RssAnon", "VmSize", "VmData"))  # in kB
    resident, mapped, data = (int(size) * 1024 for size in sizes)
    found = [Room(limit=_physical(), used=resident, whose="this machine")]
    for folder in _groups("memory", root):
        for name in _MEMORY:
            if (limit := _number(folder / name)) is not None:
                found.append(Room(limit=limit, used=resident, whose=f"{name} of {folder}"))
    found += [Room(limit=limit, used=mapped, whose="ulimit -v") for limit in _rlimit("RLIMIT_AS")]
    found += [Room(limit=limit, used=data, whose="ulimit -d") for limit in _rlimit("RLIMIT_DATA")]
    return min(found, key=lambda room: room.left)


def threads(root: Path = _ROOT) -> Room:
    """The fewest threads that any limit lets this process have: of its groups, which others use too, or `ulimit -u`."""
    mine = int(_fields(root).get("Threads", "1"))
    found = [Room(limit=sys.maxsize, used=mine, whose="this machine")]
    for folder in _groups("pids", root):
        most, now = _number(folder / "pids.max"), _number(folder / "pids.current")
        if most is not None and now is not None:
            found.append(Room(limit=mine + most - now, used=mine, whose=f"pids.max of {folder}"))
    if hasattr(os, "geteuid") and os.geteuid():  # root may start as many as it likes
        found += [Room(limit=limit, used=mine, whose="ulimit -u") for limit in _rlimit("RLIMIT_NPROC")]
    return min(found, key=lambda room: room.limit)


def processors(root: Path = _ROOT) -> int:
    """Processors that this process may use: those it is bound to, or its groups' quota of time where that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _groups("cpu", root):
        quota, _, period = (_text(folder / "cpu.max") or "").partition(" ")
        if not period:
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            count = min(count, math.ceil(int(quota) / int(period)))
    return max(1, count)


def _physical() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize  # a system that does not say


def _rlimit(name: str) -> list[int]:
    try:
        import resource
    except ImportError:
        return []
    soft, _ = resource.getrlimit(getattr(resource, name))
    return [] if soft == resource.RLIM_INFINITY else [soft]


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Folders of this process's groups that may limit `controller`, from its own up to the mount of each hierarchy.

    A container may see only a part of a hierarchy: its mount then names a group of the host as its top.
    """
    own: dict[str, str] = {}  # controller, or "" for version 2 -> the group's path
    for line in (_text(root / "proc/self/cgroup") or "").split("\n"):
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        own |= dict.fromkeys(names.split(","), path)
    for line in (_text(root / "proc/self/mountinfo") or "").split("\n"):
        fields, _, kind = (part.split() for part in line.partition(" - "))
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        key = "" if kind[0] == "cgroup2" else controller
        if key not in own or (key and controller not in kind[2].split(",")):
            continue
        top, mount = fields[3], root / fields[4].lstrip("/")
        inside = os.path.relpath(own[key], top) if own[key].startswith(top) else "."
        place = mount if inside.startswith("..") else mount / inside
        yield from (one for one in (place, *place.parents) if one == mount or mount in one.parents)


def _fields(root: Path) -> dict[str, str]:
    """What /proc/self/status says of this process, by name."""
    lines = (line.partition(":") for line in (_text(root / "proc/self/status") or "").split("\n"))
    return {name: value.strip() for name, _, value in lines}


def _number(file: Path) -> int | None:
    text = _text(file) or ""
    return int(text) if text.isdigit() else None  # "max": no limit


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
