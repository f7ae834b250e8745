"""GPUs that are not here: what is missing is said, and GPU options go to GPUs only."""

import importlib.metadata

import jax
import pytest

from splash_jax.errors import TargetError
from splash_jax.layouts import attention_mesh
from splash_jax.runtime import target
from splash_jax.runtime.options import GPU_OPTIONS, compiler_options


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(TargetError) as refusal:
        target.check_compiler()
    extra = "pip install 'splash-jax[preflight]' (in a clone: pip install -e '.[preflight]'), which brings ptxas too"
    alone = f"pip install --no-deps jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__}"
    assert "jax-cuda13-plugin is missing" in str(refusal.value) and f"{extra}. Or alone: {alone} (" in str(
        refusal.value
    )


def test_a_compiler_of_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1.2")
    with pytest.raises(TargetError, match=r"of another release than JAX .*'jax-cuda13-plugin': '0\.1\.2'.* --no-deps"):
        target.check_compiler()


def test_a_missing_ptxas_says_where_to_get_one():
    with (
        pytest.raises(TargetError, match=r"no ptxas .* pip install 'splash-jax\[preflight\]'"),
        target.clear_compile_errors(),
    ):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: No PTX compilation provider is available.")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"), target.clear_compile_errors():
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_options_are_for_gpus():
    class Gpu:
        platform = "gpu"

    mesh = attention_mesh({"rank": 2})
    assert compiler_options(mesh) is None
    assert compiler_options(attention_mesh({"rank": 1}, [Gpu()])) == GPU_OPTIONS
