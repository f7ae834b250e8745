"""Settings of an engine, checked whole before anything is loaded."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from splash_jax.errors import ConfigError, LayoutError
from splash_jax.layouts import ROLES


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. Sizes are in tokens or bytes as named; names are vLLM's where it has one."""

    model: Path
    num_devices: int = 1
    layout: str = "tp"
    layouts: tuple[str, ...] = tuple(ROLES)  # what it may switch to; programs are compiled for these
    directions: tuple[tuple[str, str], ...] | None = None  # switches it may make; None: between any two layouts
    dtype: str = "auto"  # "float32", "bfloat16", or as the checkpoint says
    max_model_len: int | None = None  # None: the model's own context
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 128  # prompt tokens per step, all owners together
    prefill_tile: int = 16  # prompt rows that share one read of their history
    decode_buckets: tuple[int, ...] = ()  # requests per step that decode programs are compiled for; () chooses
    block_size: int = 16  # tokens per page
    cp_interleave: int | None = None  # consecutive positions per rank where positions are dealt out; None: a page
    device_memory_bytes: int | None = None  # per rank, weights included; None: measured free memory, on CPU a default
    reserve_bytes: int = 0  # of it, kept free for programs' temporaries
    penalties: bool = True  # keep token counts per request, so that penalties work
    scoring: bool = True  # compile the programs of `logits`
    compile_ahead: bool = True  # False: compile each program at its first use instead
    seed: int = 0  # of requests that bring none
    compilation_cache_dir: Path | None = field(default_factory=lambda: Path.home() / ".cache" / "splash_jax" / "xla")
    skip_tokenizer_init: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model, Path):
            raise ConfigError(f"model must be the pathlib.Path of a checkpoint directory, got {self.model!r}.")
        for name in ("num_devices", "max_num_seqs", "max_num_batched_tokens", "prefill_tile", "block_size"):
            self._positive(name, getattr(self, name))
        for name in ("max_model_len", "cp_interleave", "device_memory_bytes"):
            if getattr(self, name) is not None:
                self._positive(name, getattr(self, name))
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}.")
        for name in ("reserve_bytes", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} must be a whole number of at least 0, got {value!r}.")
        examples = {"layouts": "('tp', 'dp')", "directions": "(('tp', 'dp'),)", "decode_buckets": "(8,)"}
        for name, example in examples.items():
            value = getattr(self, name)
            good = isinstance(value, Collection) and not isinstance(value, str)
            if not good and (name, value) != ("directions", None):
                raise ConfigError(f"{name} must be a tuple like {example}, got {value!r}.")
        if not self.layouts:
            raise LayoutError(f"layouts is empty; give it at least {self.layout!r}.")
        for layout in (self.layout, *self.layouts):
            if not isinstance(layout, str) or layout not in ROLES:
                raise LayoutError(f"unknown layout {layout!r}; choose one of {', '.join(ROLES)}.")
        if self.layout not in self.layouts:
            raise LayoutError(f"layout {self.layout!r} is not among the allowed layouts {', '.join(self.layouts)}.")
        for pair in self.directions or ():
            two = isinstance(pair, tuple | list) and len(pair) == 2 and pair[0] != pair[1]
            if not two or any(name not in list(self.layouts) for name in pair):
                raise LayoutError(f"direction {pair!r} must be two different ones of {', '.join(self.layouts)}.")
        if self.block_size % self.interleave:
            raise ConfigError(f"cp_interleave {self.interleave} must divide block_size {self.block_size}.")
        for size in self.decode_buckets:
            self._positive("each of decode_buckets", size)
        if any(size > self.max_num_seqs for size in self.decode_buckets):
            raise ConfigError(
                f"decode_buckets {self.decode_buckets} must lie in 1 to max_num_seqs {self.max_num_seqs}."
            )

    @property
    def interleave(self) -> int:
        return self.block_size if self.cp_interleave is None else self.cp_interleave

    @property
    def mesh_shape(self) -> Mapping[str, int]:
        return {"rank": self.num_devices}

    def _positive(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
