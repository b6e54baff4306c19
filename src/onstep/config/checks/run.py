"""The rules of everything around training: checkpoints, fine-tuning, signals, profiles, watchdog, slow ranks."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from onstep.config.checks.data import parse_split
from onstep.config.container import ConfigContainer
from onstep.config.keys import KEYS
from onstep.config.suggestions import nearest, shown
from onstep.errors import ConfigError
from onstep.stores.urls import check_place, check_url, is_url

_STEP = re.compile(r"@([0-9]+|best)\Z")
"""What selects a checkpoint of a run."""
COMPONENTS = KEYS["checkpoint.components"].option.elements
SPIKE_METRICS = KEYS["anomaly.spike_metrics"].option.elements

NO_REQUEST = {
    **dict.fromkeys(("SIGKILL", "SIGSTOP"), "no process can handle"),
    **dict.fromkeys(
        ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"), "signals a broken process"
    ),
    "SIGCHLD": "data workers use",
    "SIGALRM": "train.data_timeout uses",
}
"""Signals that cannot ask a run to save and exit, and why."""

ROLLBACK_NEEDS = ("model", "optimizer", "scheduler", "trainer", "dataset", "rng")
"""Components that a rollback requires to restore the state of the checkpoint."""


def check_run(config: ConfigContainer) -> None:
    """Refuse names that cannot be a directory's or a variable's, and a backend without its device."""
    name = config.run.name
    if name is not None and (not name.strip() or "/" in name or "\\" in name or name in (".", "..")):
        raise ConfigError(f"run.name={shown(name)} must be the name of a directory; put its path into run.output_dir.")
    if name is not None and not name.isprintable():
        raise ConfigError(
            f"run.name={shown(name)} has characters that cannot be printed, such as line ends; drop them."
        )
    check_place("run.output_dir", config.run.output_dir)
    if config.run.is_in_store and config.checkpoint.save is not None:
        raise ConfigError(
            f"checkpoint.save={shown(config.checkpoint.save)} would not be mirrored in "
            f"run.output_dir={config.run.output_dir}; leave it null, or set run.output_dir to a directory."
        )
    for key in ("load", "pretrained_checkpoint"):
        if is_url(place := getattr(config.checkpoint, key) or ""):
            check_url(f"checkpoint.{key}", _STEP.sub("", place))
    for name in config.env_vars:
        if not name or "=" in name:
            raise ConfigError(
                f"env_vars has the name {shown(name)}; a variable's name must not be empty or contain '='."
            )
    if config.ddp.grad_reduce_in_bf16 and config.ddp.grad_reduce_in_fp32:
        raise ConfigError(
            "ddp.grad_reduce_in_bf16 and ddp.grad_reduce_in_fp32 are both true, but gradients are summed in one type; "
            "set one of them to false."
        )
    if config.dist.distributed_backend == "nccl" and config.dist.device == "cpu":
        raise ConfigError("dist.distributed_backend=nccl requires GPUs, got dist.device=cpu; use gloo.")


def check_checkpoints(config: ConfigContainer) -> None:
    """Refuse combinations about checkpoints, signals and anomalies that cannot work."""
    checkpoint, anomaly, train = config.checkpoint, config.anomaly, config.train
    components = checkpoint.components or COMPONENTS
    if checkpoint.components is not None:
        _check_chosen("checkpoint.components", checkpoint.components, COMPONENTS, "null is all")
    if anomaly.on_spike != "ignore":
        _check_chosen("anomaly.spike_metrics", anomaly.spike_metrics, SPIKE_METRICS, "anomaly.on_spike=ignore for none")
    if train.exit_signal_handler:
        known = [one.name for one in signal.Signals if one.name not in NO_REQUEST]
        key = "train.exit_signals" if train.exit_signal is None else "train.exit_signal"
        _check_chosen(key, train.exit_signals, known, "train.exit_signal_handler=false for none")
    if checkpoint.certify and "trainer" not in components:
        raise ConfigError(
            "checkpoint.certify keeps its chain with the component trainer; add it to checkpoint.components."
        )
    if not config.validation.skip_train:
        _check_best(config, components)
    elif config.validation.eval_iters == 0:
        raise ConfigError(
            "validation.skip_train=True evaluates without training, and validation.eval_iters=0 evaluates nothing; set "
            "either of them otherwise (eval_iters=null is the whole split)."
        )
    _check_rollback(config, components)


def _check_chosen(key: str, chosen: Sequence[str], known: Sequence[str], instead: str) -> None:
    if not chosen:
        raise ConfigError(f"{key}=[] selects nothing; give at least one ({instead}).")
    for name in chosen:
        if name not in known:
            rule = NO_REQUEST.get(name, "is not known")
            hint = ("" if name in NO_REQUEST else nearest(name, list(known))) or f" Known: {', '.join(known)}."
            raise ConfigError(f"{key} has {shown(name)}, which {rule}; drop or correct it.{hint}")


def _check_best(config: ConfigContainer, components: Sequence[str]) -> None:
    """Check that a run that chooses its best checkpoint saves at evaluated steps.

    `checkpoint.keep_best_n` is not checked: a callback may request a save and an evaluation at the same step.
    """
    checkpoint, validation = config.checkpoint, config.validation
    best = "checkpoint.load_best_model_at_end"
    reads_own = {
        best: checkpoint.load_best_model_at_end,
        "checkpoint.ckpt_step": checkpoint.ckpt_step if checkpoint.load is None else None,
    }
    evaluates = {best: checkpoint.load_best_model_at_end, "validation.eval_on_save": validation.eval_on_save}
    for key, value in reads_own.items():
        if value and not has_dir(config):  # a save without one only warns
            raise ConfigError(
                f"{key}={value} requires a checkpoint directory, but this run has none; set run.name or "
                "checkpoint.save."
            )
    for key, value in evaluates.items():
        if value and validation.eval_iters == 0:
            raise ConfigError(f"{key}={value} requires evaluations, got validation.eval_iters=0; use null or > 0.")
    if not checkpoint.load_best_model_at_end:
        return
    if parse_split(config.dataset.split)[1] == 0:
        raise ConfigError(
            f"{best}=True requires evaluations, but dataset.split={shown(config.dataset.split)} has no share for "
            "validation; give it one, such as '95,5'."
        )
    if not saves_meet_evaluations(config):
        raise ConfigError(
            f"{best}=True requires checkpoints of evaluated steps, got "
            f"checkpoint.save_interval={checkpoint.save_interval} and validation.eval_interval="
            f"{validation.eval_interval}; make the first a multiple of the second, or set checkpoint.save_on_best or "
            f"validation.eval_on_save."
        )
    if "model" not in components:
        raise ConfigError(f"{best} requires the weights; add model to checkpoint.components.")


def has_dir(config: ConfigContainer) -> bool:
    """Whether a run has a directory for checkpoints."""
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


def check_rollback_policies(config: ConfigContainer, refused: str | None) -> None:
    """Refuse a policy that rolls back in a run that cannot.

    Raises:
        ConfigError: with the reason `refused`, unless that is None.
    """
    key = _rollback_policy(config)
    if key is not None and refused is not None:
        raise ConfigError(f"{key}=rollback is not possible: {refused}.")


def _rollback_policy(config: ConfigContainer) -> str | None:
    """The first key whose policy is to roll back."""
    policies = {"train.on_nonfinite": config.train.on_nonfinite, "anomaly.on_spike": config.anomaly.on_spike}
    return next((key for key, value in policies.items() if value == "rollback"), None)


def _check_rollback(config: ConfigContainer, components: Sequence[str]) -> None:
    """Check that a run with rollbacks saves checkpoints with the whole state."""
    key = _rollback_policy(config)
    if key is None:
        return
    checkpoint = config.checkpoint
    if not has_dir(config):
        raise ConfigError(f"{key}=rollback requires a checkpoint directory; set run.name or checkpoint.save.")
    is_on_disk = checkpoint.non_persistent_place == "disk"  # memory has the newest state only
    intervals = (checkpoint.save_interval, is_on_disk and checkpoint.non_persistent_save_interval)
    if not any(intervals) and not checkpoint.save_each_epoch and not checkpoint.save_on_best:
        raise ConfigError(
            f"{key}=rollback rolls back to a checkpoint, but none is saved during training; set "
            f"checkpoint.save_interval, or checkpoint.non_persistent_save_interval with non_persistent_place=disk."
        )
    for name in ("save_optim", "save_rng", "load_optim", "load_rng"):
        if not getattr(checkpoint, name):
            raise ConfigError(f"{key}=rollback requires the whole state, got checkpoint.{name}=False; set it to true.")
    lacking = [name for name in ROLLBACK_NEEDS if name not in components]
    if lacking:
        missing = ", ".join(lacking)
        raise ConfigError(f"{key}=rollback requires the whole state; add {missing} to checkpoint.components.")


def check_finetune(config: ConfigContainer) -> None:
    """Refuse fine-tuning without weights or with two sources of weights, and LoRA on random weights.

    Raises:
        ConfigError: naming the value, the rule and the remedy.
    """
    checkpoint, peft = config.checkpoint, config.peft
    sources = [name for name in ("pretrained_checkpoint", "load") if getattr(checkpoint, name) is not None]
    if checkpoint.finetune and not sources:
        raise ConfigError(
            "checkpoint.finetune=True requires weights to start from; set checkpoint.pretrained_checkpoint to a "
            "Hugging Face directory, a run or a checkpoint, or model.hf_model to a Hugging Face directory."
        )
    if checkpoint.finetune and len(sources) == 2 and not loads_own(config):
        raise ConfigError(
            f"checkpoint.pretrained_checkpoint={checkpoint.pretrained_checkpoint} and checkpoint.load="
            f"{checkpoint.load} both name the weights to fine-tune; keep one and set the other to null."
        )
    if peft.peft_scheme is None and peft.base_quantization is not None:
        raise ConfigError(
            f"peft.base_quantization={peft.base_quantization} freezes the weights of the base, so nothing is left to "
            f"train; set peft.peft_scheme=lora to train added ones (--qlora sets both), or leave it out."
        )
    if peft.peft_scheme is None:
        return
    if not sources:
        raise ConfigError(
            f"peft.peft_scheme={peft.peft_scheme} adds a few weights to pretrained ones, but none are given; set "
            f"checkpoint.pretrained_checkpoint, or peft.peft_scheme=null to train all weights."
        )
    if peft.target_modules == []:
        raise ConfigError(
            "peft.target_modules=[] adds weights to no layer; name ends such as [query, value], or null for every "
            "projection."
        )


def loads_own(config: ConfigContainer) -> bool:
    """Whether `checkpoint.load` is the directory that the run saves to, so that loading continues the run."""
    checkpoint, run = config.checkpoint, config.run
    own = checkpoint.save
    if own is None and run.name is not None:
        own = str(run.local_output_dir / run.name / "checkpoints")
    if checkpoint.load is None or own is None:
        return False
    return Path(own).resolve() == Path(checkpoint.load).resolve()


def check_measuring(config: ConfigContainer, world_size: int) -> None:
    """Check the profilers and the detection of slow ranks."""
    profiling, nvrx = config.profiling, config.nvrx_straggler
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
            f"profiling.profile_ranks={profiling.profile_ranks} must contain ranks >= 0; [] selects every rank."
        )
    beyond = [rank for rank in profiling.profile_ranks if rank >= world_size]
    if beyond and (profiles or profiling.record_memory_history):
        raise ConfigError(
            f"profiling.profile_ranks={profiling.profile_ranks} has the rank {beyond[0]}, but this run has the ranks 0 "
            f"to {world_size - 1}; drop it."
        )
    if nvrx.enabled and not (nvrx.calc_relative_gpu_perf or nvrx.calc_individual_gpu_perf):
        raise ConfigError(
            "nvrx_straggler.enabled=True has nothing to compare; set nvrx_straggler.calc_relative_gpu_perf or "
            "nvrx_straggler.calc_individual_gpu_perf to true."
        )


def check_watching(config: ConfigContainer, world_size: int) -> None:
    """Refuse combinations about the watchdog and simulated faults that cannot work."""
    ft = config.ft
    seconds, rank = ft.watchdog_seconds, ft.simulated_fault_rank
    names = [name for name in ("calc_ft_timeouts", "enable_ft_package") if getattr(ft, name)]
    if names and not has_dir(config):
        raise ConfigError(
            f"ft.{names[0]}=True keeps ft_state.json next to the checkpoints, but this run has no checkpoint "
            "directory; set run.name or checkpoint.save."
        )
    if ft.calc_ft_timeouts and not ft.enable_ft_package and seconds is None:
        raise ConfigError(
            "ft.calc_ft_timeouts=True learns the limits of a watchdog, but ft.watchdog_seconds=null turns it off; set "
            "ft.watchdog_seconds, the limit until others are learned."
        )
    if rank is not None and rank >= world_size:
        raise ConfigError(
            f"ft.simulated_fault_rank={rank} must be one of the ranks 0 to {world_size - 1}; leave it null to draw one."
        )
