"""A request that was interrupted goes on as if it had not been: `resumed_tokens` says where its output stood."""

from typing import Any

import pytest

from splash_jax import LLM, SamplingParams
from splash_jax.errors import RequestError
from tests.engine.conftest import add, drive, go, tokens
from tests.support import assert_all_free

PROMPT = tokens(7, 11)
ALL, HALF = 24, 10
USUAL: dict[str, Any] = {"temperature": 0.8, "seed": 5, "ignore_eos": True}


def drawn(llm: LLM, prompt: list[int], **settings: Any) -> list[int]:
    return list(llm.generate([prompt], SamplingParams(**(USUAL | settings)))[0].outputs[0].token_ids)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="seed"),
        pytest.param({"presence_penalty": 1.5, "frequency_penalty": 0.7}, id="counts of output"),
        pytest.param({"repetition_penalty": 1.8, "top_p": 0.9}, id="counts of both"),
        pytest.param({"temperature": 0.0, "frequency_penalty": 2.0}, id="greedy"),
    ],
)
def test_the_rest_of_a_request_is_what_it_would_have_been(llm: LLM, settings: dict[str, Any]) -> None:
    whole = drawn(go(llm, "tp"), PROMPT, max_tokens=ALL, **settings)
    first = drawn(llm, PROMPT, max_tokens=HALF, **settings)
    assert first == whole[:HALF]
    rest = drawn(llm, PROMPT + first, max_tokens=ALL - HALF, resumed_tokens=HALF, **settings)
    assert first + rest == whole
    if settings.get("temperature") != 0:
        assert drawn(llm, PROMPT + first, max_tokens=ALL - HALF, **settings) != rest, "without it, others are drawn."


def test_it_goes_on_across_a_switch_and_after_a_preemption(llm: LLM) -> None:
    settings: dict[str, Any] = {"presence_penalty": 1.0}
    whole = drawn(go(llm, "tp"), PROMPT, max_tokens=ALL, **settings)
    resumed = SamplingParams(**USUAL, **settings, max_tokens=ALL - HALF, resumed_tokens=HALF)
    (output,) = llm.generate([PROMPT + whole[:HALF]], resumed, switches={3: "cp", 6: "dop"})
    assert list(output.outputs[0].token_ids) == whole[HALF:]
    older, request = add(go(llm, "tp"), PROMPT[:3]), add(llm, PROMPT + whole[:HALF], resumed)

    def each(step: int) -> None:
        if step == 6:  # as when pages run out
            engine = llm.engine
            if engine._pending is not None:
                engine._read_pending()
            engine.scheduler._preempt_youngest(engine.pool, older)

    drive(llm, each)
    for done in (older, request):
        llm.engine.take(done.name)
    assert request.preemptions == 1 and request.output_ids == whole[HALF:]
    assert_all_free(llm)


def test_every_sample_of_a_seed_can_be_resumed(llm: LLM) -> None:
    four = SamplingParams(**USUAL, max_tokens=ALL, n=3)
    samples = [list(o.token_ids) for o in go(llm, "tp").generate([PROMPT], four)[0].outputs]
    rest = SamplingParams(**USUAL, max_tokens=ALL - HALF, resumed_tokens=HALF)
    requests = [add(llm, PROMPT + ids[:HALF], rest, sample=i) for i, ids in enumerate(samples)]
    drive(llm)
    assert [llm.engine.take(r.name)[0].output_ids for r in requests] == [ids[HALF:] for ids in samples]


def test_min_tokens_counts_what_was_resumed(llm: LLM) -> None:
    """The ban of the end ends where it would have without the interruption."""
    free = drawn(go(llm, "tp"), PROMPT, max_tokens=ALL, temperature=0.0)
    stop = free[HALF + 3]
    settings: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": [stop]}
    for least in (HALF + 2, HALF + 8):
        whole = drawn(llm, PROMPT, max_tokens=ALL, min_tokens=least, **settings)
        assert len(whole) > HALF
        rest = drawn(
            llm, PROMPT + whole[:HALF], max_tokens=ALL - HALF, min_tokens=least, resumed_tokens=HALF, **settings
        )
        assert whole[:HALF] + rest == whole
    assert SamplingParams(min_tokens=12, max_tokens=4, resumed_tokens=8).min_tokens == 12
    with pytest.raises(RequestError, match="min_tokens is 13, more than max_tokens 4 and resumed_tokens 8"):
        SamplingParams(min_tokens=13, max_tokens=4, resumed_tokens=8)


def test_some_of_the_prompt_is_the_prompt(llm: LLM) -> None:
    for count in (2, 3):
        with pytest.raises(
            RequestError, match=rf"resumed_tokens is {count} and the prompt has 2 tokens; send the first"
        ):
            llm.generate([[5, 6]], SamplingParams(resumed_tokens=count))
    with pytest.raises(RequestError, match=r"resumed_tokens must be a whole number from 0 to \d+, got -1"):
        SamplingParams(resumed_tokens=-1)
    with pytest.raises(RequestError, match="1 prompt tokens and min_tokens 256 exceed the context 256"):
        llm.generate([[5, 6]], SamplingParams(resumed_tokens=1, min_tokens=256, max_tokens=None))
    (output,) = llm.generate([[5, 6]], SamplingParams(resumed_tokens=1, min_tokens=2, max_tokens=1))
    assert len(output.outputs[0].token_ids) == 1
    for sample in (-1, 1.5, 2**31, True):
        with pytest.raises(RequestError, match=r"sample must be a whole number from 0 to 2147483647, got"):
            llm.engine.add_request("x", [5], SamplingParams(), sample=sample)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"seed must be a whole number from 0 to \d+, got -3"):
        llm.engine.add_request("x", [5], SamplingParams(), seed=-3)


def test_a_text_is_not_resumed_since_it_may_be_cut_into_other_tokens(llm: LLM) -> None:
    with pytest.raises(
        RequestError, match="resumed_tokens 2 counts token ids at the end of the prompt: send the prompt"
    ):
        llm.generate("a text", SamplingParams(resumed_tokens=2))
