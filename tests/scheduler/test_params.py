"""Sampling parameters: vLLM's names and defaults, and a clear no to everything that cannot be meant."""

import dataclasses
import math

import numpy as np
import pytest

from splash_jax.errors import RequestError
from splash_jax.scheduler import SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.max_tokens, params.min_tokens, params.logprobs, params.seed) == (16, 0, None, None)
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (False, True, False)
    assert params.stop_strings == () and not params.penalised


WHOLE = {
    "n": (1, 1024),
    "top_k": (-1, 2**31 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 20),
    "seed": (0, 2**63 - 1),
}
NUMBERS = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.01, 100.0, False),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_have_their_range(name):
    least, most = WHOLE[name]
    for value in (least, most):
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in (least - 1, most + 1, 1.0, True, "1"):
        with pytest.raises(
            RequestError, match=rf"^{name} must be a whole number from {least} to {most}, got {value!r}"
        ):
            SamplingParams(**{name: value})


def test_min_tokens_is_whole_and_not_above_max_tokens():
    for value in (-1, 2**31, 0.0, False):
        with pytest.raises(RequestError, match=rf"^min_tokens must be a whole number from 0 to \d+, got {value!r}"):
            SamplingParams(min_tokens=value, max_tokens=None)
    with pytest.raises(RequestError, match="min_tokens is 5, more than max_tokens 4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=400, max_tokens=None).max_tokens is None


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_their_range(name):
    least, most, above = NUMBERS[name]
    inside = [math.nextafter(least, most) if above else least, most, 1, 0.5]
    for value in inside:
        assert getattr(SamplingParams(**{name: value}), name) == value
    words = f"above {least} and at most {most}" if above else f"from {least} to {most}"
    outside = [math.nextafter(least, -math.inf), math.nextafter(most, math.inf), math.nan, math.inf, True, "0.5", None]
    for value in [*outside, least] if above else outside:
        with pytest.raises(RequestError, match=rf"^{name} must be {words}, got {value!r}\."):
            SamplingParams(**{name: value})


@pytest.mark.parametrize("stop", ["", ["fine", ""], [1], ("a", None)])
def test_stop_texts_are_not_empty(stop):
    with pytest.raises(RequestError, match="stop must be non-empty text, got"):
        SamplingParams(stop=stop)


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("a", ("a",)), (["a", "bc"], ("a", "bc")), ([], ()), ("abc", ("abc",))]
)
def test_one_stop_text_or_several(stop, strings):
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize("ids", [[-1], [1, "2"], [True], [1.0]])
def test_stop_ids_are_ids(ids):
    with pytest.raises(RequestError, match="stop_token_ids must be token ids of 0 or more, got"):
        SamplingParams(stop_token_ids=ids)
    assert SamplingParams(stop_token_ids=[0, 5]).stop_token_ids == [0, 5]


@pytest.mark.parametrize("of", [np.int64, np.uint8, np.array], ids=["int64", "uint8", "array"])
@pytest.mark.parametrize("name", [*WHOLE, "resumed_tokens"])
def test_whole_numbers_may_be_numpys(name, of):
    value = getattr(SamplingParams(**{name: of(7)}), name)
    assert type(value) is int and value == 7
    for wrong in (np.float64(1.0), np.bool_(True), np.array([1])):
        with pytest.raises(RequestError, match=f"^{name} must be a whole number from "):
            SamplingParams(**{name: wrong})


@pytest.mark.parametrize("of", [np.float32, np.float64, np.float16, np.int32, np.array])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_numpys(name, of):
    value = getattr(SamplingParams(**{name: of(1)}), name)
    assert type(value) in (int, float) and value == 1
    with pytest.raises(RequestError, match=rf"^{name} must be .*, got nan\."):
        SamplingParams(**{name: np.float32("nan")})


def test_switches_and_ids_may_be_numpys():
    params = SamplingParams(ignore_eos=np.bool_(True), stop_token_ids=np.array([3, 4]), stop=np.str_("x"))
    assert params.ignore_eos is True and params.stop_token_ids == [3, 4] and params.stop_strings == ("x",)
    assert type(params.stop_token_ids[0]) is int and type(params.stop) is str
    for ids in ([np.int32(3), 4], (np.int64(3), np.array(4))):
        got = SamplingParams(stop_token_ids=ids).stop_token_ids
        assert list(got) == [3, 4] and all(type(i) is int for i in got)
    with pytest.raises(RequestError, match=r"stop_token_ids must be token ids of 0 or more, got \[1\.5\]"):
        SamplingParams(stop_token_ids=np.array([1.5]))


@pytest.mark.parametrize(
    ("settings", "penalised"),
    [
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"temperature": 0.5, "top_k": 3}, False),
    ],
)
def test_penalties_are_told_apart(settings, penalised):
    assert SamplingParams(**settings).penalised is penalised


def test_parameters_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(2)  # type: ignore[misc]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
