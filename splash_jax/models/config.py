"""What a DeepSeek-V3 family checkpoint says about itself, refused whole when it contradicts itself.

Both spellings of `config.json` are read: transformers 5 (`rope_parameters`, `dtype`) and the older one of
the hub (`rope_theta`, `rope_scaling`, `torch_dtype`). A null counts as missing everywhere; only `q_lora_rank` must
be there, since its null means plain queries.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from splash_jax.errors import ConfigError
from splash_jax.models.checkpoint import check_folder, read_json
from splash_jax.models.rope import RopeConfig, yarn_scale

MODEL_TYPES = ("deepseek_v3", "kimi_k2")
DTYPES = ("float32", "bfloat16")
MOST_LAYERS, MOST_EXPERTS = 4096, 16_384  # far beyond any model: more is a damaged file


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and rules of one DeepSeek-V3 family model (MLA attention, sigmoid-routed experts)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None  # None: queries come from one plain projection
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int  # width of a dense layer's MLP
    moe_intermediate_size: int  # width of one expert; 0 without experts
    num_experts: int  # routed experts per layer; 0: every layer is dense
    num_experts_per_tok: int
    num_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    first_dense_layers: int  # layers [0, first_dense_layers) are dense; num_layers without experts
    rms_norm_eps: float  # not of q_a_layernorm and kv_a_layernorm, which always use 1e-6
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool  # on q_a_proj, kv_a_proj_with_mqa and o_proj only
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]  # any of them ends a request; may be empty. An engine adds its tokenizer's
    num_nextn_predict_layers: int  # multi-token-prediction layers stored after the model's own
    dtype: str | None  # what the config says that weights are computed in: see `serving_dtype`
    quantization: str | None  # how the stored weights are quantised: sizes can be planned, weights not be opened

    @classmethod
    def from_dict(cls, d: Mapping[str, object], where: str) -> "ModelConfig":
        """Read a parsed `config.json`. `where` names it in messages. Raises ConfigError."""
        f = _Fields.of(d, where)
        model_type = f.one_of("model_type", MODEL_TYPES, None)
        f.one_of("hidden_act", ("silu",), "silu")
        f.one_of("scoring_func", ("sigmoid",), "sigmoid")
        f.one_of("topk_method", ("noaux_tc",), "noaux_tc")
        num_layers = f.integer("num_hidden_layers", most=MOST_LAYERS)
        num_experts = f.integer("n_routed_experts", least=0, most=MOST_EXPERTS, default=0)
        moe = num_experts > 0
        if moe and f.values.get("moe_layer_freq", 1) != 1:
            raise ConfigError(
                f"{where}: moe_layer_freq is {d['moe_layer_freq']!r:.100}: dense and expert layers that alternate are"
                " not supported. Serve another model."
            )
        bos = f.token_ids("bos_token_id")
        if "q_lora_rank" not in d:
            raise ConfigError(f"{f.missing('q_lora_rank')} A null says that queries have no low rank.")
        cfg = cls(
            model_type=model_type,
            vocab_size=f.integer("vocab_size"),
            hidden_size=f.integer("hidden_size"),
            num_layers=num_layers,
            num_heads=f.integer("num_attention_heads"),
            q_lora_rank=f.integer("q_lora_rank") if "q_lora_rank" in f.values else None,
            kv_lora_rank=f.integer("kv_lora_rank"),
            qk_nope_head_dim=f.integer("qk_nope_head_dim"),
            qk_rope_head_dim=f.integer("qk_rope_head_dim"),
            v_head_dim=f.integer("v_head_dim"),
            intermediate_size=f.integer("intermediate_size"),
            moe_intermediate_size=f.integer("moe_intermediate_size") if moe else 0,
            num_experts=num_experts,
            num_experts_per_tok=f.integer("num_experts_per_tok") if moe else 0,
            num_shared_experts=f.integer("n_shared_experts", least=0, default=0) if moe else 0,
            n_group=f.integer("n_group") if moe else 1,
            topk_group=f.integer("topk_group") if moe else 1,
            norm_topk_prob=f.boolean("norm_topk_prob", None if moe else True),
            routed_scaling_factor=f.number("routed_scaling_factor", default=None if moe else 1.0),
            first_dense_layers=_first_dense_layers(f, num_layers) if moe else num_layers,
            rms_norm_eps=f.number("rms_norm_eps"),
            rope=_rope(f),
            max_position_embeddings=f.integer("max_position_embeddings"),
            tie_word_embeddings=f.boolean("tie_word_embeddings", False),
            attention_bias=f.boolean("attention_bias", False),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=f.token_ids("eos_token_id"),
            num_nextn_predict_layers=f.integer("num_nextn_predict_layers", least=0, default=0),
            dtype=f.text("dtype") or f.text("torch_dtype"),
            quantization=_quantization(f),
        )
        _check(cfg, where)
        return cfg


def read_model_config(path: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint directory, and more end tokens from `generation_config.json`.

    Raises CheckpointError for a file that cannot be read and ConfigError for a model that cannot be served.
    """
    check_folder(path)
    file = path / "config.json"
    cfg = ModelConfig.from_dict(read_json(file), str(file))
    generation = path / "generation_config.json"
    if not generation.exists():
        return cfg
    return with_ends(cfg, _Fields.of(read_json(generation), str(generation)).token_ids("eos_token_id"))


