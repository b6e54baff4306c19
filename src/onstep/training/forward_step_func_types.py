"""Megatron Bridge's import path of the type of forward steps."""

from onstep.training.protocols import ForwardStep as ForwardStepCallable

__all__ = ["ForwardStepCallable"]
