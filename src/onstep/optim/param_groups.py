"""Builds an optimizer's parameter groups from the roles of parameters: embedding, output matrix, matrix, vector."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from onstep.config import OptimizerConfig
from onstep.config.checks.optimizer import check_decoupled_entry
from onstep.config.suggestions import nearest
from onstep.distributed.shards import model_parameter
from onstep.errors import ConfigError
from onstep.events.context import plain_name, unwrap


@dataclass(frozen=True, order=True)
class _Place:
    """The key that distinguishes groups; they are sorted by it, so that the last one has the common rate."""

    is_for_adam: bool
    entry: int
    """Index of the matching entry of `optimizer.param_groups`; one past the last if none matches."""
    is_coupled: bool
    is_plain: bool
    """Whether the group has no weight decay."""


def param_groups(
    roles: Mapping[Parameter, ParameterRole], config: OptimizerConfig, elsewhere: Collection[str] = ()
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups for Muon (none for another optimizer) and those for the other updates; no group is empty.

    Without further settings there are two: matrices and larger, with weight decay (`wd_mult` 1), and parameters of
    fewer dimensions and biases, without (`wd_mult` 0).

    Args:
        roles: the parameters of this rank.
        config: the section `optimizer` of a configuration.
        elsewhere: names of parameters that other stages of a pipeline have, which entries may match too.

    Raises:
        ConfigError: if an entry of `optimizer.param_groups` matches no remaining trainable parameter, or lets a
            decoupled rate rise.
    """
    entries = [str(entry["match"]) for entry in config.param_groups]
    matched = {param: _first_match(role.name, entries) for param, role in roles.items()}
    used = {*matched.values(), *(_first_match(name, entries) for name in elsewhere)}
    _check_all_used(entries, used, [*dict.fromkeys([*(role.name for role in roles.values()), *elsewhere])])
    has_decoupled_rate = config.decoupled_lr is not None or config.decoupled_min_lr is not None
    members: dict[_Place, list[Parameter]] = {}
    for param, role in roles.items():
        is_for_adam = config.optimizer != "muon" or not role.is_layer_matrix
        is_coupled = not (has_decoupled_rate and role.is_embedding_or_output)
        members.setdefault(_Place(is_for_adam, matched[param], is_coupled, not role.is_decayed), []).append(param)
    groups = [(place, _group(place, members[place], config)) for place in sorted(members)]
    return (
        [group for place, group in groups if not place.is_for_adam],
        [group for place, group in groups if place.is_for_adam],
    )


def _first_match(name: str, entries: Sequence[str]) -> int:
    return next((number for number, entry in enumerate(entries) if fnmatchcase(name, entry)), len(entries))


def _group(place: _Place, params: list[Parameter], config: OptimizerConfig) -> dict[str, Any]:
    group: dict[str, Any] = {
        "params": params,
        "weight_decay": 0.0 if place.is_plain else config.weight_decay,
        "wd_mult": 0.0 if place.is_plain else 1.0,
        "is_decoupled_lr": not place.is_coupled,  # embedding and output matrices with a separate learning rate
    }
    if not place.is_coupled:
        group |= {"max_lr": config.decoupled_lr, "min_lr": config.decoupled_min_lr}
    if place.entry < len(config.param_groups):
        if not place.is_coupled:
            check_decoupled_entry(place.entry, config)
        entry = config.param_groups[place.entry]
        group |= {key: float(value) for key, value in entry.items() if key != "match" and value is not None}
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    if group.get("max_lr") is not None or "lr_mult" in group:  # the values used without a scheduler
        highest = config.lr if group.get("max_lr") is None else group["max_lr"]
        group["lr"] = (highest or 0.0) * group.get("lr_mult", 1.0)
    return group


def _check_all_used(entries: Sequence[str], used: set[int], names: list[str]) -> None:
    for number, entry in enumerate(entries):
        if number in used:
            continue
        earlier = sorted({entries[_first_match(name, entries)] for name in names if fnmatchcase(name, entry)})
        if earlier:
            raise ConfigError(
                f"optimizer.param_groups[{number}] matches only parameters of earlier entries, "
                f"{', '.join(earlier)}, got match={entry!r}; move it before them, or remove it"
            )
        raise ConfigError(
            f"optimizer.param_groups[{number}] must match the name of a trainable parameter, got match={entry!r}."
            f"{_nearest_names(entry, names)}"
        )


