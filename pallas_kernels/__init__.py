"""Kernels, one folder per op: its api, reference, kernels and tuning data. Never imports splash_jax."""
