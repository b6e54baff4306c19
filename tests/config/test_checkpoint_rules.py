"""Combinations about checkpoints, signals and anomalies that cannot work are refused before training."""

from __future__ import annotations

import pytest

from onstep.config import ConfigContainer, apply_overrides, from_dict, resolve, validate
from onstep.errors import ConfigError


def config_with(overrides: str = "") -> ConfigContainer:
    """A valid configuration of a run with a directory, and some overrides."""
    config = from_dict(
        {"train.train_iters": 100, "train.micro_batch_size": 4, "optimizer.lr": 1e-3, "run.name": "a-run"}
    )
    apply_overrides(config, overrides.split())
    return config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("checkpoint.most_recent_k=0", "most_recent_k=0 must be -1 for all, or at least 1: the newest one"),
        ("checkpoint.most_recent_k=-2", "most_recent_k=-2 must be -1 for all"),
        ("checkpoint.save_interval=0", "checkpoint.save_interval=0 must be > 0"),
        ("checkpoint.keep_every_n=0", "checkpoint.keep_every_n=0 must be > 0"),
        ("checkpoint.keep_best_n=-1", "checkpoint.keep_best_n=-1 must be >= 0"),
        ("checkpoint.on_config_change=ask", "must be error | keep | apply"),
        ("checkpoint.on_save_error=go_on", "must be stop | continue"),
        ("checkpoint.components=[model,optimiser]", "has 'optimiser', which is not known; .*Did you mean 'optimizer'"),
        ("checkpoint.components=[]", r"checkpoint.components=\[\] selects nothing; .*null is all"),
        ("checkpoint.certify=true checkpoint.components=[model]", "certify keeps its chain with the component trainer"),
        (
            "train.exit_signals=[SIGTREM]",
            "train.exit_signals has 'SIGTREM', which is not known; .*Did you mean 'SIGTERM'",
        ),
        ("train.exit_signals=[SIGKILL]", "train.exit_signals has 'SIGKILL', which no process can handle"),
        ("train.exit_signals=[SIGTERM,SIGCHLD]", "train.exit_signals has 'SIGCHLD', which data workers use"),
        ("train.exit_signals=[]", "train.exit_signals=.* selects nothing; .*exit_signal_handler=false"),
        ("anomaly.on_spike=stop anomaly.spike_metrics=[los]", "spike_metrics has 'los', .*Did you mean 'loss'"),
        ("anomaly.on_spike=stop anomaly.spike_metrics=[]", "spike_metrics=.* selects nothing"),
        ("anomaly.on_spike=explode", "must be ignore | raise | stop | skip | rollback"),
        ("anomaly.spike_window=0", "anomaly.spike_window=0 must be > 0"),
        ("train.on_nonfinite=rollback", "on_nonfinite=rollback rolls back to a checkpoint, but none is saved"),
        ("anomaly.on_spike=rollback", "anomaly.on_spike=rollback rolls back to a checkpoint, but none is saved"),
        (
            "train.on_nonfinite=rollback checkpoint.save_interval=5 checkpoint.save_optim=false",
            "requires the whole state, got checkpoint.save_optim=False",
        ),
        (
            "train.on_nonfinite=rollback checkpoint.save_interval=5 checkpoint.components=[model,trainer,rng]",
            "add optimizer, scheduler, dataset to checkpoint.components",
        ),
        ("anomaly.on_spike=rollback run.name=null", "on_spike=rollback requires a checkpoint directory"),
        ("checkpoint.ckpt_step=5 run.name=null", "checkpoint.ckpt_step=5 requires a checkpoint directory"),
        ("optimizer.initial_loss_scale=2 optimizer.min_loss_scale=4", "min_loss_scale=4.0 must be at most .*=2.0"),
        ("checkpoint.load_best_model_at_end=true", "requires checkpoints of evaluated steps"),
        (
            "checkpoint.load_best_model_at_end=true checkpoint.save_interval=10 validation.eval_interval=20",
            "save_interval=10 and validation.eval_interval=20; make the first a multiple of the second",
        ),
        (
            "checkpoint.load_best_model_at_end=true checkpoint.save_interval=9 validation.eval_each_epoch=true",
            "evaluated steps",
        ),
        (
            "checkpoint.load_best_model_at_end=true run.name=null",
            "requires a checkpoint directory, but this run has none",
        ),
        (
            "checkpoint.load_best_model_at_end=true validation.eval_iters=0",
            "requires evaluations, got validation.eval_iters=0",
        ),
        ("validation.eval_on_save=true validation.eval_iters=0", "requires evaluations, got validation.eval_iters=0"),
        ("validation.skip_train=true validation.eval_iters=0", "skip_train=True evaluates .*; set either of them"),
        (
            "checkpoint.load_best_model_at_end=true checkpoint.save_interval=10 validation.eval_interval=5 "
            "checkpoint.components=[optimizer]",
            "requires the weights; add model to checkpoint.components",
        ),
    ],
)
def test_what_cannot_work_names_value_rule_and_remedy(overrides: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(" | ", r" \| ")):
        validate(config_with(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        "checkpoint.most_recent_k=1",
        "checkpoint.save_interval=10 run.name=null checkpoint.save=ckpt",
        "checkpoint.load=other checkpoint.ckpt_step=5 run.name=null",
        "checkpoint.ckpt_step=5",
        "checkpoint.certify=true",
        "checkpoint.components=[model,trainer] checkpoint.certify=true",
        "checkpoint.load_best_model_at_end=true checkpoint.save_interval=20 validation.eval_interval=10",
        "checkpoint.load_best_model_at_end=true checkpoint.save_each_epoch=true validation.eval_each_epoch=true",
        "checkpoint.load_best_model_at_end=true checkpoint.save_interval=7 validation.eval_on_save=true",
        "checkpoint.load_best_model_at_end=true checkpoint.save_on_best=true validation.eval_interval=7",
        "train.on_nonfinite=rollback checkpoint.save_interval=10",
        "anomaly.on_spike=rollback checkpoint.non_persistent_save_interval=10",
        "train.on_nonfinite=rollback checkpoint.save_each_epoch=true",
        "train.on_nonfinite=skip run.name=null",
        "train.exit_signals=[SIGTERM,SIGUSR2]",
        "train.exit_signals=[] train.exit_signal_handler=false",
        "anomaly.spike_metrics=[]",
        "validation.skip_train=true checkpoint.save_interval=10 run.name=null",
        "optimizer.initial_loss_scale=4 optimizer.min_loss_scale=4",
    ],
)
def test_what_can_work_is_accepted(overrides: str) -> None:
    validate(config_with(overrides))


def test_the_metric_is_loss_where_checkpoints_are_chosen_and_none_is_named() -> None:
    chosen = "checkpoint.keep_best_n=1 checkpoint.save_interval=10 validation.eval_interval=10"
    assert resolve(config_with(chosen)).validation.metric_for_best_model == "loss"
    named = f"{chosen} validation.metric_for_best_model=accuracy"
    assert resolve(config_with(named)).validation.metric_for_best_model == "accuracy"
    assert resolve(config_with()).validation.metric_for_best_model is None
