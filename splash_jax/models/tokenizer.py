"""Text to token ids and back, for checkpoints that carry a Hugging Face tokenizer.

Where there is a `tokenizer.json`, it is the tokenizer. The class that `tokenizer_config.json` names is not asked, since
some classes build another one from the vocabulary, nor the model's type, which transformers need not know. What
transformers makes of the file is compared with what the `tokenizers` library does.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, final

from splash_jax.errors import CheckpointError, RequestError
from splash_jax.models.checkpoint import read_json, refuse_pointer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WHOLE, SETTINGS = "tokenizer.json", "tokenizer_config.json"
VOCABULARIES = (WHOLE, "tokenizer.model", "tiktoken.model", "vocab.json")

_PROBE = "It's 3 words: na\u00efve,\n  d\u00e9j\u00e0 vu (42)!"  # spaces, digits, accents and a line break
_BESIDE = ("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_BROKEN = "\ufffd"  # what decoding puts in place of bytes that are no character (yet)
_LONGEST = 4  # tokens that one character can take: UTF-8 has at most four bytes


@final
@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A thin wrapper over transformers' tokenizer of one checkpoint directory. No network, no torch."""

    _inner: "PreTrainedTokenizerBase"
    skipped_ids: frozenset[int]  # special tokens: no text when special tokens are skipped

    @classmethod
    def open(cls, path: Path) -> "Tokenizer":
        """Load the tokenizer in `path`. Raises CheckpointError when there is none or a file is damaged."""
        files = [path / name for name in VOCABULARIES if (path / name).exists()]
        if not files:
            raise CheckpointError(
                f"{path}: no tokenizer. Looked for {', '.join(VOCABULARIES)}. Copy its files there,"
                " or pass token ids with skip_tokenizer_init=True."
            )
        for file in files:
            refuse_pointer(file)
            if file.suffix == ".json":
                read_json(file)
        config = read_json(path / SETTINGS) if (path / SETTINGS).exists() else {}
        whole = (path / WHOLE).exists()
        if config.get("auto_map") is not None and not whole:
            raise CheckpointError(
                f"{path / SETTINGS}: auto_map names code of the checkpoint's own, which is never run. Convert the"
                f" tokenizer to {WHOLE}, or pass token ids with skip_tokenizer_init=True."
            )
        try:
            with _without_nulls(path, config) as folder:
                inner = _load(folder, whole)
            if whole:
                _compare(inner, path / WHOLE)
        except CheckpointError:
            raise
        except Exception as error:  # transformers and tokenizers raise nearly every kind
            raise CheckpointError(
                f"{path}: the tokenizer cannot be loaded ({type(error).__name__}: {error})."
                " Download its files again, or pass token ids with skip_tokenizer_init=True."
            ) from error
        # transformers 5 forgets this setting where a tokenizer.json exists; DeepSeek-V3 relies on it.
        if config.get("add_bos_token") is True and inner.bos_token_id is not None and not inner.encode(""):
            inner.add_bos_token = True
        added = inner.added_tokens_decoder.items()
        skipped = (i for i, t in added if t.special and not inner.decode([i], skip_special_tokens=True))
        return cls(inner, frozenset(skipped))

    @property
    def eos_token_id(self) -> int | None:
        eos = self._inner.eos_token_id
        return eos if isinstance(eos, int) else None

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model's own vocab_size may be padded above it."""
        return len(self._inner)

    @property
    def largest_id(self) -> int:
        """The largest id, -1 of an empty vocabulary."""
        return max(self._inner.get_vocab().values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer's own settings ask for."""
        _refuse_surrogates(text)
        return self._inner.encode(text, verbose=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, spaces untouched. Bytes that are no character become U+FFFD."""
        text = self._inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation of {"role": ..., "content": ...}, in the checkpoint's own format.

        Raises RequestError when the messages have another shape, or when there is no template or it refuses.
        """
        if not messages:
            raise RequestError("messages is empty. Give at least one message with a role and a content.")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping) or not all(
                isinstance(message.get(key), str) for key in ("role", "content")
            ):
                raise RequestError(f"messages[{i}] is {message!r:.200}. Give it a role and a content, both strings.")
        if not self._inner.chat_template:
            raise RequestError(
                "this tokenizer has no chat template. Format the prompt yourself and send it as text, or add"
                " chat_template.jinja to the checkpoint's directory."
            )
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except Exception as error:  # a template is a program of the checkpoint's, and may fail in any way
            raise RequestError(
                f"the chat template refuses these messages ({error})."
                " Change their roles or order, or send a text prompt."
            ) from error
        _refuse_surrogates(str(text))
        return self._inner.encode(str(text), add_special_tokens=False, verbose=False)


@final
class Detokenizer:
    """The text of one growing token sequence, in pieces that never end inside a character.

    The pieces together are the text of the whole sequence. A window of tokens is decoded twice, with and
    without the new ones: the first part of it has been returned already and only gives the new tokens their
    left neighbours, which decide on spaces in SentencePiece vocabularies.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window: list[int] = []
        self._returned = 0  # tokens of the window whose text has been returned
        self._before = ""  # their text

    def add(self, ids: Iterable[int]) -> str:
        """Append `ids`; return the text that is complete now and was not returned before."""
        pieces = []
        for token in ids:
            if self._skip and token in self._tokenizer.skipped_ids:
                continue
            self._window.append(token)
            pieces.append(self._advance())
        return "".join(pieces)

    def flush(self) -> str:
        """The text still held back, broken characters as U+FFFD. Call it when the sequence has ended."""
        return self._take(len(self._window), self._decode(self._window))

    def _advance(self) -> str:
        text = self._decode(self._window)
        end = len(self._window)
        if not text.endswith(_BROKEN):
            return self._take(end, text)
        if end - self._returned > _LONGEST:
            # Not one unfinished character but broken bytes: let go of all that later bytes cannot mend.
            for cut in range(end - 1, self._returned, -1):
                part = self._decode(self._window[:cut])
                if text[:-1].startswith(part):
                    return self._take(cut, part)
        return ""

    def _take(self, end: int, text: str) -> str:
        """Return what `text`, of the window's first `end` tokens, adds, and move the window behind it."""
        if text.startswith(self._before):
            new = text[len(self._before) :]
        else:  # SentencePiece breaks a whole run of bytes at one bad byte, characters returned before too
            new = self._decode(self._window[self._returned : end])
        if new:
            del self._window[: self._returned]
            self._returned = end - self._returned
            self._before = self._decode(self._window[: self._returned])
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)


