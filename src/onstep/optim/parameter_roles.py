"""What each parameter of a model is for: an embedding, the output matrix, a matrix of the layers, or a vector."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import Parameter

from onstep.events.context import unwrap

NESTED_OUTPUT_NAMES = ("lm_head", "embed_out", "output_layer", "classifier", "score", "qa_outputs", "v_head")
"""Names of modules outside of lists of layers under which a model's last projection stands."""

OUTPUT_NAMES = (*NESTED_OUTPUT_NAMES, "output", "out", "head", "fc", "fc_out", "value_head", "reward_head")
"""Names of direct children of a model under which it stands: inside, some of these are parts of layers."""

_WRAPPER_PARTS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class ParameterRole:
    """A trainable parameter and what it is for."""

    name: str
    """Its first name in the bare model; of several chunks too, without a prefix."""
    is_embedding_or_output: bool
    is_decayed: bool
    """Weight decay is for matrices and larger; biases and the scales of norms have none."""
    is_layer_matrix: bool
    """A matrix between the embedding and the output, of at least two rows and columns: what Muon is for."""


def trainable_parameters(model_chunks: list[nn.Module]) -> dict[Parameter, ParameterRole]:
    """Each trainable parameter of all chunks once, in their order, with its role."""
    outer = {id(param) for chunk in model_chunks for param in _embeddings_and_outputs(unwrap(chunk))}
    found: dict[Parameter, ParameterRole] = {}
    for chunk in model_chunks:
        for name, param in unwrap(chunk).named_parameters():
            if param.requires_grad and param not in found:
                is_outer = id(param) in outer or getattr(param, "is_embedding_or_output_parameter", False)
                found[param] = _role(_plain(name), param, bool(is_outer))
    return found


def _role(name: str, param: Parameter, is_outer: bool) -> ParameterRole:
    is_decayed = param.ndim >= 2 and not name.endswith("bias")
    is_matrix = is_decayed and param.ndim == 2 and min(param.shape) > 1 and param.is_floating_point()
    return ParameterRole(name, is_outer, is_decayed, is_matrix and not is_outer)


def _embeddings_and_outputs(model: nn.Module) -> Iterator[Tensor]:
    """The matrices of embeddings, and the matrix that the model's scores come from."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight
    outputs = [weight for module in _outputs_by_name(model) if (weight := _last_matrix(module)) is not None]
    last = None if outputs else _last_child(model)
    yield from outputs if last is None else [last.weight]


def _outputs_by_name(model: nn.Module) -> Iterator[nn.Module]:
    """What the model itself, or a name, says to be its output."""
    own_word = _hugging_face_output(model)
    if own_word is not None:
        yield own_word
    for name, module in model.named_modules():
        parts = _plain(f"{name}.").rstrip(".").split(".")
        names = OUTPUT_NAMES if len(parts) == 1 else NESTED_OUTPUT_NAMES
        if parts[-1] in names and not any(part.isdigit() for part in parts):
            yield module


def _last_matrix(module: nn.Module) -> Parameter | None:
    """The weight of an output, or of the last Linear in a head of several layers."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Parameter):
        weight = next((one.weight for one in reversed(list(module.modules())) if isinstance(one, nn.Linear)), None)
    return weight if isinstance(weight, Parameter) and weight.ndim >= 2 else None


def _last_child(model: nn.Module) -> nn.Linear | None:
    """The last of several direct children that hold matrices, if it is a Linear."""
    with_matrix = [child for child in model.children() if any(param.ndim >= 2 for param in child.parameters())]
    return with_matrix[-1] if len(with_matrix) > 1 and isinstance(with_matrix[-1], nn.Linear) else None


def _hugging_face_output(model: nn.Module) -> nn.Module | None:
    getter = getattr(model, "get_output_embeddings", None)
    try:
        module = getter() if callable(getter) else None
    except NotImplementedError:  # a model without an output matrix
        return None
    return module if isinstance(module, nn.Module) else None


def _plain(name: str) -> str:
    for part in _WRAPPER_PARTS:
        name = name.replace(part, "")
    return name