def with_ends(cfg: ModelConfig, more: Iterable[int]) -> ModelConfig:
    """The same model, and `more` tokens that end a request."""
    return replace(cfg, eos_token_ids=tuple(dict.fromkeys((*cfg.eos_token_ids, *more))))


def serving_dtype(cfg: ModelConfig, asked: str) -> str:
    """The dtype to serve or to plan in: the one asked for, or for "auto" the config's own.

    Raises ConfigError where that is none of `DTYPES`.
    """
    if asked != "auto":
        return asked
    if cfg.dtype not in DTYPES:
        says = "config.json names no dtype" if cfg.dtype is None else f"config.json says dtype {cfg.dtype!r}"
        raise ConfigError(f"{says}, and models are served in {' or '.join(DTYPES)}. Ask for one of them with dtype.")
    return cfg.dtype


def refuse_quantised(cfg: ModelConfig, folder: Path) -> None:
    """Raise ConfigError where the weights in `folder` are quantised: they cannot be opened yet."""
    if cfg.quantization is not None:
        raise ConfigError(
            f"{folder / 'config.json'}: quantization_config says {cfg.quantization}, and FP8 and other quantised"
            " weights cannot be served yet; `splash plan`, `simulate` and `preflight` take the config as it is."
            " Convert the weights to bfloat16 and remove quantization_config."
        )


def softmax_scale(cfg: ModelConfig) -> float:
    """What attention logits are multiplied by: (nope + rope)^-1/2, with yarn times m(mscale_all_dim)^2."""
    scale = (cfg.qk_nope_head_dim + cfg.qk_rope_head_dim) ** -0.5
    if cfg.rope.type == "yarn" and cfg.rope.mscale_all_dim:
        scale *= yarn_scale(cfg.rope, cfg.rope.mscale_all_dim) ** 2
    return scale


@final
@dataclass(frozen=True, slots=True)
class _Fields:
    """One JSON object without its nulls, and the name it goes by in messages."""

    values: Mapping[str, object]
    where: str

    @classmethod
    def of(cls, values: Mapping[str, object], where: str) -> "_Fields":
        return cls({name: value for name, value in values.items() if value is not None}, where)

    def missing(self, name: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: key {name!r} is missing. Add it, or take the file from the model's own release."
        )

    def wrong(self, name: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.where}: {name} is {self.values[name]!r:.100}, expected {expected}. Correct the value."
        )

    def integer(self, name: str, *, least: int = 1, most: int = 2**31 - 1, default: int | None = None) -> int:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.missing(name)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"an integer of at least {least}")
        if value > most:
            raise self.wrong(name, f"an integer of at most {most}")
        return value

    def number(self, name: str, *, default: float | None = None) -> float:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.missing(name)
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.wrong(name, "a finite number above 0")
        return float(value)

    def boolean(self, name: str, default: bool | None) -> bool:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.missing(name)
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def one_of(self, name: str, accepted: tuple[str, ...], default: str | None) -> str:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.missing(name)
            return default
        if not isinstance(value, str) or value not in accepted:
            raise ConfigError(
                f"{self.where}: {name} is {value!r}; supported: {', '.join(accepted)}."
                " Serve a checkpoint of a supported kind."
            )
        return value

    def part(self, name: str) -> "_Fields | None":
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(name, "an object or null")
        return None if value is None else _Fields.of(value, f"{self.where}: {name}")

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "text")
        return value

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self.values.get(name)
        found = [] if value is None else value if isinstance(value, list) else [value]
        ids = tuple(i for i in found if isinstance(i, int) and not isinstance(i, bool) and i >= 0)
        if len(ids) < len(found):
            raise self.wrong(name, "a token id, a list of token ids, or null")
        return ids


