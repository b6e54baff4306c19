"""What marks on parameters say about where else they are: Megatron-Core's attributes, which its layers set."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onstep.errors import ConfigError


def param_is_not_shared(param: Tensor) -> bool:
    """Whether `param` counts here: False for one whose attribute `shared` says that another rank counts it.

    So it is with an embedding that is tied across pipeline stages: it is on two of them, and one parameter.
    """
    return not getattr(param, "shared", False)


def is_expert(param: Any) -> bool:
    """Whether `param` belongs to experts that differ between ranks: its attribute `allreduce` is False."""
    return not getattr(param, "allreduce", True)


def is_counted(name: str, param: Any, tensor_rank: int, expert_tensor_rank: int) -> bool:
    """Whether this rank counts `param`, so that all ranks of the model together count each parameter once.

    A parameter that is split over tensor-parallel ranks (`tensor_model_parallel`) counts on each of them, with its part
    there; any other is the same on all of them, and counts on the first.

    Args:
        name: for the error.
        param: a parameter.
        tensor_rank: this rank's place in the group of tensor parallelism.
        expert_tensor_rank: the same for experts.

    Raises:
        ConfigError: experts are marked as shared, which nothing could count.
    """
    if is_expert(param):
        if not param_is_not_shared(param):
            raise ConfigError(
                f"the expert parameter {name} is marked as shared, but experts belong to one rank; set shared=False"
            )
        return getattr(param, "tensor_model_parallel", False) or expert_tensor_rank == 0
    return param_is_not_shared(param) and (getattr(param, "tensor_model_parallel", False) or tensor_rank == 0)
