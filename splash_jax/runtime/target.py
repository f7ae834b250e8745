"""Compile for GPUs that are not here: a mesh of described devices, from the text proto of a GPU's target."""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from splash_jax.errors import TargetError
from splash_jax.layouts import attention_mesh

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
# no GPU and no CUDA needed
EXTRA = "pip install 'splash-jax[preflight]' (in a clone: pip install -e '.[preflight]'), which brings ptxas too"
NEWER_FIELDS = ("collective_memory_granularity",)  # that JAX before 0.11 cannot read
# JAX before 0.11 cannot read it either, and with it JAX 0.12 compiles some sorts only where a GPU is.
NEVER = ("cub_version",)


def target_mesh(target: Path, sizes: dict[str, int]) -> Mesh:
    """A mesh of the given axes over one host's GPUs of the kind that `target` describes.

    Nothing runs on it; programs compile for it. Raises TargetError when the compiler is not installed or does not know
    the kind.
    """
    check_compiler()
    text = target.read_text(encoding="utf-8")
    left_out = NEVER + (NEWER_FIELDS if jax.__version_info__ < (0, 11) else ())
    text = re.sub(rf"^\s*({'|'.join(left_out)}):.*\n", "", text, flags=re.MULTILINE)
    topology = f"1x1x{prod(sizes.values())}"  # slices x hosts x devices
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=text, topology=topology)
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(
            f"JAX {jax.__version__} does not accept the target description {target.name}: {_first_line(error)}. "
            f"B200 needs JAX 0.11 or newer, and so Python 3.12 or newer; JAX 0.10 knows H100 and H200."
        ) from error
    return attention_mesh(sizes, found.devices)


def check_compiler() -> None:
    """Raise TargetError, with what to install, unless XLA's GPU compiler is here in JAX's own release."""
    wanted = " ".join(f"{name}=={jax.__version__}" for name in PACKAGES)
    how = f"Install it with: {EXTRA}. Or alone: pip install --no-deps {wanted} (with a ptxas on PATH)."
    have = {}
    for name in PACKAGES:
        try:
            have[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise TargetError(f"XLA's GPU compiler is not installed: {name} is missing. {how}") from None
    if other := {name: version for name, version in have.items() if version != jax.__version__}:
        raise TargetError(
            f"XLA's GPU compiler is of another release than JAX {jax.__version__}: {other}. "
            f"Install that of this release: pip install --no-deps {wanted}."
        )


@contextmanager
def clear_compile_errors() -> Iterator[None]:
    """Turn the compiler's complaint about a missing ptxas into a TargetError that says what to do."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "PTX compilation provider" not in str(error) and "ptxas" not in str(error):
            raise
        raise TargetError(
            f"XLA finds no ptxas that it can use: {_first_line(error)}. Put one on PATH: the CUDA toolkit has it "
            f"(13.0 or newer). Or install it with: {EXTRA}."
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).strip().rstrip(".")
