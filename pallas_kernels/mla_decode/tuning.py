"""The configurations in tuning.json, as the backends take them."""

from typing import Any

from pallas_kernels.mla_decode.blackwell import BlackwellConfig
from pallas_kernels.mla_decode.hopper import HopperConfig
from pallas_kernels.mla_decode.triton import TritonConfig
from pallas_kernels.tuning import entry_for

CONFIGS = {"blackwell": BlackwellConfig, "hopper": HopperConfig, "triton": TritonConfig}


def config_for(chip: str, backend: str, rows: str, heads: int) -> Any:
    """The configuration of `entry_for`."""
    return CONFIGS[backend](**entry_for("mla_decode", chip, backend, rows, heads)["config"])
