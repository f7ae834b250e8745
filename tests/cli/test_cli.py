"""The command line as its users meet it: words, exit codes, tables, JSON, text. The demo itself is slow."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from splash_jax import CompletionOutput, RequestOutput
from splash_jax.api import Logprob
from splash_jax.cli import scene
from splash_jax.cli.main import run
from splash_jax.cli.plots import draw_run
from splash_jax.cli.report import Proof, SwitchCost, compare, print_proof, print_switches
from splash_jax.cli.values import byte_size, in_bytes
from splash_jax.engine import StepRecord
from tests.support import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two dense layers that reads and writes bytes."""
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=2, first_k_dense_replace=2)
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258, special_tokens=["<bos>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(["a"], trainer)
    built.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def ends(arguments: list[str]) -> int | str | None:
    """The exit code of `splash` with these arguments."""
    with pytest.raises(SystemExit) as end:
        run(arguments)
    return end.value.code


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "No such command 'fly'"),
        (["plan", "small", "-T", "0"], "Input should be greater than or equal to 1"),
        (["plan", "small", "-T", "2", "--src", "xp"], "unknown layout 'xp'; choose one of tp, dp, cp, dop, dcp, rep."),
        (["plan", "small", "-T", "2", "--src", "tp", "--dst", "tp"], "a switch needs two layouts"),
        (["plan", "small"], "give the number of ranks"),
        (["plan", "small", "--mesh", "node2"], "is not AXIS=SIZE"),
        (["plan", "small", "--mesh", "node=2,node=4"], "has two sizes"),
        (["plan", "small", "-T", "2", "--tokens", "4,x"], "'4,x' is not a list of token counts; write 40,100,100."),
        (["plan", "small", "-T", "2", "--device-memory-bytes", "lots"], "'lots' is not a size in bytes; write 64M"),
        (["plan", "small", "-T", "2", "--tokens", "9" * 5000], "is not a list of token counts; write 40,100,100."),
        (["plan", "small", "-T", "2", "--device-memory-bytes", "9" * 400], "is not a size in bytes; write 64M"),
        (["generate", "small"], "give prompts with --prompt (repeatable) or with --prompts-file"),
        (["generate", "small", "--prompt", "a", "--prompts-file", "b"], "one of the two"),
        (
            ["plan", "small", "-T", "2", "--tokens", "4,5000"],
            "a request of 5000 tokens is longer than the context, 2048.",
        ),
        (["plan", "small", "-T", "2", "--json", "nowhere/a.json"], "there is no folder nowhere; make it first."),
        (["plan", "small", "-T", "2", "--json", "."], ". is a folder; name a file in it."),
        (["generate", "small", "--prompt", "a", "--json", "nowhere/a.json"], "there is no folder nowhere"),
        (["plan", "small", "-T", "2", "--hardware", "cpu", "--plot", "."], ". is a folder; name a file in it."),
        (["preflight", "deepseek-v3.2", "--plot", "nowhere/a.png"], "there is no folder nowhere; make it first."),
        (["preflight", "deepseek-v3.2", "--layouts", "tp", "--plot", "a.png"], "draws switches; name two layouts"),
        (["generate", "small", "--prompt", "a", "--max-num-seqs", "0"], "Input should be greater than or equal to 1"),
        (["demo", "--out", f"{__file__}/pictures"], "cannot be a folder (Not a directory); choose another."),
        (
            ["generate", "small", "--prompt", "a", "--switch", "dp"],
            "'dp' is not STEP:LAYOUT or STEP:LAYOUT:MODE; write 40:dp or",
        ),
        (["generate", "small", "--prompt", "a", "--switch", "3:dp", "--switch", "3:cp"], "step 3 has two switches"),
    ],
)
def test_usage_errors_say_what_to_write(arguments, words, capsys):
    assert ends(arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["plan", "nowhere", "-T", "2"],
            "no model 'nowhere': neither a folder with a config.json nor one of deep",
        ),
        (
            ["generate", "nowhere", "--prompt", "a"],
            "checkpoint nowhere does not exist. Give the folder that holds config.json",
        ),
        (["plan", "small", "-T", "3"], "8 attention heads cannot be split over 3 devices"),
        (["plan", "small", "-T", "2", "--dtype", "int4"], "dtype must be auto, float32 or bfloat16, got 'int4'."),
        (
            ["generate", "small", "--prompt", "a", "--layout", "xp"],
            "unknown layout 'xp'; choose one of tp, dp, cp, dop",
        ),
        (["generate", "small", "--prompt", "a", "--switch", "1:xp"], "unknown layout 'xp'"),
        (
            ["generate", "small", "--prompt", "a", "--switch", "1:dp:slow"],
            "switch_modes must be some of splash, blocking",
        ),
        (["generate", "small", "--prompt", "a", "--top-p", "2"], "top_p must be above 0.0 and at most 1.0, got 2.0."),
        (["generate", "small", "--prompts-file", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_what_cannot_be_served_is_one_line_without_a_trace(arguments, words, capsys):
    assert ends(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert words in err


def test_an_empty_file_of_prompts_is_refused(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("\n \n")
    assert ends(["generate", "small", "--prompts-file", str(tmp_path / "prompts.txt")]) == 2
    assert "has no line with text" in " ".join(capsys.readouterr().err.split())


def test_a_file_of_prompts_in_another_encoding_is_refused(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_bytes("Die Bücher".encode("latin-1"))
    assert ends(["generate", "small", "--prompts-file", str(tmp_path / "prompts.txt")]) == 1
    assert "is not UTF-8 text (byte 5); convert it first." in " ".join(capsys.readouterr().err.split())


def test_version_and_help(capsys):
    assert ends(["--version"]) == 0
    assert capsys.readouterr().out == "splash 0.1.0\n"
    assert ends(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples:" in out and len(out.splitlines()) < 30
    assert all(name in out for name in ("generate", "plan", "demo"))


def test_sizes_are_powers_of_1024():
    assert [byte_size(text) for text in ("64M", "1G", "1.5KiB", "1000")] == [2**26, 2**30, 1536, 1000]
    sizes = (0, 1023, 1536, 2**20 * 2000, 2**42)
    assert [in_bytes(n) for n in sizes] == ["0 B", "1023 B", "1.5 KiB", "1.95 GiB", "4 TiB"]


def test_plan_shows_every_layout_and_direction(capsys):
    assert ends(["plan", "small", "-T", "8", "--tokens", "40,100"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "Switches with 2 requests of 140 tokens live" in lines
    assert sum(" -> " in line for line in lines) == 30
    # 3 pages of 16 hold 40 tokens and 7 hold 100; tp has all of them on every rank, an owner at most 7.
    (row,) = [line for line in lines if line.startswith("tp -> dop")]
    assert row == "tp -> dop keep discard 0 B 10 / 291 7 / 291"


def test_plan_of_a_model_known_by_name(capsys):
    """DeepSeek-V3.2 in bfloat16: 61 layers of 576 numbers per token, of which a rank has an eighth in dp."""
    arguments = ["plan", "deepseek-v3.2", "-T", "8", "--src", "tp", "--dst", "dp", "--json", "-"]
    assert ends([*arguments, "--device-memory-bytes", "250G"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["layouts"]["dp"]["kv_per_token"] == 61 * 576 * 2 / 8
    assert told["switches"][0]["weights"]["primitive"] == "all_gather"
    assert ends([*arguments, "--device-memory-bytes", "100G"]) == 1
    assert re.search(r"100\.00 GiB per rank lack \d+\.\d\d GiB for one page", capsys.readouterr().err)


def test_plan_shows_which_layouts_exist(capsys):
    assert ends(["plan", "small", "-T", "8", "--layouts", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["layouts"]) == ["tp", "dp", "cp", "dop", "dcp", "rep"] and told["switches"] == []
    assert ends(["plan", "small", "--mesh", "node=2,chip=4", "--layouts"]) == 0
    assert len(re.findall(r"node=\w+,chip=\w+ ", capsys.readouterr().out)) == 36
    assert ends(["plan", "small", "--mesh", "node=2,chip=4", "--layouts", "--json", "-"]) == 0
    pairs = json.loads(capsys.readouterr().out)["layouts"]
    assert len(pairs) == 36 and pairs["node=tp,chip=tp"] == told["layouts"]["tp"]
    mixed, whole = pairs["node=dop,chip=cp"], told["layouts"]["rep"]
    assert (mixed["projections"] * 2, mixed["kv_per_token"] * 8) == (whole["projections"], whole["kv_per_token"])


def test_plan_of_a_switch_between_hybrids(capsys):
    pair = ["--src", "node=dop,chip=cp", "--dst", "node=dop,chip=tp"]
    assert ends(["plan", "small", "--mesh", "node=2,chip=4", *pair, "--tokens", "64,64", "--json", "-"]) == 0
    (switch,) = json.loads(capsys.readouterr().out)["switches"]
    assert (switch["src"], switch["dst"]) == (pair[1], pair[3])
    assert switch["kv"]["primitive"] == "all_gather" and switch["weights"]["primitive"] == "discard"


def test_plan_as_json_agrees_with_eq_2_and_3(capsys):
    assert ends(["plan", "small", "-T", "8", "--src", "tp", "--dst", "dp", "--tokens", "16", "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    (switch,) = told["switches"]
    tp, dp = told["layouts"]["tp"], told["layouts"]["dp"]
    assert tp["projections"] * 8 == dp["projections"]
    assert switch["bytes_per_rank"] == [dp["projections"] * 7 // 8] * 8
    assert switch["weights"]["primitive"] == "all_gather" and switch["kv"]["primitive"] == "discard"


def test_plan_gives_a_refusal_its_row_and_its_reason(capsys):
    budget = ["--max-model-len", "256", "--dtype", "float32", "--device-memory-bytes", "4M"]
    assert ends(["plan", "small", "-T", "8", "--tokens", "200,200,200,200", *budget]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\bdp -> tp +refused \*", out)
    assert "* dp refused: layout dp does not fit: 4194304 bytes per rank lack" in out
    assert "* dop -> tp refused: switch dop -> tp does not fit: rank 0 needs 52 pages and has 23" in out


WITHOUT_DEVICES = """
import sys
from splash_jax.cli.main import run
assert "jax" not in sys.modules, "importing the command line loads jax before the process is set up"
try:
    run(["plan", "small", "-T", "8", "--json", "-"])
except SystemExit as end:
    assert not end.code, end.code
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "plan starts a device"
"""


def test_plan_starts_no_device():
    command = [sys.executable, "-c", WITHOUT_DEVICES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["switches"]) == 30


PREPARED = """
import os, sys
for name in ("NPROC", "JAX_PLATFORMS", "XLA_FLAGS"):
    os.environ.pop(name, None)
os.environ.update(dict(pair.split("=", 1) for pair in sys.argv[1:]))
from splash_jax.cli.process import prepare_process
prepare_process(6)
print(os.environ.get("NPROC"), os.environ.get("XLA_FLAGS"))
"""


@pytest.mark.parametrize(
    ("given", "then"),
    [
        (["JAX_PLATFORMS=cpu"], "32 --xla_force_host_platform_device_count=6"),
        (["JAX_PLATFORMS=cpu", "NPROC=48", "XLA_FLAGS=--a"], "48 --a --xla_force_host_platform_device_count=6"),
        (["JAX_PLATFORMS=cpu", "NPROC="], "32 --xla_force_host_platform_device_count=6"),
        (["JAX_PLATFORMS=cuda"], "None None"),
    ],
)
def test_the_process_is_set_up_for_virtual_devices_and_only_for_them(given, then):
    command = [sys.executable, "-c", PREPARED, *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == then


def test_generate_writes_text_json_and_a_summary(checkpoint, tmp_path, capsys):
    file = tmp_path / "out.json"
    arguments = ["generate", str(checkpoint), "--prompt", "ab", "--prompt", "hello", "-T", "2", "--switch", "3:dp"]
    arguments += ["--switch", "99:tp", "--max-tokens", "6", "--ignore-eos", "--temperature", "0", "--json", str(file)]
    arguments += ["--max-num-seqs", "2", "--logprobs", "1", "--dtype", "float32", "--device-memory-bytes", "8M"]
    assert ends(arguments) == 0
    shown = capsys.readouterr()
    assert "--- 0 (length)" in shown.out and "--- 1 (length)" in shown.out
    assert "12 tokens in 6 steps" in shown.err and "1 switch, tp -> dp in step 3" in shown.err
    assert "no step 99 came" in shown.err
    told = json.loads(file.read_text())
    assert [len(output["outputs"][0]["token_ids"]) for output in told["outputs"]] == [6, 6]
    assert told["switches"][0]["step"] == 3 and told["switches"][0]["dst"] == "dp"


def test_prompts_are_the_lines_of_a_file_and_results_come_before_text(checkpoint, tmp_path, capsys, monkeypatch):
    file, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts = ["The river flows", " a\u2028b\x85c\x0cd ", "end"]
    file.write_bytes(("\ufeff" + "\r\n".join([*prompts[:2], "", " ", prompts[2], "", ""])).encode())
    there: list[bool] = []
    monkeypatch.setattr(sys.modules["splash_jax.cli.generate"], "_print_texts", lambda _: there.append(out.exists()))
    common = ["--max-tokens", "1", "--temperature", "0", "--max-num-seqs", "2"]
    assert ends(["generate", str(checkpoint), "--prompts-file", str(file), "--json", str(out), *common]) == 0
    told = json.loads(out.read_text())["outputs"]
    assert [output["prompt"] for output in told] == prompts and there == [True]
    assert capsys.readouterr().err.endswith("switches\n")


@pytest.mark.slow
def test_generate_spreads_a_switch_over_steps(checkpoint, tmp_path, capsys):
    told = []
    for number, switch in enumerate(([], ["--switch", "2:dp:spread"])):
        file = tmp_path / f"{number}.json"
        arguments = ["generate", str(checkpoint), "--prompt", "hello", "-T", "2", "--max-tokens", "10", "--ignore-eos"]
        assert ends([*arguments, "--temperature", "0", "--dtype", "float32", "--json", str(file), *switch]) == 0
        told.append(json.loads(file.read_text()))
    assert told[0]["outputs"][0]["outputs"] == told[1]["outputs"][0]["outputs"]
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    assert [(s["dst"], s["step"]) for s in told[1]["switches"]] == [("dp", 2 + layers)]
    assert "1 switch, tp -> dp" in capsys.readouterr().err


def record(step: int, layout: str, running: tuple[int, ...]) -> StepRecord:
    split = layout in ("tp", "dop")
    return StepRecord(
        step=step, layout=layout, bucket="4+0x16", rows=sum(running), drawn=sum(running), seconds=0.1,
        running_by_home=running, waiting=0, pages_used=running, pages_per_rank=9 if split else 5,
        projection_bytes=2**19 if split else 2**20, kv_bytes=9 * 2**18 if split else 5 * 2**18, transit_bytes=2**18,
        idle_ranks=0,
    )  # fmt: skip


def test_the_picture_of_a_run_is_drawn(tmp_path):
    layouts = ["dp"] * 3 + ["dop"] * 3 + ["tp"] * 2 + ["cp"] * 2
    records = [record(i, layout, (2, 1) if i < 5 else (1, 0)) for i, layout in enumerate(layouts)]
    draw_run(records, tmp_path / "run.png", 2)
    assert (tmp_path / "run.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_script_of_the_demo_shows_every_layout():
    assert set(scene.layouts()) == {"tp", "dp", "cp", "dop"}
    assert len(scene.directions()) >= 4
    assert scene.layouts()[0] == scene.layouts()[-1]  # the warm-up walks the directions in a circle


COST = SwitchCost(
    step=7, src="cp", dst="dp", requests=3, weights="keep", kv="all_to_all", planned_bytes=2048, moved_bytes=4096,
    switch_step=0.096, same_bucket_step=0.079, same_bucket_range=(0.07, 0.09), same_bucket_steps=10,
)  # fmt: skip


def test_the_tables_of_the_demo_fit_a_narrow_terminal(capsys):
    costs = [COST, replace(COST, same_bucket_step=None, same_bucket_range=None, same_bucket_steps=0)]
    print_switches(Console(width=80), costs, "CPU times: 8 virtual devices share 2 cores")
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "7 cp -> dp 3 keep all_to_all 2 KiB 4 KiB" in rows
    assert "7 cp -> dp 96 ms 79 ms (70 to 90) +17 ms" in rows
    assert "7 cp -> dp 96 ms - -" in rows
    assert "CPU times: 8 virtual devices share 2 cores." in rows


def test_the_proof_is_printed_plainly(capsys):
    print_proof(Console(width=100), Proof(requests=2, tokens=1200, equal=1200, largest=3e-6), "tp")
    assert "1,200 of 1,200 equal (all equal)" in capsys.readouterr().out
    print_proof(Console(width=100), Proof(requests=2, tokens=1200, equal=1198, largest=0.5), "tp")
    assert "1,198 of 1,200 equal (2 DIFFER)" in capsys.readouterr().out


def output(ids: tuple[int, ...], values: tuple[float, ...]) -> RequestOutput:
    logprobs = tuple({i: Logprob(logprob=v)} for i, v in zip(ids, values, strict=True))
    completion = CompletionOutput(
        index=0, text="", token_ids=ids, cumulative_logprob=None, logprobs=logprobs, finish_reason="length",
        stop_reason=None,
    )  # fmt: skip
    return RequestOutput(request_id="0", prompt="", prompt_token_ids=(1,), outputs=(completion,))


def test_a_changed_token_and_a_changed_logprob_are_found():
    a, b = output((5, 6, 7), (-1.0, -2.0, -3.0)), output((5, 8, 7), (-1.25, -9.0, -9.0))
    assert compare([a], [b]) == Proof(requests=1, tokens=3, equal=2, largest=0.25)


@pytest.mark.slow
def test_the_demo_on_two_devices(tmp_path):
    command = [sys.executable, "-m", "splash_jax.cli.main", "demo", "-T", "2", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads((tmp_path / "run.json").read_text())
    assert told["proof"]["equal"] == told["proof"]["tokens"] > 1000
    kinds = {s["weights"] for s in told["switches"]} | {s["kv"] for s in told["switches"]}
    assert {"discard", "all_gather", "all_to_all"} <= kinds
    assert all(s["moved_bytes"] >= s["planned_bytes"] for s in told["switches"])
    assert (tmp_path / "run.png").stat().st_size > 10_000
