"""Cuts a model of transformers into the stages of a pipeline, by the list of its layers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig
from onstep.distributed.pipeline.seats import Computed, Seat
from onstep.distributed.pipeline.stand_ins import stand_ins_of
from onstep.distributed.pipeline.whole import WholePipeline
from onstep.errors import ConfigError
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.layers.head_share import HeadShare
from onstep.models.sizes import vocabulary_size

_RECORDED = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Options by which a model returns something of each of its layers."""


class Layers:
    """The layers of a model, and what is around them.

    The modules that a stage needs of the rest follow from their order: an embedding and what is registered before the
    layers belong to the first stage, other modules with parameters to the last, and those without to all.

    Args:
        model: a model of transformers, or a module that contains one.

    Raises:
        ConfigError: for a model that cannot be cut.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.name, self.layers = _layers_of(model)
        parts = self.name.split(".")
        self.containers = [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
        """The modules around the layers, the outermost first."""
        self.before: list[nn.Module] = []
        self.after: list[nn.Module] = []
        self.everywhere: list[nn.Module] = []
        for container, inner in zip(self.containers, parts, strict=True):
            self._check(container)
            names = [*container._modules]
            for name, part in container.named_children():
                if name != inner:
                    self._place(part, is_ahead=names.index(name) < names.index(inner))

    def _place(self, part: nn.Module, *, is_ahead: bool) -> None:
        is_embedding = any(isinstance(one, nn.Embedding) for one in part.modules())
        has_weights = next(part.parameters(), None) is not None
        if is_embedding or (is_ahead and (has_weights or isinstance(part, nn.Dropout))):
            self.before.append(part)
        elif has_weights:
            self.after.append(part)
        else:
            self.everywhere.append(part)

    def _check(self, container: nn.Module) -> None:
        if container._parameters or "forward" in vars(container):
            what = "has parameters of its own" if container._parameters else "has a forward that was replaced"
            _refuse(self.model, f"the module around its layers, {type(container).__name__}, {what}")

    @property
    def hidden_size(self) -> int:
        """The width of the hidden states between layers."""
        config: Any = next(one.config for one in reversed(self.containers) if hasattr(one, "config"))
        size: int = config.get_text_config().hidden_size
        return size

    @property
    def aliases(self) -> dict[str, str]:
        """The further names of tied parameters, each with the first one."""
        first = {one: name for name, one in self.model.named_parameters()}
        everywhere = self.model.named_parameters(remove_duplicate=False)
        return {name: first[one] for name, one in everywhere if first[one] != name}

    @property
    def tied(self) -> tuple[str, ...]:
        """The names of the parameters that the first stage and the last have both."""
        first, last = ({one for part in parts for one in part.parameters()} for parts in (self.before, self.after))
        return tuple(name for name, one in self.model.named_parameters() if one in first & last)


def _layers_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of a model's layers, with its name.

    Raises:
        ConfigError: without one list of the layers that `config.num_hidden_layers` counts, or with several.
    """
    config: Any = next(
        (one.config for one in model.modules() if hasattr(getattr(one, "config", None), "to_dict")), None
    )
    if config is None:
        _refuse(model, "it is not a model of transformers")
    asked = [name for name in _RECORDED if getattr(config, name, False)]
    if asked:
        _refuse(model, f"config.{asked[0]} returns what all of its layers compute, and a rank has some of them")
    number = getattr(config.get_text_config(), "num_hidden_layers", None)
    found = [
        (name, one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one) == number
    ]
    outermost = [(name, one) for name, one in found if not any(name.startswith(f"{other}.") for other, _ in found)]
    if len(outermost) != 1 or config.is_encoder_decoder:
        lists = ", ".join(name for name, _ in outermost) or "none"
        _refuse(model, f"it must have one nn.ModuleList of its {number} layers (config.num_hidden_layers), got {lists}")
    return outermost[0]


def _refuse(model: nn.Module, why: str) -> NoReturn:
    raise ConfigError(
        f"{type(model).__name__} cannot be cut into the stages of a pipeline: {why}; set "
        f"parallel.pipeline_model_parallel_size=1, and let parallel.data_parallel_shard_size=-1 divide the model."
    )


def num_layers_of(model: nn.Module) -> int:
    """The number of layers of a model, which stages share.

    Raises:
        ConfigError: for one that cannot be cut.
    """
    return len(Layers(model).layers)


@dataclass
class _Input:
    """What the stage before has computed for the next call, (batch, seq, hidden)."""

    seat: Seat
    tensor: Tensor | None = None

    def set(self, tensor: Tensor | list[Tensor] | None) -> None:
        """Set it; None for tokens that are to be embedded."""
        self.tensor = tensor[0] if isinstance(tensor, list) else tensor

    @property
    def given(self) -> Tensor:
        if self.tensor is None:
            raise ConfigError(
                f"stage {self.seat.stage} of a pipeline has no input: the stage before has computed one for each "
                f"micro-batch; call the model once for each in the forward step, and nowhere else."
            )
        return self.tensor