def _first_dense_layers(f: _Fields, num_layers: int) -> int:
    kinds = f.values.get("mlp_layer_types")
    if kinds is None:
        return f.integer("first_k_dense_replace", least=0)
    dense = kinds.count("dense") if isinstance(kinds, list) else 0
    if kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise f.wrong("mlp_layer_types", f"{num_layers} entries, all 'dense' before all 'sparse'")
    if f.integer("first_k_dense_replace", least=0, default=dense) != dense:
        raise f.wrong("first_k_dense_replace", f"{dense}, the number of 'dense' in mlp_layer_types")
    return dense


def _quantization(f: _Fields) -> str | None:
    found = f.part("quantization_config")
    return None if found is None else found.text("quant_method") or "no quant_method"


def _rope(f: _Fields) -> RopeConfig:
    found = [part for key in ("rope_parameters", "rope_scaling") if (part := f.part(key)) is not None]
    if len(found) == 2 and found[0].values != found[1].values:
        raise ConfigError(f"{f.where}: rope_parameters and rope_scaling differ. Keep the one that is right.")
    r = found[0] if found else _Fields({}, f"{f.where}: rope_scaling")
    if r.values.get("rope_type", r.values.get("type")) != r.values.get("type", r.values.get("rope_type")):
        raise ConfigError(f"{r.where}: rope_type and type differ. Keep the one that is right.")
    kind = r.one_of("rope_type" if "rope_type" in r.values else "type", ("default", "yarn"), "default")
    for name, only in (("attention_factor", None), ("partial_rotary_factor", 1.0), ("truncate", True)):
        if r.values.get(name, only) != only:
            raise ConfigError(f"{r.where}: {name} {r.values[name]!r} is not supported. Serve another model.")
    yarn = kind == "yarn"
    top = "original_max_position_embeddings" in f.values  # transformers lets the outer value win
    return RopeConfig(
        theta=r.number("rope_theta") if "rope_theta" in r.values else f.number("rope_theta"),
        interleave=f.boolean("rope_interleave", True),
        type="yarn" if yarn else "default",
        factor=r.number("factor") if yarn else 1.0,
        beta_fast=r.number("beta_fast", default=32.0) if yarn else 32.0,
        beta_slow=r.number("beta_slow", default=1.0) if yarn else 1.0,
        mscale=_mscale(r, "mscale") if yarn else None,
        mscale_all_dim=_mscale(r, "mscale_all_dim") if yarn else None,
        original_max_position=(f if top else r).integer(
            "original_max_position_embeddings", default=f.integer("max_position_embeddings")
        ),
    )


def _mscale(r: _Fields, name: str) -> float | None:
    return None if r.values.get(name) in (None, 0) else r.number(name)


def _check(cfg: ModelConfig, where: str) -> None:
    """Raise ConfigError when the fields contradict each other."""
    rope, per_group = cfg.rope, cfg.num_experts // cfg.n_group
    wrongs = [
        (
            cfg.qk_rope_head_dim % 2 != 0,
            f"qk_rope_head_dim {cfg.qk_rope_head_dim} is odd and leaves half a pair",
        ),
        (rope.theta <= 1, f"rope_theta {rope.theta} is not above 1"),
        (rope.factor < 1, f"the rope factor {rope.factor} is below 1"),
        (
            rope.beta_fast < rope.beta_slow,
            f"beta_fast {rope.beta_fast} is below beta_slow {rope.beta_slow}",
        ),
        (
            cfg.first_dense_layers > cfg.num_layers,
            f"first_k_dense_replace {cfg.first_dense_layers} is above num_hidden_layers {cfg.num_layers}",
        ),
    ]
    if cfg.num_experts:
        wrongs += [
            (
                cfg.num_experts % cfg.n_group != 0,
                f"n_routed_experts {cfg.num_experts} is not divisible by n_group {cfg.n_group}",
            ),
            (cfg.topk_group > cfg.n_group, f"topk_group {cfg.topk_group} is above n_group {cfg.n_group}"),
            (
                cfg.n_group > 1 and per_group == 1,
                f"n_group {cfg.n_group} leaves one expert per group, but a group is scored by its best two",
            ),
            (
                cfg.num_experts_per_tok > per_group * cfg.topk_group,
                f"num_experts_per_tok {cfg.num_experts_per_tok} is"
                f" above the {per_group * cfg.topk_group} experts of {cfg.topk_group} groups",
            ),
        ]
    for wrong, message in wrongs:
        if wrong:
            raise ConfigError(f"{where}: {message}. Correct it, or take the file from the model's own release.")
