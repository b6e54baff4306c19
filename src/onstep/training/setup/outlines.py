"""Builds models without the values of their parameters, for layouts in which no rank holds the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep.checkpoint.format.stored_tensors import StoredTensor
from onstep.checkpoint.loading import open_weights
from onstep.config import ConfigContainer, ModelConfig, from_dict
from onstep.distributed import World, attempt, raise_together
from onstep.distributed.boxes import Box
from onstep.errors import ConfigError
from onstep.models.hf.any_directory import LanguageModel, empty_model
from onstep.models.hf.by_tensor import family_values, hf_values
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.hf.documents_probe import small_copy
from onstep.models.hf.family_directory import build_causal_lm, load_causal_lm
from onstep.models.hf.sequence_regions import check_sequences
from onstep.models.hf.tensor_styles import check_model
from onstep.models.initial_weights import initial_values
from onstep.models.transformer import Transformer
from onstep.models.weight_values import Give, GiveAll, Slices, Value, value_of
from onstep.models.without_values import CannotRedrawError, redraw, without_values
from onstep.training.setup.checkpoint_models import model_of
from onstep.training.setup.filling import PendingWeights
from onstep.training.setup.lora import adapted_names, add_lora, merged_state_dict, plain_name
from onstep.training.setup.pretrained import PretrainedSource, checked
from onstep.training.setup.weight_types import type_at_first

_CANNOT = (CannotRedrawError, ConfigError)
"""Errors of drawing again; the second is what `build_causal_lm` makes of others."""


def outline_of(
    config: ConfigContainer, world: World, source: PretrainedSource | None
) -> tuple[LanguageModel, PendingWeights]:
    """A model whose parameters are on the device `meta`, and what they are to be filled with.

    The values are those that one process would have, whatever the number of ranks.

    Args:
        config: the configuration of the run.
        world: its ranks.
        source: the pretrained weights; None draws the initial ones from the seed.

    Raises:
        ConfigError: for a quantized base.
    """
    if config.peft.base_quantization is not None:
        raise ConfigError(
            f"peft.base_quantization={config.peft.base_quantization} cannot be divided between ranks, as "
            f"parallel.data_parallel_shard_size={config.parallel.data_parallel_shard_size} asks for; set the size to "
            f"1, or keep the base in bfloat16: peft.base_quantization=null and mixed_precision=bf16_mixed."
        )
    if config.model.hf_config is None:
        return _own(config, world, source)
    return _of_transformers(config, world, source)


def check_blocks(config: ConfigContainer) -> None:
    """Refuse (ConfigError) blocks and plans that the configured model does not have; done before the ranks meet.

    Args:
        config: the configuration of a run whose model nothing but LoRA changes.
    """
    if config.parallel.tensor_model_parallel_size > 1 and config.model.hf_config is not None:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            planned = empty_model(config.model, device="meta")
            check_model(planned, config.parallel.tensor_model_parallel_size)
            if config.parallel.sequence_parallel:
                check_sequences(planned)
    if config.parallel.data_parallel_shard_size == 1 or config.fsdp.wrap is None:
        return
    from onstep.distributed.fully_sharded import blocks_of, check_shared  # importing DTensor costs 0.7 s

    sized = replace(config.model, vocab_size=config.model.vocab_size or 1)  # that of the tokenizer is not known yet
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        model = empty_model(sized, device="meta")
        if config.peft.peft_scheme is not None:
            add_lora(model, config.peft, config.rng.seed)
    check_shared(model, blocks_of(model, config.fsdp.wrap))


def _own(config: ConfigContainer, world: World, source: PretrainedSource | None) -> tuple[Transformer, PendingWeights]:
    with without_values():
        model = Transformer(config.model).to(type_at_first(config))
    if source is not None and source.is_hugging_face:
        return model, PendingWeights(model, hf_values(source.path, model))
    if source is not None:
        return model, PendingWeights(model, _of_checkpoint(source, model, config, world))
    shapes = [(name, one.shape) for name, one in model.named_parameters()]

    def draw(give: Give) -> None:
        generator = torch.Generator(device="cpu").manual_seed(config.rng.seed)
        for name, values in initial_values(shapes, model.config, generator):
            give(name, value_of(values))

    return model, PendingWeights(model, draw)


def _of_transformers(
    config: ConfigContainer, world: World, source: PretrainedSource | None
) -> tuple[CausalLM, PendingWeights]:
    dtype, seed = type_at_first(config), config.rng.seed

    def build() -> CausalLM:
        return build_causal_lm(config.model, seed, dtype=dtype)

    model, names = _without_values(build)
    if source is not None and source.is_hugging_face:
        read = family_values(source.path, model)
        whole = _from_first_rank(model, world, lambda: load_causal_lm(source.path, config.model, dtype))
        return model, PendingWeights(model, read or whole)
    if source is not None:
        return model, PendingWeights(model, _of_checkpoint(source, model, config, world))

    def draw(give: Give) -> None:
        if is_redrawn_exactly(config.model, seed, dtype):
            try:
                return _redraw(build, names, give)
            except _CANNOT:
                pass  # all ranks come here, as all build the same
        return _from_first_rank(model, world, build)(give)

    return model, PendingWeights(model, draw)


def is_redrawn_exactly(config: ModelConfig, seed: int, dtype: torch.dtype) -> bool:
    """Whether a small copy of a model gets, one tensor at a time, the values that it gets when it is built.

    Args:
        config: the section `model` of a configuration, of a class of `transformers`.
        seed: of the values.
        dtype: the type of the weights.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            small = small_copy(config).config

        def build() -> CausalLM:
            return build_causal_lm(small, seed, dtype=dtype)

        whole, (_, names) = build(), _without_values(build)
        drawn: dict[str, Tensor] = {}

        def keep(name: str, value: Value) -> None:
            drawn[name] = value.read(tuple(slice(0, size) for size in value.shape)).clone()

        _redraw(build, names, keep)
    except _CANNOT:
        return False
    values = dict(chain(whole.named_parameters(), whole.named_buffers()))
    return all(name in drawn and _same_bits(drawn[name], one) for name, one in values.items())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.detach().nan_to_num())


