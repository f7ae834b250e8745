"""Hardware profiles: those that come along load, and what is wrong with one is said."""

from pathlib import Path

import pytest

from splash_jax.configs import config_file, config_names
from splash_jax.cost import Work, compute_seconds, load_hardware, transfer_seconds
from splash_jax.errors import ConfigError


@pytest.mark.parametrize("name", config_names("hardware"))
def test_every_profile_is_whole(name):
    found = load_hardware(name)
    assert found.target.read_text().rstrip().endswith(f'device_description_str: "{_described(found.target)}"')
    assert f"device_memory_size: {found.hbm_bytes:.0f}\n" in found.target.read_text()
    assert 1e11 < found.interconnect_bytes_per_s < found.hbm_bytes_per_s < found.bf16_flops_per_s


def _described(target: Path) -> str:
    (line,) = [x for x in target.read_text().splitlines() if x.startswith("device_description_str")]
    return line.split('"')[1]


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(ConfigError, match=r"no hardware config is named 'tpu'; there are: b200, h200\."):
        load_hardware("tpu")
    with pytest.raises(ConfigError, match=r"no hardware config is named '\.\./models/x'"):
        load_hardware("../models/x")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "NVIDIA H200', 'nome = "NVIDIA H200', "name missing"),
        ("hbm_bytes = ", "more = 1\nhbm_bytes = ", "more unknown. A profile has bf16_flops_per_s, "),
        ("hbm_bytes = 151397597184", "hbm_bytes = -1", "hbm_bytes is -1, expected a finite number above 0"),
        ("hbm_bytes = 151397597184", "hbm_bytes = true", "hbm_bytes is True, expected"),
        ("message_latency_s = 1.0e-5", "message_latency_s = inf", "message_latency_s is inf"),
        ('name = "NVIDIA H200 SXM 141 GB"', 'name = ""', "name is '', expected text"),
        ('\nhbm_bytes = "', '\nother = "', "provenance does not say where hbm_bytes come from"),
        ("h200_141gb_hbm3e.txtpb", "h2oo.txtpb", "'nvidia_h2oo.txtpb' is no file beside it; there are: "),
        ("hbm_bytes = 1513", "hbm_bytes = = 1513", "not TOML"),
    ],
)
def test_a_profile_is_checked_whole(tmp_path, old, new, words):
    source = config_file("hardware", "h200")
    text = source.read_text()
    assert old in text
    for target in source.parent.glob("*.txtpb"):
        (tmp_path / target.name).write_text(target.read_text())
    file = tmp_path / "mine.toml"
    file.write_text(text)
    assert load_hardware(str(file)) == load_hardware(file)
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError) as refusal:
        load_hardware(file)
    assert words in str(refusal.value)


def test_rooflines():
    h200 = load_hardware("h200")
    assert compute_seconds(Work(flops=989e12, hbm_bytes=1.0), h200) == pytest.approx(1.0)
    assert compute_seconds(Work(flops=1.0, hbm_bytes=9.6e12), h200) == pytest.approx(2.0)
    assert transfer_seconds(9e11, 3, h200) == pytest.approx(2.0 + 3e-5)
