"""The tokenizer wrapper and the piecewise detokenizer, on small vocabularies made here."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Built

from splash_jax.errors import CheckpointError, RequestError
from splash_jax.models.tokenizer import Detokenizer, Tokenizer

CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TEXTS = [
    "",
    "hello",
    " hello  world ",
    "quick\nbrown\tfox",
    "naïve Straße",
    "日本語 テキスト",
    "👩‍🚀🚀 done 🏳️‍🌈",
]


def save(built: Built, path: Path, **settings: object) -> Tokenizer:
    built.save(str(path / "tokenizer.json"))
    if settings:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.open(path)


def byte_level() -> Built:
    """Byte-level BPE as DeepSeek has it; <bos> is 0, <eos> is 1, <think> is an added plain token."""
    built = Built(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(["hello world the quick brown fox 日本 🚀🚀"] * 9, trainer)
    built.add_tokens([AddedToken("<think>")])
    return built


def sentence_piece() -> Built:
    """BPE with spaces as U+2581 and bytes for what is not in the vocabulary, as Llama 2 has it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"helowrd"]
    merges = ["he", "hel", "hell", "hello", "▁hello", "wo", "wor", "worl", "world", "▁world"]
    pairs = [("h", "e"), ("he", "l"), ("hel", "l"), ("hell", "o"), ("▁", "hello")]
    pairs += [("w", "o"), ("wo", "r"), ("wor", "l"), ("worl", "d"), ("▁", "world")]
    vocab = {word: i for i, word in enumerate(words + merges)}
    built = Built(models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    built.decoder = decoders.Sequence(steps)
    built.add_special_tokens(["<s>", "</s>"])
    return built


SETTINGS = {"bos_token": "<bos>", "eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save(byte_level(), tmp_path_factory.mktemp("bytes"), chat_template=CHAT, **SETTINGS)


@pytest.fixture(scope="module")
def piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    settings = {**SETTINGS, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return save(sentence_piece(), tmp_path_factory.mktemp("pieces"), **settings)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_there_and_back(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text)
    assert ids == byte_level().encode(text).ids
    assert tokenizer.decode(ids) == text


def test_properties_and_special_tokens(tokenizer: Tokenizer):
    assert tokenizer.eos_token_id == 1
    assert tokenizer.vocab_size == tokenizer.largest_id + 1 == byte_level().get_vocab_size()
    think = tokenizer.encode("<think>")
    ids = [0, *think, *tokenizer.encode("hello"), 1]
    assert tokenizer.decode(ids) == "<think>hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos><think>hello<eos>"
    assert tokenizer.skipped_ids == {0, 1}


def test_no_end_token_is_none(tmp_path: Path):
    assert save(byte_level(), tmp_path).eos_token_id is None


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_a_tokenizer_that_asks_for_a_start_token_gets_it(tmp_path: Path, kind: str):
    settings = {**SETTINGS, "tokenizer_class": kind, "chat_template": CHAT}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    plain = save(byte_level(), tmp_path, **settings, add_bos_token=False)
    asking = save(byte_level(), tmp_path, **settings, add_bos_token=True)
    assert asking.encode("hello") == [0, *plain.encode("hello")]
    chat = [{"role": "user", "content": "hello"}]
    assert asking.apply_chat_template(chat) == plain.apply_chat_template(chat)


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "LlamaTokenizer", "TokenizerOfNoLibrary"])
def test_the_tokenizer_is_its_file_whatever_class_is_named(tmp_path: Path, kind: str):
    opened = save(byte_level(), tmp_path, **SETTINGS | {"tokenizer_class": kind})
    assert [opened.encode(text) for text in TEXTS] == [byte_level().encode(text).ids for text in TEXTS]


def test_a_tokenizer_that_splits_otherwise_than_its_file_is_refused(tmp_path: Path, monkeypatch):
    """LlamaTokenizer builds its own splitting from the vocabulary of a file, and so loses every space."""
    from transformers import LlamaTokenizer

    save(byte_level(), tmp_path, **SETTINGS)
    loader = "splash_jax.models.tokenizer._load"
    monkeypatch.setattr(loader, lambda path, whole: LlamaTokenizer.from_pretrained(str(path), local_files_only=True))
    words = (
        r"tokenizer.json: transformers [\d.]+ makes LlamaTokenizer of it, with \[.*\] and .* where the file itself has"
    )
    with pytest.raises(CheckpointError, match=rf"{words} \[.*\] and \"It's 3.* Install the transformers"):
        Tokenizer.open(tmp_path)


def test_a_tokenizer_that_joins_otherwise_than_its_file_is_refused(tmp_path: Path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    opened = save(byte_level(), tmp_path, **SETTINGS)
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda *_, **__: "It's3words")
    with pytest.raises(CheckpointError, match=r"and \"It's3words\" where the file itself has"):
        Tokenizer.open(tmp_path)
    assert opened.encode("hello")


def test_a_file_that_cuts_and_pads_is_compared_without_that(tmp_path: Path):
    built = byte_level()
    built.enable_truncation(2)
    built.enable_padding(length=99)
    assert save(built, tmp_path, **SETTINGS).encode(TEXTS[4]) == byte_level().encode(TEXTS[4]).ids


CONFIGS = {
    "unknown with yarn": {"model_type": "kimi_k2", "rope_scaling": {"type": "yarn", "factor": 32, "beta_fast": 1.0}},
    "unknown with code": {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_kimi.KimiConfig"}},
    "known and contradictory": {"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn"}, "hidden_size": "x"},
    "nulls": {"model_type": None, "rope_scaling": None, "tokenizer_class": None, "architectures": None},
    "another class": {"model_type": "llama", "tokenizer_class": "LlamaTokenizerFast"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_models_config_has_no_say(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    opened = save(byte_level(), tmp_path, **SETTINGS)
    assert (opened.encode(TEXTS[4]), opened.eos_token_id) == (byte_level().encode(TEXTS[4]).ids, 1)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_models_config_has_no_say_in_a_vocabulary_either(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    byte_level().model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    opened = Tokenizer.open(tmp_path)
    assert opened.decode(opened.encode("hello world")) == "hello world"


CODE = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}


def test_code_of_the_checkpoint_is_not_run(tmp_path: Path):
    assert save(byte_level(), tmp_path, **SETTINGS, **CODE).encode("hello")
    (tmp_path / "tokenizer.json").rename(tmp_path / "tiktoken.model")
    with pytest.raises(
        CheckpointError, match=r"auto_map names code .* never run. Convert the tokenizer to tokenizer.j"
    ):
        Tokenizer.open(tmp_path)


KEYS = (
    *("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens", "extra_special_tokens"),
    *("tokenizer_class", "chat_template", "added_tokens_decoder", "init_inputs", "fast_tokenizer_files", "auto_map"),
    *("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "sp_model_kwargs", "model_max_length"),
    *("padding_side", "truncation_side", "model_input_names", "split_special_tokens", "clean_up_tokenization_spaces"),
)


@pytest.mark.parametrize("key", KEYS)
def test_a_null_among_the_settings_is_as_good_as_no_key(tmp_path: Path, key: str):
    settings: dict[str, object] = {**SETTINGS, "chat_template": CHAT, "add_bos_token": True}
    absent, null = tmp_path / "absent", tmp_path / "null"
    for folder in (absent, null):
        folder.mkdir()
    one = save(byte_level(), absent, **{k: v for k, v in settings.items() if k != key})
    other = save(byte_level(), null, **settings | {key: None})
    assert one.encode("hello <think> world") == other.encode("hello <think> world")
    assert (one.eos_token_id, one.skipped_ids, one.largest_id) == (
        other.eos_token_id,
        other.skipped_ids,
        other.largest_id,
    )
    chat = [{"role": "user", "content": "hello"}]
    if key == "chat_template":
        with pytest.raises(RequestError, match="no chat template"):
            other.apply_chat_template(chat)
    else:
        assert one.apply_chat_template(chat) == other.apply_chat_template(chat)


def test_files_beside_settings_with_nulls_are_taken_along(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("[{{ messages[0].content }}]")
    opened = save(byte_level(), tmp_path, **SETTINGS, padding_side=None)
    assert opened.decode(opened.apply_chat_template([{"role": "user", "content": "hello"}])) == "[hello]"


def test_a_chat_becomes_tokens_of_its_template(tokenizer: Tokenizer):
    chat = [{"role": "system", "content": "fox"}, {"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(chat)
    assert ids[0] == 0
    assert tokenizer.decode(ids) == "[system]fox[user]hello[assistant]"
    assert tokenizer.decode(tokenizer.apply_chat_template(chat, add_generation_prompt=False)).endswith("hello")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty. Give at least one message"),
        (["hello"], r"messages\[0\] is 'hello'. Give it a role and a content, both strings"),
        ([{"role": "user"}], r"messages\[0\] is {'role': 'user'}. Give it"),
        (
            [{"role": "user", "content": "a"}, {"role": "user", "content": [1]}],
            r"messages\[1\] is .* Give it a role",
        ),
        ([{"role": "tool", "content": "a"}], r"refuses these messages \(no tools here\). Change their roles"),
    ],
)
def test_messages_of_another_shape_are_refused(tokenizer: Tokenizer, messages: list, words: str):
    with pytest.raises(RequestError, match=words):
        tokenizer.apply_chat_template(messages)


def test_text_that_is_no_unicode_is_refused(tokenizer: Tokenizer):
    for encode in (tokenizer.encode, lambda text: tokenizer.apply_chat_template([{"role": "user", "content": text}])):
        with pytest.raises(RequestError, match=r"half a character, '\\udcff', at \d+: decode it, mostly as UTF-8"):
            encode("ab\udcff")


def test_no_chat_template_is_said(piece: Tokenizer):
    with pytest.raises(RequestError, match=r"has no chat template. Format the prompt yourself .* chat_template.jinja"):
        piece.apply_chat_template([{"role": "user", "content": "hello"}])


def test_no_tokenizer_files_are_said(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no tokenizer. Looked for tokenizer.json, .*skip_tokenizer_init=True"):
        Tokenizer.open(tmp_path)


def test_damaged_tokenizer_files_are_named(tmp_path: Path):
    save(byte_level(), tmp_path, **SETTINGS)
    file, settings = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    sound = file.read_bytes()
    file.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(CheckpointError, match=r"tokenizer.json: not valid JSON"):
        Tokenizer.open(tmp_path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: 50 bytes, expected 9: it is a git-LFS pointer"):
        Tokenizer.open(tmp_path)
    file.write_text('{"version": "1.0"}')
    with pytest.raises(CheckpointError, match=r"the tokenizer cannot be loaded .* Download its files again, or pass"):
        Tokenizer.open(tmp_path)
    file.write_bytes(sound)
    settings.write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json: not valid JSON"):
        Tokenizer.open(tmp_path)


def test_loading_says_nothing(tmp_path: Path):
    save(byte_level(), tmp_path, **{**SETTINGS, "tokenizer_class": "LlamaTokenizerFast", "model_max_length": 4})
    code = "import sys, pathlib; from splash_jax.models.tokenizer import Tokenizer as T;"
    code += "t = T.open(pathlib.Path(sys.argv[1])); t.encode('hello ' * 99); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def pieces_of(tokenizer: Tokenizer, ids: list[int], step: int, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip)
    return [detokenizer.add(ids[i : i + step]) for i in range(0, len(ids), step)] + [detokenizer.flush()]


@pytest.mark.parametrize("step", [1, 2, 5])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("which", ["tokenizer", "piece"])
def test_pieces_are_whole_characters_and_add_up(request, which: str, text: str, step: int):
    tokenizer = request.getfixturevalue(which)
    ids = tokenizer.encode(text)
    *pieces, rest = pieces_of(tokenizer, ids, step)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert rest == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_held_back_until_its_last_byte(piece: Tokenizer):
    first, *others = byte_ids("é", piece)
    detokenizer = Detokenizer(piece)
    assert detokenizer.add([*piece.encode("hello"), first]) == "hello"
    assert detokenizer.add(others) == "é"
    assert detokenizer.add([first]) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def byte_ids(text: str, piece: Tokenizer) -> list[int]:
    return [3 + byte for byte in text.encode()]


def test_spaces_between_words_survive_special_tokens(piece: Tokenizer):
    hello, world = piece.encode("hello"), piece.encode("world")
    ids = [1, *hello, 2, *world, 2, 2, *world]
    assert "".join(pieces_of(piece, ids, 1)) == piece.decode(ids) == "hello world world"
    assert "".join(pieces_of(piece, ids, 1, skip=False)) == piece.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("which", ["tokenizer", "piece"])
def test_endless_broken_bytes_are_let_go_and_not_hoarded(request, which: str):
    tokenizer = request.getfixturevalue(which)
    (broken,) = [3 + 0x9F] if which == "piece" else byte_level().encode("ß").ids[-1:]  # a continuation byte
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.add([broken]) for _ in range(40)]
    assert sum(map(len, pieces)) >= 35
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode([broken] * 40)


def test_random_tokens_add_up_to_their_text(tokenizer: Tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(30):
        ids = rng.integers(0, tokenizer.vocab_size, 60).tolist()
        assert "".join(pieces_of(tokenizer, ids, 3)) == tokenizer.decode(ids)
