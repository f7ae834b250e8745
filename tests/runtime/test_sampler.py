"""Draws: exact supports, distributions, penalties, and independence of everything but (seed, sample, token)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splash_jax.runtime.batch import FLOAT_FIELDS, INT_FIELDS, Draw, _fill_draw
from splash_jax.runtime.sampler import NOT_FINITE, PROMPT, SamplerState, draw, remember
from splash_jax.runtime.shapes import MAX_STOP_IDS

V, S = 12, 512  # one shape for all, so that it compiles once
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 1.5, V).astype(np.float32)

drawing = jax.jit(draw)


def run(logits: np.ndarray, draws: list[Draw], counts: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i32[n, 21] and log-probabilities f32[n, 21] of n <= S rows; the other rows are padding."""
    n = len(draws)
    floats = np.tile(np.asarray([0, 1, 0, 0, 0, 1], np.float32), (S, 1))
    ints = np.zeros((S, len(INT_FIELDS) + MAX_STOP_IDS), np.int32)
    ints[:, len(INT_FIELDS) :] = -1
    for i, settings in enumerate(draws):
        _fill_draw(floats[i], ints[i], settings, slot=i)
    rows = np.zeros((S, V), np.float32)
    rows[:n] = logits
    whole = np.zeros((S, V), np.int32)
    if counts is not None:
        whole[:n] = counts
    drawn = drawing(rows, floats, ints, whole)
    return np.asarray(drawn.tokens)[:n], np.asarray(drawn.logprobs)[:n]


def tokens_of(logits: np.ndarray, n: int = S, counts: np.ndarray | None = None, **settings: Any) -> np.ndarray:
    """n draws of different token indices from one row of logits."""
    draws = [Draw(token=t, **({"temperature": 1.0, "seed": 7} | settings)) for t in range(n)]
    return run(np.broadcast_to(logits, (n, V)), draws, counts)[0][:, 0]


def softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(np.asarray(x, np.float64) - np.max(x))
    return p / p.sum()


def chi_square(tokens: np.ndarray, p: np.ndarray) -> float:
    """Pearson's statistic over the cells that expect at least 5 draws, the others together."""
    count, expected = np.bincount(tokens, minlength=V), p * len(tokens)
    few = expected < 5
    cells = [*zip(count[~few], expected[~few], strict=True)]
    if expected[few].sum() > 0:
        cells.append((count[few].sum(), max(expected[few].sum(), 1.0)))
    return float(sum((c - e) ** 2 / e for c, e in cells))


def test_fields_are_what_this_test_fills():
    assert FLOAT_FIELDS == ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


def test_greedy_takes_the_first_of_the_largest():
    rows = RNG.normal(size=(S, V)).astype(np.float32)
    rows[3, [5, 9]] = 10.0
    got = run(rows, [Draw(seed=i) for i in range(S)])[0][:, 0]
    np.testing.assert_array_equal(got, rows.argmax(-1))
    assert got[3] == 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature(temperature):
    """4,096 draws against softmax(logits / t); 35 is beyond the 99.9% point of any 11 degrees of freedom."""
    tokens = np.concatenate([tokens_of(LOGITS, temperature=temperature, seed=seed) for seed in range(8)])
    assert chi_square(tokens, softmax(LOGITS / temperature)) < 35
    assert chi_square(tokens, softmax(LOGITS / (temperature * 1.5))) > 35  # and it would notice


def test_almost_no_temperature_is_greedy():
    assert set(tokens_of(LOGITS, temperature=1e-4)) == {int(LOGITS.argmax())}


@pytest.mark.parametrize("k", [1, 3, V, V + 5])
def test_top_k_has_exactly_the_k_largest(k):
    tokens = tokens_of(LOGITS, temperature=5.0, top_k=k)
    assert set(tokens) == set(np.argsort(-LOGITS)[:k].tolist())


@pytest.mark.parametrize("p", [0.05, 0.3, 0.6, 0.9, 1.0])
def test_top_p_has_exactly_the_smallest_set(p):
    probability = softmax(LOGITS)
    order = np.argsort(-probability)
    size = int(np.searchsorted(np.cumsum(probability[order]), p)) + 1
    tokens = tokens_of(LOGITS, n=S, top_p=p)
    inside = set(order[:size].tolist())
    assert set(tokens) <= inside
    likely = {t for t in inside if probability[t] / probability[order[:size]].sum() > 0.02}
    assert likely <= set(tokens)