def _without_values(build: Callable[[], CausalLM]) -> tuple[CausalLM, list[str | None]]:
    """The model without values, and the name of each parameter that it gets on the way; None for one that is replaced
    by another, as an output that is tied."""
    seen: list[nn.Parameter] = []
    with without_values(lambda parameter, values: seen.append(parameter)):
        model = build()
    known = {id(one): name for name, one in model.named_parameters()}
    return model, [known.get(id(one)) for one in seen]


def _redraw(build: Callable[[], CausalLM], names: list[str | None], give: Give) -> None:
    """Give the parameters and buffers of a model their initial values."""

    def put(number: int, values: Tensor) -> None:
        if (name := names[number]) is not None:
            give(name, value_of(values))

    twin = redraw(build, put)
    for name, buffer in twin.named_buffers():
        give(name, value_of(buffer))


def _of_checkpoint(source: PretrainedSource, model: nn.Module, config: ConfigContainer, world: World) -> GiveAll:
    """What gives the weights of a checkpoint, with LoRA merged into one matrix at a time. Collective."""
    info = checked(source, world)
    peft = from_dict(info.manifest.config).peft
    if peft.base_quantization is not None:  # several tensors make up a matrix
        dtype = type_at_first(config)
        return _from_first_rank(model, world, lambda: model_of(info, config.model, dtype))
    stored = open_weights(info).tensors
    adapted = adapted_names(stored) if peft.peft_scheme is not None else {}

    def give_all(give: Give) -> None:
        for name, one in stored.items():
            if name not in adapted:
                give(plain_name(name), Value(one.shape, partial(_part, one)))
        for names in dict.fromkeys(adapted.values()):
            read = {name: stored[name].read() for name in names}
            for name, tensor in merged_state_dict(read, peft.alpha / peft.dim).items():
                give(name, value_of(tensor))

    return give_all


def _part(stored: StoredTensor, part: Slices) -> Tensor:
    return stored.read_box(Box(tuple(one.start for one in part), tuple(one.stop - one.start for one in part)))


def _from_first_rank(model: nn.Module, world: World, build: Callable[[], nn.Module]) -> GiveAll:
    """What gives the values of a model that the first of the ranks with different samples builds whole.

    Args:
        model: the same without values.
        world: the ranks of the run.
        build: builds it.
    """
    stored = model.state_dict(keep_vars=True)
    described = {id(one): (name, one.shape, one.dtype) for name, one in reversed(stored.items())}.values()

    def give_all(give: Give) -> None:
        whole, error = attempt(build) if world.data.rank == 0 else (None, None)
        raise_together(world, error, "building the model")
        tensors = (
            {} if whole is None else dict(chain(whole.named_parameters(remove_duplicate=False), whole.named_buffers()))
        )
        for name, shape, dtype in list(described):
            tensor = tensors[name].detach().to(world.device) if tensors else torch.empty(shape, dtype=dtype)
            tensor = tensor.to(world.device).contiguous()
            if world.data.size > 1:
                dist.broadcast(tensor, group=world.data.group(), group_src=0)
            give(name, value_of(tensor))

    return give_all


@contextmanager
def with_stand_ins(model: nn.Module) -> Iterator[None]:
    """Context in which parameters on `meta` are zeros on the CPU that take no memory, for code that adds to a model."""
    stands: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def replace(found: nn.Parameter) -> nn.Parameter:
        zeros = torch.zeros((), dtype=found.dtype).expand(found.shape)
        return stands.setdefault(id(found), (found, nn.Parameter(zeros, found.requires_grad)))[1]

    _exchange(model, lambda one: replace(one) if one.is_meta else one)
    try:
        yield
    finally:
        originals = {id(stand): (original, stand) for original, stand in stands.values()}

        def restore(one: nn.Parameter) -> nn.Parameter:
            original, stand = originals.get(id(one), (one, one))
            original.requires_grad_(stand.requires_grad)
            return original

        _exchange(model, restore)


def _exchange(model: nn.Module, by: Callable[[nn.Parameter], nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = by(parameter)
