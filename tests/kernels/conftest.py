"""Kernels compiled for GPUs that are not here."""

import jax
import pytest


@pytest.fixture(params=["h200", "b200"])
def chip(request: pytest.FixtureRequest, compiler: None) -> str:
    """A GPU to compile for; JAX before 0.11 does not know the B200."""
    if request.param == "b200" and jax.__version_info__ < (0, 11):
        pytest.skip("JAX before 0.11 cannot compile for a B200")
    return request.param
