"""Every backend against numpy float64, with tolerances that reject the bugs such a kernel can have."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chip import CHIPS
from pallas_kernels.mla_decode import (
    BlackwellConfig,
    HopperConfig,
    TritonConfig,
    fp8_row_bytes,
    mla_decode,
    pack_fp8,
    plan_decode,
    unpack_fp8,
)
from pallas_kernels.mla_decode.api import order_of
from pallas_kernels.mla_decode.tuning import config_for
from pallas_kernels.tuning import table
from tests.kernels.mla_cases import BLACKWELL_FP8, HOPPER_FP8, TOLERANCE, Case, Given, make, reference, within

RAGGED = (0, 1, 37, 130, 16, 64, 3)
CASES = {
    "one page is four tokens": Case(lengths=RAGGED),
    "a page is longer than a block": Case(lengths=(70, 0, 5, 33), page_size=64),
    "heads that fill no block": Case(lengths=(20, 0, 41), heads=20, page_size=8),
    "several blocks of heads": Case(lengths=(9, 50), heads=32, page_size=16),
    "fp8": Case(lengths=RAGGED, latent=256, page_size=16, fp8=True),
}
SMALL = TritonConfig(block_heads=16, block_tokens=16, warps=4, stages=2, workers=3)


@cache
def problem(name: str) -> tuple[Given, tuple[np.ndarray, np.ndarray]]:
    given = make(CASES[name])
    return given, reference(CASES[name], given)


def run(name: str, dtype: Any, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    given, _ = problem(name)
    pool = jnp.asarray(given.pool) if CASES[name].fp8 else jnp.asarray(given.pool).astype(dtype)
    decode = jax.jit(partial(mla_decode, value_width=CASES[name].latent, **options))
    out, lse = decode(jnp.asarray(given.q).astype(dtype), pool, given.pages, given.held)
    assert (out.dtype, lse.dtype) == (jnp.float32, jnp.float32)
    return np.asarray(out), np.asarray(lse)


def kind_of(name: str, dtype: Any) -> str:
    return "fp8, unscaled" if CASES[name].fp8 else jnp.dtype(dtype).name


@pytest.mark.parametrize("name", CASES)
def test_triton_is_softmax_attention(name):
    dtype = jnp.float32 if name == "one page is four tokens" else jnp.bfloat16
    ahead = SMALL.plan(jnp.asarray(CASES[name].lengths, jnp.int32)) if CASES[name].fp8 else None
    got = run(name, dtype, backend="triton", config=SMALL, work=ahead, interpret=True)
    assert within(got, problem(name)[1], kind_of(name, dtype))
    empty = np.asarray(CASES[name].lengths) == 0
    assert (got[0][empty] == 0).all() and (got[1][empty] == -np.inf).all()


@pytest.mark.parametrize("name", ["one page is four tokens", "fp8"])
def test_ref_is_softmax_attention(name):
    """With the float32 tolerance in both formats: it rounds nothing. Without a GPU it is what the op chooses."""
    assert within(run(name, jnp.float32), problem(name)[1], "float32")


def lose_a_page(case: Case, given: Given) -> tuple[np.ndarray, np.ndarray]:
    pages = given.pages.copy()
    pages[:, 0] = pages[:, 1]  # every request's first page answers with its second
    return reference(case, given._replace(pages=pages, rows=np.nan_to_num(given.rows)))


# Bugs a kernel could have. The tolerance is fit for use only while it rejects them all.
MUTANTS = {
    "one token fewer": lambda case, x: reference(case, x, lambda t, n: t < max(1, n - 1)),
    "one token more": lambda case, x: reference(
        case, x._replace(rows=np.nan_to_num(x.rows)), lambda t, n: t < n + (n > 0)
    ),
    "first block lost": lambda case, x: reference(case, x, lambda t, n: (t < n) & ((t >= 16) | (n <= 16))),
    "one page lost": lose_a_page,
    "scale wrong": lambda case, x: reference(case, x, scale=1.05),
    "parts merged by their mean": lambda case, x: reference(case, x, parts=2),
    "values shifted": lambda case, x: tuple(np.roll(part, 1, -1) for part in reference(case, x)),
    "base 2": lambda case, x: (reference(case, x)[0], reference(case, x)[1] * np.log2(np.e)),
    "free pages read": lambda case, x: (reference(case, x)[0] + np.nan, reference(case, x)[1]),
    "empty rows not empty": lambda case, x: tuple(np.nan_to_num(part, neginf=-1e30) for part in reference(case, x)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_the_tolerance_rejects(mutant, kind):
    name = "fp8" if kind.startswith("fp8") else "one page is four tokens"
    given, want = problem(name)
    assert within(want, want, kind)
    assert not within(MUTANTS[mutant](CASES[name], given), want, kind)


# What a kernel could do to the scales' bytes: u8[P, K, 4 * groups].
SCALE_MUTANTS = {
    "groups swapped": lambda scales: np.roll(scales, 4, -1),
    "the first group's for all": lambda scales: np.tile(scales[..., :4], scales.shape[-1] // 4),
    "the next token's": lambda scales: np.roll(scales, -1, 1),
    "the token's of eight rows on": lambda scales: np.roll(scales, -8, 1),
}


@pytest.mark.parametrize(
    ("case", "mutant"),
    [
        pytest.param(case, mutant, id=f"{name}-{mutant}")
        for name, case in {"triton": CASES["fp8"], **HOPPER_FP8, **BLACKWELL_FP8}.items()
        for mutant in SCALE_MUTANTS
        if not (case.page_size == 8 and "eight rows" in mutant)  # the same row of a page of eight
    ],
)
def test_scales_of_fp8_rows_matter(case, mutant):
    """A kernel that mixed up scales would be seen, in every case that one is tested with."""
    given, V = make(case), case.latent
    mixed = given.pool.copy()
    mixed[..., V : V + V // 32] = SCALE_MUTANTS[mutant](given.pool[..., V : V + V // 32])
    assert (mixed != given.pool).any()
    numbers = np.nan_to_num(np.asarray(unpack_fp8(jnp.asarray(mixed), V)), nan=0.0)
    rows = np.where(np.isnan(given.rows), np.nan, numbers)
    assert not within(reference(case, given._replace(rows=rows)), reference(case, given), "fp8")


def test_fp8_rows_are_656_bytes_and_lose_little():
    assert fp8_row_bytes(512, 64) == 656
    rows = np.random.default_rng(0).normal(size=(3, 5, 576)).astype(np.float32)
    packed = pack_fp8(jnp.asarray(rows), 512)
    assert packed.shape == (3, 5, 656) and packed.dtype == jnp.uint8
    back = np.asarray(unpack_fp8(packed, 512))
    np.testing.assert_allclose(back[..., :512], rows[..., :512], rtol=2**-4, atol=1e-5)
    np.testing.assert_array_equal(back[..., 512:], jnp.asarray(rows[..., 512:]).astype(jnp.bfloat16))


def test_work_of_another_configuration_is_refused():
    given, _ = problem("one page is four tokens")
    other = plan_decode(jnp.asarray(given.held), heads=16, fp8=False, chip="h200")
    with pytest.raises(
        ValueError, match="for 264 workers, but triton takes blocks of 16 for 3 workers here: plan it with"
    ):
        run("one page is four tokens", jnp.float32, backend="triton", config=SMALL, work=other, interpret=True)


def test_work_for_one_item_a_program_is_not_for_persistent_ones():
    q, pool = jax.ShapeDtypeStruct((7, 64, 576), jnp.bfloat16), jax.ShapeDtypeStruct((9, 64, 576), jnp.bfloat16)
    pages, held = jax.ShapeDtypeStruct((7, 4), jnp.int32), jax.ShapeDtypeStruct((7,), jnp.int32)
    work = plan_decode(np.zeros(7, np.int32), heads=64, fp8=False, backend="triton", chip="h200")
    decode = partial(mla_decode, value_width=512, backend="hopper", chip="h200", work=work)
    with pytest.raises(ValueError, match="for 132 workers, but hopper takes blocks of 64 for 132 persistent workers"):
        jax.eval_shape(decode, q, pool, pages, held)


def test_work_and_configurations_that_are_another_s_are_refused():
    name = "one page is four tokens"
    given, _ = problem(name)
    few = SMALL.plan(jnp.asarray(given.held[:2]))
    with pytest.raises(ValueError, match="work was cut for 2 rows, but there are 7 queries"):
        run(name, jnp.float32, backend="triton", config=SMALL, work=few, interpret=True)
    with pytest.raises(ValueError, match="triton takes a TritonConfig, not a HopperConfig"):
        run(name, jnp.float32, backend="triton", config=HopperConfig(stages=2, workers=1), interpret=True)


def test_the_table_serves_every_number_of_heads():
    assert set(table("mla_decode")) == {"h200", "b200"}
    for chip in table("mla_decode"):
        for rows in ("plain", "fp8"):
            for heads in (16, 17, 32, 64, 100, 128, 256):
                config = config_for(chip, "triton", rows, heads)
                assert config.block_heads <= 64 and 2 * config.workers % CHIPS[chip].sms == 0
    with pytest.raises(
        NotImplementedError, match=r"mla_decode/tuning\.json has no triton configuration for plain rows on h100"
    ):
        config_for("h100", "triton", "plain", 16)


def arguments(**changes: Any) -> dict[str, Any]:
    changes = dict(changes)
    dtypes = {"pages": jnp.int32, "held": jnp.int32, "pool": changes.pop("dtype", jnp.bfloat16)}
    sizes = {"q": (2, 16, 48), "pool": (5, 4, 48), "pages": (2, 3), "held": (2,)} | changes
    return {name: jnp.zeros(size, dtypes.get(name, jnp.bfloat16)) for name, size in sizes.items()}


@pytest.mark.parametrize(
    ("changes", "options", "error", "words"),
    [
        (
            {"pool": (5, 4, 40)},
            {},
            ValueError,
            "queries of 48 columns need bfloat16 rows of 48, but the pool's have 40",
        ),
        ({"held": (3,)}, {}, ValueError, "2 query rows, but pages of 2 and lengths of 3 rows"),
        ({}, {"value_width": 48}, ValueError, "latent width 48 is not inside the row of 48 columns"),
        ({}, {"backend": "cuda"}, ValueError, "mla_decode has no backend 'cuda'; it has: blackwell, hopper, triton"),
        ({}, {"chip": "v5e"}, ValueError, "no chip 'v5e' is known; known are: h100, h200, b200"),
        ({}, {"backend": "triton"}, ValueError, r"triton needs to know its GPU: name a chip \(h100, h200, b200\)"),
        ({}, {"backend": "triton", "chip": "h200", "value_width": 24}, NotImplementedError, "the latent width is 24"),
        ({}, {"backend": "hopper", "chip": "h200"}, NotImplementedError, "in steps of 128 up to 512, .* not 32 and 16"),
        (
            {},
            {"backend": "blackwell", "chip": "b200"},
            NotImplementedError,
            "tcgen05 takes swizzled rows: .* in steps of 128 up to 512, .* not 32 and 16",
        ),
        (
            {"pool": (5, 64, 640), "q": (2, 16, 640)},
            {"backend": "blackwell", "chip": "b200", "value_width": 512},
            NotImplementedError,
            "width of 512 and a rotary width of 128 take 544 columns of tensor memory, which has 512: take the triton",
        ),
        (
            {"pool": (5, 64, 576), "q": (2, 16, 576)},
            {"backend": "blackwell", "value_width": 512, "config": BlackwellConfig(stages=1, tiles=8, workers=1)},
            NotImplementedError,
            "give at least 2 stages and 1 tile, not 1 and 8",
        ),
        (
            {"pool": (5, 64, 656), "q": (2, 16, 576), "dtype": jnp.uint8},
            {"backend": "blackwell", "value_width": 512, "config": BlackwellConfig(stages=2, tiles=1, workers=1)},
            NotImplementedError,
            "give at least 2 stages and 2 tiles, not 2 and 1",
        ),
        ({}, {"backend": "blackwell", "chip": "h200"}, NotImplementedError, "no blackwell configuration .* on h200"),
    ],
)
def test_what_cannot_be_is_refused(changes, options, error, words):
    with pytest.raises(error, match=words):
        mla_decode(**arguments(**changes), **{"value_width": 32} | options)


@pytest.mark.parametrize(("backend", "chip"), [("hopper", "h200"), ("blackwell", "b200")])
@pytest.mark.parametrize(
    ("pool", "dtype", "latent", "words"),
    [
        ((5, 64, 192), jnp.float32, 128, "kernel reads BF16 and FP8 rows, not float32: give one of the two"),
        ((5, 64, 260), jnp.uint8, 128, "FP8 rows of a latent width in steps of 256, not 128"),
        ((5, 4, 576), jnp.bfloat16, 512, "pages of 8, 16, 32 or multiples of 64, not 4"),
    ],
)
def test_rows_and_pages_that_mosaic_kernels_cannot_take_are_refused(backend, chip, pool, dtype, latent, words):
    given = arguments(pool=pool, q=(2, 16, latent + 64), dtype=dtype)
    with pytest.raises(NotImplementedError, match=words):
        mla_decode(**given | {"backend": backend, "chip": chip, "value_width": latent})


def test_fp8_rows_of_broken_groups_are_refused():
    with pytest.raises(ValueError, match="a latent width that is a multiple of 128, not 96"):
        pack_fp8(jnp.zeros((4, 112)), 96)


def test_the_order_follows_the_chip_and_the_heads():
    assert order_of(None, 128) == ("ref",)
    assert order_of("h200", 16) == order_of("b200", 64) == ("triton", "ref")
    assert order_of("h200", 17) == order_of("h200", 17, fp8=True) == ("hopper", "triton", "ref")
    assert order_of("h200", 16, fp8=True) == order_of("b200", 64, fp8=True) == ("triton", "ref")
    assert order_of("b200", 128) == order_of("b200", 65, fp8=True) == ("blackwell", "triton", "ref")


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this JAX interprets Mosaic GPU")
@pytest.mark.parametrize("config", [HopperConfig(stages=2, workers=1), BlackwellConfig(stages=3, tiles=8, workers=1)])
def test_interpret_mode_is_refused_where_there_is_none(config):
    backend = type(config).__name__.removesuffix("Config").lower()
    rows = arguments(q=(2, 64, 576), pool=(5, 64, 576))
    with pytest.raises(NotImplementedError, match=r"Mosaic GPU's interpret mode needs JAX 0\.12 or newer, and this is"):
        mla_decode(**rows, value_width=512, backend=backend, config=config, interpret=True)


def test_float32_rows_go_to_the_reference_on_a_gpu():
    """The kernel refuses them, so the order's next backend serves; named, the refusal is the caller's."""
    want = problem("one page is four tokens")[1]
    assert within(run("one page is four tokens", jnp.float32, chip="h200"), want, "float32")
    with pytest.raises(NotImplementedError, match="float32 rows do not fit in shared memory: give BF16 or FP8"):
        run("one page is four tokens", jnp.float32, chip="h200", backend="triton")
