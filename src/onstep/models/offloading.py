"""Keeps the activations of a forward pass in host memory until the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from onstep.config import ModelConfig
from onstep.errors import ConfigError

LEAST_BYTES = 2**16
"""Smaller tensors stay on the device: copying them costs more than their memory."""


class OffloadedActivations(saved_tensors_hooks):
    """Context of a forward pass whose saved activations are in pinned host memory until they are needed.

    Weights, which the backward pass needs too, stay where they are, and so do small tensors. The copies are queued in
    the stream of the computation: the host does not wait for them.

    Args:
        module: its weights are not moved.
        device: the type of device that tensors are moved from.
    """

    def __init__(self, module: nn.Module, device: str = "cuda") -> None:
        self.num_bytes = 0
        """Bytes that were moved in this forward pass."""
        weights = {one.untyped_storage().data_ptr() for one in module.parameters() if type(one) is nn.Parameter}

        def pack(tensor: Tensor) -> Any:
            is_moved = (
                tensor.device.type == device
                and type(tensor) is Tensor
                and tensor.nbytes >= LEAST_BYTES
                and tensor.untyped_storage().data_ptr() not in weights
            )
            if not is_moved:
                return tensor
            self.num_bytes += tensor.nbytes
            is_pinned = tensor.is_cuda
            packed = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
            packed.copy_(tensor, non_blocking=is_pinned)
            return tensor.device, packed

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            place, tensor = packed
            moved: Tensor = tensor.to(place, non_blocking=True)
            return moved

        super().__init__(pack, unpack)


def offloading(module: nn.Module, config: ModelConfig) -> AbstractContextManager[object]:
    """The context of the layers of a forward pass under `model.offload_activations`."""
    is_wanted = config.offload_activations and torch.is_grad_enabled()
    return OffloadedActivations(module) if is_wanted else nullcontext()


def check_offloading(config: ModelConfig, device: torch.device) -> None:
    """Refuse (ConfigError) `model.offload_activations` where activations are in host memory already."""
    if config.offload_activations and device.type != "cuda":
        raise ConfigError(
            f"model.offload_activations=true moves activations from a GPU to host memory, and this run computes on "
            f"{device.type}, where they are; set it to false, and save memory by model.recompute_granularity=full."
        )


@contextmanager
def offloads_activations(model: Any, config: ModelConfig) -> Iterator[None]:
    """Context in which the layers of a model of `transformers` compute under `model.offload_activations`.

    Raises:
        ConfigError: for a model without `get_decoder`.
    """
    if not config.offload_activations:
        yield
        return
    find = getattr(model, "get_decoder", None)
    if not callable(find):
        raise ConfigError(
            f"model.offload_activations=true requires a model with get_decoder, which {type(model).__name__} does not "
            "have; set it to false."
        )
    decoder = find()
    own, is_replaced = decoder.forward, "forward" in vars(decoder)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with offloading(decoder, config):
            return own(*args, **kwargs)

    forward.__wrapped__ = own  # type: ignore[attr-defined]  # its signature is read
    decoder.forward = forward
    try:
        yield
    finally:
        if is_replaced:
            decoder.forward = own
        else:
            del decoder.forward
