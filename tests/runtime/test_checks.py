"""What a step is handed: each kind of bad index is found on the devices before it runs; bad states are refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from splash_jax.errors import BoundsError, ConfigError
from splash_jax.kv import PagePool
from splash_jax.kv.store import empty_pools, pool_struct
from splash_jax.layouts import attention_mesh, make_layout, pool_spec
from splash_jax.models.config import ModelConfig
from splash_jax.ownership import Bucket, KVShape, plan_switch
from splash_jax.runtime import DeviceState, Draw, Programs, Shapes, Work, build_batch, fresh_state, plan_route
from splash_jax.runtime.batch import Batch, Local, unpack_local
from splash_jax.runtime.checks import STEP_CHECKS, SWITCH_CHECKS
from splash_jax.runtime.execute import put_batch
from splash_jax.runtime.sizes import state_bytes
from splash_jax.runtime.switch import put_maps
from splash_jax.runtime.transfer import Maps, Route, make_maps
from tests.support import LAYOUTS, SMALL

T, PAGE, PAGES = 2, 4, 12
MODEL = ModelConfig.from_dict(SMALL, "small fixture")
KV = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=160)
SHAPES = Shapes(model=MODEL, dtype="float32", kv=KV, max_model_len=32, slots=4, penalties=False, debug_checks=True)
BUCKET = Bucket(decode=2, tiles=2, tile=4)


@pytest.fixture(scope="module")
def programs() -> Programs:
    return Programs(attention_mesh({"rank": T}), SHAPES)


def layout(name: str):
    return make_layout(name, {"rank": T})


def good_batch(name: str) -> Batch:
    """A prompt of six tokens and a request that decodes its tenth."""
    pool = PagePool(layout(name), KV, PAGES)
    works = []
    for slot, (start, count) in enumerate(((0, 6), (9, 1))):
        pool.add(str(slot), home=slot)
        pool.grow(str(slot), start + count)
        ids = np.arange(3, 3 + count, dtype=np.int32)
        works.append(Work(name=str(slot), slot=slot, start=start, ids=ids, draw=Draw(top_p=0.9, banned=(1,))))
    return build_batch(SHAPES, layout(name), BUCKET, pool, works)[0]


def spoil(batch: Batch, name: str, change: Callable[[Batch, Local], Any]) -> Batch:
    """A copy of the batch with something wrong in it, on the last rank."""
    copy = Batch(*(np.array(x) for x in batch))
    change(copy, unpack_local(SHAPES, layout(name), BUCKET, copy.local[-1]))
    return copy


def put(array: np.ndarray, at: Any, value: float) -> None:
    array[at] = value


def written(here: Local) -> np.ndarray:
    """Rows of a rank that are written."""
    return np.flatnonzero(here.write < PAGES * PAGE)


# In tp every rank holds everything, so the last one has rows of both requests.
FAULTS: dict[str, list[Callable[[Batch, Local], Any]]] = {
    "token ids outside the vocabulary": [
        lambda b, here: put(b.rows, (0, 2), MODEL.vocab_size),
        lambda b, here: put(b.rows, (0, 2), -2),
    ],
    "request slots outside the engine's": [lambda b, here: put(b.rows, (1, 0), 4)],
    "request slots that two sampled rows share": [
        lambda b, here: put(
            b.ints, (np.flatnonzero(b.ints[:, 0] < 4)[1], 0), b.ints[np.flatnonzero(b.ints[:, 0] < 4)[0], 0]
        )
    ],
    "positions outside the context": [lambda b, here: put(b.rows, (2, 0), 32)],
    "rows that are written outside the pool": [
        lambda b, here: put(here.write, written(here)[0], PAGES * PAGE),
        lambda b, here: put(here.write, written(here)[0], -1),
    ],
    "rows that are written where another one is": [
        lambda b, here: put(here.write, written(here)[1], here.write[written(here)[0]])
    ],
    "rows that are written to a page of another request": [
        lambda b, here: put(here.write, 0, here.write[2] // PAGE * PAGE + 3),
        lambda b, here: put(here.write, 0, (PAGES - 1) * PAGE),
    ],
    "pages outside the pool in a block table": [
        lambda b, here: put(here.pages, (2, 0), PAGES),
        lambda b, here: put(here.pages, (2, 0), -1),
    ],
    "lengths beyond their block table": [lambda b, here: put(here.held, 0, 33), lambda b, here: put(here.held, 0, -1)],
    "position shares that there are not": [lambda b, here: put(here.lag, 0, 1)],
    "sampled rows outside the step": [lambda b, here: put(b.picks, 0, BUCKET.rows)],
    "sampling settings outside their range": [
        lambda b, here: put(b.floats, (0, 0), np.nan),
        lambda b, here: put(b.floats, (0, 1), 1.5),
        lambda b, here: put(b.floats, (0, 1), -0.1),
        lambda b, here: put(b.ints, (0, 0), 5),
        lambda b, here: put(b.ints, (0, 8), MODEL.vocab_size),
    ],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_good_batch_passes(programs, name):
    put_batch(programs, layout(name), BUCKET, PAGES, good_batch(name))


@pytest.mark.parametrize(
    ("fault", "change"), [(fault, change) for fault, changes in FAULTS.items() for change in changes]
)
def test_each_bad_index_of_a_step_is_found(programs, fault, change):
    bad = spoil(good_batch("tp"), "tp", change)
    with pytest.raises(
        BoundsError, match=rf"a step in tp, bucket 2\+2x4: .*{fault} \(rank \d\).*Nothing was dispatched"
    ):
        put_batch(programs, layout("tp"), BUCKET, PAGES, bad)


def test_every_check_of_a_step_has_a_fault_here():
    """The last one needs a GPU kernel's work: see below."""
    assert [*FAULTS, "pieces of decode work outside their list"] == list(STEP_CHECKS)


