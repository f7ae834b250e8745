"""What cannot be served is refused before anything is taken, in words that name the values and the next step."""

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splash_jax import LLM, SamplingParams
from splash_jax.api.llm import _conversations
from splash_jax.engine import platform
from splash_jax.engine.build import draw_up
from splash_jax.engine.config import EngineConfig
from splash_jax.engine.platform import room_on_devices, start_devices
from splash_jax.errors import CheckpointError, ConfigError, LayoutError, RequestError, SwitchRefused
from splash_jax.host import Room
from splash_jax.ownership.footprint import IN_TRANSIT
from splash_jax.runtime.shapes import attention_kernels
from splash_jax.scheduler import PolicyConfig
from tests.engine.conftest import TOLERANCE, add, drive, go, greedy, teacher_forced, tokens
from tests.support import SMALL, assert_all_free, make_llm, write_checkpoint

PLAIN = {  # what `test_numbers_may_be_numpys_or_jaxs` says in other numbers
    "num_devices": 4, "mesh": {"node": 2, "chip": 2}, "block_size": 4, "max_model_len": 128, "decode_buckets": (4, 8),
    "seed": 3, "reserve_bytes": 0, "penalties": True, "max_num_seqs": 8, "layouts": ("tp", "dp"),
    "device_memory_bytes": 2**26,
}  # fmt: skip
FULL = 130  # eight histories of so many tokens fill more than one rank


