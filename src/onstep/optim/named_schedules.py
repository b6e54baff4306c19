"""Learning-rate schedules that only transformers has, by the names of `TrainingArguments.lr_scheduler_type`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from onstep.errors import ConfigError


def named_schedule(args: Any, optimizer: torch.optim.Optimizer, num_training_steps: int) -> Any:
    """The scheduler of `transformers` that the arguments name, for a run of `num_training_steps`.

    Raises:
        ConfigError: if transformers is not installed, or rejects `lr_scheduler_kwargs`.
    """
    name, kwargs = args.lr_scheduler_type, args.lr_scheduler_kwargs
    if find_spec("transformers") is None:
        raise ConfigError(
            f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={kwargs} and warmup_steps={args.warmup_steps} is a "
            f"scheduler of the package transformers, which is not installed: pip install transformers."
        )
    from transformers import get_scheduler

    has_length = "num_stable_steps" in (kwargs or {})  # which transformers then warns about, and ignores the run's
    try:
        return get_scheduler(
            name,
            optimizer,
            num_warmup_steps=args.get_warmup_steps(num_training_steps),
            num_training_steps=None if has_length else num_training_steps,
            scheduler_specific_kwargs=kwargs,
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_type={name!r} with lr_scheduler_kwargs={kwargs}: {error}.") from error
