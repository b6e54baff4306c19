"""Megatron Bridge's keys that Onstep has under another name, accepts without effect, or refuses by what they are.

`model_keys` and `run_keys` list them, `rules` says what a rule is, and `values` reads values as Bridge writes them.
"""
