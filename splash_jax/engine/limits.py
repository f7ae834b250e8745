"""How large a step and a set of programs may be. What is beyond would not end: it is refused before anything begins."""

from splash_jax.errors import ConfigError
from splash_jax.ownership import Bucket, Layout
from splash_jax.runtime import Shapes

MOST_ROWS = 1 << 20  # of a step, all owners together, padding included
MOST_PAGE_NUMBERS = 1 << 27  # in the tables of a step, all ranks together: 512 MiB
MOST_PROGRAMS = 1 << 14  # compiled ahead


def check_step(layout: Layout, largest: Bucket, shapes: Shapes, requests: int, prompt_rows: int) -> None:
    """Raise `ConfigError` for a layout's largest step that has too many rows, or too many pages to name."""
    rows = largest.rows * layout.owner_groups
    told = f"{requests} requests that run at once, {prompt_rows} prompt tokens a step and tiles of {largest.tile} rows"
    if rows > MOST_ROWS:
        raise ConfigError(
            f"{told} make steps of {rows} rows in layout {layout}, more than {MOST_ROWS}. Lower max_num_seqs, "
            "max_num_batched_tokens or prefill_tile."
        )
    numbers = largest.sequences * shapes.table_width(layout) * layout.size
    if numbers > MOST_PAGE_NUMBERS:
        raise ConfigError(
            f"{told} name up to {numbers} pages of {shapes.kv.page_size} tokens a step in layout {layout}, more than "
            f"{MOST_PAGE_NUMBERS}. Lower max_num_seqs or max_model_len, or raise block_size or prefill_tile."
        )
