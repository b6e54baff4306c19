"""What the ranks of the tests of saved activations run: `job_*(settings)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onstep import CallbackManager
from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.distributed import open_world
from onstep.distributed.shards import held_part
from onstep.metrics import estimate_training_memory
from onstep.models import build_transformer
from onstep.training import train
from onstep.training.setup.placement import place
from onstep.training.setup.weight_types import set_weight_types
from tests.support.jobs.pipeline_jobs import LENGTH, Ragged, config_of, divided, optimizer_of
from tests.support.saved_bytes import SavedBytes


def _weights(chunks: list[nn.Module]) -> list[Tensor]:
    return [held_part(one) for chunk in chunks for one in (*chunk.parameters(), *chunk.buffers())]


def job_of_tensors(settings: dict[str, Any]) -> list[dict[str, int]]:
    """For each list of overrides, the most bytes that a micro-batch saves, and the estimate."""
    return [_of_tensors(keys, settings["ranks"]) for keys in settings["keys"]]


def _of_tensors(keys: list[str], ranks: int) -> dict[str, int]:
    config = ConfigContainer(model=ModelConfig(num_layers=3, vocab_size=500, seq_length=32))
    config.model.hidden_size, config.model.ffn_hidden_size, config.model.num_attention_heads = 64, 96, 4
    config.train.micro_batch_size, config.optimizer.lr, config.dist.device = 2, 1e-3, "cpu"
    apply_overrides(config, keys)
    world = open_world(config.dist, config.parallel.sizes(ranks))
    built = build_transformer(config.model, seed=0)
    set_weight_types([built], config)
    [model] = place([built], world, config)
    tokens, labels = (torch.zeros(2, 32, dtype=torch.int64) for _ in range(2))
    with (
        SavedBytes([*_weights([model]), tokens, labels]) as saved,
        torch.autocast("cpu", torch.bfloat16, enabled=config.mixed_precision is not None),
    ):
        model(tokens, labels=labels, reduction="sum").backward()
    estimate = estimate_training_memory(config, device="cpu")
    assert estimate is not None
    world.close()
    kept_logits = estimate.logits // 3  # the rest is temporary
    return {"saved": saved.peak, "estimate": estimate.activations + kept_logits + estimate.weight_copies}


def job_of_stages(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """For each list of overrides, the most bytes that a step saves, and those that a pass of each stage saves.

    Of the last stage, a pass without its loss too.
    """
    found = []
    for keys in settings["rows"]:
        config = config_of(keys, 1)
        chunks, state, loader = divided(config, settings["ranks"])
        manager, optimizer = CallbackManager(), optimizer_of(chunks)
        with SavedBytes(_weights(chunks)) as saved:
            train(_step, chunks, optimizer, None, loader, None, state, callback_manager=manager)
        parts = state.world.sizes.tp if config.parallel.sequence_parallel else 1
        each = {chunk.pipeline_seat.stage: _of_pass(chunk, config, parts) for chunk in chunks}  # type: ignore[union-attr]
        found.append({"peak": saved.peak, "each": each, "left": saved.now})
        state.world.close()
    return found


def _step(data_iterator: Any, model: nn.Module) -> Any:
    batch = next(data_iterator)
    logits = model(batch["tokens"])
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), lambda loss: loss


def _of_pass(chunk: Any, config: ConfigContainer, parts: int) -> list[int]:
    rows = config.train.micro_batch_size or 1
    samples = [Ragged()[index] for index in range(rows)]
    batch = {name: torch.stack([one[name] for one in samples]) for name in ("tokens", "labels")}
    with SavedBytes(_weights([chunk])) as saved:
        if not chunk.pipeline_seat.is_first:
            shape = (rows, LENGTH // parts, config.model.hidden_size)
            chunk.set_input_tensor(torch.zeros(shape, requires_grad=True))
        result = chunk(batch["tokens"])
        without_loss = saved.now
        if chunk.pipeline_seat.is_last:
            loss = cross_entropy(result.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            result = loss * torch.tensor(1.0)  # as a step begins its backward pass
        return [saved.now, without_loss if result is not None else 0]
