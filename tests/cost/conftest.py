"""Models and layouts that several tests of the cost model price."""

import pytest

from splash_jax.cost import ServedModel
from splash_jax.layouts import ROLES, make_layout
from splash_jax.models.config import ModelConfig
from splash_jax.ownership import Layout
from tests.support import SMALL


@pytest.fixture(scope="session")
def small() -> ServedModel:
    """The small fixture in float32."""
    sizes = ModelConfig.from_dict(SMALL, "small fixture")
    return ServedModel(sizes=sizes, weight_bytes=4, activation_bytes=4, kv_bytes_per_token=160)


@pytest.fixture(scope="session")
def layouts() -> dict[str, Layout]:
    """Every role on one axis of eight ranks."""
    return {role: make_layout(role, {"rank": 8}) for role in ROLES}
