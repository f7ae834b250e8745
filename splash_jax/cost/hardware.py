"""What one device and its links can do, read from `configs/hardware/*.toml` and checked whole."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from splash_jax.configs import config_file
from splash_jax.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device of a group. `provenance` says of every other value where it comes from."""

    name: str
    target: Path  # text proto that XLA compiles for
    hbm_bytes: float
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    interconnect_bytes_per_s: float  # received by one device
    message_latency_s: float  # of a collective without payload
    provenance: Mapping[str, str]


_NUMBERS = ("hbm_bytes", "hbm_bytes_per_s", "bf16_flops_per_s", "interconnect_bytes_per_s", "message_latency_s")
_KEYS = {field.name for field in fields(Hardware)}


def load_hardware(name: str | Path) -> Hardware:
    """A profile by its name in `configs/hardware`, or from a TOML file. Raises ConfigError for what is not right."""
    path = name if isinstance(name, Path) else Path(name) if name.endswith(".toml") else config_file("hardware", name)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}.") from error
    return _checked(values, path)


def _checked(values: dict, path: Path) -> Hardware:
    if missing := sorted(_KEYS - set(values)):
        raise ConfigError(f"{path}: {', '.join(missing)} missing. A profile has {', '.join(sorted(_KEYS))}.")
    if unknown := sorted(set(values) - _KEYS):
        raise ConfigError(f"{path}: {', '.join(unknown)} unknown. A profile has {', '.join(sorted(_KEYS))}.")
    for key in _NUMBERS:
        value = values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(f"{path}: {key} is {value!r}, expected a finite number above 0.")
    for key in ("name", "target"):
        if not isinstance(values[key], str) or not values[key]:
            raise ConfigError(f"{path}: {key} is {values[key]!r}, expected text.")
    sources = values["provenance"]
    if not isinstance(sources, dict) or any(not isinstance(text, str) or not text for text in sources.values()):
        raise ConfigError(f"{path}: provenance must be a table of texts.")
    if unsaid := sorted({*_NUMBERS, "target"} - set(sources)):
        raise ConfigError(f"{path}: provenance does not say where {', '.join(unsaid)} come from.")
    target = path.parent / values["target"]
    if not target.is_file():
        found = ", ".join(sorted(p.name for p in path.parent.glob("*.txtpb"))) or "none"
        raise ConfigError(f"{path}: target {values['target']!r} is no file beside it; there are: {found}.")
    numbers = {key: float(values[key]) for key in _NUMBERS}
    return Hardware(name=values["name"], target=target, provenance=dict(sources), **numbers)
