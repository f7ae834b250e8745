"""Logits and greedy text against checkpoints that an independent implementation answered for."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from splash_jax import LLM, SamplingParams
from tests.support import LAYOUTS, USUAL, make_llm

FOLDER = Path(os.environ.get("SPLASH_ORACLES", Path(__file__).resolve().parent.parent / "oracles"))
LENGTHS = (1, 7, 33, 130)
TOLERANCE = 5e-4
PRIMARY = "ds3_base"


def config_of(name: str) -> dict[str, object]:
    return json.loads((FOLDER / name / "config.json").read_text())


def cases() -> list[str]:
    """Every DeepSeek-V3 checkpoint in plain numbers that has goldens."""
    folders = [f for f in sorted(FOLDER.glob("*")) if (f / "config.json").exists() and (f / "golden.npz").exists()]
    configs = {f.name: config_of(f.name) for f in folders}
    return [n for n, c in configs.items() if c["model_type"] == "deepseek_v3" and "quantization_config" not in c]


def combinations() -> Iterator[object]:
    """(checkpoint, ranks, layout): the paper's layouts, and for one checkpoint all of them.

    By default four ranks, and one layout of each other checkpoint.
    """
    for index, name in enumerate(cases()):
        for ranks in (1, 2, 4, 8):
            if config_of(name)["num_attention_heads"] % ranks:  # type: ignore[operator]
                continue
            for at, layout in enumerate(LAYOUTS if name == PRIMARY else USUAL):
                usual = ranks == 4 and (name == PRIMARY or at == (index + 1) % len(USUAL))
                marks = () if usual else (pytest.mark.slow,)
                yield pytest.param((name, ranks, layout), id=f"{name}-{layout}{ranks}", marks=marks)


@pytest.fixture(scope="module", params=combinations())
def case(request: pytest.FixtureRequest) -> tuple[LLM, dict[str, np.ndarray]]:
    name, ranks, layout = request.param
    with np.load(FOLDER / name / "golden.npz") as golden:
        goldens = dict(golden)
    llm = make_llm(
        FOLDER / name, num_devices=ranks, layout=layout, layouts=(layout,), compile_ahead=True, penalties=False
    )
    return llm, goldens


def test_there_are_oracles() -> None:
    assert PRIMARY in cases()


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_are_the_oracles(case: tuple[LLM, dict[str, np.ndarray]], length: int) -> None:
    llm, golden = case
    logits = llm.logits(golden[f"ids_{length}"].tolist())
    assert logits.shape == golden[f"logits_{length}"].shape
    np.testing.assert_allclose(logits, golden[f"logits_{length}"], rtol=0, atol=TOLERANCE)


def test_greedy_text_is_the_oracles(case: tuple[LLM, dict[str, np.ndarray]]) -> None:
    llm, golden = case
    expected = {n: tuple(golden[f"greedy_{n}"][: 64 if n < 130 else 24].tolist()) for n in LENGTHS}
    prompts = [golden[f"ids_{n}"].tolist() for n in LENGTHS]
    params = [SamplingParams(temperature=0.0, max_tokens=len(ids), ignore_eos=True) for ids in expected.values()]
    outputs = llm.generate(prompts, params)
    assert {n: o.outputs[0].token_ids for n, o in zip(LENGTHS, outputs, strict=True)} == expected
