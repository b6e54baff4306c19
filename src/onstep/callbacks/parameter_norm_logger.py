"""Reports the L2 norm of all parameters at logged steps, and records that of each at every evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onstep.distributed.shards import is_sharded
from onstep.errors import ConfigError, require
from onstep.events import TrainerCallback
from onstep.metrics.json_log_writer import JsonLogWriter, logging_dir_of
from onstep.metrics.norms.named_parameters import MissingOnce, named_parameters
from onstep.metrics.norms.parameter_norms import parameter_norms, total_norm
from onstep.metrics.norms.spectral_norms import SpectralNorms, require_count


@dataclass(eq=False, repr=False)
class ParameterNormLogger(TrainerCallback):
    """Appends ``{"norms": {<parameter>: ...}, "spectral_norms": ...}`` to ``<args.logging_dir>/parameter_norms.json``.

    There is one record for each evaluated step. Norms are exact to float64. A spectral norm, the largest singular value
    of a parameter seen as a matrix ``(shape[0], -1)``, is within 1 % of the exact one; of a vector it is the largest
    absolute value. A tied parameter stands under its first name. Of sharded parameters (FSDP2, tensor parallelism) the
    norms are those of the whole tensors. What has no values (parameters on the meta device, integers of quantised
    layers) is left out, with one warning that names it.

    No random number of the training is drawn. The callback's state holds the singular vectors found last, so that a
    continued run records what the run would have recorded. The file is continued, cut and kept as `JsonLogger` does it.

    Args:
        log_norms: Whether to record L2 norms.
        log_spectral_norms: Whether to record spectral norms.
        power_iter_steps: Iterations for a spectral norm, each two products with the matrix; the first evaluation takes
            twice as many, and where the estimate has not settled more are added.

    Raises:
        ConfigError: `power_iter_steps` is less than 1 or no whole number, or there is nothing to record; when training
            begins, `logging_dir` cannot be written.
    """

    log_norms: bool = True
    log_spectral_norms: bool = True
    power_iter_steps: int = 10

    def __post_init__(self) -> None:
        for name, value in (("log_norms", self.log_norms), ("log_spectral_norms", self.log_spectral_norms)):
            require(isinstance(value, bool), name, "True or False", value, "")
        require_count("power_iter_steps", self.power_iter_steps)
        if not (self.log_norms or self.log_spectral_norms):
            raise ConfigError("log_norms and log_spectral_norms are both False; leave the callback out, or set one")
        self._writer = JsonLogWriter("parameter_norms.json")
        self._missing = MissingOnce(self.name)
        self._spectral = SpectralNorms(self.power_iter_steps)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the file, cut to the step that training continues from."""
        folder = logging_dir_of(args)
        if state.is_world_process_zero and folder is not None:
            self._writer.open(folder, state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the norms of the step that is evaluated. Collective where parameters are sharded."""
        folder, model = logging_dir_of(args), kwargs["model"]
        if folder is None:
            return
        self._missing.say(model)
        if not (state.is_world_process_zero or is_sharded(named_parameters(model).values())):
            return
        norms = {"norms": parameter_norms(model)} if self.log_norms else {}
        if self.log_spectral_norms:
            norms["spectral_norms"] = self._spectral.measure(model)
        if any(norms.values()) and state.is_world_process_zero:
            self._writer.reopen(folder)
            if self._writer.last_step != state.global_step:
                self._writer.write_record(state.global_step, state.epoch, norms)

    def on_run_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the file; a later evaluation opens it again."""
        self._writer.close()

    def state_dict(self) -> dict[str, Any]:
        """Where the file stands, and what spectral norms start from next."""
        return {"writer": self._writer.state_dict(), **self._spectral.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's file when training begins; while training, go back to the checkpoint at once."""
        self._writer.load_state_dict(state_dict["writer"])
        self._spectral.load_state_dict(state_dict)


class WeightNormLogger(TrainerCallback):
    """Adds `weight_norm`, the L2 norm of all parameters together, to every logged step before anybody reads it.

    A norm that grows and grows says that weight decay is too weak; one that stands still while gradient norms rise
    points elsewhere. Tied parameters count once. Exact to float64, with one read of the device a logged step. Of
    sharded parameters (FSDP2, tensor parallelism) it is the norm of the whole model, on every rank. What has no values
    (parameters on the meta device, integers of quantised layers) is left out, with one warning that names it.
    """

    def __init__(self) -> None:
        self._missing = MissingOnce(self.name)

    def on_log_step(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Add `weight_norm` to `logs`. Collective where parameters are sharded."""
        self._missing.say(kwargs["model"])
        norms = parameter_norms(kwargs["model"])
        if norms:
            logs["weight_norm"] = total_norm(norms)
