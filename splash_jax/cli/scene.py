"""What the demo serves: its prompts, how long each runs, and at which step the layout changes."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from splash_jax import LLM, SamplingParams

QUESTIONS = (
    "What is gold?",
    "Tell me about France.",
    "How do I make tomato soup?",
    'What does "happy" mean?',
    "What is a river?",
    "Tell me about the Moon.",
    "How do I make bread?",
    "What is music?",
)
OPENINGS = (
    "The capital of France is",
    "She looked at him and said",
    "The river flows through",
    "In the morning they walked to the",
    "The city was founded in",
    "A bird of the family",
    "It was a dark evening, and",
    "The first king of",
)
# A layout and the share of the run at which it begins. Between them: every primitive, for weights and for KV.
SCRIPT = (("dp", 0.0), ("dop", 0.22), ("tp", 0.44), ("cp", 0.66), ("dp", 0.86))
SHORTEST, LONGEST = 12, 160
FIXED = "tp"  # the layout that the proof runs in from beginning to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One demo run as plain data."""

    prompts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]  # of each prompt
    max_tokens: tuple[int, ...]  # of each prompt
    switches: dict[int, str]  # step -> layout

    @property
    def tokens(self) -> int:
        return sum(self.max_tokens)


def layouts() -> list[str]:
    """The layouts of the script, in order."""
    return [name for name, _ in SCRIPT]


def directions() -> tuple[tuple[str, str], ...]:
    """The switches of the script: all that the demo compiles."""
    return tuple(dict.fromkeys(pairwise(layouts())))


def settings(num_devices: int) -> dict[str, Any]:
    """An engine small enough to compile while one waits."""
    return {
        "num_devices": num_devices,
        "layout": layouts()[0],
        "layouts": tuple(dict.fromkeys(layouts())),
        "directions": directions(),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": len(QUESTIONS) + len(OPENINGS),
        "max_num_batched_tokens": 128,
        "decode_buckets": (len(QUESTIONS) + len(OPENINGS),),
        "penalties": False,
        "scoring": False,
    }


def auto_settings(hardware: str | None) -> dict[str, Any]:
    """What differs where the policy chooses the layouts: any switch may be asked for."""
    return {"layout": "auto", "directions": None, "hardware": hardware}


def draw(llm: "LLM") -> Scene:
    """The scene in the tokens of this model: questions through its chat template, openings as they are."""
    tokenizer = llm.engine.tokenizer
    if tokenizer is None:
        raise ValueError("the demo needs an engine with a tokenizer.")
    ids = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    ids += [tokenizer.encode(text) for text in OPENINGS]
    prompts = (*QUESTIONS, *OPENINGS)
    step = (LONGEST - SHORTEST) / (len(prompts) - 1)
    # Short and long alternate between questions and openings, so that both reach the tail.
    order = [*range(0, len(prompts), 2), *range(1, len(prompts), 2)]
    lengths = [0] * len(prompts)
    for place, index in enumerate(order):
        lengths[index] = round(SHORTEST + step * ((place * 5) % len(prompts)))
    return Scene(
        prompts=prompts,
        token_ids=tuple(tuple(x) for x in ids),
        max_tokens=tuple(lengths),
        switches={round(share * LONGEST): name for name, share in SCRIPT[1:]},
    )


def params(scene: Scene) -> "list[SamplingParams]":
    """How each prompt is sampled. Seeds make draws repeatable; end of text is ignored, so lengths are as planned."""
    from splash_jax import SamplingParams

    return [
        SamplingParams(max_tokens=count, temperature=0.7, seed=seed, ignore_eos=True, logprobs=0)
        for seed, count in enumerate(scene.max_tokens)
    ]