def test_a_switch_that_does_not_fit_changes_nothing(llm: LLM, alone: LLM) -> None:
    engine = go(llm, "dop").engine
    requests = [add(llm, tokens(FULL, i), greedy(40, logprobs=0)) for i in range(8)]
    while not all(r.output_ids for r in requests):
        engine.step()
    before = engine.pool.manifest()
    future = engine.request_switch("tp")
    engine.step()
    refusal = future.exception(0)
    assert isinstance(refusal, SwitchRefused)
    found = re.fullmatch(
        r"switch dop -> tp does not fit: rank 0 needs (\d+) pages and has 170, it lacks (\d+) bytes\. "
        r"Finish or abort requests, or raise device_memory_bytes\.",
        str(refusal),
    )
    assert found, refusal
    need, lack = map(int, found.groups())
    kv = engine.pool.kv
    assert need == sum(-(-r.num_tokens // kv.page_size) for r in before.requests.values())
    assert lack == (need - 170) * kv.page_size * kv.bytes_per_token * 3
    after = engine.pool.manifest()
    assert llm.layout == "dop" and after.requests.keys() == before.requests.keys()
    for name, pages in before.requests.items():
        assert after.requests[name].home == pages.home
        for rank, held in pages.pages.items():
            assert after.requests[name].pages[rank][: len(held)] == held
    preemptions = engine.preemptions
    drive(llm)
    assert engine.preemptions == preemptions
    for request in requests:
        engine.take(request.name)
        assert len(request.output_ids) == 40
    for request in requests[::4]:
        values = teacher_forced(alone, request.prompt_ids, request.output_ids)
        assert max(abs(values - [p for p, _ in request.logprobs])) <= TOLERANCE


def test_generate_reports_a_refused_switch_after_its_requests_are_done(llm: LLM) -> None:
    go(llm, "dop")
    with pytest.raises(SwitchRefused, match="it lacks"):
        llm.generate([tokens(FULL, i) for i in range(8)], greedy(30), switches={30: "dp", 25: "tp"})
    assert_all_free(llm)


def test_a_plan_says_beforehand_that_a_switch_does_not_fit(llm: LLM) -> None:
    go(llm, "tp")
    with pytest.raises(SwitchRefused, match=r"switch dop -> tp does not fit: rank 0 needs 264 pages and has 170"):
        llm.plan("dop", "tp", tokens=[132] * 8)
    assert llm.plan("dop", "tp", tokens=[132] * 4).summary()["requests"] == 4


def test_unknown_layouts(llm: LLM, small: Path, alone: LLM) -> None:
    go(llm, "tp")
    for ask in (llm.switch, llm.engine.request_switch, lambda name: llm.generate([[5]], switches={0: name})):
        with pytest.raises(LayoutError, match=r"unknown layout 'pp'; choose one of tp, dp, cp, dop"):
            ask("pp")
        drive(llm)
    with pytest.raises(LayoutError, match="layout 'dop' is not among the allowed layouts tp"):
        alone.switch("dop")
    for settings in ({"layout": "pp"}, {"layouts": ("tp", "pp")}):
        with pytest.raises(LayoutError, match=r"unknown layout 'pp'; choose one of tp, dp, cp, dop"):
            make_llm(small, **settings)
    with pytest.raises(LayoutError, match="layout 'cp' is not among the allowed layouts tp, dp"):
        make_llm(small, layout="cp", layouts=("tp", "dp"))
    with pytest.raises(LayoutError, match=r"direction \('tp', 'cp'\) must be two different ones of tp, dp"):
        make_llm(small, layouts=("tp", "dp"), directions=(("tp", "cp"),))


def test_a_direction_nobody_announced(small: Path) -> None:
    llm = make_llm(small, directions=(("tp", "dp"),))
    with pytest.raises(LayoutError, match="switch tp -> cp is not among the engine's directions"):
        llm.switch("cp")
    assert llm.layout == "tp" and not llm.engine.busy


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_devices": 3},
            r"8 attention heads cannot be split over 3 devices; choose num_devices from \[1, 2, 4, 8\]",
        ),
        (
            {"num_devices": 10**9},
            r"a mesh has at most 16 axes and 1024 ranks, not 1 and 1000000000; give fewer num_devices",
        ),
        (
            {"directions": (("tp", ["dp"]),)},
            r"direction \('tp', \['dp'\]\) must be two different ones of tp, dp, cp, dop",
        ),
        ({"directions": {}}, r"directions must be a tuple like \(\('tp', 'dp'\),\), got \{\}"),
        ({"penalties": "false"}, "penalties must be True or False, got 'false'"),
        ({"compilation_cache_dir": 1.5}, "compilation_cache_dir must be a path or None, got 1.5"),
        ({"max_model_len": 300}, "max_model_len 300 is more than the model's context of 256"),
        ({"num_devices": 0}, "num_devices must be a whole number of at least 1, got 0"),
        ({"mesh": {"node": 2, "chip": 4}}, r"mesh \{'node': 2, 'chip': 4\} has 8 ranks and num_devices is 4; make"),
        ({"mesh": {}}, r"mesh \{\} has 1 ranks and num_devices is 4"),
        ({"mesh": {"node": 0, "chip": 4}}, "mesh axis 'node' must be a whole number of at least 1, got 0"),
        ({"mesh": 4}, r"mesh must map axes to sizes, like \{'node': 2, 'chip': 4\}; got 4"),
        ({"mesh": {"node": "2", "chip": 2}}, "mesh axis 'node' must be a whole number of at least 1, got '2'"),
        ({"switch_modes": "spread"}, r"switch_modes must be a tuple like \('splash',\), got 'spread'"),
        ({"mesh": {"a=b": 4}}, "mesh axes are named by words, such as 'node'; got 'a=b'"),
        ({"mesh": {"node": 2, "chip": 2}, "layout": "node=dop"}, r"names axes \['node'\]; the mesh has"),
        ({"mesh": {"node": 2, "chip": 2}, "layouts": ("tp", "node=dop,chip=x")}, "unknown layout 'x' for axis 'chip'"),
        ({"mesh": {"node": 2, "chip": 2}, "layout": "node=dop,chip=cp"}, "is not among the allowed layouts tp, dp"),
        ({"layout": "node=dop,chip=cp"}, r"names axes \['chip', 'node'\]; the mesh has \['rank'\]"),
        ({"block_size": 4, "cp_interleave": 3}, "cp_interleave 3 must divide block_size 4"),
        ({"decode_buckets": (99,)}, r"decode_buckets \(99,\) must lie in 1 to max_num_seqs 8"),
        ({"decode_buckets": 8}, r"decode_buckets must be a tuple like \(8,\), got 8"),
        ({"decode_buckets": (2.5,)}, "each of decode_buckets must be a whole number of at least 1, got 2.5"),
        ({"layouts": "tp"}, r"layouts must be a tuple like \('tp', 'dp'\), got 'tp'"),
        ({"layouts": ()}, "layouts is empty; give it at least 'tp'"),
        ({"layout": ["tp"]}, r"unknown layout \['tp'\]; choose one of tp, dp, cp, dop"),
        ({"directions": 5}, r"directions must be a tuple like \(\('tp', 'dp'\),\), got 5"),
        ({"directions": ("tp", "dp")}, "direction 'tp' must be two different ones of tp, dp, cp, dop"),
        ({"reserve_bytes": -1}, "reserve_bytes must be a whole number of at least 0, got -1"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        (
            {"device_memory_bytes": 10**18},
            r"more than the 1073741824 tokens that can be numbered\. Lower device_memory",
        ),
        ({"prefill_tile": 512}, "prefill_tile 512 is more than the model's context of 256"),
        ({"block_size": 10**9}, "block_size 1000000000 is more than the model's context of 256"),
        ({"dtype": "float8"}, "dtype must be auto, float32 or bfloat16, got 'float8'"),
        ({"device_memory_bytes": 1000}, r"does not fit: 1000 bytes per rank lack \d+ bytes for one page"),
    ],
)
def test_settings_that_cannot_be_served(small: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=words):
        make_llm(small, **settings)


