"""`splash plan --hardware`: what it prints, writes and draws, and what it refuses."""

import json
import re

import pytest

from splash_jax.cli.main import run
from splash_jax.cli.regimes import BATCHES, CONTEXTS, SWITCHED, tokens
from splash_jax.cli.values import in_ms
from tests.support import SMALL


def ends(arguments: list[str]) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        run(arguments)
    return end.value.code


def test_a_plan_on_hardware_prints_writes_and_draws(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["plan", "glm-5.3", "--hardware", "b200", "-T", "8", "--dtype", "float8", "--block-size", "64"]
    assert not ends([*arguments, "--json", str(out), "--plot", str(png)])
    text = capsys.readouterr().out
    titles = ("What a rank holds", "Fastest layout that fits", "Walls", "outweighs the memory", "What a switch adds")
    for words in (*titles, "1,048,576 tokens are more than the model was made for", "dop -> cp"):
        assert words in text, words
    assert "…" not in text
    assert re.search(r"\bdp +10\.8 GiB +86\.6 GiB +6\.25 KiB +\d+,\d{3} +\d+,\d{3},\d{3} ", text)
    assert png.read_bytes()[:4] == b"\x89PNG"
    told = json.loads(out.read_text())
    assert set(told["layouts"]) == {"tp", "dp", "cp", "dop", "dcp", "rep"} and told["refused"] == {}
    assert told["maps"]["1"]["contexts"] == list(CONTEXTS) and told["maps"]["512"]["batches"] == list(BATCHES)
    assert CONTEXTS[-1] == SWITCHED[-1] == 10_000_000
    # The paper's point at one glance: dop holds more than dp and cp, which hold more than tp.
    held = {name: layout["tokens"] for name, layout in told["layouts"].items()}
    assert held["dop"] > held["dp"] == held["cp"] > 4 * held["tp"]
    assert len(told["switches"]) == 30 * len(SWITCHED)
    quote = next(s for s in told["switches"] if (s["src"], s["dst"], s["context"]) == ("dp", "tp", 131_072))
    assert quote["kv_bytes"] == pytest.approx(16 * 131_071 * 656 * 7 / 8) and quote["weight_bytes"] == 0
    assert quote["spread"]["exposed_total"] <= quote["exposed"]


def test_a_mesh_of_two_axes_and_a_model_that_comes_along(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "170")
    assert not ends(["plan", "small", "--hardware", "cpu", "--mesh", "node=2,chip=4", "--json", "-"])
    told = json.loads(capsys.readouterr().out)
    assert told["num_devices"] == 8 and "node=dop,chip=dop" in told["layouts"]


def test_what_does_not_fit_is_said_beside_what_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "170")
    arguments = ["plan", "glm-5.3", "--hardware", "b200", "-T", "8", "--dtype", "float8"]
    assert not ends([*arguments, "--device-memory-bytes", "90G"])
    text = capsys.readouterr().out
    assert "refused *" in text and "* dp refused: layout dp does not fit" in text
    assert ends([*arguments, "--device-memory-bytes", "1G"]) == 1
    assert "Raise device_memory_bytes or num_devices." in capsys.readouterr().err
    assert ends(["plan", "glm-5.3", "--hardware", "b200", "-T", "8"]) == 1
    assert "--dtype float8 has smaller weights." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": None, "model_type": "llama"}, "llama has multi-head attention, 8 KV heads for 8 query heads"),
        ({"kv_lora_rank": None, "num_key_value_heads": 2}, "tensor parallelism over 4 ranks holds each 2 times"),
    ],
)
def test_models_whose_kv_is_split_by_head_are_refused_with_what_still_works(tmp_path, capsys, changes, words):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | changes))
    assert ends(["plan", str(tmp_path), "--hardware", "h200", "-T", "4"]) == 1
    err = capsys.readouterr().err
    assert words in err and "MLA models only" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["glm-5.3", "-T", "8", "--plot", "a.png"], 2, "there is no map to draw without --hardware"),
        (["glm-5.3", "-T", "8", "--hardware", "b200", "--tokens", "5"], 2, "leave --layouts, --tokens, --src, --dst"),
        (["glm-5.3", "-T", "8", "--hardware", "b300"], 1, "there are: b200, cpu, dcu, h200."),
        (["gpt", "-T", "8", "--hardware", "b200"], 1, "no model 'gpt'"),
        (["glm-5.3", "-T", "7", "--hardware", "b200"], 1, "64 attention heads cannot be split over 7 devices"),
        (
            ["glm-5.3", "-T", "8", "--hardware", "b200", "--dtype", "int4"],
            1,
            "auto or one of float32, bfloat16, float8, got 'int4'",
        ),
    ],
)
def test_what_cannot_be_priced_is_refused(arguments, code, words, capsys):
    assert ends(["plan", *arguments]) == code
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_numbers_as_people_say_them():
    assert [tokens(n) for n in (512, 1024, 98_304, 1 << 20, 8 << 20, 10_000_000)] == [
        "512",
        "1K",
        "96K",
        "1M",
        "8M",
        "10M",
    ]
    assert [in_ms(s) for s in (0.0, 1.5e-5, 0.0123, 1.5, 12, 1234)] == [
        "0 ms", "0.015 ms", "12.3 ms", "1,500 ms", "12.0 s", "1,234 s",
    ]  # fmt: skip
