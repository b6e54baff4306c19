"""Conversion to and from `transformers`.

`directory` reads and writes model directories; `llama` and `gpt2` map layouts; `architecture` has their common checks.
"""
