"""The benchmark of kernels in its dry form, and what it makes of a kernel that is wrong."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "bench_kernels", raising=False)
    import bench_kernels

    return bench_kernels


@pytest.mark.slow
def test_a_dry_run_checks_every_kernel_and_writes_every_number(bench, tmp_path, capsys):
    out = tmp_path / "kernels.json"
    assert bench.main(["--dry", "--seconds", "1", "--json", str(out)]) == 0
    told = json.loads(out.read_text())
    assert told["dry"] is True and set(told["ceilings"]) == {"copy_bytes_per_s", "matmul_flops_per_s"}
    names = [row["kernel"] for row in told["kernels"]]
    prefill = ["mla_prefill absorbed", "mla_prefill expanded", "gqa_attention"]
    sparse = ["sparse_mla triton", "indexer_topk triton", "indexer_topk select", "jax.lax.top_k, sorted"]
    moving = ["page_move gather", "page_move scatter", "dop_exchange pack"]
    assert names == ["mla_decode triton"] * 2 + prefill + sparse + moving
    for row in told["kernels"]:
        assert row["ok"] and row["seconds"] > 0
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
    printed = capsys.readouterr().out
    assert "WRONG" not in printed and "TFLOP/s" not in printed, "a dry run measures nothing"
    assert printed.count(" ok") == len(names)


def test_a_wrong_kernel_fails_the_run(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ceilings", lambda *_: {"copy_bytes_per_s": 1.0, "matmul_flops_per_s": 1.0})
    monkeypatch.setattr(bench, "decode_rows", lambda *_: iter(()))
    monkeypatch.setattr(bench, "sparse_rows", lambda *_: iter(()))
    wrong = bench.shares({"kernel": "x", "shape": "y", "seconds": 2.0, "ok": False, "bytes": 4}, bench.ceilings())
    assert wrong["of_copy"] == 2.0
    monkeypatch.setattr(bench, "prefill_rows", lambda *_: iter(()))
    monkeypatch.setattr(bench, "moving_rows", lambda *_: iter([wrong]))
    assert bench.main(["--dry"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(bench, capsys):
    assert bench.main([]) == 1
    assert "is no GPU these kernels are tuned for: try --dry" in capsys.readouterr().err


def test_the_account_needs_no_gpu(bench, capsys):
    assert bench.main(["--account", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head, decode, prefill, sparse = 1, (4 + 4) * 2, 8 + 2, 3 + 2 * 3
    assert len(lines) == head + decode + prefill + sparse and "4.8 TB/s, 989 TFLOP/s" in lines[0]
    assert lines[1].startswith("* mla_decode hopper     128 x 4096, 128 heads, BF16 ")
    assert "146.0 GFLOP  limit  147.7 us" in lines[1] and lines[2].startswith("  mla_decode triton ")
    assert lines[head + decode + prefill].startswith("  sparse_mla            128 decodes, 2048 of 16384, 128 heads")
    assert lines[-1].startswith("  indexer_topk select   1024 prompt rows, 2048 of 32768, 64 heads, FP8 ")


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [("--account h200 --dry", "runs nothing and writes nothing"), ("--dry --json nowhere/x.json", "no folder")],
)
def test_what_would_come_to_nothing_is_refused_at_once(bench, capsys, arguments, answer):
    with pytest.raises(SystemExit):
        bench.main(arguments.split())
    assert answer in capsys.readouterr().err
