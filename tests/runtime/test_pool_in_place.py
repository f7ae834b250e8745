"""No program of an ordinary step copies a layer's page pool: it updates the donated one, whatever its size.

Pools here are far larger than anything else in a program, and nothing is allocated: programs are compiled only.
"""

from collections.abc import Iterator
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from splash_jax.cost import load_hardware
from splash_jax.kv import store
from splash_jax.layouts import attention_mesh, make_layout
from splash_jax.models.config import ModelConfig
from splash_jax.ownership import Bucket, KVShape
from splash_jax.preflight.programs import target_of
from splash_jax.runtime import Programs, Shapes, StepKey, pages, step
from splash_jax.runtime.shapes import attention_kernels
from splash_jax.runtime.target import target_mesh
from tests.runtime.buffers import compile_and_read
from tests.support import HYBRIDS, LAYOUTS, MESHES, SMALL, USUAL

POOL = 256 << 20  # bytes of a layer's pool on a rank
BOUND = 16 << 20  # bytes of everything else that a program of these sizes allocates, its weights and rows included
PAGE = 16
BUCKETS = {"decode": Bucket(decode=4, tiles=0, tile=16), "prefill": Bucket(decode=4, tiles=2, tile=16)}
MODEL = ModelConfig.from_dict(SMALL, "small fixture")
WIDTH = MODEL.kv_lora_rank + MODEL.qk_rope_head_dim
KINDS = ("dense", "moe")
DTYPES = ("float32", "bfloat16")


def shapes(dtype: str, device_kind: str, backend: str = "xla") -> Shapes:
    width = {"float32": 4, "bfloat16": 2}[dtype]
    kv = KVShape(page_size=PAGE, interleave=PAGE, bytes_per_token=WIDTH * width)
    kernels, chip = attention_kernels(backend, device_kind)
    return Shapes(
        model=MODEL, dtype=dtype, kv=kv, max_model_len=256, slots=8, penalties=True, attention_backend=kernels,
        attention_chip=chip,
    )  # fmt: skip


@cache
def on_cpu(dtype: str, mesh: str | None = None) -> Programs:
    return Programs(attention_mesh({"rank": 4} if mesh is None else MESHES[mesh]), shapes(dtype, "cpu"))


@cache
def on_h200(dtype: str, backend: str) -> Programs:
    mesh = target_mesh(target_of(load_hardware("h200")), {"rank": 4})
    return Programs(mesh, shapes(dtype, "h200", backend))


def pages_of(programs: Programs) -> int:
    return POOL // (PAGE * programs.shapes.kv.bytes_per_token)


def check(programs: Programs, layout: str, bucket: str, part: str) -> None:
    """The only allocation of a pool's size is the donated argument, which holds the result; the rest stays small."""
    mesh = {axis: programs.mesh.shape[axis] for axis in programs.mesh.axis_names}
    key = StepKey(part=part, layout=make_layout(layout, mesh), bucket=BUCKETS[bucket], pages=pages_of(programs))
    compiled, found = compile_and_read(programs.lower(key), programs._options)
    large = [one for one in found if one.size >= POOL // 4]
    pools = 1 if part in KINDS else 0
    assert len(large) == pools, f"{key}: allocations {sorted((one.size for one in found), reverse=True)[:4]}"
    assert all(one.argument and one.result for one in large), f"{key}: {large}"
    rest = sum(one.size for one in found) - sum(one.size for one in large)
    memory = compiled.memory_analysis()
    assert memory is not None
    assert rest <= BOUND and memory.temp_size_in_bytes <= BOUND, f"{key}: {rest} bytes beside the pool"
    assert memory.alias_size_in_bytes >= pools * POOL * 0.99, f"{key}: the pool is not updated in place"


def cases() -> Iterator[object]:
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for bucket in BUCKETS:
                for part in (*KINDS, "embed", "head", "score"):
                    fast = (layout in USUAL and part == "moe") or (layout, part) == ("tp", "head")
                    marks = () if fast else pytest.mark.slow
                    yield pytest.param(layout, dtype, bucket, part, marks=marks)


@pytest.mark.parametrize(("layout", "dtype", "bucket", "part"), [*cases()])
def test_a_step_on_cpu_updates_its_pool_in_place(layout, dtype, bucket, part):
    check(on_cpu(dtype), layout, bucket, part)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", HYBRIDS)
def test_a_step_of_two_axes_updates_its_pool_in_place(layout, dtype, bucket):
    check(on_cpu(dtype, "2x2"), layout, bucket, "moe")


def put_by_float32(pool: jax.Array, slots: jax.Array, rows: jax.Array, *, kernels: bool) -> jax.Array:
    wide = jax.lax.optimization_barrier(pool.astype(jnp.float32))
    return pages.put(wide, slots, rows.astype(jnp.float32), kernels=kernels).astype(pool.dtype)


def test_a_pool_of_bfloat16_would_be_copied_on_cpu(monkeypatch):
    """The planted fault: what the test above is there to see."""
    if jax.__version_info__ >= (
        0,
        12,
    ):  # which writes a few bfloat16 rows in place; so what JAX 0.10 does is written out
        monkeypatch.setattr(step, "put", put_by_float32)
    monkeypatch.setattr(store, "stored_dtype", lambda dtype, platform: jnp.dtype(dtype))
    with pytest.raises(AssertionError, match="allocations"):
        check(on_cpu("bfloat16"), "tp", "decode", "moe")


@pytest.mark.slow
@pytest.mark.parametrize("bucket", BUCKETS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "backend"), [("bfloat16", "gpu"), ("bfloat16", "xla"), ("float32", "xla")])
def test_a_step_on_h200_updates_its_pool_in_place(compiler, dtype, backend, layout, bucket):
    check(on_h200(dtype, backend), layout, bucket, "moe")
