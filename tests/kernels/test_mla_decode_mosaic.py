"""Mosaic GPU's decode kernels in interpret mode: their numbers, and the order of what their warpgroups do."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode import BlackwellConfig, HopperConfig, blackwell_kernel, hopper, hopper_kernel, mla_decode
from pallas_kernels.mla_decode.tuning import config_for
from pallas_kernels.tuning import entry_for
from tests.kernels.mla_cases import BLACKWELL_FP8, HOPPER_FP8, Case, Given, in_blocks, make, reference, within

HOPPER = {
    "pages of half a block": Case(lengths=(70, 0, 5, 200), latent=128, rotary=64, heads=64, page_size=32),
    "pages of two blocks": Case(lengths=(64, 130), latent=128, rotary=64, heads=16, page_size=128),
}
BLACKWELL = {
    "pages of half a block": Case(lengths=(64, 0, 130, 70), latent=128, rotary=64, heads=40, page_size=32),
    "pages of two blocks and 130 heads": Case(lengths=(150,), latent=256, rotary=64, heads=130, page_size=128),
    "pages of 8 and a rotary width of two tiles": Case(lengths=(30, 64), latent=128, rotary=128, page_size=8),
    "what the table is for": Case(lengths=(300,), latent=512, rotary=64, heads=20, page_size=64),
}
# The second Python of CI has the newer JAX: there all of these run, the slow ones by `make test-b200`.
interpreted = pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="Mosaic GPU's interpret mode needs JAX 0.12")


def decode(given: Given, config: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """By the kernel that `config` is of."""
    backend = "hopper" if isinstance(config, HopperConfig) else "blackwell"
    pool, latent = (given.pool, options.pop("latent"))
    pool = jnp.asarray(pool) if pool.dtype == np.uint8 else as_bf16(pool)
    call = partial(mla_decode, value_width=latent, backend=backend, config=config, interpret=True)
    out, lse = jax.jit(call)(as_bf16(given.q), pool, given.pages, given.held, **options)
    return np.asarray(out), np.asarray(lse)


def as_bf16(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x).astype(jnp.bfloat16)


def check(case: Case, config: Any) -> None:
    """It is attention, as near as rounding lets it be; and nothing is rounded but rows and probabilities."""
    given = make(case)
    got = decode(given, config, latent=case.latent)
    assert within(got, reference(case, given), "fp8" if case.fp8 else "bfloat16")
    assert within(got, in_blocks(case, given, config.plan(given.held)), "in blocks")
    empty = given.held == 0
    assert (got[0][empty] == 0).all() and (got[1][empty] == -np.inf).all()


@interpreted
@pytest.mark.parametrize("name", HOPPER)
def test_hopper_is_softmax_attention(name):
    """Ragged, empty, split, several items of a program, poisoned; every copy and barrier as the kernel issues them."""
    check(HOPPER[name], HopperConfig(stages=2, workers=2))


@interpreted
@pytest.mark.parametrize(
    "name", [name if name in HOPPER else pytest.param(name, marks=pytest.mark.slow) for name in HOPPER_FP8]
)
def test_hopper_makes_bf16_of_fp8_rows(name):
    """Ragged, empty, split; free slots hold NaN values and NaN scales."""
    check(HOPPER_FP8[name], HopperConfig(stages=2, workers=2))


@interpreted
@pytest.mark.parametrize(
    "name",
    [
        name if i == 0 else pytest.param(name, marks=pytest.mark.slow)
        for cases in (BLACKWELL, BLACKWELL_FP8)
        for i, name in enumerate(cases)
    ],
)
def test_blackwell_is_softmax_attention(name):
    """Ragged, empty, split and poisoned; nothing stands in for the GPU's operations, and a race would be raised."""
    case = (BLACKWELL | BLACKWELL_FP8)[name]
    # Several items in one program, or one of several rows' cut among programs.
    config = BlackwellConfig(stages=2, tiles=3, workers=1 if len(case.lengths) > 2 else 3, overhead=0)
    if "what the table is for" in name:
        config = replace(config_for("b200", "blackwell", "fp8" if case.fp8 else "plain", 128), workers=2)
    check(case, config)


SMALL = {"hopper": HopperConfig(stages=2, workers=1), "blackwell": BlackwellConfig(stages=2, tiles=3, workers=1)}


