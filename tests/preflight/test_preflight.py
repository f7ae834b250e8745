"""Preflight from end to end, for eight H200 that are not here. Sizes are small, the programs are the real ones."""

import json
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.mla_decode import triton
from splash_jax import preflight
from splash_jax.cli.main import run
from splash_jax.cost import load_hardware
from splash_jax.errors import ConfigError, TargetError
from splash_jax.models.config import ModelConfig
from splash_jax.preflight import Case, Report, compile_case, draw_case, make_report
from splash_jax.preflight.case import read_model
from splash_jax.preflight.programs import step_keys
from splash_jax.preflight.timeline import timeline
from splash_jax.runtime import Programs, SwitchKey, spread_programs
from splash_jax.runtime.keys import PartKey
from splash_jax.runtime.schedule import read_schedule
from splash_jax.runtime.target import target_mesh
from tests.support import LAYOUTS, SMALL

SIZES: Mapping[str, Any] = {
    "dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
    "max_position_embeddings": 4096,
}
DENSE = {"first_k_dense_replace": 2, "num_hidden_layers": 2}


pytestmark = pytest.mark.usefixtures("compiler")


def small_case(
    layouts: tuple[str, ...], hardware: str = "h200", kinds: tuple[str, ...] = (), attention_backend: str = "xla",
    **changes: Any,
) -> Case:  # fmt: skip
    model = ModelConfig.from_dict({**SMALL, **SIZES, **changes}, "small fixture")
    return draw_case(
        "small fixture", load_hardware(hardware), num_devices=8, layouts=layouts, batch=16, context=1024,
        prefill_tokens=256, block_size=16, memory_fraction=0.001, config=model, kinds=kinds,
        attention_backend=attention_backend,
    )  # fmt: skip


def compiled(case: Case) -> Report:
    return make_report(case, compile_case(case), 0.0)


def check(report: Report) -> None:
    """What the issue demands of every direction."""
    assert {(s.src, s.dst) for s in report.switches} == set(permutations([str(x) for x in report.case.layouts], 2))
    for switch in report.switches:
        plan, _ = next(p for (a, b), p in report.case.switches.items() if (str(a), str(b)) == (switch.src, switch.dst))
        assert switch.planned_bytes == max(plan.bytes_per_rank()) // plan.num_layers
        assert switch.compiled_bytes == switch.planned_bytes, switch
        assert not switch.waits, switch
        assert switch.peak_bytes <= switch.bound_bytes, switch
        assert (switch.overlapped_share is None) == (switch.compiled_bytes == 0)
        if switch.compiled_bytes:
            assert switch.overlapped_share is not None and switch.overlapped_share >= 0.95, switch
            assert switch.computing_share is not None and switch.computing_share >= 0.5, switch
            assert 0 < switch.exposed_ms_prefill <= switch.exposed_ms


@pytest.fixture(scope="module")
def both() -> Report:
    """dop and cp: between them weights are gathered and histories exchanged."""
    return compiled(small_case(("dop", "cp"), **DENSE))


@pytest.mark.slow
def test_both_primitives_lie_beside_compute(both):
    check(both)
    assert [s.primitives for s in both.switches] == [
        {"weights": "all_gather", "kv": "all_to_all"},
        {"weights": "discard", "kv": "all_to_all"},
    ]
    for key, facts in both.facts.items():
        if isinstance(key, SwitchKey) and key.kind:
            bars = timeline(both.case, key, "decode", facts.schedule)
            assert {bar.what for bar in bars} == {"attention", "mlp", "exchange", "transfer"}
            assert all(bar.end > bar.start >= 0 for bar in bars)


@pytest.mark.slow
def test_every_direction_lies_beside_compute():
    """All twelve, beside an expert layer, in decode and prefill steps."""
    check(compiled(small_case(LAYOUTS, kinds=("moe",), n_routed_experts=8)))


@pytest.mark.slow
def test_steps_with_attention_kernels_compile_in_every_layout(monkeypatch):
    """As an engine on eight H200 takes them by default: decode rows and prompt tiles, one head a rank or all eight."""
    case = small_case(LAYOUTS, kinds=("dense",), attention_backend="auto", **DENSE)
    assert (case.shapes.attention_backend, case.shapes.attention_chip) == ("gpu", "h200")
    programs, cut = Programs(target_mesh(case.hardware.target, case.mesh_sizes), case.shapes), triton.split_work

    def on_the_host(held: Any, **options: Any) -> Any:
        assert isinstance(held, np.ndarray), "decode rows' work is cut once a step, not once a layer."
        return cut(held, **options)

    monkeypatch.setattr(triton, "split_work", on_the_host)
    for key in step_keys(case):
        if key.part == "dense":
            text, prompts = programs.get(key).as_text(), key.bucket.tiles > 0
            assert "mla_decode" in text and "page_scatter" in text, str(key)
            assert ("mla_prefill" in text) == prompts, str(key)
            assert ("mla_prefill_expanded" in text) == (prompts and key.layout.attends_locally), str(key)
            if str(key.layout) == "dop":  # packing is part of what joins the queries, or turns the outputs
                unpacks = [x for x in text.splitlines() if " fusion(" in x and "/all_to_all" in x]
                assert len(unpacks) <= 2 and " copy(" not in text, "more passes than a kernel would make."


