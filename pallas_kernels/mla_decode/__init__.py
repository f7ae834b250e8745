"""Decode attention of absorbed MLA queries over pages of latent history, BF16 or FP8, split over a ragged batch."""

from pallas_kernels.formats import fp8_row_bytes, pack_fp8, unpack_fp8
from pallas_kernels.mla_decode.api import IMPLEMENTATIONS, fits, mla_decode, order_of, plan_decode
from pallas_kernels.mla_decode.blackwell import BlackwellConfig
from pallas_kernels.mla_decode.hopper import HopperConfig
from pallas_kernels.mla_decode.triton import TritonConfig
from pallas_kernels.mla_decode.work import Work

__all__ = [
    "IMPLEMENTATIONS",
    "BlackwellConfig",
    "HopperConfig",
    "TritonConfig",
    "Work",
    "fits",
    "fp8_row_bytes",
    "mla_decode",
    "order_of",
    "pack_fp8",
    "plan_decode",
    "unpack_fp8",
]
