"""What a process has set in JAX changes no token: an engine sets it aside, or refuses it by name."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from splash_jax import LLM, SamplingParams
from splash_jax.errors import ConfigError
from splash_jax.runtime.settings import REFUSED
from tests.engine.conftest import greedy, tokens
from tests.support import make_llm

PROMPTS = [tokens(5, 1), tokens(20, 2), tokens(2, 3)]
COMMON: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "logprobs": 3}
SETTINGS = [  # all that the sampler has: draws, limits, penalties, a ban
    SamplingParams(temperature=0.9, seed=7, top_p=0.9, min_p=0.05, **COMMON),
    SamplingParams(temperature=0, presence_penalty=0.5, min_tokens=3, stop_token_ids=[9], **COMMON),
    SamplingParams(temperature=1.0, seed=2**40, repetition_penalty=1.2, top_k=50, **COMMON),
]


def served(small: Path, dtype: str = "float32") -> Any:
    """Tokens, log-probabilities and logits of an engine that compiles anew and switches once."""
    llm = make_llm(small, num_devices=2, layouts=("tp", "cp"), switch_modes=("splash",), dtype=dtype)
    outputs = llm.generate(PROMPTS, SETTINGS, switches={4: "cp"})
    assert llm.layout == "cp" and not any(output.error for output in outputs)
    return [output.outputs for output in outputs], llm.logits(PROMPTS[0])


@pytest.fixture(scope="module")
def undisturbed(small: Path) -> Any:
    return served(small)


FLAGS: dict[str, Any] = {
    "jax_enable_x64": True,
    "jax_transfer_guard": "disallow",
    "jax_transfer_guard_host_to_device": "disallow_explicit",
    "jax_transfer_guard_device_to_host": "disallow_explicit",
    "jax_threefry_partitionable": False,
    "jax_disable_jit": True,
    "jax_no_tracing": True,
    "jax_no_execution": True,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_default_prng_impl": "rbg",
    "jax_default_matmul_precision": "bfloat16",
}
MORE: dict[str, Any] = {  # that never mattered here
    "jax_transfer_guard_device_to_device": "disallow_explicit",
    "jax_check_tracer_leaks": True,
    "jax_enable_custom_prng": True,
    "jax_softmax_custom_jvp": True,
    "jax_random_seed_offset": 3,
    "jax_legacy_prng_key": "error",
    "jax_debug_key_reuse": True,
    "jax_enable_checks": True,
    "jax_check_static_indices": True,
    "jax_use_shardy_partitioner": False,
    "jax_use_simplified_jaxpr_constants": True,
    "jax_remove_size_one_mesh_axis_from_type": True,
    "jax_disallow_mesh_context_manager": True,
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_log_compiles": True,
    "jax_explain_cache_misses": True,
    "jax_thread_guard": True,
}


@pytest.fixture
def flag() -> Iterator[Callable[[str, Any], None]]:
    """Sets a flag of the whole process until the test has ended."""
    before: dict[str, Any] = {}

    def set_it(name: str, value: Any) -> None:
        before[name] = jax.config.values[name]
        jax.config.update(name, value)

    yield set_it
    for name, value in reversed(before.items()):  # the flag over all transfer guards was set before each of them
        jax.config.update(name, getattr(value, "value", value))


def each() -> list[Any]:
    """All at once, 64 bits alone, and by themselves the others, which are slow together."""
    alone = [pytest.param([name], id=name, marks=() if "x64" in name else pytest.mark.slow) for name in FLAGS | MORE]
    return [pytest.param(list(FLAGS), id="all"), *alone]


@pytest.mark.parametrize("names", each())
@pytest.mark.filterwarnings("ignore")
def test_a_flag_changes_nothing(
    small: Path, undisturbed: Any, flag: Callable[[str, Any], None], caplog: pytest.LogCaptureFixture, names: list[str]
) -> None:
    caplog.set_level(logging.ERROR)
    for name in names:
        flag(name, (FLAGS | MORE)[name])
    outputs, logits = served(small)
    assert outputs == undisturbed[0]
    assert logits.dtype == np.float32 and (logits == undisturbed[1]).all()


def mesh(kind: Any) -> Any:
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


@pytest.mark.parametrize(
    "around",
    [
        pytest.param(lambda: jax.set_mesh(mesh(jax.sharding.AxisType.Auto)), id="mesh"),
        pytest.param(lambda: jax.set_mesh(mesh(jax.sharding.AxisType.Explicit)), id="explicit", marks=pytest.mark.slow),
        pytest.param(lambda: jax.default_device(jax.devices()[3]), id="device", marks=pytest.mark.slow),
    ],
)
def test_what_is_set_around_an_engine_changes_nothing_and_stays_set(
    small: Path, undisturbed: Any, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    with around():
        now = jax.sharding.get_abstract_mesh(), jax.config.jax_default_device
        outputs, logits = served(small)
        assert (jax.sharding.get_abstract_mesh(), jax.config.jax_default_device) == now
    assert outputs == undisturbed[0] and (logits == undisturbed[1]).all()


def test_a_step_in_another_thread_is_shielded_too(llm: LLM) -> None:
    """Contexts are of a thread; whoever drives has the engine's."""
    (want,) = llm.generate([PROMPTS[0]], SETTINGS[:1])
    found: list[Any] = []

    def drive() -> None:
        with jax.transfer_guard("disallow"), jax.enable_x64(True), jax.set_mesh(mesh(jax.sharding.AxisType.Auto)):
            found.extend(llm.generate([PROMPTS[0]], SETTINGS[:1]))

    thread = threading.Thread(target=drive)
    thread.start()
    thread.join(60)
    assert [output.outputs for output in found] == [want.outputs]


@pytest.mark.parametrize("name", REFUSED)
def test_a_flag_that_cannot_be_set_aside_is_refused_by_name(
    small: Path, alone: LLM, flag: Callable[[str, Any], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    right = REFUSED[name]
    (want,) = alone.generate([PROMPTS[0]], greedy(2))
    flag(name, "raise" if right == "ignore" else True)
    words = rf"JAX's flag {name} is .* and an engine's programs need {right!r}\. Call jax\.config\.update"
    with pytest.raises(ConfigError, match=words):
        make_llm(small)
    with monkeypatch.context() as patch:  # set later, when there are still programs to compile
        patch.setattr(alone.engine.programs, "_programs", {})
        (output,) = alone.generate([PROMPTS[0]], greedy(2))
    assert output.error and f"JAX's flag {name}" in output.error
    assert alone.generate([PROMPTS[0]], greedy(2))[0].outputs == want.outputs


def test_every_program_compiled_while_serving_is_logged(
    alone: LLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone.generate([PROMPTS[0]], greedy(2))
    caplog.set_level(logging.INFO, "splash_jax")
    assert not [r for r in caplog.records if "compiled" in r.message]
    programs = dict(alone.engine.programs._programs)
    key = next(key for key in programs if str(key).startswith("embed tp"))
    del programs[key]
    monkeypatch.setattr(alone.engine.programs, "_programs", programs)
    alone.generate([PROMPTS[0]], greedy(2))
    (message,) = [r.message for r in caplog.records if "compiled" in r.message]
    assert re.fullmatch(rf"compiled {re.escape(str(key))} in \d+\.\d\d s", message)
