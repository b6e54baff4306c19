"""Declares the arguments for the log and the trackers."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.hf.argument import LOG_LEVELS, Choice, Steps, Texts, argument, declares_arguments
from onstep.config.trackers import DEFAULT_PROJECT


@declares_arguments
@dataclass(kw_only=True)
class LoggingArguments:
    """What is logged, and to which trackers."""

    logging_strategy: str = argument("steps", choices=("no", "steps", "epoch"))
    """no | steps | epoch"""
    logging_steps: Steps | None = argument(500, bound=">= 0")
    """Steps; below 1 it is a share of the run."""
    logging_first_step: bool = False
    logging_dir: str | None = None
    """Where the metrics log is written; None is `output_dir`."""
    logging_nan_inf_filter: bool = True
    """Leave out of the logged loss the steps that `train.on_nonfinite` = skip left out; False logs NaN for them. By
    default a non-finite loss ends the run."""
    include_num_input_tokens_seen: Choice = argument("no", choices=("no", "all", "non_padding"))
    """Count the input tokens, in `state.num_input_tokens_seen` and every record: no | all | non_padding. True is all,
    False is no."""
    skip_memory_metrics: bool = True
    """False adds how much memory `train`, `evaluate` and `predict` took to their metrics; it requires psutil and
    transformers."""
    log_on_each_node: bool = True
    """Whether the first process of each machine logs, not only that of the first one."""
    log_level: str = argument("passive", choices=tuple(LOG_LEVELS))
    """Level of Onstep's messages on the first rank of each machine (of all with `log_on_each_node=False`)."""
    log_level_replica: str = argument("warning", choices=tuple(LOG_LEVELS))
    """Level of Onstep's messages on the other ranks."""
    disable_tqdm: bool | None = None
    """Whether no progress bar is shown; None shows one at a terminal."""
    report_to: Texts = "none"
    """Trackers to report to: none | all (that are installed) | one of `logger.report_to` or a list of them (comet is
    Hugging Face's comet_ml). Becomes a list, as in `transformers`."""
    run_name: str | None = None
    """The run's name in trackers; None is the name of `output_dir`."""
    project: str = DEFAULT_PROJECT
    """Project (in MLflow: experiment) in trackers. The default leaves it to them: their environment variable, else
    "onstep"."""
    trackio_space_id: str | None = None
    """Hugging Face Space that Trackio logs to; None is the local store."""
    trackio_bucket_id: str | None = None
    """Hugging Face Bucket of that Space."""
