"""A setting that has no effect in combination with the others is named in one line, never ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep import Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer, apply_overrides, explain, from_dict
from onstep.config.checks import idle_line, idle_settings
from onstep.config.checks.conditions import holds
from onstep.config.checks.idle import idle_without_trainer
from onstep.config.keys import KEYS
from onstep.errors import ConfigError
from onstep.recipes import tiny_gpt_pretrain_config
from tests.support.small_models import Regression, regression_rows

LINE = "settings without effect: "


def config_with(words: str = "") -> ConfigContainer:
    config = from_dict({"train.micro_batch_size": 4, "train.train_iters": 100, "optimizer.lr": 1e-3, "run.name": "run"})
    apply_overrides(config, words.split())
    return config


@pytest.mark.parametrize(
    ("alone", "need", "together"),
    [
        ("checkpoint.save_interval=5 run.name=null", "run.name or checkpoint.save", "checkpoint.save=here"),
        ("checkpoint.load_optim=false", "checkpoint.load", "checkpoint.load=there"),
        ("train.manual_gc_interval=5", "train.manual_gc=true", "train.manual_gc=true"),
        ("train.exit_signal_handler=false train.data_timeout=5", "exit_signal_handler=true", ""),
        ("model.rotary_base=5e5 model.position_embedding_type=none", "rope", "model.position_embedding_type=rope"),
        ("optimizer.adam_beta2=0.95 optimizer.optimizer=sgd", "other than sgd", "optimizer.optimizer=adam"),
        ("optimizer.sgd_momentum=0.5", "optimizer.optimizer=sgd", "optimizer.optimizer=sgd"),
        ("optimizer.loss_scale=8", "mixed_precision", "mixed_precision=bf16_mixed"),
        ("ddp.check_for_nan_in_grad=true mixed_precision=fp16_mixed", "loss_scale", "optimizer.loss_scale=8"),
        ("optimizer.hysteresis=3 mixed_precision=bf16_mixed", "fp16_mixed", "mixed_precision=fp16_mixed"),
        ("optimizer.min_lr=1e-5 scheduler.lr_decay_style=constant", "constant", "scheduler.lr_decay_style=linear"),
        ("scheduler.lr_wsd_decay_iters=5", "WSD", "scheduler.lr_decay_style=WSD"),
        ("scheduler.lr_warmup_init=1e-4", "warm-up", "scheduler.lr_warmup_iters=5"),
        ("validation.eval_interval=5 dataset.split=100", "validation share", "dataset.split=95,5"),
        *(
            (f"validation.eval_iters=0 {setting}", "validation.eval_iters=null or > 0", "validation.eval_iters=2")
            for setting in (
                "validation.eval_interval=1",
                "validation.eval_on_start=true",
                "validation.eval_each_epoch=true",
                "validation.eval_global_batch_size=8",
                "validation.metric_for_best_model=loss",
                "checkpoint.save_on_best=true",
                "checkpoint.keep_best_n=2 checkpoint.most_recent_k=1",
            )
        ),
        ("checkpoint.keep_every_n=3", "checkpoint.most_recent_k > 0", "checkpoint.most_recent_k=2"),
        ("checkpoint.keep_best_n=2", "checkpoint.most_recent_k > 0", "checkpoint.most_recent_k=2"),
        ("dataset.num_workers=0 dataset.prefetch_factor=4", "dataset.num_workers > 0", "dataset.num_workers=1"),
        (
            "logger.timing_log_level=-1 logger.timing_log_option=all",
            "logger.timing_log_level >= 0",
            "logger.timing_log_level=0",
        ),
        ("validation.start_eval_at_iter=5", "eval_interval", "validation.eval_interval=5"),
        ("logger.log_runtime_to_tensorboard=true", "report_names=[bridge]", "logger.tensorboard_dir=here"),
        ("logger.wandb_entity=us", "[wandb] or logger.wandb_project", "logger.report_to=all"),
        ("logger.report_names=[bridge]", "logger.report_to", "logger.report_to=csv"),
        ("profiling.profile_ranks=[]", "use_pytorch_profiler", "profiling.use_pytorch_profiler=true"),
        ("profiling.use_pytorch_profiler=true profiling.profile_step_start=100", "within the run", ""),
        ("anomaly.spike_window=5", "anomaly.on_spike", "anomaly.on_spike=stop"),
        ("rerun_state_machine.spiky_loss_factor=5", "rerun_mode", "rerun_state_machine.rerun_mode=validate_results"),
        ("ft.simulated_fault_type=rank_hung", "ft.simulate_fault=true", "ft.simulate_fault=true"),
        ("straggler.threshold=0.5", "log_straggler=true", "straggler.log_straggler=true"),
        ("nvrx_straggler.profiling_interval=5", "nvrx_straggler.enabled=true", "nvrx_straggler.enabled=true"),
        ("peft.dim=8", "peft.peft_scheme=lora", "peft.peft_scheme=lora"),
    ],
)
def test_a_setting_without_effect_is_named_with_what_it_requires(alone: str, need: str, together: str) -> None:
    [(condition, settings)] = idle_settings(config_with(alone))
    assert need in condition
    assert settings[0].partition("=")[0] in alone
    if together:
        assert idle_settings(config_with(f"{alone} {together}")) == []


def test_defaults_name_nothing() -> None:
    assert idle_line(idle_settings(config_with())) is None


@pytest.mark.parametrize(
    "words",
    [
        "",
        "run.name=a dataset.split=100 optimizer.optimizer=sgd scheduler.lr_decay_style=constant",
        "run.name=a validation.eval_iters=0 validation.eval_interval=1",
    ],
)
def test_values_of_the_recipe_itself_are_not_named(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("row, row, row your boat " * 200, encoding="utf-8")
    config = tiny_gpt_pretrain_config()
    sizes = "model.num_layers=1 model.hidden_size=16 train.train_iters=1 scheduler.lr_warmup_iters=0 dist.device=cpu"
    apply_overrides(config, [*sizes.split(), *words.split(), "dataset.paths=[text.txt]", "checkpoint.keep_every_n=7"])
    pretrain(config)
    lines = [record.message for record in caplog.records if LINE in record.message]
    named = "checkpoint.keep_every_n=7 (requires a directory: run.name or checkpoint.save)"
    assert lines == ([] if words else [LINE + named])


def test_a_declared_condition_is_about_keys_that_exist() -> None:
    for need in {need for key in KEYS.values() for need in (*key.needs, key.option.only_with)} - {""}:
        assert holds(need, config_with()) in (True, False)


def test_the_explanation_of_a_key_names_what_it_requires() -> None:
    assert "requires    train.manual_gc=true" in explain("train.manual_gc_interval")
    assert "requires    mixed_precision=fp16_mixed; optimizer.loss_scale=null" in explain("optimizer.hysteresis")
    assert "requires    straggler.log_straggler=true" in explain("straggler.threshold")
    assert "requires" not in explain("straggler.log_straggler")


def test_pretrain_names_them_in_one_line(tiny_config: ConfigContainer, caplog: pytest.LogCaptureFixture) -> None:
    apply_overrides(tiny_config, ["train.train_iters=3", "optimizer.sgd_momentum=0.5", "trainer.label_names=[y]"])
    tiny_config.checkpoint.save_interval = 2
    pretrain(tiny_config)
    [line] = [record.message for record in caplog.records if LINE in record.message]
    for part in ("checkpoint.save_interval=2", "optimizer.sgd_momentum=0.5", "trainer.label_names=['y']"):
        assert part in line


def test_pretrain_names_an_optimizer_and_a_schedule_that_only_the_trainer_has(tiny_config: ConfigContainer) -> None:
    options = ["trainer.optim=adafactor", "trainer.lr_scheduler_type=polynomial", "trainer.warmup_steps=2"]
    apply_overrides(tiny_config, options)
    [(need, settings)] = idle_without_trainer(tiny_config)
    assert need == "onstep.Trainer, which alone reads them"
    assert settings == ["trainer.optim=adafactor", "trainer.lr_scheduler_type=polynomial"]
    tiny_config.trainer = {"optim": "adamw_torch"}
    assert idle_without_trainer(tiny_config) == []


def test_a_trainer_names_settings_of_a_model_that_it_does_not_build(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = {"model.num_layers": 12, "dataset.paths": ["text"], "anomaly.spike_window": 5, "dataset.shuffle": False}
    args = TrainingArguments(str(tmp_path / "run"), max_steps=1, use_cpu=True, config_overrides=overrides)
    Trainer(Regression(), args, train_dataset=regression_rows(), default_callbacks=False).train()
    lines = [record.message for record in caplog.records if LINE in record.message]
    assert [line.removeprefix(LINE).partition(" (")[0] for line in lines] == [
        "config_overrides['anomaly.spike_window']=5",
        "config_overrides['model.num_layers']=12, config_overrides['dataset.paths']=['text']",
    ]


def test_the_best_model_of_a_run_without_validation_is_refused(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    words = ["checkpoint.load_best_model_at_end=true", "checkpoint.save_interval=5", "dataset.split=100", "run.name=a"]
    apply_overrides(tiny_config, [*words, f"run.output_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"dataset.split='100' has no share for validation; give it one"):
        pretrain(tiny_config)


def test_a_value_is_shown_without_escapes_and_without_a_long_end() -> None:
    config = config_with()
    for backend, ending in (("\x1b[31mred\n", r"'\x1b[31mred\n' ("), ("x" * 5000, "... (5,002 characters) (")):
        config.train.torch_compile_backend = backend
        line = idle_line(idle_settings(config))
        assert line is not None
        assert line.isprintable()
        assert ending in line
