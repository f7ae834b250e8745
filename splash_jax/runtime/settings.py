"""What the process has set in JAX must not change what an engine computes, nor keep it from running.

Flags that JAX lets a thread set aside are set aside while an engine traces, compiles and runs. The rest are refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from splash_jax.errors import ConfigError

# Flags that JAX has no public way to set aside, and their only values that programs are right with.
REFUSED = {
    "eager_constant_folding": False,
    "jax_error_checking_behavior_divide": "ignore",
    "jax_error_checking_behavior_nan": "ignore",
    "jax_error_checking_behavior_oob": "ignore",
    "jax_high_dynamic_range_gumbel": False,
}


@contextmanager
def own_settings() -> Iterator[None]:
    """JAX as an engine wants it, in this thread and for the block.

    32 bits, one generator, compiled programs, nobody else's mesh, no guards that are meant for the caller's own code.
    """
    with (
        jax.enable_x64(False),
        jax.threefry_partitionable(True),
        jax.default_matmul_precision(None),
        jax.default_device(None),
        jax.disable_jit(False),
        jax.no_tracing(False),
        jax.no_execution(False),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.check_tracer_leaks(False),
        jax.transfer_guard("allow"),
        jax.set_mesh(None),
    ):
        yield


def check_settings() -> None:
    """Raise `ConfigError` for a flag of the process that programs would be wrong under and that cannot be set aside."""
    for name, right in REFUSED.items():
        value = getattr(jax.config, name, right)
        if value != right:
            raise ConfigError(
                f"JAX's flag {name} is {value!r} in this process, and an engine's programs need {right!r}. Call "
                f"jax.config.update({name!r}, {right!r}) before the engine is built, or unset {name.upper()} in the "
                f"environment."
            )
