"""What a kernel must know of a GPU before it runs there: how much of it one block takes, and so how many share it.

Rates (bytes/s, FLOP/s) are not here: callers that compute times bring them, as configs/hardware/*.toml has them.
"""

from dataclasses import dataclass
from typing import final

import jax


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Limits of one kind of GPU. Shared memory in bytes, registers in 32-bit words."""

    name: str
    capability: tuple[int, int]
    sms: int  # streaming multiprocessors
    smem_per_sm: int
    smem_per_block: int  # the most one block may ask for
    smem_reserved: int  # that the system takes per block
    registers_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    flops_per_clock: int  # dense BF16, of one SM

    def blocks_resident(self, *, registers: int, smem: int, threads: int) -> int:
        """Blocks of `threads` threads with so many registers each and `smem` bytes that one SM holds; 0 if none."""
        if threads > self.threads_per_sm or smem > self.smem_per_block:
            return 0
        per_warp = -(-registers * 32 // 256) * 256  # handed out to warps in units of 256
        warps = -(-threads // 32)
        return min(
            self.registers_per_sm // max(1, per_warp * warps),
            self.smem_per_sm // (smem + self.smem_reserved),
            self.threads_per_sm // threads,
            self.blocks_per_sm,
        )


def _chip(name: str, capability: tuple[int, int], sms: int, flops_per_clock: int) -> Chip:
    return Chip(
        name=name,
        capability=capability,
        sms=sms,
        smem_per_sm=228 * 1024,
        smem_per_block=227 * 1024,
        smem_reserved=1024,
        registers_per_sm=65536,
        threads_per_sm=2048,
        blocks_per_sm=32,
        flops_per_clock=flops_per_clock,
    )


# CUDA C++ Programming Guide, "Compute Capabilities" (9.0 and 10.0 agree in what `_chip` fills in). FLOPs per clock: the
# data sheets' dense BF16 rates over SMs and boost clock, as the powers of two that they are.
CHIPS = {
    "h100": _chip("h100", (9, 0), 132, 4096),
    "h200": _chip("h200", (9, 0), 132, 4096),
    "b200": _chip("b200", (10, 0), 148, 8192),
}


def chip_of(kind: str) -> Chip | None:
    """The chip that a device or a data sheet calls so, as "NVIDIA H200"; None where it is none of CHIPS."""
    return next((chip for name, chip in CHIPS.items() if name in kind.lower().split()), None)


def this_chip() -> Chip | None:
    """The chip of the default device; None where it is no GPU of CHIPS."""
    return chip_of(jax.devices()[0].device_kind)


def target_chip(chip: str | None) -> str | None:
    """The chip that a program is for: the one named, else the default device's; None where that is no GPU of CHIPS.

    Raises ValueError for a name that is none of CHIPS.
    """
    if chip is None:
        found = this_chip()
        return found.name if found else None
    if chip not in CHIPS:
        raise ValueError(f"no chip {chip!r} is known; known are: {', '.join(CHIPS)}.")
    return chip


def known_chip(chip: str | None, backend: str) -> str:
    """`chip`, which a backend without a configuration of the caller's has to know."""
    if chip is None:
        raise ValueError(f"{backend} needs to know its GPU: name a chip ({', '.join(CHIPS)}) or give a config.")
    return chip
