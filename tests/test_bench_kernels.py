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
    assert "published, H800: FlashMLA dense decode, memory-bound: 3 TB/s" in printed
    assert "published, H800: FlashMLA dense decode, compute-bound: 660 TFLOP/s" in printed and "WRONG" not in printed


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
    decode, prefill, sparse = (4 + 4) * 2, 8 + 2, 3 + 2 * 3
    assert len(lines) == decode + prefill + sparse
    assert "128 x 4096, 128 heads, BF16" in lines[0] and "146 GFLOP, limit 0.148 ms" in lines[0]
    assert (
        lines[decode + prefill].startswith("sparse  128 decodes, 2048 of 16384, 128 heads, FP8: ")
        and "73 GFLOP" in lines[decode + prefill]
    )
    assert lines[-1].startswith("select  1024 prompt rows, 2048 of 32768, 64 heads, FP8: ")