@dataclass(frozen=True)
class _Place:
    """Where a module is: its name in the whole model, the stage that has it, and the one that does not."""

    name: str
    stage: int
    seat: Seat


class _Elsewhere(nn.Module):
    """In the place of a module that is on another stage, with its attributes, and without its weights."""

    def __init__(self, whole: nn.Module, place: _Place) -> None:
        super().__init__()
        self.training = whole.training
        for name, value in vars(whole).items():
            if name != "forward" and name not in vars(self):
                setattr(self, name, value)
        self.kind, self.place = type(whole).__name__, place

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            place = self.__dict__.get("place")
            if place is None or name.startswith("__"):
                raise
        raise place.seat.lacks(f"{place.name}.{name}", place.stage)


class _Layer(_Elsewhere):
    """Hands on the hidden states; before the stage's own layers those of the stage before."""

    def __init__(self, whole: nn.Module, index: int, place: _Place, received: _Input | None) -> None:
        super().__init__(whole, place)
        self._index, self._received = index, received

    def forward(self, hidden_states: Tensor, *args: object, **keywords: object) -> Tensor:
        cache: Any = next((one for one in (*args, *keywords.values()) if getattr(one, "of_stage", False)), None)
        if cache is not None:  # it tells by its first layer how many positions it has
            seen = hidden_states.new_zeros(1, 1, hidden_states.shape[1], 1)
            cache.update(seen, seen, self._index)
        return hidden_states if self._received is None else self._received.given


class _End(_Elsewhere):
    """Ends the call of a stage with what its layers have computed."""

    def forward(self, hidden_states: Tensor, *args: object, **keywords: object) -> Tensor:
        raise Computed(hidden_states)


class _Before(_Elsewhere):
    """In the place of an embedding: its result has the right shape, and NaN for whatever should not read it."""

    def __init__(self, whole: nn.Module, place: _Place, received: _Input, tied: dict[str, nn.Parameter]) -> None:
        super().__init__(whole, place)
        self._received = received
        self._is_embedding = isinstance(whole, nn.Embedding)
        for name, parameter in tied.items():
            self.register_parameter(name, parameter)

    def forward(self, given: Tensor | None = None, *args: object, **keywords: object) -> Tensor:
        hidden = self._received.given
        is_table = self._is_embedding and isinstance(given, Tensor)
        shape = (*given.shape, self.embedding_dim) if is_table and given is not None else hidden.shape
        return hidden.new_full((), torch.nan).expand(shape)


class _After(_Elsewhere):
    """In the place of a module of the last stage."""

    def forward(self, *args: object, **keywords: object) -> NoReturn:
        raise ConfigError(
            f"the model calls its {self.kind} before its layers, but in a pipeline it must follow them; set "
            f"parallel.pipeline_model_parallel_size=1, and let parallel.data_parallel_shard_size=-1 divide the model."
        )


def cut(whole: nn.Module, seats: Sequence[Seat]) -> list[nn.Module]:
    """The stages of this rank, ascending: models of the same class, whose other parts have no weights.

    A stage is called as the whole model is. It computes masks and positions from the micro-batch, as the whole model
    does; its first layer begins with what `set_input_tensor` was given. Its call ends after its last layer with
    `Computed`, or on the last stage with what the whole model returns.

    Args:
        whole: the model, or its outline, whose modules the stages share.
        seats: which stages this rank has.

    Raises:
        ConfigError: for a model that cannot be cut.
    """
    layers = Layers(whole)
    has_first = any(seat.is_first for seat in seats)
    return [_stage(layers, seat, is_alone=not has_first) for seat in seats]


