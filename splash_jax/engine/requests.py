"""What of a request can never be served, told before anything is taken."""

import logging

import numpy as np

from splash_jax.engine.build import Blueprint
from splash_jax.errors import RequestError
from splash_jax.models.config import ModelConfig, with_ends
from splash_jax.models.tokenizer import Tokenizer
from splash_jax.runtime.shapes import MAX_STOP_IDS
from splash_jax.scheduler import SamplingParams, plain

log = logging.getLogger("splash_jax")


def with_tokenizer(model: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """The model with its tokenizer's end of sequence among its own. Warns where the two do not fit each other."""
    if tokenizer is not None:
        if tokenizer.largest_id >= model.vocab_size:
            log.warning(
                "the tokenizer has ids up to %d, the model's vocab_size is %d: text with ids beyond it is refused.",
                tokenizer.largest_id, model.vocab_size,
            )  # fmt: skip
        if tokenizer.eos_token_id is not None:
            model = with_ends(model, [tokenizer.eos_token_id])
    if not any(i < model.vocab_size for i in model.eos_token_ids):
        told = f"{list(model.eos_token_ids)} are" if model.eos_token_ids else "none is"
        log.warning(
            "no end of sequence among the model's %d tokens (%s told): requests end by length, or by stops of their"
            " own.", model.vocab_size, told,
        )  # fmt: skip
    return model


def stop_ids(model: ModelConfig, params: SamplingParams) -> frozenset[int]:
    """Tokens that end a request: its own, and the model's ends of sequence unless it ignores them.

    Of those only what the vocabulary has: no other is ever drawn.
    """
    ends = () if params.ignore_eos else model.eos_token_ids
    return frozenset(i for i in (*(params.stop_token_ids or ()), *ends) if i < model.vocab_size)


def check_request(blueprint: Blueprint, ids: list[int], params: SamplingParams, score: bool, *, text: bool) -> None:
    """Raise `RequestError` for what an engine cannot serve; `text`: it has a tokenizer."""
    vocabulary, limit = blueprint.model.vocab_size, blueprint.shapes.max_model_len
    if not ids:
        raise RequestError("the prompt is empty: give it at least one token.")
    for place, i in enumerate(ids):
        if isinstance(i, bool) or not isinstance(i, int | np.integer) or not 0 <= i < vocabulary:
            raise RequestError(
                f"token id {i!r} at position {place} is not in the vocabulary: ids go from 0 to {vocabulary - 1}."
            )
    room = limit if score else limit - 1
    if len(ids) > room:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, the context holds {limit}{'' if score else ', one of them drawn'}. "
            f"Shorten it or raise max_model_len."
        )
    resumed = params.resumed_tokens
    if resumed >= len(ids):
        raise RequestError(
            f"resumed_tokens is {resumed} and the prompt has {len(ids)} tokens; send the first prompt, which has at "
            f"least one, and the resumed output behind it."
        )
    if not score and len(ids) - resumed + params.min_tokens > limit:
        raise RequestError(
            f"{len(ids) - resumed} prompt tokens and min_tokens {params.min_tokens} exceed the context {limit}."
        )
    if params.min_tokens and (count := len(stop_ids(blueprint.model, params))) > MAX_STOP_IDS:
        raise RequestError(f"min_tokens bans at most {MAX_STOP_IDS} stop ids, this request has {count}.")
    if params.penalised and not blueprint.config.penalties:
        raise RequestError("penalties need an engine with penalties=True.")
    if params.stop_strings and not text:
        raise RequestError("stop strings need a tokenizer; use stop_token_ids or skip_tokenizer_init=False.")
    if score and not blueprint.config.scoring:
        raise RequestError("logits need an engine with scoring=True.")


def whole(name: str, value: object, bits: int) -> int:
    """A sample's index or a seed as an int. Raises `RequestError` for what is none of 0 to 2**bits - 1."""
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**bits:
        raise RequestError(f"{name} must be a whole number from 0 to {2**bits - 1}, got {number!r}.")
    return number