def test_a_name_of_one_word_is_that_role_on_every_axis(small: Path) -> None:
    settings = {"layouts": ("tp", "node=tp,chip=tp", "chip=cp,node=dop"), "directions": (("tp", "node=dop,chip=cp"),)}
    llm = make_llm(small, num_devices=None, mesh={"node": 2, "chip": 2}, **settings)
    assert llm.layout == "node=tp,chip=tp" and list(llm.engine.blueprint.layouts) == [llm.layout, "node=dop,chip=cp"]
    for name in ("chip=cp,node=dop", "node=dop,chip=cp"):
        assert str(llm.engine.allowed_layout(name)) == "node=dop,chip=cp"
    with pytest.raises(LayoutError, match="layout 'cp' is not among the allowed layouts node=tp,chip=tp, node=dop"):
        llm.switch("cp")


def test_a_plan_that_its_compiled_transfer_cannot_carry_is_refused_whole(llm: LLM, monkeypatch) -> None:
    """Before anything changes: the step after it goes on where it was."""
    engine = go(llm, "cp").engine
    request = add(llm, tokens(40, 3), greedy(8))
    for _ in range(3):
        engine.step()
    route, before = engine.blueprint.route(engine.layout, engine.allowed_layout("dp")), engine.pool.manifest()
    monkeypatch.setattr(type(engine.blueprint), "route", lambda self, src, dst: replace(route, sends=0))
    future = engine.request_switch("dp")
    engine.step()
    monkeypatch.undo()
    with pytest.raises(SwitchRefused, match="switch cp -> dp does not fit its compiled transfer: the plan sends"):
        future.result()
    assert llm.layout == "cp" and engine.pool.manifest().requests.keys() == before.requests.keys()
    drive(llm)
    engine.take(request.name)
    assert len(request.output_ids) == 8


def test_a_budget_too_small_for_one_request_names_layout_and_bytes(llm: LLM, small: Path) -> None:
    state, kv = llm.engine.blueprint.state, llm.engine.blueprint.shapes.kv
    page = kv.page_size * kv.bytes_per_token * (state.num_layers + IN_TRANSIT)
    budget = state.common + state.projections * (state.num_layers + 1) + 40 * page
    words = rf"layout dp has 40 pages per rank and one request of max_model_len 256 needs 64: {24 * page} bytes lack"
    with pytest.raises(ConfigError, match=words):
        make_llm(small, device_memory_bytes=budget, layout="dp", layouts=("dp",))
    assert make_llm(small, device_memory_bytes=budget, max_model_len=160, layouts=("tp", "dp")).layout == "tp"


