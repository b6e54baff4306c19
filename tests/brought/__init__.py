"""Scripts and modules of others, run unmodified under `transformers` and under `onstep run`, and compared."""
