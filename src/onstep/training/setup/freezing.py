"""Parts of a model that training leaves as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from onstep.models.heads import ModelList, ensure_model_list

_ROUTER = ("weight", "bias")
_SHARED_GATE = ("gate_weight", "gate_bias")


def freeze_moe_router(model: nn.Module | ModelList) -> ModelList:
    """The model as a list of chunks, the weights of its routers and of its shared experts' gates frozen in place.

    Found are `layers[i].feed_forward` of Onstep's models and `decoder.layers[i].mlp` of Megatron's, those of
    multi-token prediction too, also behind data-parallel and other wrappers; what a layer does not have is passed over.

    The routing of a frozen router does not move: its expert bias is left as it is here, and our loop updates it only
    where the router's weight is trained. The auxiliary losses still reach what lies before the router. Freeze before
    the optimizer is made and the model is wrapped.

    Args:
        model: one chunk or a list of chunks; a list is returned itself.
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
    """Take the parameter `name` of a module out of training; nothing where there is none."""
    parameter = getattr(module, name, None)
    if parameter is not None:
        parameter.requires_grad = False


def _feed_forwards(chunk: nn.Module) -> Iterator[object]:
    """The feed-forward parts of all layers of a chunk, under Onstep's name or Megatron's."""
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
