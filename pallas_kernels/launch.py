"""How every Triton kernel here is launched, and so where the limits stand that all of them have."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

MOST_PROGRAMS = 2**31 - 2  # of one launch


def triton_call(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    out_shape: Sequence[jax.ShapeDtypeStruct],
    warps: int,
    stages: int,
    interpret: bool,
    name: str,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., list[jax.Array]]:
    """A function of the kernel's inputs that launches it.

    `aliases` maps inputs to the outputs that take their memory. Refuses inputs and outputs as `refuse_wide` does, and
    more programs than one launch has. A grid without a program is not launched: outputs are then the inputs that they
    alias, or zeros.
    """
    aliases = dict(aliases or {})

    def call(*inputs: jax.Array) -> list[jax.Array]:
        refuse_wide(*inputs, *out_shape)
        if (programs := math.prod(grid)) > MOST_PROGRAMS:
            raise NotImplementedError(f"a launch has {MOST_PROGRAMS} programs at most, not the {programs} of {name}.")
        if not programs:
            given = {output: inputs[number] for number, output in aliases.items()}
            return [given.get(i, jnp.zeros(x.shape, x.dtype)) for i, x in enumerate(out_shape)]
        return pl.pallas_call(
            kernel,
            grid=grid,
            out_shape=list(out_shape),
            input_output_aliases=aliases,
            compiler_params=pltriton.CompilerParams(num_warps=warps, num_stages=stages),
            interpret=interpret,
            name=name,
        )(*inputs)

    return call


def refuse_wide(*arrays: Any) -> None:
    """Refuse what Pallas' Triton backend addresses wrongly: up to 4 GiB its offsets are int32, counted in elements."""
    for x in arrays:
        if x.size > 2**31 and x.size * x.dtype.itemsize <= 2**32:
            raise NotImplementedError(
                f"{x.size} elements of {x.dtype} are beyond the 32-bit offsets that Pallas' Triton backend has up to "
                "4 GiB: make the pool smaller than 2 GiB or larger than 4 GiB."
            )


def refuse_sizes(sizes: Mapping[str, int]) -> None:
    """Refuse widths and blocks that Triton's arrays and products cannot have."""
    for name, size in sizes.items():
        if size < 16 or size & (size - 1):
            raise NotImplementedError(f"Triton arrays are powers of two from 16: the {name} is {size}.")


def refuse_stored(what: str, dtype: Any, *, interpret: bool, fp8: bool = True) -> None:
    """Refuse rows or keys that shared memory has no room for, or that no kernel reads; `fp8`: it reads FP8 ones."""
    wanted = "BF16 or FP8" if fp8 else "BF16"
    if (dtype == jnp.float32 and interpret) or (fp8 and dtype == jnp.uint8):
        return
    if dtype.itemsize > 2:
        raise NotImplementedError(f"{dtype} {what} do not fit in shared memory: give {wanted} {what}.")
    if dtype.itemsize < 2 or not jnp.issubdtype(dtype, jnp.floating):
        raise NotImplementedError(f"no kernel reads {dtype} {what}: give {wanted} {what}.")