@pytest.mark.slow
def test_switches_by_page_kernels_lie_beside_compute():
    """The kernels take and put pages in place, and leave the transfer where it was."""
    case = small_case(("dop", "cp"), kinds=("dense",), attention_backend="auto", **DENSE)
    report = compiled(case)
    check(report)
    programs = Programs(target_mesh(case.hardware.target, case.mesh_sizes), case.shapes)
    key = next(key for key in report.facts if isinstance(key, SwitchKey) and key.kind)
    text = programs.get(key).as_text()
    assert "page_gather" in text and "page_scatter" in text and "scatter(" not in text


@pytest.mark.slow
def test_the_parts_of_a_spread_switch_lie_beside_compute():
    """Of a layer of the source and of one of the destination, in decode steps."""
    case = small_case(("dop", "cp"), **DENSE)
    programs = Programs(target_mesh(case.hardware.target, case.mesh_sizes), case.shapes)
    read = 0
    for (src, dst), (_, route) in case.switches.items():
        buckets = [(case.buckets[src]["decode"], case.buckets[dst]["decode"])]
        for key in spread_programs(route, 4, ["dense"], buckets):
            if isinstance(key, PartKey) and key.beside:
                schedule = read_schedule(programs.get(key))
                assert schedule.overlapped_share == 1.0, str(key)
                schedule.check_independent()
                read += 1
    assert read == 4


def test_b200_needs_a_newer_jax():
    case = small_case(("tp", "dop"), "b200", **DENSE)
    if jax.__version_info__ >= (0, 11):
        check(compiled(case))
    else:
        with pytest.raises(TargetError, match=r"does not accept the target description nvidia_b200\.txtpb.* JAX 0\.11"):
            compile_case(case)


def test_hardware_without_a_target_is_refused_with_those_that_have_one():
    with pytest.raises(
        TargetError, match=r"BW1000 DCU has no target that XLA could compile for .*; choose b200, h200\."
    ):
        compile_case(small_case(("tp", "dop"), "dcu", **DENSE))


@pytest.mark.parametrize(("name", "layers", "projections"), [("deepseek-v3.2", 61, 328), ("glm-5.3", 78, 284)])
def test_models_at_full_size_agree_with_eq_9(name, layers, projections):
    case = draw_case(
        name, load_hardware("h200"), num_devices=8, layouts=LAYOUTS, batch=16, context=4096, prefill_tokens=8192,
        block_size=64, memory_fraction=0.9,
    )  # fmt: skip
    assert (case.model.num_layers, case.state.projections) == (layers, projections * 2**20)
    plans = {(str(a), str(b)): plan for (a, b), (plan, _) in case.switches.items()}
    assert plans["tp", "dp"].weights.bytes_per_rank == projections * 2**20 * 7 // 8
    live = 16 * 4096 * 576 * 2  # Bsk of Eq. 2
    assert set(plans["dp", "tp"].kv.bytes_received(8)) == {live * 7 // 8}
    assert set(plans["cp", "dop"].kv.bytes_received(8)) == {live * 7 // 8 // 8}


def test_a_model_is_a_name_or_a_folder(tmp_path):
    assert read_model("glm-5.3-flash").num_layers == 45
    with pytest.raises(ConfigError, match=r"no model 'gpt': .* deepseek-v3\.2, glm-5\.3, glm-5\.3-flash"):
        read_model("gpt")
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **SIZES}))
    assert read_model(str(tmp_path)).hidden_size == 256


@pytest.mark.slow
def test_the_command_prints_writes_and_draws(both: Report, tmp_path: Path, monkeypatch, capsys):
    """With the programs that another test compiled: the case is the same, and so are their keys."""
    monkeypatch.setattr(preflight, "compile_case", lambda case, progress: both.facts)
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **SIZES, **DENSE}))
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["--layouts", "dop,cp", "--context", "1024", "--prefill-tokens", "256", "--block-size", "16"]
    arguments += ["--memory-fraction", "0.001"]
    with pytest.raises(SystemExit) as end:
        run(["preflight", str(tmp_path), *arguments, "--json", str(out), "--plot", str(png)])
    assert not end.value.code
    text = capsys.readouterr().out
    assert "dop -> cp" in text and "100.0 %" in text and f"{len(both.facts)} programs compiled in" in text
    told = json.loads(out.read_text())
    wanted = "src dst primitives planned_bytes compiled_bytes overlapped_share peak_bytes bound_bytes exposed_ms"
    assert [(s["src"], s["dst"]) for s in told["switches"]] == [("dop", "cp"), ("cp", "dop")]
    assert all(set(wanted.split()) <= set(switch) for switch in told["switches"])
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_a_kind_of_layer_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="has no layers of kind kda; it has: dense, moe"):
        draw_case(
            "glm-5.3-flash", load_hardware("h200"), num_devices=8, layouts=("tp",), batch=1, context=64,
            prefill_tokens=64, block_size=64, memory_fraction=0.9, kinds=("kda",),
        )  # fmt: skip
