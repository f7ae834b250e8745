"""The tuner against the tables it fills: it can make every entry, chooses by its own rule, and writes what it reads."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from pallas_kernels.tuning import table

ROOT = Path(__file__).resolve().parent.parent
OPS = sorted(path.parent.name for path in (ROOT / "pallas_kernels").glob("*/tuning.json"))


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in [name for name in sys.modules if name.split(".")[0] in ("tune_kernels", "tuning")]:
        monkeypatch.delitem(sys.modules, name)
    import tune_kernels

    return tune_kernels


def entry(backend: str = "triton", spill: int = 0, **config: int) -> dict[str, Any]:
    evidence = {"registers": 1, "spill_bytes": spill, "smem_bytes": 2, "threads": 128, "blocks_per_sm": 1}
    block = {"block_heads": 32, "block_tokens": 32, "warps": 4, "stages": 2, "workers": 1}
    return {"backend": backend, "rows": "plain", "heads": 64, "config": block | config, "evidence": evidence}


def test_every_table_is_served(tune):
    assert sorted(tune.OPS) == OPS


@pytest.mark.parametrize("chip", ["h200", "b200"])
@pytest.mark.parametrize("op", OPS)
def test_every_entry_is_of_a_point_and_among_its_candidates(tune, op, chip):
    space, point_of = tune.OPS[op], sys.modules["tuning.search"].point_of
    entries = {point_of(entry): entry for entry in table(op)[chip]}
    assert set(entries) == set(space.points(chip)), "the points and the table are the same list"
    for point, entry in entries.items():
        assert tune.known(op, chip, point) in list(space.candidates(point.backend, point.heads))
        assert 0 < space.expected_s(chip, entry) < 1 and space.in_hand(entry)
        assert "us" in tune.told(entry, 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_writing_an_entry_again_changes_nothing(tune, op, tmp_path):
    own, copy = ROOT / "pallas_kernels" / op / "tuning.json", tmp_path / "tuning.json"
    shutil.copy(own, copy)
    entries = json.loads(own.read_text())["chips"]["b200"]
    tune.write("b200", entries[:1], copy)
    assert copy.read_bytes() == own.read_bytes()
    changed = entries[0] | {"config": {"stages": 9}}
    tune.write("b200", [changed], copy)
    after = json.loads(copy.read_text())["chips"]
    assert after["b200"] == [changed, *entries[1:]]
    assert after["h200"] == json.loads(own.read_text())["chips"]["h200"]


def test_a_table_is_begun(tune, tmp_path):
    tune.write("h200", [entry()], tmp_path / "tuning.json")
    assert json.loads((tmp_path / "tuning.json").read_text()) == {"chips": {"h200": [entry()]}}


def test_spills_come_before_time_and_time_before_what_is_in_hand(tune):
    space, soon, late, most = tune.OPS["mla_decode"], entry(stages=2), entry(stages=3), entry(block_tokens=64)
    spills = entry(spill=8, block_heads=64)
    assert tune.choose(space, [(spills, 1.0), (late, 9.0)]) is late
    assert tune.choose(space, [(soon, 1.0), (most, 1.2)]) is soon
    assert tune.choose(space, [(soon, 1.0), (late, 1.05)]) is late, "what is level: the deeper pipeline"
    assert tune.choose(space, [(late, 1.0), (most, 1.05)]) is most, "what is level: more tokens in hand"


def test_a_search_prints_its_candidates_and_writes_the_best(tune, monkeypatch, tmp_path, capsys):
    path, asked = tmp_path / "tuning.json", []
    space = tune.OPS["sparse_mla"]
    shutil.copy(ROOT / "pallas_kernels" / "sparse_mla" / "tuning.json", path)

    def entry_of(chip: str, backend: str, rows: str, heads: int, config: dict[str, int]) -> dict[str, Any] | None:
        asked.append(config)
        old = next(e for e in table("sparse_mla")[chip] if (e["rows"], e["heads"]) == (rows, heads))
        return None if config["block_tokens"] == 64 else old | {"config": config | {"workers": 7}}

    monkeypatch.setattr(space, "entry_of", entry_of)
    monkeypatch.setattr(tune, "table_of", lambda op: path)
    wanted = ["--op", "sparse_mla", "--chip", "h200", "--rows", "fp8", "--heads", "16"]
    assert tune.main([*wanted, "--write"]) == 0
    assert asked == list(space.candidates("triton", 16))
    written = json.loads(path.read_text())["chips"]["h200"]
    assert [e["config"]["workers"] == 7 for e in written].count(True) == 1
    printed = capsys.readouterr().out
    assert printed.count("does not fit") == 2 and "best: {'block_heads': 16, 'block_tokens': 32" in printed
    asked.clear()
    assert tune.main([*wanted, "--keep"]) == 0
    assert asked == [tune.known("sparse_mla", "h200", sys.modules["tuning.search"].Point("triton", "fp8", 16))]


def test_what_nothing_fits_is_told_and_not_written(tune, monkeypatch, tmp_path, capsys):
    path = tmp_path / "tuning.json"
    shutil.copy(ROOT / "pallas_kernels" / "sparse_mla" / "tuning.json", path)
    before = path.read_bytes()
    monkeypatch.setattr(tune.OPS["sparse_mla"], "entry_of", lambda *_: None)
    monkeypatch.setattr(tune, "table_of", lambda op: path)
    assert tune.main(["--op", "sparse_mla", "--chip", "h200", "--rows", "fp8", "--heads", "16", "--write"]) == 1
    assert "no configuration fits on the h200" in capsys.readouterr().out and path.read_bytes() == before


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (
            "--op mla_prefill --chip b200 --backend hopper",
            "no backend hopper on the b200; there are: absorbed",
        ),
        ("--chip h200 --heads 64 999", "no heads 999 on the h200; there are: 16, 32, 64, 128"),
        (
            "--op mla_decode --chip h200 --backend hopper --heads 16",
            "on the h200; it has: triton plain: 16, 32, 64, 128; triton fp8",
        ),
    ],
)
def test_a_point_that_is_not_there_is_refused(tune, capsys, asked, answer):
    assert tune.main(asked.split()) == 2
    assert answer in capsys.readouterr().err
