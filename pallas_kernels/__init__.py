"""Kernels, one folder per op: its api, its reference, its kernels, its tuning data. Never imports splash_jax."""