def test_another_architecture(tmp_path: Path) -> None:
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ConfigError), match="llama"):
        make_llm(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty"),
        ([5, 512], r"prompts\[1\]: token id 512 at position 1 is not in the vocabulary: ids go from 0 to 511"),
        ([5] * 17 + [99999], r"prompts\[1\]: token id 99999 at position 17 is not in the vocabulary"),
        ([-1], "token id -1 at position 0 is not in the vocabulary"),
        ([1.5], r"token id 1\.5 at position 0 is not in the vocabulary"),
        ([5, True], "token id True at position 1 is not in the vocabulary"),
        ([5] * 256, "the prompt has 256 tokens.* context holds 256, one of them drawn.* [Ss]horten it"),
        ("text", "text prompts need a tokenizer"),
        (None, "a prompt must be text or a list of token ids; got NoneType None"),
        (b"ab", "a prompt must be text or a list of token ids; got bytes b'ab'"),
        (7.5, r"a prompt must be text or a list of token ids; got float 7\.5"),
        ({5}, "a prompt must be text or a list of token ids; got set"),
    ],
)
def test_prompts_that_cannot_be_served_queue_nothing(llm: LLM, prompt: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate([[5, 6], prompt], greedy(4))  # type: ignore[list-item]
    assert_all_free(llm)


def test_what_is_no_list_of_prompts(llm: LLM) -> None:
    for prompts in (None, 5, b"ab", {"prompt": [5]}, iter([[5]])):
        with pytest.raises(RequestError, match="prompts must be text, token ids, or a list of these; got"):
            llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="logits are of a list of token ids; got int 5"):
        llm.logits(5)  # type: ignore[arg-type]
    assert_all_free(llm)


def test_arrays_of_ids_are_prompts(llm: LLM) -> None:
    (want,) = llm.generate([[5, 6]], greedy(2))
    for prompts in (np.array([5, 6]), np.array([[5, 6]]), [np.array([5, 6])], jnp.array([5, 6]), [np.int32(5), 6]):
        (output,) = llm.generate(prompts, greedy(2))  # type: ignore[arg-type]
        assert output.outputs[0].token_ids == want.outputs[0].token_ids
        assert json.dumps(output.prompt_token_ids) == "[5, 6]"


def test_what_is_no_conversation() -> None:
    user = {"role": "user", "content": "hi"}
    assert _conversations([user]) == [[user]] and _conversations(([user], [user])) == [[user], [user]]
    assert _conversations([]) == [[]]  # which the tokenizer refuses: messages is empty
    refused = {
        "messages must be a list of messages, or a list of such lists; got NoneType": None,
        "or a list of such lists; got str 'hi'": "hi",
        "or a list of such lists; got dict": user,
        "a conversation must be a list of messages; got int 5": [5],
    }
    for words, messages in refused.items():
        with pytest.raises(RequestError, match=words):
            _conversations(messages)


def test_one_prompt_is_not_counted(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"^token id 512 at position 0 is not"):
        llm.generate([512])


