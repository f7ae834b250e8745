"""Routing and experts: the bias selects (S16), the scale is applied once (S17), sharding and padding change nothing."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splash_jax.models import deepseek_v3, moe
from splash_jax.models.config import ModelConfig
from splash_jax.models.deepseek_v3_weights import model_leaves
from splash_jax.models.params import Leaf
from tests.support import SMALL

D = F = 8
N = 24
PLAIN = {"n_group": 1, "topk_group": 1}


def config(**changes: Any) -> ModelConfig:
    """Eight experts: compiling is what these tests wait for."""
    sizes = {
        "hidden_size": D,
        "moe_intermediate_size": F,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "n_routed_experts": 8,
    }
    return ModelConfig.from_dict(SMALL | sizes | changes, "moe test")


class File(dict):
    """Tensors by their names in a checkpoint, without the model's and layer's prefix."""

    def read(self, name: str, index: Any = ...) -> np.ndarray:
        return self[name.removeprefix("model.layers.0.mlp.")][index]

    def rank(self, cfg: ModelConfig, ranks: int, rank: int) -> dict[str, Any]:
        """What a rank holds of them, as the engine would load it: {"moe": ..., "shared": ...}."""

        def block(leaf: Leaf) -> np.ndarray:
            cut = {"ranks": lambda n: slice(rank * n // ranks, (rank + 1) * n // ranks)}
            whole = lambda n: slice(0, n)  # noqa: E731
            index = tuple(cut.get(dim, whole)(n) for dim, n in zip(leaf.dims, leaf.shape, strict=True))
            return leaf.read(self, index).astype(np.float32)

        layer = model_leaves(cfg, ranks)["layers"][0]
        wanted = {"moe": layer["moe"], "shared": layer["shared"]}
        return jax.tree.map(block, wanted, is_leaf=lambda x: isinstance(x, Leaf))


def make_file(cfg: ModelConfig) -> File:
    rng, E = np.random.default_rng(0), cfg.num_experts
    file = File({"gate.weight": rng.normal(0, 0.5, (E, D)), "gate.e_score_correction_bias": rng.normal(0, 0.1, E)})
    for expert in (*(f"experts.{e}" for e in range(E)), "shared_experts"):
        for kind, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
            file[f"{expert}.{kind}_proj.weight"] = rng.normal(0, 0.5, shape)
    return File({name: value.astype(np.float32) for name, value in file.items()})


def route_float64(cfg: ModelConfig, file: File, x: np.ndarray):
    """(chosen experts bool[N, E], weights f64[N, E], rows whose choice no rounding can flip bool[N])."""
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ file["gate.weight"].T.astype(np.float64))))
    biased = scores + file["gate.e_score_correction_bias"].astype(np.float64)
    rows, E = biased.shape
    grouped = biased.reshape(rows, cfg.n_group, E // cfg.n_group)
    best = np.sort(grouped, -1)[..., -2:].sum(-1)
    order = np.argsort(-best, -1)
    ranked_groups = np.take_along_axis(best, order, -1)
    clear = np.ones(rows, bool)
    if cfg.topk_group < cfg.n_group:
        clear &= ranked_groups[:, cfg.topk_group - 1] - ranked_groups[:, cfg.topk_group] > 1e-6
    is_open = np.zeros((rows, cfg.n_group), bool)
    np.put_along_axis(is_open, order[:, : cfg.topk_group], True, -1)
    biased = np.where(np.repeat(is_open, E // cfg.n_group, -1), biased, -np.inf)
    order = np.argsort(-biased, -1)
    k = cfg.num_experts_per_tok
    ranked = np.take_along_axis(biased, order, -1)
    if k < E:
        clear &= ~(ranked[:, k - 1] - ranked[:, k] <= 1e-6)
    chosen = np.zeros((rows, E), bool)
    np.put_along_axis(chosen, order[:, :k], True, -1)
    weights = np.where(chosen, scores, 0)
    if cfg.norm_topk_prob:
        weights /= weights.sum(-1, keepdims=True)
    return chosen, weights * cfg.routed_scaling_factor, clear


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("groups", [{}, PLAIN], ids=["groups", "no groups"])
def test_the_bias_selects_and_does_not_weigh(groups, norm):
    """1,000 rows in bfloat16 with a bias of 2.02 and small differences: the choice and weights of float64."""
    cfg = config(**groups, norm_topk_prob=norm, n_routed_experts=16)
    rng, file = np.random.default_rng(0), make_file(cfg)
    file["gate.weight"] *= 0.6
    file["gate.e_score_correction_bias"] = (2.02 + rng.normal(0, 0.02, 16)).astype(np.float32)
    x = jnp.asarray(rng.normal(size=(1000, D)), jnp.bfloat16)
    w = file.rank(cfg, 1, 0)["moe"]
    ids, weights = jax.jit(partial(moe.route, cfg))(w["router"], w["router_bias"], x)
    assert (ids.dtype, weights.dtype) == (jnp.int32, jnp.float32)
    exact = np.asarray(x.astype(jnp.float32))
    chosen, wanted, clear = route_float64(cfg, file, exact)
    assert clear.mean() > 0.999
    got, spread = np.zeros((1000, 16), bool), np.zeros((1000, 16))
    np.put_along_axis(got, np.asarray(ids), True, 1)
    np.testing.assert_array_equal(got[clear], chosen[clear])
    np.put_along_axis(spread, np.asarray(ids), np.asarray(weights, np.float64), 1)
    np.testing.assert_allclose(spread[clear], wanted[clear], rtol=2e-6, atol=1e-7)
    bias = file["gate.e_score_correction_bias"]
    file["gate.e_score_correction_bias"] = np.asarray(jnp.asarray(bias).astype(jnp.bfloat16).astype(jnp.float32))
    assert (route_float64(cfg, file, exact)[0] != chosen).any(1).mean() > 0.02  # a bias in bfloat16 would show


def test_groups_limit_the_choice():
    """The best expert of all is not chosen when its group is not: a group counts by its best two."""
    cfg = config(num_experts_per_tok=2, topk_group=1, n_routed_experts=16)
    bias = np.full(16, -5.0, np.float32)
    bias[0], bias[[4, 5]] = 1.0, 0.9  # group 0 has the best expert, group 1 the best pair
    file = make_file(cfg)
    w = File({name: np.zeros_like(value) for name, value in file.items()}).rank(cfg, 1, 0)["moe"]
    ids, _ = jax.jit(partial(moe.route, cfg))(w["router"], bias, np.ones((1, D), np.float32))
    assert sorted(np.asarray(ids)[0].tolist()) == [4, 5]


def test_an_expert_without_a_chance_still_stands_before_those_of_other_groups():
    """Groups 1 and 2 of four are kept, and of their eight experts one has a bias of -inf: all eight are chosen."""
    cfg = config(n_routed_experts=16, n_group=4, topk_group=2, num_experts_per_tok=8)
    bias = np.where((np.arange(16) >= 4) & (np.arange(16) < 12), np.float32(1), np.float32(0))
    bias[5] = -np.inf
    ids, _ = route_with(cfg, bias, np.zeros((1, 16)))
    assert sorted(ids[0].tolist()) == list(range(4, 12))


@cache
def router(cfg: ModelConfig) -> Any:
    return jax.jit(partial(moe.route, cfg))


def route_with(cfg: ModelConfig, bias: np.ndarray, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Experts and weights of rows that give the experts these logits: one column of a row for each."""
    eye = np.eye(cfg.num_experts, dtype=np.float32)
    ids, weights = router(cfg)(eye, np.asarray(bias, np.float32), np.asarray(logits, np.float32))
    return np.asarray(ids), np.asarray(weights)


