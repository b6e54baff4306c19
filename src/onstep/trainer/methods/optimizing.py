"""Hugging Face's methods that create and describe the optimizer and the scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from onstep.config import TrainingArguments
from onstep.errors import ConfigError
from onstep.optim.named_optimizers import optimizer_class
from onstep.optim.protocol import Groups
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.optimizer_checks import is_object
from onstep.trainer.optimizers import own_optimizer, own_scheduler
from onstep.training.protocols import UserOptimizer

_NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Source: transformers 5.23, Trainer.get_decay_parameter_names."""


class OptimizingMethods(BaseTrainer):
    """Hugging Face's methods that create and describe the optimizer and the scheduler.

    `train()` calls `create_optimizer` and `create_scheduler`, or `create_optimizer_and_scheduler` if a subclass
    overrides it (Hugging Face 5.x does not call that one), once the model is on its device.
    """

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Set `self.optimizer` and `self.lr_scheduler`.

        Args:
            num_training_steps: steps (optimizer updates) of the whole training, which the schedule is for.
        """
        self.create_optimizer()
        self.create_scheduler(num_training_steps=num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> object:
        """Set `self.optimizer`, unless it is set, and return it: a torch optimizer of the trainable parameters.

        It is the one of `optimizers`, `optimizer_cls_and_kwargs` or `args`; one of `args` has a group of the parameters
        of `get_decay_parameter_names`, with weight decay, and a group of the others.

        Args:
            model: the module whose trainable parameters are optimized; None for the Trainer's own, or its
                stages on this rank.
        """
        if not is_object(self.optimizer):
            of_this_rank = self.model if self.stages is None else self.stages.module
            self.optimizer = own_optimizer(self, of_this_rank if model is None else model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: UserOptimizer | None = None) -> object:
        """Set `self.lr_scheduler`, unless it is set, and return it: the schedule of `args` as a torch scheduler.

        Args:
            num_training_steps: length of the schedule in optimizer steps.
            optimizer: whose rates it sets; None is `self.optimizer`.
        """
        if not is_object(self.lr_scheduler):
            self.lr_scheduler = own_scheduler(
                self, self.optimizer if optimizer is None else optimizer, num_training_steps
            )
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(
        args: TrainingArguments, model: nn.Module | None = None
    ) -> tuple[Callable[..., UserOptimizer], dict[str, object]]:
        """The class and the keywords of the optimizer that `args` name.

        Args:
            model: the model, which some optimizers ask for.

        Raises:
            ConfigError: if its package is not installed.
        """
        return optimizer_class(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: all but biases and norms, recognized by name or class.

        Args:
            model: the module whose parameters are named.
        """
        norms = tuple(f"{name}." for name, each in model.named_modules() if name and isinstance(each, nn.LayerNorm))
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        return [name for name in names if not name.startswith(norms) and not _NOT_DECAYED.search(name.lower())]

    def get_num_trainable_parameters(self) -> int:
        """Number of trainable values of the model.

        Raises:
            ConfigError: before there is a model.
        """
        if self.model is None:
            raise ConfigError("Trainer has no model yet: model_init runs when training starts; call train().")
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The next learning rate of each parameter group.

        Raises:
            ConfigError: before an optimizer is created.
        """
        return [group["lr"] for group in self._groups()]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> object:
        """The group of a parameter; for None, or a parameter that is in no group, the parameters of each group.

        Args:
            param: the parameter whose group is returned; None for all groups.

        Raises:
            ConfigError: before an optimizer is created.
        """
        groups = self._groups()
        for group in groups:
            if any(one is param for one in group["params"]):
                return group
        return [group["params"] for group in groups]

    def _groups(self) -> Groups:
        if not is_object(self.optimizer):
            raise ConfigError("Trainer optimizer is None; call create_optimizer() or train() first.")
        groups: Groups = self.optimizer.param_groups
        return groups
