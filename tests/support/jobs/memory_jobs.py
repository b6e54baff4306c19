"""What the ranks of the tests of the memory of ranks run: `job_*(settings)`."""

from __future__ import annotations

from typing import Any

import torch

from onstep import Callback, CallbackManager
from onstep.config import ConfigContainer, ModelConfig, apply_overrides
from onstep.distributed import open_world, world_size_from_environment
from onstep.distributed.buffered import BufferedDataParallel, buffered_chunks
from onstep.distributed.shards import held_part
from onstep.metrics import estimate_training_memory
from onstep.metrics.memory.estimate import rank_estimates
from onstep.models import build_transformer
from onstep.optim import build_optimizer
from onstep.training import train
from onstep.training.setup.placement import place
from onstep.training.setup.weight_types import set_weight_types
from tests.support.jobs.pipeline_jobs import STEPS, config_of, divided, optimizer_of
from tests.support.live_bytes import LiveBytes

SIZES = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "vocab_size": 48, "num_layers": 4}


def job_counted(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """For each list of overrides, what a rank holds and makes in sums and an update, beside the estimate."""
    ranks, found = world_size_from_environment(), []
    for keys in settings["keys"]:
        config = ConfigContainer(model=ModelConfig(seq_length=8, **SIZES))
        config.train.micro_batch_size, config.train.global_batch_size = 1, ranks
        apply_overrides(config, ["optimizer.lr=0.01", "dist.device=cpu", *keys])
        world = open_world(config.dist, config.parallel_sizes(ranks))
        built = build_transformer(config.model, seed=0)
        set_weight_types([built], config)
        [model] = place([built], world, config)
        optimizer = build_optimizer([model], config.optimizer)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens, tokens, reduction="sum").backward()
            with LiveBytes() as summed:
                optimizer.prepare()
            with LiveBytes() as made:
                optimizer.apply()
        estimate = estimate_training_memory(config, device="cpu", ranks=ranks)
        assert estimate is not None
        counted = {"weights": _bytes(model.parameters()), "optimizer state": 0, "masters": 0}
        for state in optimizer.state.values():
            for name, value in state.items():
                kind = "masters" if name == "remainder" else "optimizer state"
                counted[kind] += _bytes([value]) if value.ndim else 0
        if isinstance(model, BufferedDataParallel):
            counted["masters"] += _bytes(model.masters.values())
            pairs = [(one.gradient, one.shard_gradient) for one in model.members]
            counted["gradients"] = _bytes(one for pair in pairs for one in pair)
        else:
            counted["gradients"] = _bytes(one.grad for one in model.parameters() if one.grad is not None)
        expected = {kind: estimate.kinds.get(kind, estimate.weights) for kind in counted}
        beyond = estimate.total - estimate.held - estimate.gradients
        found.append(
            {"counted": counted, "expected": expected, "made": made.peak, "summed": summed.peak, "beyond": beyond}
        )
        world.close()
    return found


def _bytes(tensors: Any) -> int:
    return sum(held_part(one).nbytes for one in tensors)


class Held(Callback):
    """Bytes of weights, gradients and optimizer state on this rank at the end of a step."""

    ranks = "all"

    def on_train_step_end(self, context: Any) -> None:
        parameters = dict.fromkeys(one for chunk in context.model for one in chunk.parameters())
        self.found = {
            "weights": _bytes(parameters),
            "gradients": _bytes(one.grad for one in parameters if one.grad is not None),
            "optimizer state": 0,
        }
        if members := [one for chunk in buffered_chunks(context.model) for one in chunk.members]:
            pairs = [(one.gradient, one.shard_gradient) for one in members]
            self.found["gradients"] = _bytes(one for pair in pairs for one in pair)

    def on_train_end(self, context: Any) -> None:
        state = [one for kept in context.optimizer.state.values() for one in kept.values() if one.ndim]
        self.found["optimizer state"] = _bytes(state)


def job_of_layouts(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """For each list of overrides, what a rank holds in a training, beside the estimate of its stage."""
    found = []
    for keys in settings["keys"]:
        config = config_of(["model.vocab_size=68", *keys], 1)
        chunks, state, loader = divided(config, settings["ranks"])
        held, manager, world = Held(), CallbackManager(), state.world
        manager.add(held)
        train(STEPS["sum"], chunks, optimizer_of(chunks), None, loader, None, state, callback_manager=manager)
        estimate = rank_estimates(config, device="cpu", ranks=world.data.size)[
            world.rank * world.sizes.pp // world.size
        ]
        expected = {kind: estimate.kinds.get(kind, estimate.weights) for kind in held.found}
        found.append({"held": held.found, "expected": expected})
        world.close()
    return found