def _nearest_names(entry: str, names: list[str]) -> str:
    """A hint: the name nearest to a plain entry, or the word nearest to one of a pattern's words, and some names."""
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    unknown = [word for word in entry.replace("*", "").split(".") if word and word not in parts]
    of_words = next((found for word in unknown if (found := nearest(word, parts))), "")
    hint = of_words if "*" in entry else nearest(entry, names)
    return f"{hint} Examples of names: {', '.join(names[:3])}."


NESTED_OUTPUT_NAMES = ("lm_head", "embed_out", "output_layer", "classifier", "score", "qa_outputs", "v_head")
"""Names of modules, outside of lists of layers, that hold a model's last projection."""

OUTPUT_NAMES = (*NESTED_OUTPUT_NAMES, "output", "out", "head", "fc", "fc_out", "value_head", "reward_head")
"""Names of direct children of a model that hold it: deeper inside, some of these are parts of layers."""


@dataclass(frozen=True)
class ParameterRole:
    """A trainable parameter and its role."""

    name: str
    """Its first name in the bare model, without a prefix even if there are several chunks."""
    is_embedding_or_output: bool
    is_decayed: bool
    """Whether it has weight decay: unless chosen otherwise, at least two dimensions, unlike biases and the scales of
    norms."""
    is_layer_matrix: bool
    """A matrix between the embedding and the output, of at least two rows and columns, which Muon can update."""


def trainable_parameters(
    model_chunks: list[nn.Module], decayed: Collection[Parameter] | None = None
) -> dict[Parameter, ParameterRole]:
    """Each trainable parameter of all chunks once, in order, with its role; `decayed` chooses the weight decay."""
    outer = {id(param) for chunk in model_chunks for param in _embeddings_and_outputs(unwrap(chunk))}
    found: dict[Parameter, ParameterRole] = {}
    for chunk in model_chunks:
        for name, param in unwrap(chunk).named_parameters():
            if param.requires_grad and param not in found:
                is_outer = id(param) in outer or bool(getattr(param, "is_embedding_or_output_parameter", False))
                is_weight = param.ndim >= 2 and not name.endswith("bias")
                is_matrix = is_weight and param.ndim == 2 and min(param.shape) > 1 and param.is_floating_point()
                is_decayed = is_weight if decayed is None else param in decayed
                found[param] = ParameterRole(plain_name(name), is_outer, is_decayed, is_matrix and not is_outer)
    return found


def parameters_left_out(model_chunks: list[nn.Module], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of trainable parameters that are in none of an optimizer's groups."""
    updated = {id(model_parameter(param)) for group in groups for param in group["params"]}
    return [role.name for param, role in trainable_parameters(model_chunks).items() if id(param) not in updated]


def _embeddings_and_outputs(model: nn.Module) -> Iterator[Tensor]:
    """The matrices of embeddings, and the matrix that produces the model's scores."""
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            yield module.weight
    outputs = [weight for module in _outputs_by_name(model) if (weight := _last_matrix(module)) is not None]
    yield from outputs
    # else the last of several direct children that hold matrices, if it is a Linear
    with_matrix = [child for child in model.children() if any(param.ndim >= 2 for param in child.parameters())]
    if not outputs and len(with_matrix) > 1 and isinstance(with_matrix[-1], nn.Linear):
        yield with_matrix[-1].weight


def _outputs_by_name(model: nn.Module) -> Iterator[nn.Module]:
    """The output modules that the model itself, or a name, declares."""
    getter = getattr(model, "get_output_embeddings", None)  # of transformers
    try:
        own_word = getter() if callable(getter) else None
    except NotImplementedError:  # a model without an output matrix
        own_word = None
    if isinstance(own_word, nn.Module):
        yield own_word
    for name, module in model.named_modules():
        parts = plain_name(f"{name}.").rstrip(".").split(".")
        names = OUTPUT_NAMES if len(parts) == 1 else NESTED_OUTPUT_NAMES
        if parts[-1] in names and not any(part.isdigit() for part in parts):
            yield module


def _last_matrix(module: nn.Module) -> Parameter | None:
    """The weight of an output, or of the last Linear in a head with several layers."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Parameter):
        weight = next((one.weight for one in reversed(list(module.modules())) if isinstance(one, nn.Linear)), None)
    return weight if isinstance(weight, Parameter) and weight.ndim >= 2 else None
