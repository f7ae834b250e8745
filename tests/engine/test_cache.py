"""The cache of compiled programs saves time, and is no condition for an engine to start."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from splash_jax.engine import EngineConfig, platform
from splash_jax.engine.config import DEFAULT_CACHE_DIR
from splash_jax.engine.platform import CACHE_DIR, NEVER_S, use_compilation_cache
from splash_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (CACHE_DIR, "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture):
    """JAX without a cache of its own; afterwards as it was. What the log warned of."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update(CACHE_DIR, None)
    caplog.set_level(logging.WARNING, "splash_jax")
    yield lambda: [record.getMessage() for record in caplog.records]
    for name, value in before.items():
        jax.config.update(name, value)


def now(name: str = CACHE_DIR):
    return getattr(jax.config, name)


def test_settings_are_made_without_a_home(monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: pytest.fail("asked for a home"))
    assert EngineConfig(model=ROOT).compilation_cache_dir == DEFAULT_CACHE_DIR


def test_the_default_is_in_the_users_home(tmp_path, monkeypatch, told):
    monkeypatch.setenv("HOME", str(tmp_path))
    use_compilation_cache(DEFAULT_CACHE_DIR)
    assert now() == str(tmp_path / ".cache" / "splash_jax" / "xla") and Path(now()).is_dir()
    assert told() == [] and now(SETTINGS[1]) == 0 and os.listdir(now()) == []


def test_without_a_home_it_starts_without_a_cache(monkeypatch, told):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where neither HOME nor passwd knows one
    use_compilation_cache(DEFAULT_CACHE_DIR)
    assert now() is None
    assert told() == [
        "compiled programs are not kept: ~/.cache/splash_jax/xla cannot be used as their cache (this user has no home "
        "folder)."
    ]


def test_a_home_that_takes_no_folder_is_no_obstacle(tmp_path, monkeypatch, told):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    use_compilation_cache(DEFAULT_CACHE_DIR)
    assert now() is None and len(told()) == 1 and told()[0].endswith("as their cache (Not a directory).")


def test_a_cache_of_the_process_is_used_or_left(tmp_path, told):
    jax.config.update(CACHE_DIR, str(tmp_path / "own"))
    use_compilation_cache("/dev/null/never asked for")
    assert now() == str(tmp_path / "own") and told() == []
    jax.config.update(CACHE_DIR, "/dev/null/own")
    use_compilation_cache(tmp_path)
    assert now() is None and told()[0].startswith("compiled programs are not kept: /dev/null/own cannot be used")
    jax.config.update(CACHE_DIR, "gs://bucket/folder")
    use_compilation_cache(tmp_path)
    assert now() == "gs://bucket/folder" and len(told()) == 1


def test_a_cache_that_takes_nothing_is_read_only(tmp_path, monkeypatch, told):
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(platform.tempfile, "TemporaryFile", full)
    use_compilation_cache(tmp_path)
    assert now() == str(tmp_path) and now(SETTINGS[1]) == NEVER_S
    assert told() == [f"compiled programs are read from {tmp_path}, which takes no new ones."]


def test_a_cache_that_was_asked_for_is_made_or_refused(tmp_path, told):
    use_compilation_cache(tmp_path / "new")
    assert (tmp_path / "new").is_dir()
    jax.config.update(CACHE_DIR, None)
    words = (
        r"compilation_cache_dir '/dev/null/x' cannot be used: Not a directory\. Name a folder that may be written, or"
    )
    with pytest.raises(ConfigError, match=words):
        use_compilation_cache("/dev/null/x")
    assert now() is None


SPLASH = ["-m", "splash_jax.cli.main"]
ALONE = """
from splash_jax import LLM, SamplingParams, small_model
llm = LLM(small_model(), compile_ahead=False, progress=False, max_num_seqs=1)
print(llm.generate("The river", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text)
"""


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True], ids=["no cache", "JAX's own"])
@pytest.mark.parametrize("command", [["-c", ALONE], [*SPLASH, "generate", "small", "--prompt", "a"]])
def test_a_user_without_a_home_is_served(tmp_path, command, own):
    """A container's arbitrary user: no HOME, no line in /etc/passwd."""
    tmp_path.chmod(0o777)
    nobody = ["unshare", "-U", "--map-user=77000"]
    if shutil.which("unshare") is None or subprocess.run([*nobody, "true"], check=False).returncode:
        pytest.skip("no user namespace can be made here")
    known = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "NPROC": "32", "JAX_PLATFORMS": "cpu"}
    known |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "xla")} if own else {}
    words = [f"{name}={value}" for name, value in known.items()]
    line = [*nobody, "env", "-i", *words, sys.executable, *command]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() and "Traceback" not in done.stderr
    assert ("this user has no home folder" in done.stderr) != own
    assert not own or any((tmp_path / "xla").iterdir())