def test_numbers_may_be_numpys_or_jaxs(llm: LLM, small: Path) -> None:
    settings = {
        "num_devices": np.int64(4), "mesh": {"node": np.int32(2), "chip": jnp.int32(2)}, "block_size": np.uint8(4),
        "max_model_len": np.array(128), "decode_buckets": np.array([4, 8]), "seed": np.int64(3),
        "reserve_bytes": np.int64(0), "penalties": np.bool_(True), "max_num_seqs": jnp.int32(8),
        "layouts": ("tp", "dp"), "device_memory_bytes": np.int64(2**26),
    }  # fmt: skip
    config = EngineConfig(model=small, **settings)  # type: ignore[arg-type]
    for name in settings:
        value = getattr(config, name)
        parts = value.values() if name == "mesh" else value if isinstance(value, tuple) else (value,)
        assert {type(part) for part in parts} <= {int, bool, str}, name
    assert draw_up(config) == draw_up(EngineConfig(model=small, **PLAIN))  # type: ignore[arg-type]
    policy = PolicyConfig(margin=np.float32(0.5), dwell_steps=np.int64(3), step_seconds=np.array(0.25))  # type: ignore[arg-type]
    assert (policy.margin, policy.dwell_steps, policy.step_seconds) == (0.5, 3, 0.25)
    assert {type(x) for x in (policy.margin, policy.dwell_steps, policy.step_seconds)} == {int, float}
    params = SamplingParams(temperature=jnp.float32(0), max_tokens=jnp.int32(4), ignore_eos=True)  # type: ignore[arg-type]
    (want,) = go(llm, "tp").generate([[5, 6]], greedy(4))
    for prompt in ([jnp.int32(5), 6], [np.array(5), np.uint16(6)]):
        (output,) = llm.generate(prompt, params, switches={np.int64(2): "dp"})  # type: ignore[dict-item]
        assert output.outputs[0].token_ids == want.outputs[0].token_ids and llm.layout == "dp"
        go(llm, "tp")
    assert (
        llm.plan("tp", "dp", tokens=[np.int64(4), jnp.int32(9)]).summary()
        == llm.plan("tp", "dp", tokens=[4, 9]).summary()
    )
    request = llm.engine.add_request("np", [5, 6], greedy(4, temperature=0.7), sample=np.int64(1), seed=np.int64(9))  # type: ignore[arg-type]
    assert type(request.sample) is int and type(request.seed) is int
    drive(llm)
    llm.engine.take("np")


def test_max_tokens_beyond_the_context_are_cut_there(llm: LLM) -> None:
    """As vLLM's offline LLM does; the rule stands in `SamplingParams` and in `LLM.generate`."""
    for settings in ({"max_tokens": 100}, {"max_tokens": None}, {"max_tokens": 2**31 - 1}):
        (output,) = llm.generate([tokens(250, 1)], greedy(**settings))  # type: ignore[arg-type]
        assert len(output.outputs[0].token_ids) == 6 and output.outputs[0].finish_reason == "length"
    for text in (SamplingParams.__doc__, LLM.generate.__doc__):
        assert "max_tokens` is cut" in text or "beyond it is cut" in text  # type: ignore[operator]


def test_records_say_what_the_first_request_waits_for(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """It is served in its turn: nobody behind it passes it, however small."""
    caplog.set_level(logging.DEBUG, "splash_jax")
    go(llm, "dp")
    first = len(llm.records)
    requests = [llm.engine.add_request(f"w{i}", tokens(4, i), greedy(30)) for i in range(9)]
    drive(llm)
    told = [record.waiting_for for record in llm.records[first:]]
    assert told[3] == "request w8 lacks 1 slots" and told[-1] is None
    assert [r.message for r in caplog.records if "w8 lacks" in r.message] == [
        "request w8 lacks 1 slots, and waits with 0 behind it"
    ]
    for request in requests:
        llm.engine.take(request.name)


def test_a_temperature_too_small_to_divide_by_is_greedy(llm: LLM) -> None:
    prompts = [tokens(9, i) for i in range(4)]
    want = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy(6))]
    for temperature in (2e-38, 1e-9):
        outputs = llm.generate(prompts, greedy(6, temperature=temperature))
        assert [output.outputs[0].token_ids for output in outputs] == want


def test_sampling_params_of_another_kind_queue_nothing(llm: LLM) -> None:
    for params in ([greedy(), None], {"temperature": 0}, 5):
        with pytest.raises(RequestError, match="sampling_params must be one SamplingParams or a list of them; got"):
            llm.generate([[5], [6]], params)  # type: ignore[arg-type]
        assert_all_free(llm)


