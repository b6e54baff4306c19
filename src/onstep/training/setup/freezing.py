"""Freezes parts of a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from onstep.models.heads import ModelList, ensure_model_list

_ROUTER = ("weight", "bias")
_SHARED_GATE = ("gate_weight", "gate_bias")


def freeze_moe_router(model: nn.Module | ModelList) -> ModelList:
    """Freeze the weights of the routers and of the shared experts' gates in place; returns the model as list of chunks.

    Covers `layers[i].feed_forward` of Onstep's models and `decoder.layers[i].mlp` of Megatron's, including those of
    multi-token prediction and those inside data-parallel and other wrappers; missing modules are skipped.

    The routing of a frozen router does not change: its expert bias is not modified here, and Onstep's loop updates it
    only if the router's weight is trained. The auxiliary losses still reach the layers before the router. Freeze before
    building the optimizer and wrapping the model.

    Args:
        model: one chunk or a list of chunks; a list is returned as is.
    """
    chunks = ensure_model_list(model)
    for chunk in chunks:
        for block in _feed_forwards(chunk):
            for name in _ROUTER:
                _freeze_parameter_if_present(getattr(block, "router", None), name)
            for name in _SHARED_GATE:
                _freeze_parameter_if_present(getattr(block, "shared_experts", None), name)
    return chunks


def _freeze_parameter_if_present(module: object, name: str) -> None:
    """Exclude the parameter `name` of a module from training; do nothing if it does not exist."""
    parameter = getattr(module, name, None)
    if parameter is not None:
        parameter.requires_grad = False


def _feed_forwards(chunk: nn.Module) -> Iterator[object]:
    """The feed-forward modules of all layers of a chunk, under Onstep's name or Megatron's."""
    inner = chunk
    while isinstance(inside := getattr(inner, "module", None), nn.Module):
        inner = inside
    layers: list[object] = []
    for owner in (inner, getattr(inner, "decoder", None)):
        found: Iterable[object] | None = getattr(owner, "layers", None)
        layers += found or ()
    layers += [depth.layer for depth in getattr(getattr(inner, "mtp", None), "depths", ())]
    for layer in layers:
        for name in ("feed_forward", "mlp"):
            block = getattr(layer, name, None)
            if block is not None:
                yield block
