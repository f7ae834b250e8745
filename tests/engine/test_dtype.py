"""What an engine serves in, and that it says so; single rows in bfloat16; pools that hold bfloat16 as words."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splash_jax import platforms
from splash_jax.engine import EngineConfig
from splash_jax.engine import build as builder
from splash_jax.engine.build import served_dtype
from splash_jax.models.math import dot, dot_heads
from tests.engine.conftest import greedy, teacher_forced, tokens
from tests.support import make_llm, write_checkpoint


@pytest.mark.parametrize(
    ("asked", "stored", "cpu", "has", "served"),
    [
        ("auto", "bfloat16", True, True, "bfloat16"),
        ("auto", "bfloat16", True, False, "float32"),
        ("auto", "bfloat16", False, False, "bfloat16"),
        ("auto", "float32", True, True, "float32"),
        ("auto", "float32", False, False, "float32"),
        ("bfloat16", "float32", True, False, "bfloat16"),
        ("float32", "bfloat16", True, True, "float32"),
    ],
)
def test_auto_is_what_is_fast(monkeypatch, asked, stored, cpu, has, served):
    monkeypatch.setattr(builder, "cpu_has_bfloat16", lambda: has)
    assert served_dtype(asked, stored, cpu=cpu) == served


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 amx_bf16\n", True),
        ("processor : 0\nflags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("processor : 0\nFeatures\t: fp asimd bf16 i8mm\n", True),
        ("processor : 0\nFeatures\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_read_from_the_processors_flags(tmp_path: Path, text, has):
    (tmp_path / "cpuinfo").write_text(text)
    assert platforms.cpu_has_bfloat16(tmp_path / "cpuinfo") is has
    assert platforms.cpu_has_bfloat16(tmp_path / "none") is False


def test_an_engine_says_what_it_serves_in(tmp_path: Path):
    seen: list[str] = []
    model = write_checkpoint(tmp_path / "m", dtype="bfloat16")
    llm = make_llm(model, num_devices=1, layouts=("tp",), dtype="auto", progress=lambda what, *_: seen.append(what))
    served = llm.engine.blueprint.shapes.dtype
    assert served == ("bfloat16" if platforms.cpu_has_bfloat16() else "float32")
    (what,) = set(seen)
    assert re.fullmatch(rf"loading (\d+) of \1 tensors as {served}", what)


def test_bfloat16_on_cpu_stays_near_float32_in_every_layout(tmp_path: Path):
    """Pools hold words there: what attention reads is what was written, across page borders and a switch."""
    model = write_checkpoint(tmp_path / "m")
    exact = make_llm(model, num_devices=1, layouts=("tp",))
    llm = make_llm(model, dtype="bfloat16")
    assert llm.engine.state.pools[0].dtype == jnp.uint16
    ids = tokens(37, 5)
    wanted = exact.logits(ids)
    for layout in ("tp", "cp"):
        if llm.layout != layout:
            llm.switch(layout)
        assert near(llm.logits(ids).max(-1), wanted.max(-1)) and near(llm.logits(ids).min(-1), wanted.min(-1))
    outputs = llm.generate([ids, ids[:5]], greedy(12, logprobs=0), switches={3: "cp", 6: "dp", 9: "tp"})
    for output in outputs:
        (sample,) = output.outputs
        assert sample.logprobs is not None
        drawn = [values[token].logprob for token, values in zip(sample.token_ids, sample.logprobs, strict=True)]
        assert near(np.asarray(drawn), teacher_forced(exact, output.prompt_token_ids, sample.token_ids))


def near(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether three rows of four are within the rounding; in others it may make the router choose another expert."""
    return float(np.quantile(np.abs(got - wanted), 0.75)) < 0.25


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_single_rows_are_products_like_others(rows, dtype):
    """One bfloat16 row goes in twice on CPU: same numbers, same shape."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=size), dtype) for size in ((3, 96), (40, 96)))
    xh, wh = (jnp.asarray(rng.normal(size=size), dtype) for size in ((3, 5, 24), (5, 7, 24)))
    got, heads = jax.jit(dot)(x[:rows], w), jax.jit(dot_heads)(xh[:rows], wh)
    assert got.shape == (rows, 40) and heads.shape == (rows, 5, 7)
    loose = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    exact = np.asarray(x[:rows], np.float64) @ np.asarray(w, np.float64).T
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, atol=loose * 10, rtol=loose)
    by_head = np.einsum("nhi,hoi->nho", np.asarray(xh[:rows], np.float64), np.asarray(wh, np.float64))
    np.testing.assert_allclose(np.asarray(heads, np.float64), by_head, atol=loose * 10, rtol=loose)


def test_a_plan_does_not_depend_on_the_cpu_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Without devices it is for a machine that is not here."""
    monkeypatch.setattr(builder, "cpu_has_bfloat16", lambda: False)
    config = EngineConfig(model=write_checkpoint(tmp_path / "m", dtype="bfloat16"))
    assert builder.draw_up(config).shapes.dtype == "bfloat16"
    assert builder.draw_up(config, device_kind="cpu").shapes.dtype == "float32"
    assert builder.draw_up(config, device_kind="NVIDIA H200").shapes.dtype == "bfloat16"
