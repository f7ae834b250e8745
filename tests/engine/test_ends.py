"""A request ends at the end of sequence that any file of the checkpoint tells: config, generation config, tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

from splash_jax import LLM, SamplingParams, small_model
from splash_jax.engine.requests import stop_ids, with_tokenizer
from splash_jax.errors import ConfigError, RequestError
from splash_jax.models.config import read_model_config
from splash_jax.models.tokenizer import Tokenizer
from splash_jax.runtime.shapes import MAX_STOP_IDS
from tests.support import make_llm

ASSISTANT = 3  # the id of "<|assistant|>"
CHAT = [{"role": "user", "content": "What is gold?"}]


def copy_of_small(folder: Path, **changes: dict[str, object]) -> Path:
    """The embedded model with some keys of its files changed: `config={"eos_token_id": 5}`."""
    shutil.copytree(small_model(), folder)
    for name, values in changes.items():
        file = folder / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


def ends(folder: Path) -> tuple[int, ...]:
    return with_tokenizer(read_model_config(folder), Tokenizer.open(folder)).eos_token_ids


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """A chat model whose tokenizer alone says how an answer ends."""
    folder = copy_of_small(
        tmp_path_factory.mktemp("tuned") / "model", tokenizer_config={"eos_token": "<|assistant|>"},
        generation_config={"eos_token_id": [1, *range(1900, 1900 + MAX_STOP_IDS - 2)]},
    )  # fmt: skip
    return make_llm(
        folder, num_devices=1, layouts=("tp",), max_num_seqs=1, decode_buckets=(1,), skip_tokenizer_init=False,
        scoring=False, penalties=False,
    )  # fmt: skip


def test_the_end_of_the_tokenizer_ends(tuned: LLM) -> None:
    output = tuned.chat(CHAT, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0]
    assert (len(output.token_ids), output.token_ids[-1], output.finish_reason) == (8, ASSISTANT, "stop")
    whole = tuned.chat(CHAT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    assert (len(whole.token_ids), whole.token_ids[:8], whole.finish_reason) == (12, output.token_ids, "length")
    assert tuned.engine.model is tuned.engine.blueprint.model and tuned.engine.model.eos_token_ids[-1] == ASSISTANT


def test_it_is_banned_before_min_tokens_and_counted_among_what_can_be(tuned: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=10)
    output = tuned.chat(CHAT, params)[0].outputs[0]
    assert len(output.token_ids) >= 10 and ASSISTANT not in output.token_ids[:10]
    with pytest.raises(RequestError, match=f"min_tokens bans at most {MAX_STOP_IDS} stop ids, this request has 17"):
        tuned.chat(CHAT, SamplingParams(min_tokens=1, max_tokens=2, stop_token_ids=[7]))


def test_ends_of_all_three_files_are_joined(tmp_path: Path) -> None:
    files = {"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [5, 7]}}
    folder = copy_of_small(tmp_path / "all", **files, tokenizer_config={"eos_token": "<|assistant|>"})
    model = with_tokenizer(read_model_config(folder), Tokenizer.open(folder))
    assert model.eos_token_ids == (5, 7, ASSISTANT)
    assert stop_ids(model, SamplingParams(stop_token_ids=[9])) == {5, 7, ASSISTANT, 9}
    assert stop_ids(model, SamplingParams(stop_token_ids=[9], ignore_eos=True)) == {9}


def test_the_tokenizer_ends_where_no_other_file_tells_an_end(tmp_path: Path, caplog) -> None:
    nothing = {"eos_token_id": None}
    folder = copy_of_small(tmp_path / "one", config=nothing, generation_config=nothing)
    assert ends(folder) == (1,) and not caplog.messages


def test_without_a_tokenizer_the_two_configs_tell_the_ends(tmp_path: Path) -> None:
    folder = copy_of_small(tmp_path / "two", tokenizer_config={"eos_token": "<|assistant|>"})
    assert with_tokenizer(read_model_config(folder), None).eos_token_ids == (1,)


def test_a_model_that_nothing_can_end_is_told(tmp_path: Path, caplog) -> None:
    nothing = {"eos_token_id": None}
    folder = copy_of_small(
        tmp_path / "none", config=nothing, generation_config=nothing, tokenizer_config={"eos_token": None}
    )
    assert ends(folder) == ()
    beyond = copy_of_small(tmp_path / "beyond", config={"eos_token_id": 9999}, generation_config=nothing)
    with_tokenizer(read_model_config(beyond), None)
    head, tail = "no end of sequence among the model's 2048 tokens", "requests end by length, or by stops of their own."
    assert caplog.messages == [f"{head} (none is told): {tail}", f"{head} ([9999] are told): {tail}"]


def test_a_tokenizer_with_ids_beyond_the_vocabulary_is_told(tmp_path: Path, caplog) -> None:
    folder = copy_of_small(tmp_path / "more", tokenizer_config={"eos_token": "<|im_end|>"})
    assert ends(folder) == (1, 2048)
    assert caplog.messages == [
        "the tokenizer has ids up to 2048, the model's vocab_size is 2048: text with ids beyond it is refused."
    ]


def test_quantised_weights_are_refused_before_a_tokenizer_is_opened(tmp_path: Path, monkeypatch) -> None:
    folder = copy_of_small(tmp_path / "fp8", config={"quantization_config": {"quant_method": "fp8"}})
    monkeypatch.setattr(Tokenizer, "open", lambda *_: pytest.fail("the tokenizer was opened"))
    words = r"fp8/config.json: quantization_config says fp8, and FP8 and other quantised weights cannot be served"
    with pytest.raises(ConfigError, match=words):
        LLM(folder, progress=False)
