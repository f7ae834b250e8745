"""Data, model and export code of the small checkpoint that ships with SPLASH for JAX."""