def test_top_p_is_of_what_top_k_left_and_of_the_temperature():
    probability = softmax(LOGITS / 3.0)
    order = np.argsort(-probability)
    kept = probability[order[:4]] / probability[order[:4]].sum()
    size = int(np.searchsorted(np.cumsum(kept), 0.7)) + 1
    assert 1 < size < 4
    assert set(tokens_of(LOGITS, temperature=3.0, top_k=4, top_p=0.7)) == set(order[:size].tolist())


@pytest.mark.parametrize("min_p", [0.0, 0.1, 0.5, 1.0])
def test_min_p_is_relative_to_the_most_likely(min_p):
    probability = softmax(LOGITS / 2.0)
    inside = set(np.flatnonzero(probability >= min_p * probability.max()).tolist())
    assert set(tokens_of(LOGITS, temperature=2.0, min_p=min_p)) <= inside
    if min_p:
        assert set(tokens_of(LOGITS, temperature=2.0, min_p=min_p)) == inside


def test_ties_at_the_edge_stay_in():
    """Equal logits cannot be told apart: top_k keeps all that equal the k-th."""
    row = np.full(V, -20.0, np.float32)
    row[[2, 4, 6]] = 1.0
    assert set(tokens_of(row, top_k=2)) == {2, 4, 6}


def test_a_draw_depends_on_seed_sample_and_token_only():
    """The same request alone, in another row, and among others of all kinds (scenario S10)."""
    mine = Draw(temperature=0.8, seed=42, sample=1, token=5)
    alone = run(LOGITS[None], [mine])[0][0, 0]
    others = [Draw(temperature=1.3, seed=i, top_k=3, min_p=0.1, top_p=0.5, presence=1.0, token=i) for i in range(30)]
    for row in (0, 1, 17, 29):
        draws = [*others[:row], mine, *others[row + 1 :]]
        rows = RNG.normal(size=(30, V)).astype(np.float32)
        rows[row] = LOGITS
        counts = RNG.integers(0, 3, (30, V))
        counts[row] = 0
        assert run(rows, draws, counts)[0][row, 0] == alone


def test_seeds_samples_and_tokens_differ():
    flat = np.zeros(V, np.float32)

    def sequence(**settings: int) -> tuple[int, ...]:
        return tuple(tokens_of(flat, n=24, **settings).tolist())

    seen = [sequence(seed=s, sample=n) for s in (0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1) for n in range(3)]
    assert len(set(seen)) == len(seen)
    assert sequence(seed=1, sample=2) == sequence(seed=1, sample=2)
    # a sample is not a shifted copy of another, nor of the next seed
    assert sequence(seed=1, sample=0)[1:] != sequence(seed=1, sample=1)[:-1]


def penalised(logits: np.ndarray, counts: np.ndarray, presence: float, frequency: float, repetition: float):
    """vLLM's definition, in float64."""
    out = logits.astype(np.float64).copy()
    prompt, output = counts >= PROMPT, counts % PROMPT
    seen = prompt | (output > 0)
    out = np.where(seen, np.where(out > 0, out / repetition, out * repetition), out)
    return out - presence * (output > 0) - frequency * output


@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"),
    [(0, 0, 1), (1.5, 0, 1), (0, 0.7, 1), (0, 0, 1.8), (-1.0, 0, 1), (0.5, -0.4, 0.6), (2, 2, 2)],
)
def test_penalties(presence, frequency, repetition):
    rows = RNG.normal(0, 2, (S, V)).astype(np.float32)
    counts = RNG.integers(0, 4, (S, V)) * RNG.integers(0, 2, (S, V)) + PROMPT * RNG.integers(0, 2, (S, V))
    settings = Draw(presence=presence, frequency=frequency, repetition=repetition)
    got = run(rows, [settings] * S, counts.astype(np.int32))[0][:, 0]
    wanted = penalised(rows, counts, presence, frequency, repetition)
    clear = np.sort(wanted)[:, -1] - np.sort(wanted)[:, -2] > 1e-5
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(got[clear], wanted.argmax(-1)[clear])


def test_a_token_seen_often_still_counts_as_output_only_so_often():
    counts = np.zeros((1, V), np.int32)
    counts[0, 3] = PROMPT + 5
    row = np.zeros((1, V), np.float32)
    row[0, 3] = 5.4
    assert run(row, [Draw(frequency=1.0)], counts)[0][0, 0] == 3
    row[0, 3] = 4.9
    assert run(row, [Draw(frequency=1.0)], counts)[0][0, 0] == 0


