"""S22: a request ends where its settings say, and its text is cut exactly there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from splash_jax import LLM, CompletionOutput, SamplingParams
from splash_jax.models.tokenizer import Tokenizer
from tests.engine.conftest import drive
from tests.support import assert_all_free, make_llm

CHECKPOINT = Path(__file__).resolve().parents[2] / "splash_jax" / "assets" / "small"
PROMPT = "The river"
LENGTH = 40


@pytest.fixture(scope="module")
def writer() -> Iterator[LLM]:
    """The checkpoint that ships with the package: it has a tokenizer."""
    llm = make_llm(
        CHECKPOINT, num_devices=1, layouts=("tp",), max_num_seqs=4, decode_buckets=(4,), skip_tokenizer_init=False,
        scoring=False, compile_ahead=True,
    )  # fmt: skip
    yield llm
    assert_all_free(llm)


def write(llm: LLM, **settings: object) -> CompletionOutput:
    defaults: dict[str, object] = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}
    return llm.generate(PROMPT, SamplingParams(**(defaults | settings)))[0].outputs[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def whole(writer: LLM) -> CompletionOutput:
    """What is written when nothing stops it."""
    return write(writer)


@pytest.fixture(scope="module")
def tokenizer(writer: LLM) -> Tokenizer:
    assert writer.engine.tokenizer is not None
    return writer.engine.tokenizer


def text_of(tokenizer: Tokenizer, output: CompletionOutput, count: int) -> str:
    return tokenizer.decode(list(output.token_ids[:count]))


def first_seen(ids: tuple[int, ...], least: int) -> int:
    """An index of at least `least` whose token did not come before."""
    return next(i for i in range(least, len(ids)) if ids[i] not in ids[:i])


def test_without_stops_a_request_ends_by_length(whole: CompletionOutput, tokenizer: Tokenizer) -> None:
    assert len(whole.token_ids) == LENGTH
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    assert whole.text == text_of(tokenizer, whole, LENGTH)


def test_a_stop_id_ends_the_text_before_it(writer: LLM, whole: CompletionOutput, tokenizer: Tokenizer) -> None:
    at = first_seen(whole.token_ids, 6)
    stop = whole.token_ids[at]
    output = write(writer, stop_token_ids=[stop, 1])
    assert output.token_ids == whole.token_ids[: at + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == text_of(tokenizer, whole, at)


@pytest.mark.parametrize("spread", (1, 2, 3))
def test_a_stop_string_over_several_tokens_is_cut_exactly(
    writer: LLM, whole: CompletionOutput, tokenizer: Tokenizer, spread: int
) -> None:
    begin = len(text_of(tokenizer, whole, 12)) - (spread > 1)
    end = len(text_of(tokenizer, whole, 12 + spread - 1)) + 1
    stop = whole.text[begin:end]
    at = whole.text.find(stop)  # it may come earlier
    output = write(writer, stop=stop)
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == whole.text[:at]
    count = len(output.token_ids)
    assert output.token_ids == whole.token_ids[:count]
    assert stop in text_of(tokenizer, whole, count) and stop not in text_of(tokenizer, whole, count - 1)
    included = write(writer, stop=[stop], include_stop_str_in_output=True)
    assert included.text == whole.text[: at + len(stop)] and included.token_ids == output.token_ids


def test_the_stop_string_that_begins_first_wins(writer: LLM, whole: CompletionOutput) -> None:
    middle = len(whole.text) // 2
    late, early = whole.text[middle + 1 : middle + 4], whole.text[middle - 3 : middle + 2]
    expected = min((whole.text.find(stop), stop) for stop in (late, early))
    output = write(writer, stop=[late, early])
    assert (output.text, output.stop_reason) == (whole.text[: expected[0]], expected[1])


def test_a_stop_string_that_never_completes_loses_nothing(writer: LLM, whole: CompletionOutput) -> None:
    output = write(writer, stop=[whole.text[-5:] + "\x00", whole.text[3:9] + "\x00"])
    assert output.text == whole.text and output.finish_reason == "length"


def test_stop_wins_where_the_last_token_stops_too(writer: LLM, whole: CompletionOutput) -> None:
    at = first_seen(whole.token_ids, 4)
    output = write(writer, stop_token_ids=[whole.token_ids[at]], max_tokens=at + 1)
    assert (output.finish_reason, output.stop_reason) == ("stop", whole.token_ids[at])
    assert write(writer, max_tokens=at).finish_reason == "length"


def test_no_stop_id_comes_before_min_tokens(writer: LLM, whole: CompletionOutput) -> None:
    stop = whole.token_ids[2]
    assert len(write(writer, stop_token_ids=[stop]).token_ids) <= 3
    output = write(writer, stop_token_ids=[stop], min_tokens=8)
    assert len(output.token_ids) > 8 and stop not in output.token_ids[:8]


def test_a_stop_string_does_not_end_before_min_tokens(writer: LLM, whole: CompletionOutput) -> None:
    stop = whole.text[1:3]
    assert len(write(writer, stop=stop).token_ids) < 8
    output = write(writer, stop=stop, min_tokens=10)
    assert len(output.token_ids) >= 10 and output.token_ids[:10] == whole.token_ids[:10]


def test_the_end_of_sequence_ends_unless_ignored(writer: LLM, whole: CompletionOutput) -> None:
    engine, at = writer.engine, first_seen(whole.token_ids, 5)
    real = engine.model
    engine.model = _with_eos(real, whole.token_ids[at])
    try:
        output, ignoring = write(writer, ignore_eos=False), write(writer)
    finally:
        engine.model = real
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids == whole.token_ids[: at + 1]
    assert ignoring.token_ids == whole.token_ids


def _with_eos(model: object, token: int) -> object:
    from dataclasses import replace

    return replace(model, eos_token_ids=(1, token))  # type: ignore[type-var]


def test_the_text_of_a_stop_id_is_kept_when_stops_are_included(
    writer: LLM, whole: CompletionOutput, tokenizer: Tokenizer
) -> None:
    at = first_seen(whole.token_ids, 6)
    stop = whole.token_ids[at]
    assert write(writer, stop_token_ids=[stop], skip_special_tokens=False).text == text_of(tokenizer, whole, at)
    output = write(writer, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert output.text == text_of(tokenizer, whole, at + 1)


def test_requests_of_one_batch_end_apart(writer: LLM, whole: CompletionOutput) -> None:
    at = first_seen(whole.token_ids, 9)
    params = [
        SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, **settings)  # type: ignore[arg-type]
        for settings in (
            {},
            {"stop_token_ids": [whole.token_ids[at]]},
            {"stop": whole.text[4:6]},
            {"min_tokens": LENGTH},
        )
    ]
    outputs = [o.outputs[0] for o in writer.generate([PROMPT] * 4, params)]
    assert [o.finish_reason for o in outputs] == ["length", "stop", "stop", "length"]
    assert outputs[0] == whole
    assert outputs[1].token_ids == whole.token_ids[: at + 1]
    assert not writer.engine.scheduler.unfinished
    drive(writer)


def test_a_conversation_is_rendered_and_answered(writer: LLM, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "What is gold?"}]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    answer = writer.chat(messages, params)
    assert list(answer[0].prompt_token_ids) == tokenizer.apply_chat_template(messages)
    several = writer.chat([messages, messages], params)
    assert [o.outputs[0].token_ids for o in several] == [answer[0].outputs[0].token_ids] * 2
