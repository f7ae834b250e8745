"""Settings of an engine, checked whole before anything is loaded."""

import math
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from splash_jax.errors import ConfigError, LayoutError
from splash_jax.layouts import make_layout
from splash_jax.ownership import Layout
from splash_jax.runtime import SwitchMode
from splash_jax.scheduler import PolicyConfig, plain

AUTO = "auto"
ATTENTION_BACKENDS = ("auto", "gpu", "xla")
DEFAULT_CACHE_DIR = "~/.cache/splash_jax/xla"
MOST_PARTS = 64  # of a layer in a spread switch, each padded to whole pages
PREFILL_TILE, GPU_PREFILL_TILE = 16, 128  # rows: the default, and the most that it is on GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is built from. Sizes are in tokens or bytes as named; names are vLLM's where it has one.

    Scalars of numpy and JAX are taken as the Python values they hold.

    A layout is a role's name, which every axis of the mesh then plays, or one role per axis: "node=dop,chip=cp".
    """

    model: Path
    num_devices: int = 1
    mesh: Mapping[str, int] | None = None  # axis -> size, num_devices in all; None: one axis, "rank"
    layout: str = "tp"  # to start in; "auto": the policy chooses, before every step
    layouts: tuple[str, ...] = ("tp", "dp", "cp", "dop")  # what it may switch to; programs are compiled for these
    directions: tuple[tuple[str, str], ...] | None = None  # switches it may make; None: between any two layouts
    switch_modes: tuple[str, ...] = ("splash", "blocking")  # ways to switch; programs are compiled for these
    spread_layers: int = 1  # layers that a spread switch moves per step
    spread_parts: int = 4  # parts that each of them moves in, each beside another layer
    dtype: str = "auto"  # "float32", "bfloat16"; "auto": the checkpoint's, or see decision 0010
    attention_backend: str = "auto"  # "gpu": Pallas kernels; "xla"; "auto": kernels on the GPUs that they are tuned for
    max_model_len: int | None = None  # None: the model's own context
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 128  # prompt tokens per step, all owners together
    prefill_tile: int | None = None  # rows of a prompt that share a read of its history; None: 16, on GPUs up to 128
    decode_buckets: tuple[int, ...] = ()  # requests per step that decode programs are compiled for; () chooses
    block_size: int = 16  # tokens per page
    cp_interleave: int | None = None  # consecutive positions per rank where positions are dealt out; None: a page
    device_memory_bytes: int | None = None  # per rank, weights included; None: measured free memory, on CPU a default
    reserve_bytes: int = 0  # of device_memory_bytes, kept free for programs' temporaries
    transfer_bytes: int | None = None  # most KV that a rank receives at a time in a switch; None: 1.5 times a layer's
    penalties: bool = True  # keep token counts per request, so that penalties work
    scoring: bool = True  # compile the programs of `logits`
    compile_ahead: bool = True  # False: compile each program at its first use instead
    seed: int = 0  # of requests that bring none
    hardware: str | Path | None = None  # of layout "auto": a name in configs/hardware or a TOML file; None: as is here
    policy: PolicyConfig = field(default_factory=PolicyConfig)  # of layout "auto"
    decision_log: str | Path | None = None  # of layout "auto": every decision, a line of JSON each; begun anew
    compilation_cache_dir: str | Path | None = DEFAULT_CACHE_DIR  # unless JAX has one; None: as JAX has it
    skip_tokenizer_init: bool = False
    debug_checks: bool = False  # check all indices of steps and switches on the devices first: slow, for tests

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, plain(getattr(self, one.name)))
        if isinstance(self.mesh, Mapping):
            object.__setattr__(self, "mesh", {axis: plain(size) for axis, size in self.mesh.items()})
        if isinstance(self.decode_buckets, Iterable) and not isinstance(self.decode_buckets, str | Mapping):
            object.__setattr__(self, "decode_buckets", tuple(map(plain, self.decode_buckets)))
        if not isinstance(self.model, Path):
            raise ConfigError(f"model must be the pathlib.Path of a checkpoint directory, got {self.model!r}.")
        object.__setattr__(self, "model", Path(os.path.expanduser(self.model)))
        for name in (
            "num_devices",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "spread_layers",
            "spread_parts",
        ):
            _positive(name, getattr(self, name))
        for name in ("prefill_tile", "max_model_len", "cp_interleave", "device_memory_bytes", "transfer_bytes"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"dtype must be auto, float32 or bfloat16, got {self.dtype!r}.")
        if self.attention_backend not in ATTENTION_BACKENDS:
            known = ", ".join(ATTENTION_BACKENDS)
            raise ConfigError(f"attention_backend must be one of {known}, got {self.attention_backend!r}.")
        for name in ("reserve_bytes", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name} must be a whole number of at least 0, got {value!r}.")
        if self.seed >= 2**63:
            raise ConfigError(f"seed must be below 2**63, as a request's own is; got {self.seed}.")
        if self.spread_parts > MOST_PARTS:
            raise ConfigError(f"spread_parts is {self.spread_parts}; a layer moves in {MOST_PARTS} parts at most.")
        for name in ("penalties", "scoring", "compile_ahead", "skip_tokenizer_init", "debug_checks"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}.")
        for name in ("hardware", "decision_log", "compilation_cache_dir"):
            if not isinstance(value := getattr(self, name), str | Path | None):
                raise ConfigError(f"{name} must be a path or None, got {value!r}.")
        examples = {
            "layouts": "('tp', 'dp')",
            "directions": "(('tp', 'dp'),)",
            "decode_buckets": "(8,)",
            "switch_modes": "('splash',)",
        }
        for name, example in examples.items():
            value = getattr(self, name)
            good = isinstance(value, Collection) and not isinstance(value, str | Mapping)
            if not good and (name, value) != ("directions", None):
                raise ConfigError(f"{name} must be a tuple like {example}, got {value!r}.")
        if not self.layouts:
            raise LayoutError(f"layouts is empty; give it at least {self.layout!r}.")
        self._check_mesh()
        self._check_layouts()
        if not self.switch_modes or any(mode not in list(SwitchMode) for mode in self.switch_modes):
            raise ConfigError(f"switch_modes must be some of {', '.join(SwitchMode)}, got {self.switch_modes!r}.")
        if not isinstance(self.policy, PolicyConfig):
            raise ConfigError(f"policy must be a PolicyConfig, got {self.policy!r}.")
        for name in (self.policy.pin, *(self.policy.allowed or ())):
            if name is not None and self.spelled_out(name) not in {self.spelled_out(one) for one in self.layouts}:
                raise LayoutError(f"the policy's {name!r} is not among the allowed layouts {', '.join(self.layouts)}.")
        if self.block_size % self.interleave:
            raise ConfigError(f"cp_interleave {self.interleave} must divide block_size {self.block_size}.")
        for size in self.decode_buckets:
            _positive("each of decode_buckets", size)
        if any(size > self.max_num_seqs for size in self.decode_buckets):
            raise ConfigError(
                f"decode_buckets {self.decode_buckets} must lie in 1 to max_num_seqs {self.max_num_seqs}."
            )

    @property
    def first_layout(self) -> str:
        """The layout to start in."""
        return self.layouts[0] if self.layout == AUTO else self.layout

    def tile_of(self, attention_backend: str) -> int:
        """`prefill_tile`, or what it is by default for "gpu" or "xla".

        A GPU's tensor cores want 64 rows of a head and more, which the expanded form takes from one tile. But a prompt
        takes whole tiles: no more than a quarter of a device's share of a step, so that several prompts find room.
        """
        if self.prefill_tile is not None:
            return self.prefill_tile
        share = self.max_num_batched_tokens // (4 * self.num_devices) if attention_backend == "gpu" else 0
        return max(PREFILL_TILE, min(GPU_PREFILL_TILE, 1 << max(0, share.bit_length() - 1)))

    @property
    def interleave(self) -> int:
        return self.block_size if self.cp_interleave is None else self.cp_interleave

    @property
    def mesh_shape(self) -> Mapping[str, int]:
        return {"rank": self.num_devices} if self.mesh is None else self.mesh

    def layout_of(self, name: str) -> Layout:
        """The layout of a name. Raises `LayoutError` where the mesh has none such."""
        return make_layout(name, self.mesh_shape)

    def spelled_out(self, name: str) -> str:
        """The one spelling of a layout's name; a name that is not known stays as it is."""
        try:
            return str(self.layout_of(name))
        except LayoutError:
            return name

    def _check_mesh(self) -> None:
        if self.mesh is not None and (mesh_ranks(self.mesh) != self.num_devices or not self.mesh):
            raise ConfigError(
                f"mesh {dict(self.mesh)} has {mesh_ranks(self.mesh)} ranks and num_devices is {self.num_devices}; "
                f"make the sizes of its axes multiply to it."
            )

    def _check_layouts(self) -> None:
        allowed = {str(self.layout_of(name)) for name in self.layouts}
        if str(self.layout_of(self.first_layout)) not in allowed:
            raise LayoutError(f"layout {self.layout!r} is not among the allowed layouts {', '.join(self.layouts)}.")
        spelled: dict[str, str] = {}
        for pair in self.directions or ():
            names = isinstance(pair, tuple | list) and all(isinstance(name, str) for name in pair)
            for name in pair if names else ():
                if name not in spelled:
                    spelled[name] = self.spelled_out(name)
            known = {spelled[name] for name in pair} if names else set()
            if len(known) != 2 or len(pair) != 2 or not known <= allowed:
                raise LayoutError(f"direction {pair!r} must be two different ones of {', '.join(self.layouts)}.")


def mesh_ranks(mesh: Mapping[str, int] | None) -> int:
    """Ranks of a mesh, 1 where there is none. Raises `ConfigError` for what is no mesh."""
    if mesh is None:
        return 1
    if not isinstance(mesh, Mapping):
        raise ConfigError(f"mesh must map axes to sizes, like {{'node': 2, 'chip': 4}}; got {mesh!r}.")
    for axis, size in mesh.items():
        if not isinstance(axis, str) or not axis.isidentifier() or not axis.isascii():  # XLA aborts on others
            raise ConfigError(f"mesh axes are named by words, such as 'node'; got {axis!r}.")
        _positive(f"mesh axis {axis!r}", plain(size))
    return math.prod(map(plain, mesh.values()))


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}.")
