"""Mixtures of experts and multi-token prediction in the loop.

`experts.Experts` is the feature; `moe_log` reports by Megatron Bridge's names.
"""
