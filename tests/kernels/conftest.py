"""Kernels compiled for GPUs that are not here."""

import os

import jax
import pytest

from splash_jax.errors import TargetError
from splash_jax.runtime.target import check_compiler


@pytest.fixture(scope="session")
def compiler() -> None:
    """XLA's GPU compiler; CI installs it, so there its absence is a failure."""
    try:
        check_compiler()
    except TargetError as missing:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(missing))


@pytest.fixture(params=["h200", "b200"])
def chip(request: pytest.FixtureRequest, compiler: None) -> str:
    """A GPU to compile for; JAX before 0.11 does not know the B200."""
    if request.param == "b200" and jax.__version_info__ < (0, 11):
        pytest.skip("JAX before 0.11 cannot compile for a B200")
    return request.param
