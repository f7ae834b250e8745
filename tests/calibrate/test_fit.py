"""The fit finds the constants that steps were made from, says how far off it is, and its profile is a profile."""

import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from splash_jax.calibrate import Calibration, profile_toml
from splash_jax.calibrate.fit import Fit, fit, predict, regrets
from splash_jax.calibrate.micro import _line
from splash_jax.calibrate.steps import Measured, smallest_bucket
from splash_jax.cost import Hardware, Load, ServedModel, StepModel, load_hardware
from splash_jax.layouts import make_layout
from splash_jax.models.config import ModelConfig
from splash_jax.ownership import Bucket
from tests.support import SMALL

MODEL = ServedModel(
    sizes=ModelConfig.from_dict(SMALL | {"max_position_embeddings": 4096}, "small"), weight_bytes=4,
    activation_bytes=4, kv_bytes_per_token=160,
)  # fmt: skip
LAYOUTS = [make_layout(name, {"rank": 4}) for name in ("tp", "dp", "cp", "dop")]
TRUE = Hardware(
    name="made up", hbm_bytes=2e9, hbm_bytes_per_s=3e9, bf16_flops_per_s=2e10, interconnect_bytes_per_s=5e8,
    message_latency_s=3e-4, kv_bytes_per_s=1e9, attention_flops_per_s=6e9, step_overhead_s=4e-3,
    ranks_share_device=True,
    provenance=dict.fromkeys(
        ("hbm_bytes", "hbm_bytes_per_s", "bf16_flops_per_s", "interconnect_bytes_per_s", "message_latency_s",
         "kv_bytes_per_s", "attention_flops_per_s", "step_overhead_s"), "made up"),
)  # fmt: skip
LOADS = [Load.decode([c] * b, 4) for b in (1, 4, 16) for c in (32, 512, 4000)]
LOADS += [Load(np.array([c]), np.array([128]), np.array([0])) for c in (128, 2048)]


def model_of(hardware: Hardware) -> StepModel:
    return StepModel(MODEL, LAYOUTS, hardware)


def steps(noise: float) -> list[Measured]:
    rng, found = np.random.default_rng(3), []
    for load in LOADS:
        for layout, estimate in model_of(TRUE).seconds(load).items():
            seconds = estimate.seconds * float(np.exp(noise * rng.normal()))
            found.append(Measured(layout=layout, load=load, seconds=seconds, low=seconds * 0.97, high=seconds * 1.03))
    return found


def off_by(factor: float) -> Hardware:
    """A profile whose every constant is wrong."""
    rates = {name: getattr(TRUE, name) * factor for name in ("hbm_bytes_per_s", "bf16_flops_per_s", "kv_bytes_per_s")}
    return replace(TRUE, message_latency_s=TRUE.message_latency_s / factor, step_overhead_s=1e-4, **rates)


@pytest.fixture(scope="module")
def noisy() -> Fit:
    return fit(off_by(3.0), steps(0.05), model_of)


def test_steps_of_known_constants_are_predicted_again(noisy: Fit) -> None:
    found = fit(off_by(3.0), steps(0.0), model_of)
    assert found.median_error <= 0.02 and found.regret <= 0.02
    assert noisy.median_error <= 0.06 and noisy.regret <= 0.06
    assert found.noise == pytest.approx(0.03, abs=0.005)


def test_a_profile_that_is_off_misses_and_the_fit_says_so() -> None:
    measured = steps(0.0)
    before = np.abs(predict(model_of(off_by(3.0)), measured) / [one.seconds for one in measured] - 1)
    assert np.median(before) > 0.1
    spoilt = [replace(one, seconds=one.seconds * (5 if i == 7 else 1)) for i, one in enumerate(measured)]
    found = fit(off_by(3.0), spoilt, model_of)
    assert found.worst is spoilt[7] and found.worst_error > 0.5 and found.median_error < 0.05


def test_regret_is_the_time_lost_by_the_predicted_best() -> None:
    measured = [
        Measured(layout=layout, load=LOADS[0], seconds=s, low=s, high=s)
        for layout, s in zip(LAYOUTS, (4.0, 2.0, 3.0, 8.0), strict=True)
    ]
    assert regrets(np.array([9.0, 9.0, 1.0, 9.0]), measured) == [0.5]
    assert regrets(np.array([9.0, 1.0, 2.0, 9.0]), measured) == [0.0]


def test_a_line_through_collectives() -> None:
    latency, per_byte = _line({size: 2e-4 + size * 1e-9 for size in (1 << 10, 1 << 16, 1 << 20, 1 << 23)})
    assert latency == pytest.approx(2e-4) and per_byte == pytest.approx(1e-9)


def test_the_smallest_bucket_that_holds_a_load() -> None:
    dp = LAYOUTS[1]
    buckets = (
        Bucket(decode=1, tiles=0, tile=16),
        Bucket(decode=4, tiles=0, tile=16),
        Bucket(decode=4, tiles=2, tile=16),
    )
    assert smallest_bucket(dp, buckets, Load.decode([9] * 4, 4)) == buckets[0]
    assert smallest_bucket(dp, buckets, Load.decode([9] * 5, 4)) == buckets[1]
    prompt = Load(np.array([32]), np.array([32]), np.array([2]))
    assert smallest_bucket(dp, buckets, prompt) == buckets[2]
    assert smallest_bucket(dp, buckets, Load(np.array([48]), np.array([48]), np.array([2]))) is None


def test_the_profile_that_is_written_is_read_again(noisy: Fit, tmp_path: Path) -> None:
    text = profile_toml(Calibration(micro={}, measured=steps(0.05), fit=noisy, seconds=1.0))
    (tmp_path / "here.toml").write_text(text)
    read = load_hardware(tmp_path / "here.toml")
    assert read.ranks_share_device and read.message_latency_s == pytest.approx(
        noisy.hardware.message_latency_s, rel=1e-4
    )
    assert set(tomllib.loads(text)["provenance"]) == set(TRUE.provenance)


@pytest.mark.parametrize("name", ["here", 'a "b" \\', "Rechner \U0001f30d", "a\x7f\nb", "\u2028"])
def test_a_profile_of_any_name_is_read_again(noisy: Fit, tmp_path: Path, name: str) -> None:
    named = replace(noisy, hardware=replace(noisy.hardware, name=name))
    text = profile_toml(Calibration(micro={}, measured=steps(0.05), fit=named, seconds=1.0))
    (tmp_path / "here.toml").write_text(f"\ufeff{text}", encoding="utf-8", newline="\r\n")  # as an editor may save it
    assert load_hardware(tmp_path / "here.toml").name == name