def test_banned_ids_are_never_drawn():
    best = np.argsort(-LOGITS)
    tokens, logprobs = run(LOGITS[None], [Draw(banned=tuple(best[:2].tolist()))])
    assert tokens[0, 0] == best[2]
    assert logprobs[0, 0] == pytest.approx(np.log(softmax(LOGITS)[best[2]]), abs=1e-5)  # of the model itself
    assert not set(tokens_of(LOGITS, temperature=3.0, banned=(0, 1, int(best[0])))) & {0, 1, int(best[0])}
    everything = tokens_of(LOGITS, n=4, temperature=0.0, banned=tuple(range(V)))
    assert set(everything) == {NOT_FINITE}


@pytest.mark.parametrize("min_p", [0.0, 1e-30, 1.0])
@pytest.mark.parametrize("top_p", [1e-44, 0.6, 1.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, V])
def test_tokens_without_a_chance_are_never_drawn(top_k, top_p, min_p):
    """Whatever narrows them, with more asked for than there are: of four that the model allows two are banned."""
    row = np.full(V, -np.inf, np.float32)
    row[[3, 5, 8, 11]] = (2.0, -3e38, 1.0, 3.0)
    drawn = set(tokens_of(row, n=64, temperature=50.0, top_k=top_k, top_p=top_p, min_p=min_p, banned=(11, 5)))
    narrowed = top_k == 1 or top_p == 1e-44 or min_p == 1.0
    assert drawn == ({3} if narrowed else {3, 8})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked_and_its_neighbours_are_fine(temperature):
    rows = np.tile(LOGITS, (5, 1))
    rows[1, 4] = np.nan
    rows[2] = -np.inf
    rows[3, :6] = -np.inf
    draws = [Draw(temperature=temperature, seed=3, top_k=5, top_p=0.9, top_logprobs=2)] * 5
    tokens, logprobs = run(rows, draws)
    clean, clean_logprobs = run(np.tile(LOGITS, (5, 1)), draws)
    assert tokens[1, 0] == tokens[2, 0] == NOT_FINITE
    assert tokens[3, 0] >= 6
    for row in (0, 4):
        np.testing.assert_array_equal(tokens[row], clean[row])
        np.testing.assert_array_equal(logprobs[row], clean_logprobs[row])


def test_logprobs_are_the_models_own_whatever_the_settings():
    reference = np.log(softmax(LOGITS))
    draws = [
        Draw(top_logprobs=20),
        Draw(temperature=0.7, top_k=2, seed=1),
        Draw(temperature=2.0, top_p=0.5, min_p=0.2, seed=2),
        Draw(presence=2.0, repetition=1.5),
    ]
    counts = np.ones((4, V), np.int32)
    tokens, logprobs = run(np.tile(LOGITS, (4, 1)), draws, counts)
    for row in range(4):
        assert logprobs[row, 0] == pytest.approx(reference[tokens[row, 0]], abs=1e-5)


def test_the_most_likely_tokens_come_with_their_logprobs():
    """V of the 20 columns are real here; without a row that asks for them they are not computed."""
    tokens, logprobs = run(LOGITS[None], [Draw(temperature=1.0, top_logprobs=3)])
    order = np.argsort(-LOGITS)
    np.testing.assert_array_equal(tokens[0, 1 : V + 1], order)
    np.testing.assert_allclose(logprobs[0, 1 : V + 1], np.log(softmax(LOGITS))[order], atol=1e-5)
    assert (logprobs[0, V + 1 :] == -np.inf).all()


def test_slots_remember_what_was_drawn():
    state = SamplerState(jnp.zeros(3, jnp.int32), jnp.zeros((3, V), jnp.int32).at[1, 4].set(PROMPT))
    slots, tokens = jnp.asarray([1, 3, 0], jnp.int32), jnp.asarray([4, 5, 6], jnp.int32)
    after = remember(state, slots, tokens)
    assert after.last.tolist() == [6, 4, 0]  # slot 3 is out of bounds: a padding row
    assert after.counts[1, 4] == PROMPT + 1 and after.counts[0, 6] == 1
    assert int(after.counts.sum()) == PROMPT + 2
    untracked = remember(SamplerState(state.last, jnp.zeros((1, 1), jnp.int32)), slots, tokens)
    assert untracked.counts.shape == (1, 1) and untracked.last.tolist() == [6, 4, 0]


def test_a_row_without_a_token_counts_for_none():
    """Its mark is below every id: it must not be taken for the last of the vocabulary."""
    state = SamplerState(jnp.zeros(2, jnp.int32), jnp.zeros((2, 5), jnp.int32))
    after = remember(state, jnp.asarray([0, 1], jnp.int32), jnp.asarray([NOT_FINITE, 4], jnp.int32))
    assert after.counts.tolist() == [[0] * 5, [0, 0, 0, 0, 1]]