EXTREMES = (-np.inf, -3.4e38, -1e30, -5.0, 0.0, 1e-30, 5.0, 1e30)


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(4, 1, 2), (4, 2, 8), (4, 3, 8), (8, 2, 3), (1, 1, 5)]))
def test_no_bias_leads_out_of_the_kept_groups(seed, sizes):
    """Any biases, -inf and the most negative among them, against plain sorts; the best pairs make the kept groups."""
    groups, keep, k = sizes
    cfg = config(n_routed_experts=16, n_group=groups, topk_group=keep, num_experts_per_tok=k)
    rng, expert = np.random.default_rng(seed), np.arange(16)
    bias = np.where(rng.random(16) < 0.5, rng.choice(EXTREMES, 16), rng.normal(size=16)).astype(np.float32)
    logits = rng.normal(size=(4, 16)).astype(np.float32)
    ids, weights = route_with(cfg, bias, logits)
    # Rounded as float32 rounds them: biases that swallow scores leave ties, which the first of them wins.
    with np.errstate(over="ignore"):
        biased = np.asarray(jax.nn.sigmoid(logits)) + bias
        pairs = np.sort(biased.reshape(4, groups, -1), -1)[..., -2:].sum(-1)
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for row, own in enumerate(ids):
        kept = np.lexsort((np.arange(groups), -pairs[row]))[:keep]
        there = expert[np.isin(expert // (16 // groups), kept)]
        assert sorted(own.tolist()) == sorted(there[np.lexsort((there, -biased[row, there]))][:k].tolist())
        share = scores[row, own] / scores[row, own].sum()
        np.testing.assert_allclose(weights[row], share * cfg.routed_scaling_factor, rtol=1e-5)


@pytest.fixture(params=["every row", "chosen rows"])
def way(request, monkeypatch) -> str:
    """Few rows run through every expert that is chosen at all; of many rows each expert takes tiles of its own."""
    monkeypatch.setattr(moe, "FEW_ROWS", N if request.param == "every row" else 4)
    return request.param


@cache
def runner(cfg: ModelConfig, way: str) -> Any:
    return jax.jit(partial(moe.run_experts, cfg))


def experts_float64(cfg: ModelConfig, file: File, x: np.ndarray) -> np.ndarray:
    _, weights, clear = route_float64(cfg, file, x)
    assert clear.all()
    total = np.zeros(x.shape)
    for e in range(cfg.num_experts):
        gate_w, up_w, down_w = (
            file[f"experts.{e}.{kind}_proj.weight"].T.astype(np.float64) for kind in ("gate", "up", "down")
        )
        gate = x.astype(np.float64) @ gate_w
        total += weights[:, e : e + 1] * ((gate / (1 + np.exp(-gate)) * (x @ up_w)) @ down_w)
    return total


def over_ranks(cfg: ModelConfig, file: File, x: np.ndarray, valid: np.ndarray, ranks: int, way: str) -> np.ndarray:
    """The sum of what `ranks` ranks compute, each with its experts."""
    run = runner(cfg, way)
    parts = [run(file.rank(cfg, ranks, r)["moe"], x, valid, np.int32(r)) for r in range(ranks)]
    return np.sum([np.asarray(part, np.float64) for part in parts], 0)


ROWS = np.random.default_rng(5).normal(size=(N, D)).astype(np.float32)
EVERY = np.ones(N, bool)


@pytest.mark.parametrize("ranks", [1, 4])
def test_experts_are_their_weighted_sum(ranks, way):
    cfg = config()
    w = make_file(cfg)
    np.testing.assert_allclose(over_ranks(cfg, w, ROWS, EVERY, ranks, way), experts_float64(cfg, w, ROWS), atol=1e-5)


def test_experts_that_do_not_divide_are_padded(way):
    cfg = config(**PLAIN, n_routed_experts=6, num_experts_per_tok=2)
    w = make_file(cfg)
    np.testing.assert_allclose(over_ranks(cfg, w, ROWS, EVERY, 4, way), experts_float64(cfg, w, ROWS), atol=1e-5)


@pytest.mark.parametrize("favourites", [[3], [0, 1], [7]], ids=str)
def test_uneven_routing_is_exact(favourites, way):
    """One expert takes every row, or one rank all there is: more rows than a tile holds, and ranks with none."""
    cfg = config()
    w = make_file(cfg)
    w["gate.e_score_correction_bias"][favourites] += 10
    assert route_float64(cfg, w, ROWS)[0][:, favourites].all()
    np.testing.assert_allclose(over_ranks(cfg, w, ROWS, EVERY, 4, way), experts_float64(cfg, w, ROWS), atol=1e-5)


@pytest.mark.parametrize("filling", [0.0, 1e30, np.nan, np.inf])
def test_padding_rows_are_zero_and_touch_nobody(filling, way):
    cfg = config()
    w, valid = make_file(cfg), np.arange(N) % 3 == 0
    padded = np.where(valid[:, None], ROWS, np.float32(filling))
    got = over_ranks(cfg, w, padded, valid, 4, way)
    assert (got[~valid] == 0).all()
    clean = over_ranks(cfg, w, np.where(valid[:, None], ROWS, np.float32(0)), valid, 4, way)
    np.testing.assert_array_equal(got[valid], clean[valid])
    np.testing.assert_allclose(got[valid], experts_float64(cfg, w, ROWS[valid]), atol=1e-5)
    assert (over_ranks(cfg, w, padded, np.zeros(N, bool), 4, way) == 0).all()


def test_a_row_that_is_not_finite_stays_alone(way):
    """A request gone wrong is an error of its own; its neighbours are served."""
    cfg = config()
    w, rows = make_file(cfg), ROWS.copy()
    rows[7] = np.nan
    got, clean = over_ranks(cfg, w, rows, EVERY, 4, way), over_ranks(cfg, w, ROWS, EVERY, 4, way)
    others = np.arange(N) != 7
    np.testing.assert_array_equal(got[others], clean[others])


@pytest.mark.parametrize(("norm", "ranks"), [(True, 1), (True, 4), (False, 4)])
def test_identity_experts_return_scale_times_the_row_and_the_shared_one_adds_one(norm, ranks):
    """silu(c) * x / silu(c) = x: rows of +-1 that end in 1 make the gate a constant, and the norm the identity."""
    cfg = config(norm_topk_prob=norm)
    c, eye, gate = np.float32(1.5), np.eye(D, dtype=np.float32), np.zeros((F, D), np.float32)
    gate[:, -1] = c
    w = make_file(cfg)
    for name in w:
        for kind, value in (("gate_proj", gate), ("up_proj", eye / (c / (1 + np.exp(-c)))), ("down_proj", eye)):
            if kind in name:
                w[name] = value
    x = np.sign(ROWS)
    x[:, -1] = 1
    factor = route_float64(cfg, w, x)[1].sum(-1)
    assert not norm or np.allclose(factor, 2.5)
    got = over_ranks(cfg, w, x, EVERY, ranks, "chosen rows")
    np.testing.assert_allclose(got, factor[:, None] * x, rtol=1e-6)

    ones = np.ones(D, np.float32)
    weights: dict[str, Any] = {
        "attn_norm": ones,
        "mlp_norm": ones,
        "attn": {},
        "moved": {"w_uk": None, "w_uv": None},
        "moe": None,
        "shared": None,
    }

    def spread(f: Any, h: jax.Array) -> jax.Array:
        """Each rank has its experts and, of the shared one, its part of the width."""
        total = jnp.zeros_like(h)
        for rank in range(ranks):
            weights.update(w.rank(cfg, ranks, rank))
            total += f(h, jnp.asarray(EVERY), jnp.int32(rank))
        return total

    layer = jax.jit(lambda x: deepseek_v3.layer(cfg, weights, x, lambda family, h: jnp.zeros_like(h), spread))
    np.testing.assert_allclose(layer(x), x * (2 + factor[:, None]), rtol=3e-6)
