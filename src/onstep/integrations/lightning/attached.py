"""Gives a module its `self.trainer`: the facts of a run under the names of Lightning's Trainer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.integrations.lightning.definitions import is_defined
from onstep.integrations.lightning.loaders import Loaders, length_of
from onstep.integrations.lightning.logged import Logged
from onstep.trainer import Trainer


@dataclass
class Progress:
    """Where a training is, as Lightning counts."""

    epoch: int = 0
    batches: int = 0
    """Micro-batches of this epoch so far, on this rank."""
    awaits: str = ""
    """What waits for the evaluation that is due, before plateau schedulers see its metrics: "step", "epoch" or ""."""


class AttachedTrainer:
    """`self.trainer` of a module: it has the names in `FACTS`, `max_steps` and `should_stop`; others are refused."""

    def __init__(self, trainer: Trainer, loaders: Loaders, logged: Logged, progress: Progress) -> None:
        self._trainer, self._loaders, self._logged, self._progress = trainer, loaders, logged, progress
        self._scheduled: list[Any] = []
        """The schedulers of `configure_optimizers`."""

    def __deepcopy__(self, memo: object) -> Self:
        """Itself: a copy of a module, such as a moving average, has the same trainer."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name in FACTS:
            return FACTS[name](self)
        known = ", ".join(sorted(FACTS))
        raise AttributeError(f"self.trainer has no {name} under Onstep's LightningTrainer; it has {known}")

    def attach(self, module: Any) -> None:
        """Make this the module's trainer, and route its `log` and the like here."""
        module.trainer, module.log, module.log_dict = self, self._logged.log, self._logged.log_dict
        for name in ("optimizers", "lr_schedulers", "print", "all_gather"):
            if not is_defined(module, name):
                setattr(module, name, getattr(self, f"_of_module_{name}"))

    def set_scheduled(self, scheduled: list[Any]) -> None:
        """Show these schedulers to the module."""
        self._scheduled = scheduled

    @property
    def should_stop(self) -> bool:
        """Whether a stop is asked for; set it to ask for one."""
        return bool(self._trainer.control.should_training_stop)

    @should_stop.setter
    def should_stop(self, stops: bool) -> None:
        self._trainer.control.should_training_stop = stops

    def _of_module_optimizers(self, use_pl_optimizer: bool = True) -> Any:
        return self._trainer.optimizer

    def _of_module_lr_schedulers(self) -> Any:
        return _one_or_all([one.scheduler for one in self._scheduled])

    def _of_module_print(self, *args: Any, **options: Any) -> None:
        if self.is_global_zero:
            print(*args, **options)  # noqa: T201 - what the module asked for

    def _of_module_all_gather(self, data: Tensor, group: object = None, sync_grads: bool = False) -> Tensor:
        """The tensors of all ranks, stacked; with `sync_grads`, gradients reach this rank's own. Collective."""
        if self.world_size == 1:
            return data
        parts = [torch.empty_like(data) for _ in range(self.world_size)]
        dist.all_gather(parts, data.detach().contiguous())
        if sync_grads:
            parts[self.global_rank] = data
        return torch.stack(parts)

    def _num_training_batches(self) -> int | float:
        whole = length_of(self._loaders.training_loader())
        return whole if math.isinf(whole) else math.ceil(whole / self._trainer.args.world_size)

    def _num_steps(self) -> int | float:
        args = self._trainer.args
        if args.max_steps > 0:
            return args.max_steps
        steps = self._num_training_batches() / args.gradient_accumulation_steps
        return steps if math.isinf(steps) else math.ceil(math.ceil(steps) * args.num_train_epochs)

    def _global_step(self) -> int:
        run = self._trainer.global_state
        return 0 if run is None else run.train_state.step


def _one_or_all(found: list[Any]) -> Any:
    """None, the only one, or all."""
    return found if len(found) > 1 else (found or [None])[0]


def _max_epochs(args: Any) -> int | None:
    return math.ceil(args.num_train_epochs) if args.max_steps <= 0 else None


FACTS: dict[str, Callable[[Any], Any]] = {
    "accumulate_grad_batches": lambda my: my._trainer.args.gradient_accumulation_steps,
    "callback_metrics": lambda my: my._logged.metrics,
    "callbacks": lambda my: my._trainer.callback_manager.callbacks,
    "current_epoch": lambda my: my._progress.epoch,
    "datamodule": lambda my: my._loaders.datamodule,
    "default_root_dir": lambda my: my._trainer.args.output_dir,
    "estimated_stepping_batches": lambda my: my._num_steps(),
    "global_rank": lambda my: my._trainer.args.process_index,
    "global_step": lambda my: my._global_step(),
    "gradient_clip_val": lambda my: my._trainer.args.max_grad_norm,
    "is_global_zero": lambda my: my._trainer.args.process_index == 0,
    "is_last_batch": lambda my: my._progress.batches + 1 >= my._num_training_batches(),
    "lightning_module": lambda my: my._trainer.model,
    "local_rank": lambda my: my._trainer.args.local_process_index,
    "log_dir": lambda my: my._trainer.args.output_dir,
    "logged_metrics": lambda my: my._logged.metrics,
    "logger": lambda my: None,
    "loggers": lambda my: [],
    "lr_scheduler_configs": lambda my: my._scheduled,
    "max_epochs": lambda my: _max_epochs(my._trainer.args),
    "max_steps": lambda my: my._trainer.args.max_steps,
    "model": lambda my: my._trainer.model,
    "num_training_batches": lambda my: my._num_training_batches(),
    "optimizers": lambda my: [my._trainer.optimizer],
    "sanity_checking": lambda my: False,
    "train_dataloader": lambda my: my._loaders.training_loader(),
    "training": lambda my: my._trainer.is_in_train and my._logged.phase == "training",
    "val_dataloaders": lambda my: _one_or_all(my._loaders.validation()),
    "validating": lambda my: my._logged.phase == "validation",
    "world_size": lambda my: my._trainer.args.parallel_sizes.ranks,
}
"""The attributes that `self.trainer` has."""
