"""What the cost model must know of a model as it is served: sizes, and bytes per weight, activation and token."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from splash_jax.errors import ConfigError


@runtime_checkable
class MLASizes(Protocol):
    """Sizes of a model of the DeepSeek-V3 family, as its config has them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def first_dense_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def q_lora_rank(self) -> int | None: ...
    @property
    def kv_lora_rank(self) -> int: ...
    @property
    def qk_nope_head_dim(self) -> int: ...
    @property
    def qk_rope_head_dim(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...
    @property
    def num_shared_experts(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


WIDTHS = {"float32": 4, "bfloat16": 2, "float8": 1}  # bytes per weight
FLOAT8 = "float8"  # quoted as the paper serves it; the engine does not serve it


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model and the widths it is served in."""

    sizes: MLASizes
    weight_bytes: float  # per weight
    activation_bytes: int  # per number that ranks exchange between layers, and per query and output
    kv_bytes_per_token: int  # of one layer

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "activation_bytes", "kv_bytes_per_token"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}.")

    @classmethod
    def of(cls, sizes: MLASizes, dtype: str) -> "ServedModel":
        """The model served in a dtype, history included. Raises ConfigError for one that is not in WIDTHS.

        In float8 a latent has a float32 scale per 128 numbers, the rotary key and activations are bfloat16: 656 bytes
        for DeepSeek-V3's history, its indexer's not counted.
        """
        if dtype not in WIDTHS:
            raise ConfigError(f"dtype must be auto or one of {', '.join(WIDTHS)}, got {dtype!r}.")
        width = WIDTHS[dtype]
        row = width * (sizes.kv_lora_rank + sizes.qk_rope_head_dim)
        if dtype == FLOAT8:
            row = sizes.kv_lora_rank + 4 * -(-sizes.kv_lora_rank // 128) + 2 * sizes.qk_rope_head_dim
        return cls(sizes=sizes, weight_bytes=width, activation_bytes=max(2, width), kv_bytes_per_token=row)

    @property
    def query_width(self) -> int:
        """Numbers of an absorbed query of one head, d_q of Eq. 4."""
        return self.sizes.kv_lora_rank + self.sizes.qk_rope_head_dim

    @property
    def value_width(self) -> int:
        """Numbers of an attention output of one head before its value projection, d_z of Eq. 4."""
        return self.sizes.kv_lora_rank

    @property
    def whole_projection_weights(self) -> int:
        """Weights of one layer's Q-A and KV-A, which every rank holds in every layout."""
        m = self.sizes
        return m.hidden_size * (m.kv_lora_rank + m.qk_rope_head_dim + (m.q_lora_rank or 0))

    @property
    def placed_projection_weights(self) -> int:
        """Weights of one layer's Q-B, KV-B and O, which a layout splits by head or keeps whole (Eq. 9)."""
        m = self.sizes
        per_head = (m.q_lora_rank or m.hidden_size) * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        per_head += m.kv_lora_rank * (m.qk_nope_head_dim + m.v_head_dim) + m.v_head_dim * m.hidden_size
        return m.num_heads * per_head

    @property
    def kinds(self) -> dict[str, int]:
        """Layers of each kind that there are: "dense" and "moe"."""
        counts = {"dense": self.sizes.first_dense_layers, "moe": self.sizes.num_layers - self.sizes.first_dense_layers}
        return {kind: count for kind, count in counts.items() if count}
