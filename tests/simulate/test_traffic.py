"""Traffic as it is drawn and as it is read."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from splash_jax.errors import ConfigError
from splash_jax.simulate import Traffic, traffic

TRACES = Path(__file__).resolve().parent.parent / "data" / "traces"


def test_a_rollout_comes_at_once_and_its_rounds_follow_each_other():
    drawn = traffic.rollout(np.random.default_rng(0), 100, median=50, most=400, rounds=4)
    assert (drawn.arrival == 0).all()
    assert (drawn.after[:25] == -1).all()
    total = drawn.prompt + drawn.output
    for turn in range(1, 4):
        before = (turn - 1) * 25 + int(total[(turn - 1) * 25 : turn * 25].argmax())
        assert (drawn.after[turn * 25 : (turn + 1) * 25] == before).all()
    assert drawn.output.max() <= 400 == drawn.limit[0]


def test_alternating_load_has_short_and_long_halves():
    drawn = traffic.alternating(np.random.default_rng(0), 400, period=20.0)
    first, second = drawn.arrival % 20 < 10, drawn.arrival % 20 >= 10
    assert drawn.prompt[first].max() < 2048 and drawn.prompt[second].min() >= 32_768
    assert first.sum() > 4 * second.sum() > 0


def test_an_agents_prompt_holds_all_that_was_said():
    drawn = traffic.agents(np.random.default_rng(0), 120, turns=6)
    later = np.flatnonzero(drawn.after >= 0)
    before = drawn.after[later]
    assert (drawn.prompt[later] >= drawn.prompt[before] + drawn.output[before]).all()
    assert len(later) == 100


@pytest.mark.parametrize("groups", [1, 3, 7])
def test_parts_of_a_fleet_keep_sessions_together_and_lose_nothing(groups):
    drawn = traffic.agents(np.random.default_rng(0), 200, turns=5)
    parts = [drawn.part(i, groups) for i in range(groups)]
    assert sum(map(len, parts)) == 200
    assert sum(int(part.prompt.sum()) for part in parts) == int(drawn.prompt.sum())
    for part in parts:
        later = np.flatnonzero(part.after >= 0)
        assert (part.prompt[later] > part.prompt[part.after[later]]).all()
        assert len(later) == 4 * (part.after < 0).sum()


def test_traces_are_read(tmp_path):
    azure = traffic.azure(TRACES / "azure_conv_2023_head.csv")
    assert (len(azure), azure.prompt[0], azure.output[0], azure.arrival[0]) == (60, 374, 44, 0.0)
    assert azure.arrival[1] == pytest.approx(4.314489, abs=1e-3)
    fast = traffic.azure(TRACES / "azure_conv_2023_head.csv", requests=10, speed=2.0)
    assert fast.arrival == pytest.approx(azure.arrival[:10] / 2)
    plain = TRACES / "mooncake_conversation_head.jsonl"
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        mooncake = traffic.mooncake(path)
        assert (len(mooncake), mooncake.prompt[0], mooncake.output[0]) == (40, 6758, 500)
    drawn = traffic.servegen(TRACES / "servegen_deepseek_r1_lengths.csv", np.random.default_rng(0), 20_000, rate=10.0)
    assert (drawn.prompt <= 16).mean() == pytest.approx(0.0923, abs=0.01)  # the first bin of the file
    assert drawn.arrival[-1] == pytest.approx(2000, rel=0.05)


def test_requests_can_be_cut_to_what_a_layout_holds():
    drawn = traffic.agents(np.random.default_rng(0), 50).shortened(6000)
    assert (drawn.prompt + drawn.output).max() <= 6000 and drawn.output.min() >= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,374\n", "line 2: KeyError.*a line has TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,374,1\n", "line 2: ValueError"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
    ],
)
def test_a_file_that_is_no_trace_says_what_it_lacks(tmp_path, text, words):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        traffic.azure(path)


def test_what_cannot_be_read_or_meant_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read: No such file"):
        traffic.azure(tmp_path / "none.csv")
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"line 1: KeyError.*a line has timestamp, input_length"):
        traffic.mooncake(tmp_path / "bad.jsonl")
    (tmp_path / "bad.csv").write_text("kind,tokens_up_to,probability\ninput,10,1\n")
    with pytest.raises(ConfigError, match="has no lengths of kind output"):
        traffic.servegen(tmp_path / "bad.csv", np.random.default_rng(0), 10)
    with pytest.raises(ConfigError, match="speed is 0"):
        traffic.azure(TRACES / "azure_conv_2023_head.csv", speed=0)
    one = np.ones(1, np.int64)
    for change, words in (
        ({"prompt": 0 * one}, "prompts and outputs of at least 1"),
        ({"output": 3 * one}, "outputs within their limits"),
        ({"arrival": np.array([np.inf])}, "finite times"),
        ({"after": np.zeros(1, np.int64)}, "only follow one that stands before it"),
        ({"limit": np.ones(2, np.int64)}, "arrays of other lengths"),
    ):
        with pytest.raises(ConfigError, match=words):
            Traffic(**{"arrival": np.zeros(1), "prompt": one, "output": one, "limit": one} | change)


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda rng: traffic.rollout(rng, 10**9), "requests must be 1 to 10000000, got 1000000000"),
        (lambda rng: traffic.rollout(rng, 0), "requests must be 1 to 10000000, got 0"),
        (lambda rng: traffic.rollout(rng, 5, rounds=0), "rounds must be 1 to 10000000, got 0"),
        (lambda rng: traffic.alternating(rng, 10**9), "requests must be 1 to 10000000, got 1000000000"),
        (lambda rng: traffic.alternating(rng, 5, period=0.0), "8.0 requests a second make 0.0 in a period of 0.0 s"),
        (lambda rng: traffic.alternating(rng, 5, period=1e-9), "in a period of 1e-09 s; give at least 1"),
        (lambda rng: traffic.agents(rng, 5, turns=0), "turns must be 1 to 10000000, got 0"),
        (lambda rng: traffic.agents(rng, 5, rate=0.0), "sessions begin at a rate above 0 a second, not 0.0"),
    ],
    ids=range(8),
)
def test_traffic_that_would_never_be_drawn_is_refused(draw, words):
    with pytest.raises(ConfigError, match=words):
        draw(np.random.default_rng(0))
    assert len(traffic.alternating(np.random.default_rng(0), 5, period=1.0, rate=1.0)) == 5
