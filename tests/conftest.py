"""The world the tests run in: eight CPU devices, and rules stricter than users meet."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

# All of this before JAX is imported, and in the environment, so that processes the tests start have it too.
os.environ["NPROC"] = "32"  # collectives on virtual CPU devices deadlock with fewer threads
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # a GPU machine names its own to run the tests marked gpu
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Tests compile much and run little. These choose how machine code is written; XLA's own passes, which decide what is
# computed, stay on. A JAX that still has its older emitters compiles in half the time with them, one object a program:
# fewer, too, of the memory maps that Linux allows a process (65,530; a program of the new emitters takes 180).
# And on a busy machine a collective may wait long for all of its threads before that is a deadlock.
OWN_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_collective_call_terminate_timeout_seconds=300"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {OWN_FLAGS}".strip()

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example of a law may compile, so no example has a deadline; CI draws the same examples every time.
settings.register_profile("splash", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("splash")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ["JAX_PLATFORMS"] == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: run with JAX_PLATFORMS=cuda,cpu"))


@pytest.fixture(scope="session")
def oracles() -> Path:
    """The folder of small checkpoints with the logits that an independent implementation gave for them."""
    folder = Path(os.environ.get("SPLASH_ORACLES", ROOT / "tests" / "oracles"))
    if not folder.is_dir():
        pytest.fail(f"no oracles at {folder}: set SPLASH_ORACLES to the folder that holds them.")
    return folder


@pytest.fixture(scope="session")
def compiler() -> None:
    """XLA's GPU compiler; CI installs it, so there its absence is a failure."""
    from splash_jax.errors import TargetError
    from splash_jax.runtime.target import check_compiler

    try:
        check_compiler()
    except TargetError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))
