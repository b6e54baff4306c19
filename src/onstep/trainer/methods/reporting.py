"""Hugging Face's methods that log and print, and those that tell the ranks apart."""

from __future__ import annotations

from pathlib import Path

from onstep.data import Batch
from onstep.errors import ConfigError
from onstep.events import Dispatcher
from onstep.record.kinds import Metrics
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.reporting.input_counts import InputCounts, num_input_flops
from onstep.trainer.reporting.metric_files import formatted, lines, write_metrics
from onstep.trainer.uploads import writing_output
from onstep.training.stages.record import record


class ReportingMethods(BaseTrainer):
    """Hugging Face's methods that log and print, and those that tell the ranks apart."""

    current_flos: float = 0.0
    """What an overridden `floating_point_ops` counted on this rank since the last report."""
    input_counts: InputCounts | None = None
    """Counts the input tokens, with `include_num_input_tokens_seen`."""

    def log(self, logs: Metrics, start_time: float | None = None) -> None:
        """Add a record to `state.log_history`, and fire `on_log`, from where metrics log and trackers have it.

        The records of steps and evaluations and the final one pass through an override. You may also call it, for
        example in `compute_loss`. `start_time` (Unix seconds) adds the rate of input tokens, if they are counted.

        Args:
            logs: the metrics by name.

        Raises:
            ConfigError: before the first run.
        """
        if self.global_state is None:
            raise ConfigError("Trainer.log requires a run; call it during training or evaluation, or after it.")
        state = self.global_state
        logs["epoch"] = state.trainer_state.epoch
        counts = self.input_counts
        if counts is not None:
            logs["num_input_tokens_seen"] = counts.tokens
            if start_time is not None:
                logs["train_tokens_per_second"] = counts.rate_since(start_time)
        if self.session is not None:
            record(state, logs, self.session.notify, self.session.record_kind)
            return
        notify = Dispatcher(self.callback_manager, state, [] if self.model is None else [self.model])
        record(state, logs, notify)
        notify.on_run_end(reason="completed")  # what opens a file for the record closes it

    def metrics_format(self, metrics: Metrics) -> dict[str, object]:
        """Metrics as `log_metrics` prints them.

        Args:
            metrics: the metrics by name.
        """
        return formatted(metrics)

    def log_metrics(self, split: str, metrics: Metrics) -> None:
        """Print metrics under a heading with the name of the split, on rank 0.

        Args:
            split: the name of the split, such as `train`, `eval` or `test`.
            metrics: the metrics by name.
        """
        if self.is_world_process_zero():
            print("\n".join(lines(split, metrics)), flush=True)  # noqa: T201 - this output is what was asked for

    def save_metrics(self, split: str, metrics: Metrics, combined: bool = True) -> None:
        """Write `<split>_results.json` to `args.output_dir`, and add to `all_results.json` if `combined`, on rank 0.

        Args:
            metrics: the metrics by name.
        """
        if self.is_world_process_zero():
            with writing_output(self) as directory:
                write_metrics(Path(directory), split, metrics, combined=combined)

    def floating_point_ops(self, inputs: Batch) -> int:
        """FLOPs of the forward and backward pass of a micro-batch; an override is what `total_flos` adds up.

        Args:
            inputs: one micro-batch as the collator returned it, a mapping or a tuple.
        """
        return num_input_flops(self.model, inputs)

    def store_flos(self) -> None:
        """Add `current_flos` of all ranks to `state.total_flos`, and reset it. Collective."""
        if self.global_state is None:
            return
        counted, self.current_flos = self.current_flos, 0.0
        state = self.global_state
        state.train_state.floating_point_operations_so_far += sum(state.world.data.gather(counted))

    def end(self) -> None:
        """Leave the process group, which otherwise stays for further calls; trackers are closed when a run ends."""
        if self.global_state is not None:
            self.global_state.world.close()