def test_decode_work_is_checked():
    """With the lists that the GPU kernels are handed, as they are made for an H200."""
    shapes = replace(SHAPES, attention_backend="gpu", attention_chip="h200")
    at, pool = Programs(attention_mesh({"rank": T}), shapes), PagePool(layout("tp"), KV, PAGES)
    pool.add("0", home=0)
    pool.grow("0", 10)
    work = Work(name="0", slot=0, start=9, ids=np.asarray([5], np.int32))
    batch, _ = build_batch(shapes, layout("tp"), BUCKET, pool, [work])
    put_batch(at, layout("tp"), BUCKET, PAGES, batch)
    here = unpack_local(shapes, layout("tp"), BUCKET, batch.local[1])
    here.first[1] = len(here.items) + 1
    with pytest.raises(BoundsError, match=r"pieces of decode work outside their list \(rank 1\)"):
        put_batch(at, layout("tp"), BUCKET, PAGES, batch)


def round_of_a_switch() -> tuple[Route, Maps]:
    pool = PagePool(layout("dp"), KV, PAGES)
    for i in range(4):
        pool.add(str(i), home=i % T)
        pool.grow(str(i), 6)
    plan = plan_switch(pool.manifest(), layout("tp"), pages_per_rank=PAGES, state=state_bytes(MODEL, "float32", T, KV))
    route = plan_route(SHAPES, plan)
    return route, make_maps(route, plan.kv)[0]


@pytest.mark.parametrize(
    ("fault", "spoiled", "value"),
    [(SWITCH_CHECKS[0], "read", PAGES), (SWITCH_CHECKS[0], "read", -1), (SWITCH_CHECKS[1], "write", PAGES),
     (SWITCH_CHECKS[1], "write", -1), (SWITCH_CHECKS[2], "write", None)],
)  # fmt: skip
def test_each_bad_index_of_a_switch_is_found(programs, fault, spoiled, value):
    route, maps = round_of_a_switch()
    put_maps(programs, route, maps)
    bad = Maps(np.array(maps.read), np.array(maps.write))
    row = getattr(bad, spoiled)[1]
    at = np.flatnonzero(row < PAGES)
    row[at[0]] = row[at[1]] if value is None else value
    with pytest.raises(BoundsError, match=rf"a switch dp -> tp: 1 {fault} \(rank 1\)"):
        put_maps(programs, route, bad)


def test_off_there_is_no_check():
    programs = Programs(attention_mesh({"rank": T}), replace(SHAPES, debug_checks=False))
    put_batch(programs, layout("tp"), BUCKET, PAGES, spoil(good_batch("tp"), "tp", FAULTS[STEP_CHECKS[0]][0]))
    assert programs.compiled == 0


def state(**changes: Any) -> DeviceState:
    """A state of two layers, without weights that matter here."""
    mesh = attention_mesh({"rank": T})
    sharding = NamedSharding(mesh, pool_spec(layout("tp")))
    moved = [{"q_b": jax.device_put(np.ones((T, 2), np.float32), sharding)} for _ in range(2)]
    given: dict[str, Any] = {
        "weights": {"layers": [{"moved": arrays} for arrays in moved]},
        "pools": empty_pools(pool_struct(sharding, KV, PAGES, 40, "float32"), 2),
        "sampler": fresh_state(mesh, SHAPES),
        "layout": layout("tp"),
        "pages": PAGES,
    }
    return DeviceState(**(given | changes))


def test_one_buffer_for_two_layers_is_refused():
    good = state()
    with pytest.raises(
        ConfigError, match=r"pools\[1\] and pools\[0\] are one buffer, and steps donate both; give each"
    ):
        state(pools=[good.pools[0]] * 2)
    layers = good.weights["layers"]
    with pytest.raises(ConfigError, match=r"layer 1\['q_b'\] and .* layer 0\['q_b'\] are one buffer"):
        state(weights={"layers": [layers[0], layers[0]]})
    twice = {"moved": layers[0]["moved"] | {"o": layers[0]["moved"]["q_b"]}}
    with pytest.raises(ConfigError, match=r"layer 0\['q_b'\] and .* layer 0\['o'\] are one buffer"):
        state(weights={"layers": [twice, layers[1]]})


def test_a_state_that_cannot_be_stepped_is_refused():
    good = state()
    with pytest.raises(ConfigError, match=r"1 pools for 2 layers; give each layer one"):
        state(pools=good.pools[:1])
    with pytest.raises(ConfigError, match=r"pools\[0\] is float32\[2, 12, 4, 40\]; in tp every pool is .* 13 pages"):
        state(pages=13)
    whole = jax.device_put(np.zeros((T, PAGES, PAGE, 40), np.float32), NamedSharding(good.pools[0].sharding.mesh, P()))
    with pytest.raises(ConfigError, match=r"pools\[1\] lies as .*; place it as NamedSharding\(mesh, P"):
        state(pools=[good.pools[0], whole])
    good.pools[1].delete()
    with pytest.raises(ConfigError, match=r"pools\[1\] was deleted or donated before; make it anew"):
        state(pools=good.pools)