def _stage(layers: Layers, seat: Seat, *, is_alone: bool) -> nn.Module:
    whole, received, last = layers.model, _Input(seat), seat.num_stages - 1
    names = {id(module): name for name, module in whole.named_modules()}
    kept = [*layers.everywhere, *(layers.before if seat.is_first else ()), *(layers.after if seat.is_last else ())]
    copies: dict[int, Any] = {id(one): one for one in kept}
    for container in layers.containers:
        copies |= {id(one): one for one in container._buffers.values()}
        copies |= {id(value): value for value in vars(container).values() if hasattr(value, "to_dict")}
    if not seat.is_first:
        tied = {whole.get_parameter(name) for name in layers.tied} if seat.is_last else set()
        for one in layers.before:
            shared = {name: value for name, value in one.named_parameters(recurse=False) if value in tied}
            copies[id(one)] = _Before(one, _Place(names[id(one)], 0, seat), received, shared)
        if is_alone:  # the first stage, on another rank, counts them
            for parameter in tied:
                parameter.shared = True  # type: ignore[attr-defined]
    if not seat.is_last:
        kind = _End if seat.layers.stop == len(layers.layers) else _After
        copies |= {id(one): kind(one, _Place(names[id(one)], last, seat)) for one in layers.after}
    for index, one in enumerate(layers.layers):
        if index in seat.layers:
            copies[id(one)] = one
        else:
            copies[id(one)] = _place_of(one, index, _Place(names[id(one)], seat.stage_of(index), seat), received)
    stage: Any = copy.deepcopy(whole, copies)
    stage.pipeline_seat, stage.aliases = seat, layers.aliases
    stage.whole_shapes = {name: tuple(one.shape) for name, one in whole.state_dict().items()}
    stage.hidden_size, stage.tied_weights = layers.hidden_size, layers.tied
    stage.elsewhere = {one.place.name: one.place.stage for one in stage.modules() if isinstance(one, _Elsewhere)}
    stage.stand_ins = stand_ins_of(whole, stage)
    stage.set_input_tensor = received.set
    stage.own_stream = HeadShare(seat.stage, seat.num_stages).own_stream
    made: nn.Module = stage
    return made


def _place_of(layer: nn.Module, index: int, place: _Place, received: _Input) -> nn.Module:
    """What is in the place of a layer of another stage."""
    seat = place.seat
    if index == seat.layers.stop and not seat.is_last:
        return _End(layer, place)
    return _Layer(layer, index, place, received if index == seat.layers.start - 1 and not seat.is_first else None)


def new_cache(stage: Any) -> Any:
    """An empty cache for the keys and values of the layers of a stage.

    Args:
        stage: a stage.
    """
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=_inner(stage).config)
    cache.of_stage = True
    return cache


def _inner(stage: Any) -> Any:
    """The model of transformers that a stage is, or has."""
    return stage.model if isinstance(stage, CausalLM) else stage


def called(stage: Any, received: Tensor | None, tokens: Tensor, cache: Any = None) -> Tensor:
    """The hidden states that a stage computes, or of the last one the logits.

    Args:
        stage: a stage.
        received: what the stage before has computed; None for the first.
        tokens: (batch, seq), int64.
        cache: of this stage, at earlier positions, to which these are appended; None for none.
    """
    stage.set_input_tensor(received)
    try:
        kept: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        output: Any = stage(tokens) if cache is None else _inner(stage)(input_ids=tokens, **kept)
    except Computed as computed:
        output = computed.output
    finally:
        stage.set_input_tensor(None)
    found: Tensor = output if isinstance(output, Tensor) else output.logits
    return found


@torch.no_grad()
def scores_of_stages(
    pipeline: WholePipeline, tokens: Tensor, config: ModelConfig, caches: dict[nn.Module, Any] | None = None
) -> Tensor:
    """The logits (batch, vocab) of the token after `tokens`, on all ranks. Collective over the pipeline.

    Args:
        pipeline: the stages of a model of transformers.
        tokens: (batch, seq), the same on all ranks.
        config: of the model.
        caches: of the stages of this rank, at earlier positions, to which these are appended; empty at first, None
            for none.
    """

    def forward(chunk: Any, received: Tensor | None) -> Tensor:
        if caches is not None and chunk not in caches:
            caches[chunk] = new_cache(chunk)
        output = called(chunk, received, tokens, None if caches is None else caches[chunk])
        return output[:, -1] if chunk.pipeline_seat.is_last else output

    stage: Any = pipeline.chunks[0]
    dtype = next(stage.parameters()).dtype
    scores = torch.empty(len(tokens), vocabulary_size(config), dtype=dtype, device=tokens.device)
    return pipeline.run(forward, (*tokens.shape, stage.hidden_size), scores)


def empty_whole(stage: Any, dtype: torch.dtype) -> nn.Module:
    """The whole model that a stage is of, on the CPU, for a caller that fills all its weights.

    Args:
        stage: a stage of a model of `transformers`, whose class is made from its configuration.
        dtype: the type of its weights.
    """
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.random.fork_rng(devices=[]):
        whole: Any = type(stage)(stage.config).to(dtype)
    whole.tie_weights()
    made: nn.Module = whole
    return made


def release(whole: nn.Module, stages: Sequence[nn.Module]) -> None:
    """Free the weights of a model that are on other ranks: they stay as outlines.

    Args:
        whole: the model that was cut.
        stages: its stages on this rank.
    """
    kept = {one for stage in stages for one in stage.parameters()}
    outlines: dict[nn.Parameter, nn.Parameter] = {}
    for module in whole.modules():
        for name, one in module._parameters.items():
            if one is not None and one not in kept and not one.is_meta:
                if one not in outlines:
                    outlines[one] = nn.Parameter(one.detach().to("meta"), one.requires_grad)
                module._parameters[name] = outlines[one]
