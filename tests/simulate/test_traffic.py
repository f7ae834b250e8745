"""Traffic as it is drawn and as it is read."""

import gzip
import time
from pathlib import Path

import numpy as np
import pytest

from splash_jax.errors import ConfigError
from splash_jax.simulate import Traffic, traffic

NOON, HEADER = "2024-05-12 12:00:00", "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACES = Path(__file__).resolve().parent.parent / "data" / "traces"


@pytest.mark.parametrize("requests", [1, 3, 4, 10])
def test_rounds_have_as_many_requests_as_were_asked_for(requests):
    drawn = traffic.rollout(np.random.default_rng(0), requests, rounds=4)
    assert len(drawn) == requests
    assert (drawn.after < np.arange(requests)).all()
    per = -(-requests // 4)
    assert [int((drawn.after[i : i + per] >= 0).sum()) for i in range(per, requests, per)] == [
        len(drawn.after[i : i + per]) for i in range(per, requests, per)
    ]


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


@pytest.mark.parametrize("zone", ["UTC", "America/Los_Angeles"])
def test_arrivals_do_not_depend_on_where_the_machine_stands(tmp_path, monkeypatch, zone):
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    file = tmp_path / "trace.csv"

    def read(*stamps):
        file.write_text(HEADER + "".join(f"{stamp},100,10\n" for stamp in stamps))
        return traffic.azure(file).arrival.tolist()

    try:
        day = "2024-05-12 00:00:0"
        assert read(f"{day}0.500000+00:00", f"{day}1+00:00", f"{day}1.500000+00:00") == [0, 0.5, 1]
        assert read("2024-03-10 01:59:59.5", "2024-03-10 02:59:59.5", "2024-03-10 03:59:59.5") == [0, 3600, 7200]
        assert read(f"{day}0.00993+00:00", f"{day}1.00993+00:00") == [0, 1]
        assert read(f"{day}1.0000001", f"{day}1.0000004") == pytest.approx([0, 3e-7], rel=1e-6)
        assert read(f"{day}9", f"{day}1.25") == [0, 7.75]
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("packed", [False, True])
def test_traces_from_any_editor_are_read_alike(tmp_path, packed):
    azure = f"\ufeffTimestamp , contexttokens,GENERATEDTOKENS,Model\r\n{NOON},12.0,1e3,x\r\n\r\n{NOON},0,7,y\r\n\r\n"
    mooncake = '\ufeff{"timestamp": 0, "input_length": 12.0, "output_length": 1e3, "of": "\u2028"}\r\n\r\n'
    mooncake += '{"timestamp": 0.5, "input_length": 0, "output_length": 7}\r\n\r\n'
    bins = "\ufeffKIND,tokens_up_to,probability\r\ninput,1,1\r\n\r\noutput,1,1\r\n\r\n"
    files = []
    for name, text in (("azure", azure), ("mooncake", mooncake), ("bins", bins)):
        raw = text.encode()
        files.append(tmp_path / name)
        files[-1].write_bytes(gzip.compress(raw) if packed else raw)
    for read, file in ((traffic.azure, files[0]), (traffic.mooncake, files[1])):
        assert read(file).prompt.tolist() == [12, 1] and read(file).output.tolist() == [1000, 7]
    assert traffic.servegen(files[2], np.random.default_rng(0), 3).prompt.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "there is no timestamp"),
        ("{", "line 2: Expecting property name"),
        ("[" * 100_000, "line 2: maximum recursion depth"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp nan is not a finite number"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "input_length True is not a number of tokens"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1.5}', r"output_length 1\.5 is not a number of tokens"),
        ('{"timestamp": 1, "input_length": 1, "output_length": null}', "output_length None is not a number"),
        ('{"timestamp": 1, "input_length": 1e400, "output_length": 1}', "input_length inf is not a number of tokens"),
    ],
)  # fmt: skip
def test_a_line_of_json_that_is_no_request_names_it(tmp_path, line, words):
    (tmp_path / "t.jsonl").write_text('{"timestamp": 1, "input_length": 1, "output_length": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=words):
        traffic.mooncake(tmp_path / "t.jsonl")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("input,10,1\nprompt,10,1", "line 3: kind is 'prompt'; write input or output"),
        ("input,10,1\ninput,10,1", "line 3: tokens_up_to is 10, and 10 before it; sort the bins"),
        ("input,10,-1", r"line 2: probability is -1\.0; write 0 or more"),
        ("input,10,nan", "line 2: probability 'nan' is not a finite number"),
        ("input,10,0\noutput,10,1", "has no lengths of kind input; give it bins whose probabilities add up"),
    ],
)
def test_bins_that_cannot_be_drawn_from_are_refused(tmp_path, rows, words):
    (tmp_path / "t.csv").write_text(f"kind,tokens_up_to,probability\n{rows}\n")
    with pytest.raises(ConfigError, match=words):
        traffic.servegen(tmp_path / "t.csv", np.random.default_rng(0), 3)


def test_requests_can_be_cut_to_what_a_layout_holds():
    drawn = traffic.agents(np.random.default_rng(0), 50).shortened(6000)
    assert (drawn.prompt + drawn.output).max() <= 6000 and drawn.output.min() >= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46.68,374\n",
            r"line 1 has columns .*; needed are TIMESTAMP, ContextTokens, GeneratedTokens",
        ),
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,374,1\n",
            "line 2: TIMESTAMP 'noon' is not a time; write it as 2024",
        ),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        (HEADER + f"{NOON},374\n", "line 2: GeneratedTokens '' is not a number of tokens"),
        (
            HEADER + f"{NOON},374,1\n\n{NOON},-1,1\n",
            "line 4: ContextTokens '-1' is not a number of tokens; write a whole",
        ),
        (HEADER + f"{NOON},nan,1\n", "line 2: ContextTokens 'nan' is not a number of tokens"),
        (HEADER + f"{NOON},1,024,1\n", "line 2 has 4 values for 3 columns"),
    ],
)
def test_a_file_that_is_no_trace_says_what_it_lacks(tmp_path, text, words):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        traffic.azure(path)


def test_what_cannot_be_read_or_meant_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read: No such file"):
        traffic.azure(tmp_path / "none.csv")
    (tmp_path / "bad.jsonl").write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"line 1: there is no input_length; every line has one"):
        traffic.mooncake(tmp_path / "bad.jsonl")
    (tmp_path / "bad.csv").write_text("kind,tokens_up_to,probability\ninput,10,1\n")
    with pytest.raises(ConfigError, match="has no lengths of kind output"):
        traffic.servegen(tmp_path / "bad.csv", np.random.default_rng(0), 10)
    for speed in (0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"speed is {speed}"):
            traffic.azure(TRACES / "azure_conv_2023_head.csv", speed=speed)
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
