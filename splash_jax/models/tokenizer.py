"""Text to token ids and back, for checkpoints that carry a Hugging Face tokenizer."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from splash_jax.errors import CheckpointError, RequestError
from splash_jax.models.checkpoint import read_json, refuse_pointer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")

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
        settings = path / "tokenizer_config.json"
        for file in files:
            refuse_pointer(file)
            if file.suffix == ".json":
                read_json(file)
        config = read_json(settings) if settings.exists() else {}
        try:
            inner = _load(path)
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


def _load(path: Path) -> "PreTrainedTokenizerBase":
    """transformers' tokenizer, without its advice on what else could be installed or renamed."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    finally:
        logging.set_verbosity(verbosity)
