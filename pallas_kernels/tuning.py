"""The tuning tables: which configuration of an op serves a shape on a chip, with the evidence for it.

`pallas_kernels/<op>/tuning.json` holds one entry per chip, backend, kind of rows and number of heads. Its evidence is
what a compiler, named there, made of that configuration; `measured` is null until a GPU has timed it.
`scripts/tune_kernels.py` writes the tables.
"""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def table(op: str) -> dict[str, list[dict[str, Any]]]:
    """The entries of every chip, smallest number of heads first."""
    text = (resources.files(f"pallas_kernels.{op}") / "tuning.json").read_text(encoding="utf-8")
    return {chip: sorted(entries, key=lambda e: e["heads"]) for chip, entries in json.loads(text)["chips"].items()}


def entry_for(op: str, chip: str, backend: str, rows: str, heads: int) -> dict[str, Any]:
    """The entry of the fewest heads that are enough, else of the most. Refuses a chip or format without entries.

    Args:
      rows: the op's word for what its pool holds; of MLA "fp8", or "plain" for BF16.
      heads: per rank.
    """
    own = [e for e in table(op).get(chip, []) if e["backend"] == backend and e["rows"] == rows]
    if not own:
        raise NotImplementedError(
            f"{op}/tuning.json has no {backend} configuration for {rows} rows on {chip}: give config= one of your own."
        )
    return next((e for e in own if e["heads"] >= heads), own[-1])
