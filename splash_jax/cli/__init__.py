"""The command line, `splash ...`: thin over the library. Importing it loads no jax, so that `process` acts before."""
