"""Shared by the programs of `gpu_check.py`: the device, quiet jobs, a small model, and how results are printed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onstep import Callback, TrainingArguments
from onstep.cli.config import configuration
from onstep.config import ConfigContainer, ModelConfig, resolve

GIB = 2**30
IS_CUDA = torch.cuda.is_available() and os.environ.get("ONSTEP_GPU_CHECK_DEVICE") != "cpu"
DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("cpu")
QUIET = (
    "train.train_iters=20",
    "logger.log_interval=100",
    "validation.eval_interval=null",
    "validation.eval_iters=0",
    "checkpoint.save_interval=null",
    "run.name=null",
    "run.save_weights=false",
)
"""Steps that neither log, evaluate nor save."""


def job(words: list[str], *defaults: str) -> ConfigContainer:
    """The configuration that the words describe, quiet unless they say otherwise."""
    recipes = [word.partition("=")[2] for word in words if word.startswith("recipe=")]
    chosen = [word for word in words if not word.startswith("recipe=")]
    keys = {word.partition("=")[0] for word in chosen}
    before = {word.partition("=")[0]: word for word in (*QUIET, *defaults)}
    kept = [word for key, word in before.items() if key not in keys]
    config, _ = configuration([*kept, *chosen], recipes[0] if recipes else None)
    return config


def shape(**sizes: Any) -> ModelConfig:
    """A model's configuration with what derives from the sizes."""
    config = ConfigContainer(model=ModelConfig(**sizes))
    config.train.train_iters = config.train.micro_batch_size = 1
    config.optimizer.lr, config.dataset.seq_length = 1e-3, config.model.seq_length
    return resolve(config).model


def say(text: str, *, ok: bool = True) -> int:
    """Print the line of the program; the exit code."""
    print(f"RESULT {text}{'' if IS_CUDA else ' (on a CPU: waits and GPU memory are not checked)'}", flush=True)
    return int(not ok)


class Regression(nn.Module):
    """A small model of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The squared error."""
        return {"loss": (self.layers(x).squeeze(-1) - labels).square().mean()}


def rows(number: int) -> list[dict[str, Tensor]]:
    """Samples for it."""
    generator = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(64, generator=generator), "labels": torch.randn((), generator=generator)}
        for _ in range(number)
    ]


def arguments(**options: Any) -> TrainingArguments:
    """Twenty quiet steps."""
    given: dict[str, Any] = {
        "output_dir": f"trainer-{os.getpid()}-{time.monotonic_ns()}",
        "max_steps": 20,
        "per_device_train_batch_size": 8,
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not IS_CUDA,
        "config_overrides": {"run.save_weights": False},
    }
    return TrainingArguments(**{**given, **options})


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory allocated on the GPU during some work."""
    if not IS_CUDA:
        work()
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


class Losses(Callback):
    """Keeps what is logged, and the seconds of steps after the first ten."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._start = 0.0

    def on_log(self, context: Any) -> None:
        """Keep the loss."""
        if "loss" in context.logs:
            self.losses.append(float(context.logs["loss"]))

    def on_train_step_start(self, context: Any) -> None:
        """The clock of a step, which the host may leave before the device has finished; sums are right."""
        now = time.perf_counter()
        if context.trainer_state.global_step > 10:
            self.seconds.append(now - self._start)
        self._start = now
