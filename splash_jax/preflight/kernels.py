"""One kernel compiled for a GPU that is not here, and what the compiler made of it."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.compiled import KernelFacts, dump_options, find_ptxas, read_kernels
from splash_jax.cost import load_hardware
from splash_jax.engine.platform import spare_the_trace
from splash_jax.preflight.programs import target_of
from splash_jax.runtime.target import clear_compile_errors, target_mesh


def compile_kernels(
    chip: str, function: Callable[..., Any], *args: Any, ranks: int = 1, in_specs: Any = None, out_specs: Any = None
) -> dict[str, KernelFacts]:
    """The GPU kernels of `function` on one GPU of configs/hardware/<chip>.toml, or on several, by name.

    Args:
      args: arrays or `jax.ShapeDtypeStruct`s, of all ranks together.
      ranks: GPUs of one host along the mesh axis "rank"; with more than one, `function` is of local views.
      in_specs, out_specs: of those views, as `jax.shard_map` takes them.

    Raises TargetError where the compiler is missing or does not know the chip.
    """
    spare_the_trace()
    mesh = target_mesh(target_of(load_hardware(chip)), {"rank": ranks})
    specs = in_specs if ranks > 1 else tuple(jax.tree.map(lambda _: P(), arg) for arg in args)
    structs = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), args, specs
    )
    if ranks > 1:
        function = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    # From JAX 0.11 on the Triton backend asks which device it lowers for.
    named = getattr(jax.sharding, "use_abstract_mesh", None) if jax.__version_info__ >= (0, 11) else None
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_environment("MOSAIC_GPU_DUMP_TO", str(folder)))
        with contextlib.suppress(FileNotFoundError):  # which the compiler says better
            ours = str(Path(find_ptxas()).parent)
            stack.enter_context(_environment("PATH", os.pathsep.join((ours, os.environ.get("PATH", "")))))
        stack.enter_context(clear_compile_errors())
        if named is not None:
            stack.enter_context(named(mesh.abstract_mesh))
        options: Any = dump_options(folder) | {"xla_backend_optimization_level": 3}  # whatever XLA_FLAGS say
        jax.jit(function).lower(*structs).compile(compiler_options=options)
        return read_kernels(folder)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """What the compiler reads from nowhere else, for as long as it runs."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
