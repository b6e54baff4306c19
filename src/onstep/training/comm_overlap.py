"""Megatron Bridge's import path of `CommOverlapConfig`; its values change nothing here."""

from onstep.config.bridge.precision import CommOverlapConfig

__all__ = ["CommOverlapConfig"]
