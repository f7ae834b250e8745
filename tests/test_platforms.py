"""Where JAX will run, and that nobody reads of a GPU that is not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from splash_jax import platforms
from splash_jax.platforms import cuda_without_driver, has_cuda_driver, on_cpu

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("plugins", "driver", "cpu", "blind"),
    [
        (set(), False, True, False),
        (set(), True, True, False),
        ({"xla_cuda13"}, False, True, True),
        ({"xla_cuda13"}, True, False, False),
        ({"xla_rocm7"}, False, False, False),
        ({"xla_cuda13", "of_another_maker"}, False, False, True),
    ],
)
def test_a_plugin_is_of_use_where_its_driver_is(monkeypatch, plugins, driver, cpu, blind):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(platforms, "_plugins", lambda: plugins)
    monkeypatch.setattr(platforms, "has_cuda_driver", lambda: driver)
    monkeypatch.setattr(platforms, "OTHERS", ())
    assert (on_cpu(), cuda_without_driver()) == (cpu, blind)


def test_whoever_names_a_platform_has_it(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert not on_cpu() and on_cpu("cpu") and not on_cpu("tpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert on_cpu() and on_cpu("cpu,cuda")


# What README shows, as small as it gets; each of them starts JAX's devices.
README = """
from splash_jax import LLM, small_model
print(LLM(small_model(), num_devices=2, layouts=("tp",), max_num_seqs=1, compile_ahead=False, progress=False).layout)
"""
COMMANDS = {
    "LLM": ["-c", README],
    "plan": ["-m", "splash_jax.cli.main", "plan", "small", "-T", "2"],
    "kernels": ["-c", "from splash_jax.preflight.kernels import compile_kernels as c; import jax\n"
                "print(len(c('h200', lambda x: x + 1, jax.ShapeDtypeStruct((8,), 'float32'))))"],
}  # fmt: skip


@pytest.mark.skipif(has_cuda_driver(), reason="a GPU may be here, and JAX is to use it")
@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(command, id=name) for name, command in COMMANDS.items()),
        pytest.param(["scripts/own_loop.py"], id="own loop", marks=pytest.mark.slow),
        pytest.param(["scripts/bench_kernels.py", "--dry"], id="kernels in interpret mode", marks=pytest.mark.slow),
    ],
)
def test_nobody_reads_a_trace_of_a_gpu_that_is_not_here(command):
    env = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    env |= {"PYTHONPATH": str(ROOT), "NPROC": "32"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]
    assert "cuDNN" not in done.stderr and "Traceback" not in done.stderr
