"""What the ranks of the tests of calls of tensor-parallel models run: `job_*(settings)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.diloco.worker.parameters import Parameters
from onstep.distributed import World, open_world
from onstep.distributed.shards import held_part, whole
from onstep.errors import ConfigError
from onstep.metrics import estimate_training_memory
from onstep.models.heads import create_value_head_hook
from onstep.models.layers.sequence_context import KeyValueCache
from onstep.models.transformer import Transformer, build_transformer
from onstep.training.profiling.live_memory import LiveMemory
from onstep.training.setup.placement import place

VOCABULARY, LENGTH = 67, 12
VALUES = "values"


def tokens_of(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (3, length), generator=torch.Generator().manual_seed(length))


def _documents(model: Transformer) -> Tensor:
    ids = torch.tensor([0] * 5 + [1] * 3 + [2] * 4).expand(3, LENGTH)
    tokens = tokens_of(LENGTH)
    losses: Tensor = model(tokens, tokens.roll(-1, 1), document_ids=ids)
    return losses.sum()


def _positions(model: Transformer) -> Tensor:
    tokens = tokens_of(LENGTH)
    positions = torch.arange(LENGTH).flip(0).expand(3, LENGTH)
    total: Tensor = model(tokens, tokens, position_ids=positions, reduction="sum")
    return total


def _hidden(model: Transformer) -> Tensor:
    """A loss of hidden states that each rank computes as a whole."""
    return model.hidden_states(tokens_of(LENGTH)).square().sum()


def _values(model: Transformer) -> Tensor:
    values: Tensor = model(tokens_of(LENGTH))
    return values.square().sum()


def _generated(model: Transformer) -> Tensor:
    """Logits of 7 positions without and with a cache, of a length that no rank divides."""
    cache, tokens = KeyValueCache(2, 7), tokens_of(7)
    with torch.no_grad():
        first, then = model(tokens[:, :4], cache=cache), model(tokens[:, 4:], cache=cache)
        return torch.cat([model(tokens), first, then], 1)


CALLS: dict[str, Callable[[Transformer], Tensor]] = {
    "documents": _documents,
    "positions": _positions,
    "hidden": _hidden,
    VALUES: _values,
    "generated": _generated,
}


def job_calls(settings: dict[str, Any]) -> dict[str, Any]:
    """For each call, its result and the norm of each gradient; and what a length that is not a multiple says."""
    config = ConfigContainer(model=ModelConfig(vocab_size=VOCABULARY, seq_length=LENGTH))
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 2, 16, 4
    config.dist.device = "cpu"
    apply_overrides(config, settings["keys"])
    world = open_world(config.dist, config.parallel.sizes(settings["ranks"]))
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        torch.manual_seed(3)
        model: Any = build_transformer(config.model, seed=0).double()
        if name == VALUES:
            create_value_head_hook(16, sequence_parallel=False, output_size=2)([model])
            model = model.double()
        [model] = place([model], world, config)
        result = call(model)
        if result.requires_grad:
            torch.autograd.backward(result)
        grads = {one: whole(p.grad).norm().item() for one, p in model.named_parameters() if p.grad is not None}
        found[name] = [result.detach().double().flatten().tolist(), grads]
    try:
        model(tokens_of(7))
    except ConfigError as error:
        found["refused"] = str(error)
    found["averaged"] = averaged_in_vain(config, world)
    world.close()
    return found


def averaged_in_vain(config: ConfigContainer, world: World) -> list[str]:
    """What is said of parameters of whose gradients Megatron would average those of the ranks."""
    said = []
    for name in ("final_norm.weight", "layers.0.attention.query.weight"):
        model = build_transformer(config.model, seed=0)
        model.get_parameter(name).average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        try:
            place([model], world, config)
        except ConfigError as error:
            said.append(str(error))
    return said


def job_memory(settings: dict[str, Any]) -> dict[str, list[int]]:
    """Bytes of weights and activations of a rank, and what is estimated."""
    config = ConfigContainer(model=ModelConfig(num_layers=2, vocab_size=500, seq_length=128))
    config.model.hidden_size, config.model.ffn_hidden_size, config.model.num_attention_heads = 128, 512, 4
    config.train.micro_batch_size, config.optimizer.lr, config.dist.device = 2, 1e-3, "cpu"
    apply_overrides(config, settings["keys"])
    world = open_world(config.dist, config.parallel.sizes(2))
    [model] = place([build_transformer(config.model, seed=0)], world, config)
    meter, tokens = LiveMemory(250), torch.zeros(2, 128, dtype=torch.int64)
    weights = [held_part(one) for one in model.parameters()]
    meter.assign("weights, trained", [*weights, *model.buffers()])
    meter.assign("data", [tokens])
    with meter:
        meter.is_forward = True
        model(tokens, labels=tokens, reduction="sum").backward()
    estimate = estimate_training_memory(config, device="cpu")
    assert estimate is not None
    world.close()
    return {
        "weights": [sum(one.nbytes for one in weights), estimate.trained_weights],
        "activations": [meter.kept["activations"], estimate.activations],
    }


def job_exchanged(settings: dict[str, Any]) -> list[bool]:
    """Whether a worker of DiLoCo reads the whole weights on rank 0, and writes all of them."""
    config = ConfigContainer(model=ModelConfig(vocab_size=VOCABULARY, seq_length=LENGTH))
    config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads = 1, 16, 4
    config.dist.device = "cpu"
    apply_overrides(config, settings["keys"])
    world = open_world(config.dist, config.parallel.sizes(settings["ranks"]))
    alone = dict(build_transformer(config.model, seed=0).named_parameters())
    [model] = place([build_transformer(config.model, seed=0)], world, config)
    parameters = Parameters([model], world)
    read, own = parameters.whole(), parameters.read(alone)
    parameters.write(list(alone), lambda name: own[name] * 2)
    written = {name: whole(one.detach()) for name, one in model.named_parameters()}
    world.close()
    return [
        set(read) == (set(alone) if world.rank == 0 else set()),
        all(torch.equal(one, alone[name]) for name, one in read.items()),
        all(torch.equal(one, alone[name] * 2) for name, one in written.items()),
    ]
