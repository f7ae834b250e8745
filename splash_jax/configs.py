"""Where the files of `configs/` are: beside the package in a checkout, inside it once it is installed."""

from pathlib import Path

from splash_jax.errors import ConfigError

_HERE = Path(__file__).resolve().parent
_ROOTS = (_HERE / "assets" / "configs", _HERE.parent / "configs")  # of an installed wheel, of a checkout


def config_names(kind: str) -> list[str]:
    """Names of the files in `configs/KIND`, without their ending."""
    return sorted({path.stem for root in _ROOTS for path in (root / kind).glob("*.toml")})


def config_file(kind: str, name: str) -> Path:
    """The file `configs/KIND/NAME.toml`. Raises ConfigError with the names that exist."""
    for root in _ROOTS:
        path = root / kind / f"{name}.toml"
        if "/" not in name and path.is_file():
            return path
    raise ConfigError(f"no {kind} config is named {name!r}; there are: {', '.join(config_names(kind)) or 'none'}.")
