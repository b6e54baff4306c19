"""Logs the L2 norm of all parameters at logged steps, and records each parameter's norms at every evaluation."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import nn

from onstep.config import TrainingArguments
from onstep.errors import ConfigError, require
from onstep.events import RunState, TrainerCallback
from onstep.metrics.norms.named_parameters import MissingOnce
from onstep.metrics.norms.parameter_norms import are_over_ranks, parameter_norms, total_norm
from onstep.metrics.norms.spectral_norms import SpectralNorms, require_count
from onstep.record.kinds import Metrics
from onstep.record.writer import JsonLogWriter, logging_dir_of
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class ParameterNormLogger(TrainerCallback):
    """Appends ``{"norms": {<parameter>: ...}, "spectral_norms": ...}`` to ``<args.logging_dir>/parameter_norms.json``.

    There is one record per evaluated step. Norms are exact to float64. A spectral norm, the largest singular value of a
    parameter viewed as a matrix ``(shape[0], -1)``, is within 1 % of the exact value; for a vector it is the largest
    absolute value. A tied parameter is listed under its first name. For sharded parameters (FSDP2, tensor parallelism),
    the norms are those of the full tensors, and in a pipeline those of all stages. Parameters without values (on the
    meta device, or integers of quantized layers) are omitted, with a single warning that names them.

    The random generators of the training are not used. The callback's state contains the latest singular vectors, so a
    resumed run records the same values as an uninterrupted one. The file is continued, truncated and preserved as by
    `JsonLogger`.

    Args:
        log_norms: Whether to record L2 norms.
        log_spectral_norms: Whether to record spectral norms.
        power_iter_steps: Power iterations per spectral norm, each of two products with the matrix; the first evaluation
            runs twice as many, and more are added while the estimate has not converged.

    Raises:
        ConfigError: if `power_iter_steps` is not an integer >= 1, or nothing would be recorded; when training begins,
            if `logging_dir` is not writable.
    """

    log_norms: bool = True
    log_spectral_norms: bool = True
    power_iter_steps: int = 10

    def __post_init__(self) -> None:
        for name, value in (("log_norms", self.log_norms), ("log_spectral_norms", self.log_spectral_norms)):
            require(isinstance(value, bool), name, "True or False", value, "")
        require_count("power_iter_steps", self.power_iter_steps)
        if not (self.log_norms or self.log_spectral_norms):
            raise ConfigError("log_norms and log_spectral_norms are both False; set one, or drop the callback")
        self._writer = JsonLogWriter("parameter_norms.json")
        self._missing = MissingOnce(self.name)
        self._spectral = SpectralNorms(self.power_iter_steps)

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Open the file, truncated to the step that training resumes from."""
        directory = logging_dir_of(args)
        if not state.is_world_process_zero:
            return
        if directory is None:
            logger.warning(
                "%s records nothing: the run has no directory; set run.name or logger.logging_dir", self.name
            )
        else:
            self._writer.open(directory, state.global_step)

    def on_evaluate(
        self, args: TrainingArguments, state: RunState, control: object, model: nn.Module, **kwargs: object
    ) -> None:
        """Record the norms of the evaluated step. Collective if parameters are sharded, or in stages."""
        directory = logging_dir_of(args)
        if directory is None:
            return
        self._missing.say(model)
        if not (state.is_world_process_zero or are_over_ranks(model)):
            return
        norms = {"norms": parameter_norms(model)} if self.log_norms else {}
        if self.log_spectral_norms:
            norms["spectral_norms"] = self._spectral.measure(model)
        if any(norms.values()) and state.is_world_process_zero:
            self._writer.reopen(directory)
            if self._writer.last_step != state.global_step:
                self._writer.write_record(state.global_step, state.epoch, norms)

    def on_run_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
        """Close the file; a later evaluation reopens it."""
        self._writer.close()

    def state_dict(self) -> StateDict:
        """The position in the file, and the singular vectors that the next spectral norms start from."""
        return {"writer": self._writer.state_dict(), **self._spectral.state_dict()}

    def make_durable(self) -> None:
        """Fsync the file, before a checkpoint that refers to it is committed."""
        self._writer.make_durable()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a checkpoint's file position: when training begins, or immediately in a rollback.

        Args:
            state_dict: what `state_dict()` returned.
        """
        self._writer.load_state_dict(state_dict["writer"])
        self._spectral.load_state_dict(state_dict)


class WeightNormLogger(TrainerCallback):
    """Adds `weight_norm`, the L2 norm of all parameters together, to the logs of every logged step.

    A steadily growing norm suggests that weight decay is too weak; a constant norm with rising gradient norms points to
    another cause. Tied parameters count once. The norm is exact to float64, with one device read per logged step. With
    sharded parameters (FSDP2, tensor parallelism) or stages of a pipeline it is the norm of the whole model, on every
    rank. Parameters without values (on the meta device, or integers of quantized layers) are omitted, with a single
    warning that names them.
    """

    def __init__(self) -> None:
        self._missing = MissingOnce(self.name)

    def on_log_step(
        self, args: object, state: object, control: object, logs: Metrics, model: nn.Module, **kwargs: object
    ) -> None:
        """Add `weight_norm` to `logs`. Collective if parameters are sharded, or in stages."""
        self._missing.say(model)
        norms = parameter_norms(model)
        if norms:
            logs["weight_norm"] = total_norm(norms)
