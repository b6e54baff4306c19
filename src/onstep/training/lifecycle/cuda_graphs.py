"""Keeps a compiled model's CUDA graphs right: where steps begin, and gradients that outlive a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from onstep.training.compute.losses import MicroLoss, Scalar
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.stages.job import Job

P = ParamSpec("P")
T = TypeVar("T")
_MODES, _BACKEND = ("reduce-overhead", "max-autotune"), "cudagraphs"
"""Modes of `torch.compile` that record CUDA graphs, and the backend that only does that."""


class CudaGraphs(Feature[Job]):
    """Marks the beginning of each forward pass, and copies gradients that further micro-batches are added to.

    What a graph returns, gradients included, is in memory that its next replay overwrites. The loop copies losses and
    reports for every model; gradients are complete, and used, before the next replay, unless a step has several
    micro-batches.
    """

    name = "cuda_graphs"
    needs_of_engine = ("loss", "backward")
    when = "train.torch_compile_mode is reduce-overhead or max-autotune, or the model is compiled so"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether the run compiles its model with such a mode, or the model came so."""
        train = host.run.cfg.train
        if train.torch_compile and (train.torch_compile_mode in _MODES or train.torch_compile_backend == _BACKEND):
            return True
        return uses_cuda_graphs(host.model)

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._continues = False

    def wrap_forward(self, forward: Callable[P, T]) -> Callable[P, T]:
        return _marked(forward)

    def wrap_score(self, score: Callable[P, T]) -> Callable[P, T]:
        return _marked(score)

    def before_backward(self, step: Step, micro: MicroLoss, start: Scalar | None) -> None:
        """Note whether more micro-batches are added to gradients that this one gives memory."""
        self._continues = not step.micros and len(step.batches.micro_batches) > 1

    def wrap_backward(self, backward: Callable[P, T]) -> Callable[P, T]:
        def kept(*args: P.args, **kwargs: P.kwargs) -> T:
            result = backward(*args, **kwargs)
            if self._continues:
                own_gradients(self.host.model)
            return result

        return kept


def uses_cuda_graphs(model: list[nn.Module]) -> bool:
    """Whether a user's module, or one in it, is compiled with a mode or an option that records CUDA graphs."""
    return any(_records(module) for chunk in model for module in chunk.modules())


def own_gradients(model: list[nn.Module]) -> None:
    """Copy the gradients into memory of their own."""
    for chunk in model:
        for parameter in chunk.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()


def _marked(function: Callable[P, T]) -> Callable[P, T]:
    def marked(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        return function(*args, **kwargs)

    return marked


def _records(module: Any) -> bool:
    """`torch.compile(module)`, `module.compile()` and a compiled `forward` keep the compiler's options apart."""
    for compiled in (module, getattr(module, "_compiled_call_impl", None), vars(module).get("forward")):
        configuration = getattr(compiled, "get_compiler_config", None)
        if configuration is not None and (configuration() or {}).get("triton.cudagraphs", False):
            return True
    return False
