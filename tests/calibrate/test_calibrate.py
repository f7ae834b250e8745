"""A calibration on the devices that are here."""

from pathlib import Path

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


@pytest.mark.slow
def test_a_small_model_is_measured_and_predicted(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small")
    found = calibrate(checkpoint, num_devices=4, name="here", dtype="float32", max_num_seqs=8, rounds=2)
    assert {str(one.layout) for one in found.measured} == {"tp", "dp", "cp", "dop"}
    assert all(0 < one.low <= one.seconds <= one.high for one in found.measured)
    assert found.fit.median_error < 0.5  # of a machine that others use too
    assert found.hardware.ranks_share_device
