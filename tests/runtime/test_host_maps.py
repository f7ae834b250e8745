"""An engine of too many programs is refused while it compiles; LLVM would crash the process later."""

from pathlib import Path

import pytest

from splash_jax.errors import ConfigError
from splash_jax.runtime import host_maps
from tests.support import make_llm, write_checkpoint


def test_projects_from_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = host_maps.MemoryMaps(began=1000, limit=20_000)
    monkeypatch.setattr(host_maps, "_count", lambda: 2440)
    maps.check(8, 94)  # 180 each: 17,920 and what must stay free
    with pytest.raises(ConfigError, match=r"95 programs need about 18,100 .*180 each.* allows 20,000: name fewer"):
        maps.check(8, 95)


def test_unknown_where_linux_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_maps, "LIMIT", tmp_path / "none")
    assert host_maps.MemoryMaps.of_process() is None


def test_an_engine_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text("1000")
    monkeypatch.setattr(host_maps, "LIMIT", tmp_path / "limit")
    with pytest.raises(ConfigError, match=r"vm\.max_map_count allows 1,000"):
        make_llm(write_checkpoint(tmp_path), num_devices=1, layouts=("tp",), compile_ahead=True)
