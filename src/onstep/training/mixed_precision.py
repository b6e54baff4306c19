"""Megatron Bridge's import path of the objects for the precision of a run."""

from onstep.config.bridge.precision import MixedPrecisionConfig, bf16_mixed, fp16_mixed, get_mixed_precision_config

__all__ = ["MixedPrecisionConfig", "bf16_mixed", "fp16_mixed", "get_mixed_precision_config"]
