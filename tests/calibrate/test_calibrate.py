"""A calibration on the devices that are here."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from splash_jax.calibrate import calibrate
from splash_jax.calibrate.micro import micro
from splash_jax.errors import ConfigError
from splash_jax.layouts import attention_mesh
from tests.support import write_checkpoint


@pytest.mark.parametrize("ranks", [1, 4])
def test_microbenchmarks_find_rates(ranks: int) -> None:
    found = micro(attention_mesh({"rank": ranks}), "float32")
    assert set(found) == {
        "hbm_bytes_per_s", "bf16_flops_per_s", "interconnect_bytes_per_s", "message_latency_s", "step_overhead_s",
    }  # fmt: skip
    assert 1e8 < found["hbm_bytes_per_s"] < 1e13 and 1e8 < found["bf16_flops_per_s"] < 1e15
    assert 1e6 < found["interconnect_bytes_per_s"] < 1e13 and 1e-8 < found["message_latency_s"] < 1


def test_no_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layouts is empty; name at least one to measure"):
        calibrate(tmp_path, num_devices=1, layouts=(), name="x")


def test_what_the_process_has_set_in_jax_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def engine(*args: object) -> None:
        seen.append((jnp.asarray(1.0).dtype, jax.config.jax_disable_jit))
        raise ConfigError("seen")

    monkeypatch.setattr(sys.modules["splash_jax.calibrate.calibrate"], "Engine", engine)
    with jax.enable_x64(True), jax.disable_jit(True), pytest.raises(ConfigError, match="seen"):
        calibrate(tmp_path, num_devices=1, name="x")
    assert seen == [(jnp.float32, False)]


@pytest.mark.slow
def test_a_small_model_is_measured_and_predicted(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small")
    found = calibrate(checkpoint, num_devices=4, name="here", dtype="float32", max_num_seqs=8, rounds=2)
    assert {str(one.layout) for one in found.measured} == {"tp", "dp", "cp", "dop"}
    assert all(0 < one.low <= one.seconds <= one.high for one in found.measured)
    assert found.fit.median_error < 0.5  # of a machine that others use too
    assert found.hardware.ranks_share_device
