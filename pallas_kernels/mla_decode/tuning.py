"""The tuning table: which configuration serves a shape on a chip, with the evidence for it (tuning.json)."""

import json
from functools import cache
from importlib import resources
from typing import Any

from pallas_kernels.mla_decode.hopper import HopperConfig
from pallas_kernels.mla_decode.triton import TritonConfig

CONFIGS = {"hopper": HopperConfig, "triton": TritonConfig}


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    """The entries of every chip, smallest number of heads first."""
    text = (resources.files("pallas_kernels.mla_decode") / "tuning.json").read_text(encoding="utf-8")
    return {chip: sorted(entries, key=lambda e: e["heads"]) for chip, entries in json.loads(text)["chips"].items()}


def entry_for(chip: str, backend: str, rows: str, heads: int) -> dict[str, Any]:
    """The entry of the fewest heads that are enough, else of the most. Refuses a chip or format without entries.

    Args:
      rows: "fp8", or "plain" for BF16.
      heads: per rank.
    """
    own = [e for e in table().get(chip, []) if e["backend"] == backend and e["rows"] == rows]
    if not own:
        raise NotImplementedError(f"tuning.json has no {backend} configuration for {rows} rows on {chip}.")
    return next((e for e in own if e["heads"] >= heads), own[-1])


def config_for(chip: str, backend: str, rows: str, heads: int) -> Any:
    """The configuration of `entry_for`, as the backend takes it."""
    return CONFIGS[backend](**entry_for(chip, backend, rows, heads)["config"])