def test_switches_and_token_counts_of_another_kind(llm: LLM) -> None:
    for switches in (["dp"], "dp", 5):
        with pytest.raises(RequestError, match=r"switches maps steps to layouts, like \{16: 'cp'\}; got"):
            llm.generate([[5]], switches=switches)  # type: ignore[arg-type]
    for move in (("dp",), ("dp", "splash", 1), ["dp", "splash"], None):
        with pytest.raises(LayoutError, match="is not among the allowed layouts tp, dp"):
            llm.generate([[5]], switches={0: move})  # type: ignore[dict-item]
    with pytest.raises(LayoutError, match=r"layout \['dp'\] is not among the allowed layouts"):
        llm.switch(["dp"])  # type: ignore[arg-type]
    for count in (0, -4, 1.5, True, "9", 257):
        words = rf"tokens must be whole numbers from 1 to the context 256, got {count!r} at position 1"
        with pytest.raises(RequestError, match=words):
            llm.plan("tp", "dp", tokens=[4, count])  # type: ignore[list-item]
    with pytest.raises(RequestError, match="tokens must be a list of token counts; got int 5"):
        llm.plan("tp", "dp", tokens=5)  # type: ignore[arg-type]


def test_a_result_is_taken_once_and_when_it_is_there(llm: LLM) -> None:
    with pytest.raises(RequestError, match="no request is named 'nobody', or its result was taken already"):
        llm.engine.take("nobody")
    request = add(llm, [5], greedy(2))
    with pytest.raises(RequestError, match=f"request '{request.name}' is waiting: step until it is finished, or drop"):
        llm.engine.take(request.name)
    drive(llm)
    assert llm.engine.take(request.name)[0] is request


def test_a_budget_that_the_devices_do_not_have_names_what_to_lower() -> None:
    with (
        pytest.raises(ConfigError, match=r"no room for this engine \(Out of memory.*\)\. Lower device_memory_bytes"),
        room_on_devices("device_memory_bytes (now 5)"),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")
    with (
        pytest.raises(ConfigError, match=r"no room for this engine \(Unable.*\)\. Lower this"),
        room_on_devices("this"),
    ):
        raise MemoryError("Unable to allocate 2 TiB")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), room_on_devices("nothing"):
        raise jax.errors.JaxRuntimeError("INTERNAL: another fault")