each_kernel = pytest.mark.parametrize("kernel", ["hopper", "blackwell"])


@pytest.mark.parametrize("fp8", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["bf16", "b200, fp8"])
@each_kernel
@interpreted
def test_damage_stays_in_its_row(kernel, fp8):
    """A persistent program takes several requests one after another: a NaN in one must show there, and only there."""
    case = Case(lengths=(70, 64, 5), latent=256, rotary=64, heads=20, page_size=64, fp8=fp8)
    given = make(case)
    sound = decode(given, SMALL[kernel], latent=case.latent)
    given.pool[given.pages[0, 0], 3] = 0xFF if fp8 else np.nan
    for got, was in zip(decode(given, SMALL[kernel], latent=case.latent), sound, strict=True):
        assert np.isnan(got[0]).any() and np.array_equal(got[1:], was[1:])


@each_kernel
@interpreted
def test_both_take_work_that_reaches_past_the_tokens(kernel):
    """As of a row that has grown shorter since the work was planned."""
    case = Case(lengths=(70, 10), latent=128, rotary=64, heads=20, page_size=64)
    given = make(case)
    work = SMALL[kernel].plan(np.asarray([70 + 64, 10], np.int32))
    assert within(decode(given, SMALL[kernel], latent=128, work=work), reference(case, given), "bfloat16")


@pytest.fixture
def reads_of_wgmma(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the race detector of JAX 0.12 see what a wgmma reads, which it leaves to do. Returns one entry per read."""
    callbacks = import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    wgmma, seen = callbacks.wgmma, []

    def checked(*, thread: Any, **call: Any) -> Any:
        token, memory = wgmma(thread=thread, **call), callbacks._get_shared_memory()
        for operand in "ab":
            key = callbacks.HostAllocationKey.from_array(call[f"{operand}_allocation_key_as_array"])
            index = jax.tree.map(int, callbacks._remove_noop_transforms(call[f"{operand}_transforms"]))
            clock, mine = memory.get_clock(thread), memory.all_concurrent_threads[thread]
            clock.inc(mine)
            clock.async_smem_clock.clock[mine] = clock.generic_clock.clock[mine]
            races, where = callbacks.get_races(), call.get("source_info")
            races.check_read(thread, clock.async_smem_clock.copy(), key, memory.access(key, index), source_info=where)
            with memory.lock:
                memory.clocks[thread].update(clock)
            seen.append(1)
        return token

    monkeypatch.setattr(callbacks, "wgmma", callbacks.fail_on_exception(checked))
    return seen


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the fixture reaches into JAX 0.12's interpreter")
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_no_two_warpgroups_race(monkeypatch, reads_of_wgmma, fp8):
    """One program, three items after each other, the last of which uses every stage twice: each access of shared
    memory is ordered by a barrier, and by a fence where it has to be, with the one before it.
    """
    interpreter = import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
    params = vars(hopper.plgpu)["InterpretGPUParams"](detect_races=True)
    monkeypatch.setattr(hopper, "interpret_params", lambda interpret: params if interpret else None)
    case = Case(lengths=(70, 0, 250), latent=256, rotary=64, heads=64, page_size=64, fp8=fp8)
    decode(make(case), SMALL["hopper"], latent=case.latent)
    blocks, products = 2 + 4, 2 + 1 + 1  # of the logits, by halves and rotary columns, and the follower's
    assert len(reads_of_wgmma) == 2 * blocks * products and not interpreter.get_races().races_found


def test_registers_of_warpgroups_are_those_that_a_program_has():
    """A warpgroup that asked for more than the others leave would wait for them for ever."""
    of_warpgroups = hopper_kernel.REGISTERS.values()
    assert all(registers % 8 == 0 and 24 <= registers <= 256 for registers in of_warpgroups)
    for rows, heads in product(("plain", "fp8"), (64, 128)):
        evidence = entry_for("mla_decode", "h200", "hopper", rows, heads)["evidence"]
        assert sum(of_warpgroups) <= evidence["registers"] * evidence["threads"] // 128
    for rows, of_warpgroups in blackwell_kernel.REGISTERS.items():
        assert all(registers % 8 == 0 and 24 <= registers <= 256 for registers in of_warpgroups)
        evidence = entry_for("mla_decode", "b200", "blackwell", rows, 128)["evidence"]
        assert sum(of_warpgroups) <= evidence["registers"] * evidence["threads"] // 128
