"""What one device and its links can do, read from `configs/hardware/*.toml` and checked whole.

These are the constants of Eq. 10 (arXiv 2609.37626): effective rates where they were measured, published peaks where
not. Where a profile does not tell attention's rates from those of weights, one rate serves both.
"""

import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splash_jax.configs import config_file
from splash_jax.errors import ConfigError
from splash_jax.files import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device of a group. `provenance` says of every other value where it comes from."""

    name: str
    hbm_bytes: float
    hbm_bytes_per_s: float  # reading weights
    bf16_flops_per_s: float  # of products with weights
    interconnect_bytes_per_s: float  # received by one device
    message_latency_s: float  # of a collective without payload
    provenance: Mapping[str, str]
    target: Path | None = None  # text proto that XLA compiles for; None: it cannot be compiled for from afar
    kv_bytes_per_s: float | None = None  # reading histories; None: as weights
    attention_flops_per_s: float | None = None  # of the attention kernel; None: as products with weights
    step_overhead_s: float = 0.0  # of a step, whatever is in it (t0 of Eq. 10)
    ranks_share_device: bool = False  # all ranks are one device's: their work adds up, and rates are of all together

    @property
    def kv_rate(self) -> float:
        return self.kv_bytes_per_s or self.hbm_bytes_per_s

    @property
    def attention_rate(self) -> float:
        return self.attention_flops_per_s or self.bf16_flops_per_s


_NUMBERS = ("hbm_bytes", "hbm_bytes_per_s", "bf16_flops_per_s", "interconnect_bytes_per_s", "message_latency_s")
_MORE_NUMBERS = ("kv_bytes_per_s", "attention_flops_per_s", "step_overhead_s")
_REQUIRED = {"name", "provenance", *_NUMBERS}
_OPTIONAL = {"target", "ranks_share_device", *_MORE_NUMBERS}


def load_hardware(name: str | Path) -> Hardware:
    """A profile by its name in `configs/hardware`, or from a TOML file. Raises ConfigError for what is not right."""
    path = Path(os.path.expanduser(name))
    if isinstance(name, str) and not name.endswith(".toml"):
        path = config_file("hardware", name)
    try:
        values = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}.") from error
    return _checked(values, path)


def _checked(values: dict, path: Path) -> Hardware:
    known = f"A profile has {', '.join(sorted(_REQUIRED))}, and may have {', '.join(sorted(_OPTIONAL))}."
    if missing := sorted(_REQUIRED - set(values)):
        raise ConfigError(f"{path}: {', '.join(missing)} missing. {known}")
    if unknown := sorted(set(values) - _REQUIRED - _OPTIONAL):
        raise ConfigError(f"{path}: {', '.join(unknown)} unknown. {known}")
    numbers = {key: values[key] for key in (*_NUMBERS, *_MORE_NUMBERS) if key in values}
    for key, value in numbers.items():
        least_is_zero = key == "step_overhead_s"
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise ConfigError(f"{path}: {key} is {value!r}, expected a finite number above 0.")
        if value == 0 and not least_is_zero:
            raise ConfigError(f"{path}: {key} is {value!r}, expected a finite number above 0.")
    if not isinstance(values["name"], str) or not values["name"]:
        raise ConfigError(f"{path}: name is {values['name']!r}, expected text.")
    shared = values.get("ranks_share_device", False)
    if not isinstance(shared, bool):
        raise ConfigError(f"{path}: ranks_share_device is {shared!r}, expected true or false.")
    sources = values["provenance"]
    if not isinstance(sources, dict) or any(not isinstance(text, str) or not text for text in sources.values()):
        raise ConfigError(f"{path}: provenance must be a table of texts.")
    if unsaid := sorted({*numbers, *({"target"} & set(values))} - set(sources)):
        raise ConfigError(f"{path}: provenance does not say where {', '.join(unsaid)} come from.")
    return Hardware(
        name=values["name"],
        target=_target(values["target"], path) if "target" in values else None,
        provenance=dict(sources),
        ranks_share_device=shared,
        **{key: float(value) for key, value in numbers.items()},
    )


def _target(value: object, path: Path) -> Path:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: target is {value!r}, expected text.")
    target = path.parent / value
    if not target.is_file():
        found = ", ".join(sorted(p.name for p in path.parent.glob("*.txtpb"))) or "none"
        raise ConfigError(f"{path}: target {value!r} is no file beside it; there are: {found}.")
    return target
