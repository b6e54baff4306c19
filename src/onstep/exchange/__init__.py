"""Puts Onstep's names in the place of those of `transformers`, so that unmodified scripts train with Onstep.

`names` is the table; `install` makes the exchange, `onstep run` and `import onstep.as_transformers` call it.
"""
