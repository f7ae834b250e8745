"""The static shapes of a step: what a compiled program is keyed by."""

import math
from dataclasses import dataclass

import numpy as np

from pallas_kernels.chip import chip_of
from pallas_kernels.mla_decode import Work, plan_decode
from pallas_kernels.tuning import table
from splash_jax.errors import ConfigError
from splash_jax.models.config import ModelConfig
from splash_jax.models.mla import latent_width
from splash_jax.ownership import Bucket, KVShape, Layout

MAX_TOP_LOGPROBS = 20
MAX_STOP_IDS = 16
NOWHERE = 2**30  # beyond every pool: a write there is dropped


def attention_kernels(asked: str, device_kind: str) -> tuple[str, str | None]:
    """`attention_backend` and `attention_chip` of `Shapes` for an engine's setting and the name of a device.

    "auto" takes the kernels where that names a GPU that they are tuned for, and XLA elsewhere. Raises `ConfigError`
    where "gpu" is asked for and it names none; an empty name is of devices that have not started.
    """
    chip, tuned = chip_of(device_kind), table("mla_decode")
    chip = chip if chip and chip.name in tuned else None
    if asked == "gpu" and device_kind and chip is None:
        raise ConfigError(
            f'attention_backend "gpu" has kernels for {", ".join(tuned)}, and this is {device_kind}. '
            f'Use "auto" or "xla".'
        )
    backend = ("gpu" if chip else "xla") if asked == "auto" else asked
    return backend, chip.name if chip and backend == "gpu" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """Everything about an engine that programs depend on and that no layout changes."""

    model: ModelConfig
    dtype: str
    kv: KVShape
    max_model_len: int
    slots: int  # requests that may run at once
    penalties: bool  # whether token counts are kept per slot
    attention_backend: str = "xla"  # of pallas_kernels.mla_attention
    attention_chip: str | None = None  # of pallas_kernels.chip.CHIPS, that "gpu" chooses kernels for
    transfer_bytes: int | None = None  # most that a rank receives of a layer's histories at a time; None: 1.5 pools
    debug_checks: bool = False  # whether the indices of every step and switch are checked on the devices before it runs

    @property
    def width(self) -> int:
        """Numbers stored per token and layer."""
        return latent_width(self.model)

    @property
    def kernels(self) -> bool:
        """Whether programs are for a GPU that has kernels, and are to take them."""
        return self.attention_chip is not None

    def table_width(self, layout: Layout) -> int:
        """Pages of one request that a rank holds at most."""
        return self.kv.pages_held(layout, 0, self.max_model_len)

    def cut_decodes(self, layout: Layout, held: np.ndarray) -> Work | None:
        """How the decode kernel of a rank takes histories of `held` i32[B] tokens; None where there is none."""
        if not self.kernels or not len(held):
            return None
        heads = self.model.num_heads // layout.kernel_shards
        return plan_decode(held, heads=heads, fp8=False, chip=self.attention_chip)


def groups(layout: Layout) -> tuple[int, ...]:
    """Sizes of the owner axes: the leading dimensions of rows."""
    return tuple(axis.size for axis in layout.axes if axis.name in layout.owner_axes)


def sample_rows(layout: Layout, bucket: Bucket) -> int:
    """Rows that the sampler sees, padded so that every rank samples as many."""
    return math.ceil(layout.owner_groups * bucket.sequences / layout.size) * layout.size