def test_a_budget_that_the_host_does_not_have(small: Path) -> None:
    have = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    words = (
        r"4 CPU devices of \d+ bytes need \d+ bytes and this process has \d+ left: \d+ by .*, less \d+ that it has "
        r"taken already\. Lower device_memory_bytes, max_num_seqs or num_devices, or raise that limit"
    )
    with pytest.raises(ConfigError, match=words):
        make_llm(small, device_memory_bytes=have // 3)


def test_threads_that_a_process_may_not_have(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Room(limit=60, used=3, whose="pids.max of somewhere")
    monkeypatch.setattr(platform, "threads", lambda: few)
    words = r"XLA starts about 80 threads \(NPROC is 32\), this process may have 60 by pids.max of somewhere; raise"
    with pytest.raises(ConfigError, match=words):
        make_llm(small)


@pytest.mark.parametrize("value", ["auto", "-4", "0", "3.5", "１６"])
def test_a_number_of_threads_that_is_none(small: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NPROC", value)
    with pytest.raises(
        ConfigError, match=re.escape(f"NPROC is {value!r}, which is no number of threads; set NPROC=32")
    ):
        make_llm(small)


def test_an_empty_number_of_threads_is_none_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "")
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    with pytest.warns(UserWarning, match="set NPROC=32"):
        platform.prepare_platform(2)


def test_rows_that_no_step_can_have_are_not_compiled_for(small: Path) -> None:
    sizes = {
        rows: draw_up(EngineConfig(model=small, max_num_seqs=2, max_model_len=64, max_num_batched_tokens=rows)).buckets
        for rows in (128, 10**9)
    }
    assert sizes[128] == sizes[10**9]


def test_a_token_that_cannot_become_text_ends_its_request_alone(llm: LLM) -> None:
    class Broken:
        def add(self, ids: list[int]) -> str:
            raise UnicodeError(f"no text for {ids}")

    bad, good = add(llm, tokens(3, 1)), add(llm, tokens(4, 2), greedy(5))
    llm.engine._requests[bad.name][1].detokenizer = Broken()  # type: ignore[assignment]
    drive(llm)
    assert (good.finish_reason, len(good.output_ids), good.error) == ("length", 5, None)
    assert bad.finish_reason == "error"
    assert re.match(r"token \d+ could not be turned into text: UnicodeError\('no text for", bad.error or "")
    for request in (bad, good):
        llm.engine.take(request.name)


def test_a_platform_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise RuntimeError("Unable to initialize backend 'banana'")

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setenv("JAX_PLATFORMS", "banana")
    with pytest.raises(ConfigError, match=r"no device; JAX_PLATFORMS is banana\. Correct it, or set JAX_PLATFORMS=cpu"):
        start_devices()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_PLATFORM_NAME", "gpu")
    words = "JAX_PLATFORMS is cpu, JAX_PLATFORM_NAME is gpu. Correct it, or set JAX_PLATFORMS=cpu JAX_PLATFORM_NAME=cpu"
    with pytest.raises(ConfigError, match=words):
        start_devices()


@pytest.mark.parametrize("model", [b"folder", 7, None])
def test_a_model_that_is_no_path(model: object) -> None:
    with pytest.raises(ConfigError, match=r"model must be the pathlib\.Path of a checkpoint directory, got"):
        LLM(model)  # type: ignore[arg-type]


def test_a_home_folder_is_found_by_its_sign(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(small.parent))
    assert EngineConfig(model=Path("~") / small.name).model == small


def test_the_longest_prompts(llm: LLM) -> None:
    go(llm, "tp")
    output = llm.generate([tokens(255, 1)], greedy(24))[0].outputs[0]
    assert len(output.token_ids) == 1 and output.finish_reason == "length"
    assert llm.logits(tokens(256, 1)).shape == (256, 512)
    with pytest.raises(RequestError, match=r"the prompt has 257 tokens.* context holds 256.* [Ss]horten it"):
        llm.logits(tokens(257, 1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop": "x"}, "stop strings need a tokenizer"),
        ({"min_tokens": 254, "max_tokens": 254}, "3 prompt tokens and min_tokens 254 exceed the context 256"),
        ({"min_tokens": 1, "stop_token_ids": list(range(2, 20))}, "min_tokens bans at most 16 stop ids, .* has 19"),
    ],
)
def test_settings_of_a_request_that_this_engine_cannot_serve(llm: LLM, settings: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate([[5, 6, 7]], SamplingParams(**settings))  # type: ignore[arg-type]
    assert_all_free(llm)


def test_penalties_and_scoring_that_are_switched_off(small: Path) -> None:
    llm = make_llm(small, num_devices=1, layouts=("tp",), penalties=False, scoring=False)
    with pytest.raises(RequestError, match="penalties need an engine with penalties=True"):
        llm.generate([[5]], SamplingParams(presence_penalty=0.5))
    with pytest.raises(RequestError, match="logits need an engine with scoring=True"):
        llm.logits([5])
    assert not llm.engine.busy


def test_a_name_in_use(llm: LLM) -> None:
    request = llm.engine.add_request("mine", [5], greedy(2))
    with pytest.raises(RequestError, match="request id 'mine' is already in use; choose another"):
        llm.engine.add_request("mine", [6], greedy(2))
    drive(llm)
    llm.engine.take("mine")
    assert len(request.output_ids) == 2
    llm.engine.add_request("mine", [6], greedy(2))  # free again
    drive(llm)
    llm.engine.take("mine")


def test_names_that_others_gave_are_not_taken_again(llm: LLM) -> None:
    mine = add(llm, tokens(3, 1), greedy(2))
    following = str(int(llm._name()) + 1)
    llm.engine.add_request(following, tokens(3, 2), greedy(2))
    [output] = llm.generate([tokens(3, 3)], greedy(2))
    assert output.request_id not in (mine.name, following)
    for name in (mine.name, following):
        llm.engine.take(name)


def test_one_setting_for_each_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 sampling_params were given for 3 prompts; give one, or one each"):
        llm.generate([[5], [6], [7]], [greedy(), greedy()])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n": 0}, "n must be a whole number from 1 to 1024, got 0"),
        ({"temperature": -1.0}, "temperature must be from 0.0 to 100.0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be from 0.0 to 100.0, got nan"),
        ({"top_p": 0.0}, "top_p must be above 0.0 and at most 1.0, got 0.0"),
        ({"top_p": 1.5}, "top_p must be above 0.0 and at most 1.0, got 1.5"),
        ({"top_k": -2}, "top_k must be a whole number from -1"),
        ({"min_p": 2.0}, "min_p must be from 0.0 to 1.0, got 2.0"),
        ({"presence_penalty": 3.0}, "presence_penalty must be from -2.0 to 2.0, got 3.0"),
        ({"frequency_penalty": -3.0}, "frequency_penalty must be from -2.0 to 2.0, got -3.0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 0.01 to 100.0, got 0.0"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ({"max_tokens": 2.5}, "max_tokens must be a whole number from 1 to .*, got 2.5"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, more than max_tokens 4"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, got 21"),
        ({"seed": -1}, "seed must be a whole number from 0 to .*, got -1"),
        ({"stop": ""}, "stop must be non-empty text, got ''"),
        ({"stop": ["a", ""]}, "stop must be non-empty text"),
        ({"stop": 5}, "stop must be a list, got 5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list, got 5"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False, got None"),
        ({"temperature": 10**400}, "temperature must be from 0.0 to 100.0, got 1000"),
        ({"stop_token_ids": [-3]}, "stop_token_ids must be token ids of 0 or more"),
    ],
)
def test_sampling_settings_that_cannot_be_meant(settings: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_an_end_of_sequence_beyond_the_vocabulary_bans_nothing(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, eos_token_id=[1, 512, 2**40])
    llm = make_llm(checkpoint, num_devices=1, layouts=("tp",))
    (output,) = llm.generate([[2, 3]], SamplingParams(min_tokens=3, max_tokens=3, stop_token_ids=[600]))
    assert len(output.outputs[0].token_ids) == 3


def test_more_logprobs_than_a_small_vocabulary_has(tmp_path: Path) -> None:
    llm = make_llm(write_checkpoint(tmp_path, vocab_size=11), num_devices=1, layouts=("tp",))
    (output,) = llm.generate([[2, 3]], greedy(3, logprobs=20))
    for values in output.outputs[0].logprobs or ():
        assert set(values) == set(range(11))
        assert sum(np.exp(value.logprob) for value in values.values()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tensor_parallel_size", "there is no setting 'tensor_parallel_size'; here that is num_devices, the ranks"),
        ("max_num_seq", r"there is no setting 'max_num_seq'; did you mean max_num_seqs\?"),
        ("zzz", "there is no setting 'zzz'; there are model, num_devices"),
    ],
)
def test_a_setting_that_there_is_not(small: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(small, **{name: 1})


def test_attention_kernels_are_refused_where_there_are_none(small: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend must be one of auto, gpu, xla, got 'cuda'"):
        make_llm(small, num_devices=1, layouts=("tp",), attention_backend="cuda")
    words = 'attention_backend "gpu" has kernels for h200, b200, and this is cpu. Use "auto" or "xla"'
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_llm(small, num_devices=1, layouts=("tp",), attention_backend="gpu")
    assert attention_kernels("auto", "NVIDIA H100 80GB HBM3") == ("xla", None), "known, but tuned for by no table"
    assert attention_kernels("auto", "NVIDIA H200") == attention_kernels("gpu", "NVIDIA H200") == ("gpu", "h200")
    assert attention_kernels("xla", "NVIDIA H200") == ("xla", None)


def test_progress_is_told_unless_nobody_wants_it(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    seen = []
    make_llm(small, num_devices=1, layouts=("tp",), progress=lambda what, done, total: seen.append((what, done, total)))
    assert seen[-1][0] == "loading 139 of 139 tensors as float32" and seen[-1][1] == seen[-1][2]
    make_llm(small, num_devices=1, layouts=("tp",), progress=False)
    assert capfd.readouterr().err == ""
    make_llm(small, num_devices=1, layouts=("tp",))
    assert re.fullmatch(
        r"(loading \d+ of \d+ tensors as float32) \.\.\.\n\1: done after \d+ s\n", capfd.readouterr().err
    )
