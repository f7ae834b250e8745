"""Seconds of a layer's compute and of a layer's transfer, from counts and hardware constants."""

from dataclasses import dataclass

from splash_jax.cost.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one rank computes in one stage of a layer."""

    flops: float
    hbm_bytes: float  # read and written


def compute_seconds(work: Work, hardware: Hardware) -> float:
    """The roofline: no stage is faster than its FLOPs at the peak rate, nor than its bytes at the memory's."""
    return max(work.flops / hardware.bf16_flops_per_s, work.hbm_bytes / hardware.hbm_bytes_per_s)


def transfer_seconds(received_bytes: float, messages: int, hardware: Hardware) -> float:
    """Seconds for a rank to receive so many bytes in so many collectives, one after another."""
    return received_bytes / hardware.interconnect_bytes_per_s + messages * hardware.message_latency_s
