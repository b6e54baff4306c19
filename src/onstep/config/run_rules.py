"""The rules of what surrounds training: checkpoints, fine-tuning, signals, profiles, timers, watchdog, slow ranks.

Each check raises a ConfigError for the first rule that is broken: it names the value, the rule and the remedy.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from onstep.config.part import nearest
from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError

COMPONENTS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng", "callbacks")
"""What `checkpoint.components` selects from."""

SPIKE_METRICS = ("loss", "grad_norm")
"""What `anomaly.spike_metrics` selects from."""

NO_REQUEST = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "no process can handle"),
    **dict.fromkeys(
        ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"), "tells of a broken process"
    ),
    "SIGCHLD": "data workers use",
    "SIGALRM": "train.data_timeout uses",
}
"""Signals that cannot ask a run to save and leave, and why."""

ROLLBACK_NEEDS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng")
"""Components without which a rollback does not come back to where the checkpoint was."""


def check_run(config: ConfigContainer) -> None:
    """Refuse a name that cannot be a folder, and a backend without its device."""
    name = config.run.name
    if name is not None and (not name or "/" in name or "\\" in name or name in (".", "..")):
        raise ConfigError(f"run.name={name!r} must be the name of a folder; put its path into run.output_dir.")
    if config.dist.distributed_backend == "nccl" and config.dist.device == "cpu":
        raise ConfigError("dist.distributed_backend=nccl takes GPUs, got dist.device=cpu; use gloo.")


def check_checkpoints(config: ConfigContainer) -> None:
    """Refuse combinations about checkpoints, signals and anomalies that cannot work."""
    checkpoint, anomaly, train = config.checkpoint, config.anomaly, config.train
    components = checkpoint.components or COMPONENTS
    if checkpoint.components is not None:
        _check_chosen("checkpoint.components", checkpoint.components, COMPONENTS, "null is all")
    if anomaly.on_spike != "ignore":
        _check_chosen("anomaly.spike_metrics", anomaly.spike_metrics, SPIKE_METRICS, "anomaly.on_spike=ignore is none")
    if train.exit_signal_handler:
        known = [one.name for one in signal.Signals if one.name not in NO_REQUEST]
        _check_chosen("train.exit_signals", train.exit_signals, known, "train.exit_signal_handler=false is none")
    if checkpoint.certify and "trainer" not in components:
        raise ConfigError(
            "checkpoint.certify keeps its chain with the component trainer; add it to checkpoint.components."
        )
    kept = checkpoint.most_recent_k
    if kept == 0 or kept < -1:
        raise ConfigError(
            f"checkpoint.most_recent_k={kept} would keep no checkpoint; use -1 for all, or at least 1: the newest one."
        )
    if not config.validation.skip_train:
        _check_best(config, components)
    _check_rollback(config, components)


def _check_chosen(key: str, chosen: Sequence[str], known: Sequence[str], instead: str) -> None:
    if not chosen:
        raise ConfigError(f"{key}=[] chooses nothing; give at least one ({instead}).")
    for name in chosen:
        if name not in known:
            rule = NO_REQUEST.get(name, "is not known")
            hint = nearest(name, list(known)) or f" Known: {', '.join(known)}."
            raise ConfigError(f"{key} has {name!r}, which {rule}; leave it out or correct it.{hint}")


def _check_best(config: ConfigContainer, components: Sequence[str]) -> None:
    """The best checkpoint is one of this very run that was evaluated: saves and evaluations have to meet.

    What only keeps best checkpoints may leave it to a callback to ask for both at the same step.
    """
    checkpoint, validation = config.checkpoint, config.validation
    best = "checkpoint.load_best_model_at_end"
    reads_own = {
        best: checkpoint.load_best_model_at_end,
        "checkpoint.ckpt_step": checkpoint.ckpt_step if checkpoint.load is None else None,
    }
    evaluates = {best: checkpoint.load_best_model_at_end, "validation.eval_on_save": validation.eval_on_save}
    for key, value in reads_own.items():
        if value and not _has_folder(config):  # a save without one only warns
            raise ConfigError(
                f"{key}={value} takes a folder of checkpoints, and this run has none; set run.name or checkpoint.save."
            )
    for key, value in evaluates.items():
        if value and validation.eval_iters == 0:
            raise ConfigError(f"{key}={value} takes evaluations, got validation.eval_iters=0; set it to null or > 0.")
    if not checkpoint.load_best_model_at_end:
        return
    if not saves_meet_evaluations(config):
        raise ConfigError(
            f"{best}=True takes checkpoints of evaluated steps, got "
            f"checkpoint.save_interval={checkpoint.save_interval} and validation.eval_interval="
            f"{validation.eval_interval}; make the first a multiple of the second, or set checkpoint.save_on_best or "
            f"validation.eval_on_save."
        )
    if "model" not in components:
        raise ConfigError(f"{best} takes the weights; add model to checkpoint.components.")


def _has_folder(config: ConfigContainer) -> bool:
    return config.run.name is not None or config.checkpoint.save is not None


def saves_meet_evaluations(config: ConfigContainer) -> bool:
    """Whether checkpoints are saved at steps that are evaluated."""
    checkpoint, validation = config.checkpoint, config.validation
    saved, evaluated = checkpoint.save_interval, validation.eval_interval
    if checkpoint.save_on_best:
        return True
    if validation.eval_on_save:
        return saved is not None or checkpoint.save_each_epoch
    if checkpoint.save_each_epoch and validation.eval_each_epoch:
        return True
    return saved is not None and evaluated is not None and saved % evaluated == 0


def _check_rollback(config: ConfigContainer, components: Sequence[str]) -> None:
    """A rollback goes to a checkpoint of this run, so there has to be one, with everything in it."""
    policies = {"train.on_nonfinite": config.train.on_nonfinite, "anomaly.on_spike": config.anomaly.on_spike}
    key = next((key for key, value in policies.items() if value == "rollback"), None)
    if key is None:
        return
    checkpoint = config.checkpoint
    if not _has_folder(config):
        raise ConfigError(f"{key}=rollback takes a folder of checkpoints; set run.name or checkpoint.save.")
    intervals = (checkpoint.save_interval, checkpoint.non_persistent_save_interval)
    if not any(intervals) and not checkpoint.save_each_epoch and not checkpoint.save_on_best:
        raise ConfigError(
            f"{key}=rollback goes back to a checkpoint, and none is saved while training; set "
            f"checkpoint.save_interval or checkpoint.non_persistent_save_interval."
        )
    for name in ("save_optim", "save_rng", "load_optim", "load_rng"):
        if not getattr(checkpoint, name):
            raise ConfigError(f"{key}=rollback takes the whole state, got checkpoint.{name}=False; set it to true.")
    lacking = [name for name in ROLLBACK_NEEDS if name not in components]
    if lacking:
        raise ConfigError(f"{key}=rollback takes the whole state; add {', '.join(lacking)} to checkpoint.components.")


def check_finetune(config: ConfigContainer) -> None:
    """Refuse fine-tuning of nothing, of two things at once, and LoRA on weights that stay random.

    Raises:
        ConfigError: naming the value, the rule and the remedy.
    """
    checkpoint, peft = config.checkpoint, config.peft
    sources = [name for name in ("pretrained_checkpoint", "load") if getattr(checkpoint, name) is not None]
    if checkpoint.finetune and not sources:
        raise ConfigError(
            "checkpoint.finetune=True takes weights to start from; set checkpoint.pretrained_checkpoint to a Hugging "
            "Face folder, a run or a checkpoint."
        )
    if checkpoint.finetune and len(sources) == 2 and not loads_own(config):
        raise ConfigError(
            f"checkpoint.pretrained_checkpoint={checkpoint.pretrained_checkpoint} and checkpoint.load="
            f"{checkpoint.load} both name the weights to fine-tune; keep one and set the other to null."
        )
    if peft.peft_scheme is None:
        return
    if not sources:
        raise ConfigError(
            f"peft.peft_scheme={peft.peft_scheme} trains a few weights beside trained ones, and there are none; set "
            f"checkpoint.pretrained_checkpoint, or peft.peft_scheme=null to train all weights."
        )
    if peft.target_modules == []:
        raise ConfigError(
            "peft.target_modules=[] adds weights to no layer; name ends such as [query, value], or null for every "
            "projection."
        )


def loads_own(config: ConfigContainer) -> bool:
    """Whether `checkpoint.load` is the folder that the run saves to: it then continues the run."""
    checkpoint, run = config.checkpoint, config.run
    own = checkpoint.save
    if own is None and run.name is not None:
        own = str(Path(run.output_dir) / run.name / "checkpoints")
    if checkpoint.load is None or own is None:
        return False
    return Path(own).resolve() == Path(checkpoint.load).resolve()


def check_measuring(config: ConfigContainer, world_size: int) -> None:
    """Check what is profiled and timed, and how slow ranks are found."""
    profiling, nvrx, port = config.profiling, config.nvrx_straggler, config.straggler.straggler_ctrlr_port
    if profiling.use_pytorch_profiler and profiling.use_nsys_profiler:
        raise ConfigError(
            "profiling.use_pytorch_profiler and use_nsys_profiler are both true, but a process has one profiler; set "
            "one of them to false."
        )
    profiles = profiling.use_pytorch_profiler or profiling.use_nsys_profiler
    if profiles and profiling.profile_step_end <= profiling.profile_step_start:
        raise ConfigError(
            f"profiling.profile_step_end={profiling.profile_step_end} must be after "
            f"profile_step_start={profiling.profile_step_start}; the steps between them are profiled."
        )
    if any(rank < 0 for rank in profiling.profile_ranks):
        raise ConfigError(
            f"profiling.profile_ranks={profiling.profile_ranks} must be ranks from 0 on; [] is every rank."
        )
    beyond = [rank for rank in profiling.profile_ranks if rank >= world_size]
    if beyond and (profiles or profiling.record_memory_history):
        raise ConfigError(
            f"profiling.profile_ranks={profiling.profile_ranks} has the rank {beyond[0]}, but this run has the ranks 0 "
            f"to {world_size - 1}; leave it out."
        )
    if port > 65535:
        raise ConfigError(f"straggler.straggler_ctrlr_port={port} must be at most 65535; choose a free port.")
    if nvrx.enabled and not (nvrx.calc_relative_gpu_perf or nvrx.calc_individual_gpu_perf):
        raise ConfigError(
            "nvrx_straggler.enabled=True has nothing to compare; set nvrx_straggler.calc_relative_gpu_perf or "
            "nvrx_straggler.calc_individual_gpu_perf to true."
        )


def check_watching(config: ConfigContainer, world_size: int) -> None:
    """Refuse combinations about the watchdog and simulated faults that cannot work."""
    ft = config.ft
    seconds, rank = ft.watchdog_seconds, ft.simulated_fault_rank
    if seconds is not None and seconds < 1:
        raise ConfigError(
            f"ft.watchdog_seconds={seconds} must be at least 1: ranks look at each other a few times in it; choose "
            "more than the longest single operation takes, or null to watch nothing."
        )
    names = [name for name in ("calc_ft_timeouts", "enable_ft_package") if getattr(ft, name)]
    if names and not _has_folder(config):
        raise ConfigError(
            f"ft.{names[0]}=True keeps ft_state.json beside the checkpoints, and this run has no folder for them; set "
            "run.name or checkpoint.save."
        )
    if ft.calc_ft_timeouts and not ft.enable_ft_package and seconds is None:
        raise ConfigError(
            "ft.calc_ft_timeouts=True learns the limits of a watchdog, and ft.watchdog_seconds=null watches nothing; "
            "set ft.watchdog_seconds, which holds until limits are learned."
        )
    if rank is not None and rank >= world_size:
        raise ConfigError(
            f"ft.simulated_fault_rank={rank} must be one of the ranks 0 to {world_size - 1}; leave it null to draw one."
        )
