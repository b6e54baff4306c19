"""What the ranks of the tests of tensor-parallel runs run: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
from hashlib import sha256
from typing import Any

import torch

from onstep import Callback, pretrain
from onstep.config import ConfigContainer, apply_overrides
from onstep.distributed.shards import as_dtensor
from onstep.errors import ConfigError, ReplicaMismatchError
from onstep.events.context import unwrap
from onstep.training.verification.fingerprint import fingerprint
from tests.support.small_configs import small_pretrain_config

LAYOUTS: dict[str, list[str]] = {
    "one": [],
    "tp2": ["parallel.tensor_model_parallel_size=2"],
    "tp2 sp": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
    "fsdp2": ["parallel.data_parallel_shard_size=2"],
    "fsdp2 x tp2 sp": [
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
        "parallel.data_parallel_shard_size=2",
    ],
    "distopt2 x tp2 sp": [
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
        *(f"ddp.{key}=true" for key in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")),
    ],
}


class Noted(Callback):
    """Losses, norms and evaluations; kills this process, or changes a bit of a weight, at a step."""

    ranks = "all"

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluated: list[float] = []
        self.random: list[float] = []
        self.replicas: dict[str, str] = {}
        self.prints: list[str] = []
        """The fingerprint of the weights with which each step began."""

    def on_train_step_start(self, context: Any) -> None:
        """Do what the test asks for."""
        step, rank = context.state.train_state.step, context.state.world.rank
        if not self.settings.get("long"):
            self.prints.append(fingerprint(context.model[0].parameters(), context.state.world))
        if [step, rank] == self.settings.get("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if [step, rank] == self.settings.get("drifts"):
            weight = dict(unwrap(context.model[0]).named_parameters())[self.settings["drifting"]]
            found = as_dtensor(weight)
            assert found is not None
            with torch.no_grad():
                found.to_local().view(torch.int32).view(-1)[3] ^= 1

    def on_train_step_end(self, context: Any) -> None:
        """Note a step."""
        self.losses.append(float(next(iter(context.loss_dict.values()))))
        self.norms.append(float(context.grad_norm))
        self.random.append(float(torch.rand((), generator=_copy_of_stream())))

    def on_train_end(self, context: Any) -> None:
        """Note the replicated weights with which the training ends."""
        named = {name: as_dtensor(one) for name, one in context.model[0].named_parameters()}
        replicas = {
            name: one for name, one in named.items() if one is not None and not any(map(is_shard, one.placements))
        }
        content = {name: one.to_local().detach().numpy().tobytes() for name, one in replicas.items()}
        self.replicas = {name: sha256(one).hexdigest()[:16] for name, one in content.items()}

    def on_eval_end(self, context: Any) -> None:
        """Note an evaluation."""
        self.evaluated.append(float(next(iter(context.total_loss_dict.values()))))


def is_shard(placement: Any) -> bool:
    """Whether a DTensor is divided along this dimension of its mesh."""
    return bool(placement.is_shard())


def _copy_of_stream() -> torch.Generator:
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return generator


def config_of(settings: dict[str, Any]) -> ConfigContainer:
    """Of a tiny model on a text, with a checkpoint each two steps."""
    config = small_pretrain_config(settings["corpus"] + "/colorsys.py", settings["cache"], layers=2, length=16)
    config.model.num_attention_heads, config.model.num_query_groups, config.model.hidden_dropout = 4, 1, 0.1
    config.run.name, config.run.output_dir = settings.get("run", "run"), settings["directory"]
    config.dataset.num_workers, config.logger.log_interval = 0, 1
    config.train.global_batch_size, config.train.micro_batch_size = 4, 1
    config.train.train_iters = settings.get("steps", 4)
    config.validation.eval_interval, config.validation.eval_iters = 2, 1
    config.checkpoint.certify, config.checkpoint.save_interval, config.checkpoint.most_recent_k = True, 2, -1
    apply_overrides(config, [*LAYOUTS[settings["how"]], *settings.get("keys", [])])
    return config


def job_pretrain(settings: dict[str, Any]) -> dict[str, Any]:
    """A run, or the rest of one."""
    noted = Noted(settings)
    try:
        state = pretrain(config_of(settings), callbacks=[noted])
    except (ConfigError, ReplicaMismatchError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {
        "losses": noted.losses,
        "norms": noted.norms,
        "evaluated": noted.evaluated,
        "random": noted.random,
        "prints": noted.prints,
        "replicas": noted.replicas,
        "step": state.train_state.step,
    }


def job_runs(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Several runs, one after the other, in the same processes."""
    return [job_pretrain(one) for one in settings["runs"]]
