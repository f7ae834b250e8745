"""Traffic against a clock instead of devices: the same scheduler, pool and policy. No jax."""
