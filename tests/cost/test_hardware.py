"""Hardware profiles: those that come along load, and what is wrong with one is said."""

from pathlib import Path

import pytest

from splash_jax.configs import config_file, config_names
from splash_jax.cost import Work, compute_seconds, load_hardware, transfer_seconds
from splash_jax.errors import ConfigError


@pytest.mark.parametrize("name", config_names("hardware"))
def test_every_profile_is_whole(name):
    found = load_hardware(name)
    assert found.hbm_bytes > 1e9 and 1e-6 < found.message_latency_s < 1e-3
    assert found.hbm_bytes_per_s < found.bf16_flops_per_s
    assert all(len(text) > 20 for text in found.provenance.values())
    assert found.kv_rate == (found.kv_bytes_per_s or found.hbm_bytes_per_s)
    assert found.attention_rate == (found.attention_flops_per_s or found.bf16_flops_per_s)


@pytest.mark.parametrize("name", ["b200", "h200"])
def test_a_profile_agrees_with_its_target(name):
    found = load_hardware(name)
    assert found.target is not None
    assert found.target.read_text().rstrip().endswith(f'device_description_str: "{_described(found.target)}"')
    assert f"device_memory_size: {found.hbm_bytes:.0f}\n" in found.target.read_text()
    assert 1e11 < found.interconnect_bytes_per_s < found.hbm_bytes_per_s


def test_profiles_say_what_they_are():
    """The paper's has no target to compile for, and says where it comes from; ranks of a CPU share its cores."""
    dcu, cpu = load_hardware("dcu"), load_hardware("cpu")
    assert dcu.target is None and not dcu.ranks_share_device
    told = [text for key, text in dcu.provenance.items() if "paper" in text]
    assert len(told) >= 4 and dcu.provenance["hbm_bytes_per_s"].startswith("Assumption")
    assert cpu.ranks_share_device and sum("itted to steps of small" in text for text in cpu.provenance.values()) == 7


def _described(target: Path) -> str:
    (line,) = [x for x in target.read_text().splitlines() if x.startswith("device_description_str")]
    return line.split('"')[1]


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(ConfigError, match=r"no hardware config is named 'tpu'; there are: b200, cpu, dcu, h200\."):
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
        ("hbm_bytes = ", "ranks_share_device = 1\nhbm_bytes = ", "ranks_share_device is 1, expected true or false"),
        ("hbm_bytes = ", "kv_bytes_per_s = 0\nhbm_bytes = ", "kv_bytes_per_s is 0, expected a finite number above 0"),
        ("hbm_bytes = ", "step_overhead_s = 1e-4\nhbm_bytes = ", "does not say where step_overhead_s come from"),
        ('target = "nvidia', 'target = 3 # "nvidia', "target is 3, expected text"),
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


def test_what_a_profile_may_leave_out(tmp_path):
    source = config_file("hardware", "h200")
    text = "".join(line for line in source.read_text().splitlines(True) if not line.startswith("target"))
    file = tmp_path / "mine.toml"
    file.write_text(
        text.replace("[provenance]", "kv_bytes_per_s = 1e12\nstep_overhead_s = 0\n\n[provenance]\n"
                     'kv_bytes_per_s = "guessed"\nstep_overhead_s = "guessed"')
    )  # fmt: skip
    found = load_hardware(file)
    assert (found.target, found.kv_rate, found.attention_rate, found.step_overhead_s) == (None, 1e12, 9.89e14, 0)
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load_hardware("nowhere.toml")


def test_rooflines():
    h200 = load_hardware("h200")
    assert compute_seconds(Work(flops=989e12, hbm_bytes=1.0), h200) == pytest.approx(1.0)
    assert compute_seconds(Work(flops=1.0, hbm_bytes=9.6e12), h200) == pytest.approx(2.0)
    assert transfer_seconds(9e11, 3, h200) == pytest.approx(2.0 + 3e-5)