def _refuse_surrogates(text: str) -> None:
    """Raise RequestError for text that is no Unicode, such as a command line with foreign bytes leaves."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has half a character, {text[error.start]!r}, at {error.start}: decode it, mostly as UTF-8."
        ) from None


@contextmanager
def _without_nulls(path: Path, settings: Mapping[str, object]) -> Iterator[Path]:
    """The folder itself, or one like it where the settings have nulls that transformers would not take for missing."""
    if all(value is not None or name.endswith("_token") for name, value in settings.items()):
        yield path
        return
    with TemporaryDirectory() as made:
        folder = Path(made)
        for name in (*VOCABULARIES, *_BESIDE):
            if (path / name).exists():
                shutil.copy(path / name, folder)
        kept = {name: value for name, value in settings.items() if value is not None}
        (folder / SETTINGS).write_text(json.dumps(kept), encoding="utf-8")
        yield folder


def _load(path: Path, whole: bool) -> "PreTrainedTokenizerBase":
    """transformers' tokenizer of a folder, from its tokenizer.json if that is `whole`.

    Comes without transformers' advice on what else could be installed or renamed.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        if whole:
            return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
        return AutoTokenizer.from_pretrained(
            str(path), config=PreTrainedConfig(), local_files_only=True, trust_remote_code=False
        )
    finally:
        logging.set_verbosity(verbosity)


def _compare(inner: "PreTrainedTokenizerBase", file: Path) -> None:
    """Raise CheckpointError where transformers splits or joins a sentence in another way than its tokenizer.json."""
    import tokenizers
    import transformers

    plain = tokenizers.Tokenizer.from_file(str(file))
    plain.no_truncation()
    plain.no_padding()
    ids = plain.encode(_PROBE, add_special_tokens=False).ids
    text = plain.decode(ids, skip_special_tokens=False)
    found = inner.encode(_PROBE, add_special_tokens=False, verbose=False)
    back = inner.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if (found, back) != (ids, text):
        raise CheckpointError(
            f"{file}: transformers {transformers.__version__} makes {type(inner).__name__} of it, with {found} and"
            f" {back!r} where the file itself has {ids} and {text!r}. Install the transformers that this package asks"
            f" for, correct {SETTINGS}, or pass token ids with skip_tokenizer_init=True."
        )
