"""What the ranks of the tests of equal events and logs run: `job_*(settings)`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onstep import Callback, JsonLogger, pretrain
from onstep.callbacks import (
    GradNormLogger,
    LearningRateMonitor,
    ParameterNormLogger,
    ThroughputMonitor,
    WeightNormLogger,
)
from onstep.config import ConfigContainer, apply_overrides
from onstep.distributed.shards import local_part
from onstep.errors import NonFiniteError
from onstep.events import VALID_EVENTS
from tests.support.small_configs import small_pretrain_config

OF_MICRO_BATCHES = ("on_forward_backward_start", "on_forward_backward_end", "on_substep_end")
MICRO_BATCHES, BAD_STEP = 4, 3
"""Of each step; and the step, from 1, in which a gradient of one rank is NaN."""
_FIELDS = ("loss_dict", "grad_norm", "skipped_iter", "metrics", "total_loss_dict", "logs", "checkpoint_step", "reason")


class Witness(Callback):
    """Notes each event of this rank with what it says; makes a gradient of one rank NaN in one step."""

    ranks = "all"

    def __init__(self, spoils: bool) -> None:
        self.lines: list[Any] = []
        self._spoils, self._left = spoils, MICRO_BATCHES

    def at(self, event: str, context: Any) -> None:
        """Note an event."""
        step = context.state.train_state.step
        said = {name: _plain(getattr(context, name, None)) for name in _FIELDS}
        self.lines.append([event, step, {name: value for name, value in said.items() if value is not None}])
        if self._spoils and event == "on_forward_backward_end" and step == BAD_STEP - 1:
            gradients = (one.grad for chunk in context.model for one in chunk.parameters())
            local_part(next(one for one in gradients if one is not None)).view(-1)[0] = torch.nan
            self._left -= 1
            self._spoils = self._left > 0


def _listen(event: str) -> Callable[[Witness, Any], None]:
    return lambda self, context: self.at(event, context)


for _event in VALID_EVENTS:
    setattr(Witness, _event, _listen(_event))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value if isinstance(value, (int, float, str, type(None))) else type(value).__name__


def job_runs(settings: dict[str, Any]) -> list[Any]:
    """Train on a text in two starts, on each layout in a directory of its own; each start's events and exit code."""
    rank, found = int(os.environ.get("RANK", "0")), []
    for name, keys in settings["layouts"].items():
        place = Path(name)
        place.mkdir(exist_ok=True)
        with chdir(place):
            runs = [
                _start(settings, keys, spoils=rank == settings["spoiled"], stop=stop)
                for stop in ([4, None] if settings["policy"] in ("skip", "rollback") else [None])
            ]
        found.append(runs)
    return found


def job_reported(settings: dict[str, Any]) -> None:
    """Train on a text in two starts with all trackers and reports, and with Megatron Bridge's console in the first."""
    reports = ("params_norm", "throughput")
    for_trackers = ("throughput", "timers", "validation_ppl", "l2_norm_grad", "runtime", "world_size")
    for console, stop in (("bridge", 4), ("default", None)):
        config = _config(settings, stop=stop)
        options = config.logger
        options.report_to, options.report_names, options.tensorboard_dir = "all", ["hf", "bridge"], "tb"
        options.console, options.timing_log_level, options.throughput_window_size = console, 1, 2
        for name in (*reports, *(f"{one}_to_tensorboard" for one in for_trackers)):
            setattr(options, f"log_{name}", True)
        config.model.log_max_attention_logit = True
        apply_overrides(config, settings["keys"])
        norms = [GradNormLogger(), ParameterNormLogger(), WeightNormLogger()]
        rates = [LearningRateMonitor(), ThroughputMonitor(peak_flops_per_device=1e9)]
        with suppress(SystemExit):
            pretrain(config, callbacks=[JsonLogger(), *norms, *rates])


def _start(settings: dict[str, Any], keys: list[str], *, spoils: bool, stop: int | None) -> list[Any]:
    config = _config(settings, stop=stop)
    config.logger.tensorboard_dir = "tb"
    config.train.on_nonfinite = settings["policy"]
    apply_overrides(config, keys)
    witness = Witness(spoils)
    code: int | str | None = 0
    try:
        pretrain(config, callbacks=[witness, JsonLogger()])
    except SystemExit as leaving:
        code = leaving.code
    except NonFiniteError as error:
        code = f"{type(error).__name__}: {error}"
    return [witness.lines, code]


def _config(settings: dict[str, Any], *, stop: int | None) -> ConfigContainer:
    """6 steps of 8 samples; an evaluation and a checkpoint at every second."""
    config = small_pretrain_config(settings["corpus"], settings["cache"], layers=4, length=16)
    config.tokenizer.tokenizer_type, config.model.vocab_size = "bytes", 261
    config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters = 8, 2, 6
    config.train.exit_interval = stop
    config.validation.eval_interval, config.validation.eval_iters = 2, 2
    config.logger.log_interval, config.logger.tensorboard_log_interval = 1, 1
    config.logger.log_progress = config.optimizer.log_num_zeros_in_grad = True
    config.checkpoint.save_interval, config.checkpoint.most_recent_k = 2, -1
    config.run.name, config.run.output_dir = "run", "runs"
    return config
