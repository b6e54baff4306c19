"""Every key that a run reads has the same effect through `pretrain()` and through `Trainer`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from onstep import Trainer, TrainingArguments
from onstep.config import KEYS
from onstep.config.trackers import BRIDGE_FIELDS
from onstep.errors import ConfigError
from onstep.trackers import TRACKERS, tracker_class
from tests.support.contract.two_doors import (
    Outcome,
    configuration,
    differing,
    shared_readers,
    through_pretrain,
    through_trainer,
)
from tests.support.tracker_files import scalars

TRACKER_KEYS = {
    key
    for name in TRACKERS
    for keys in tracker_class(name).options.values()
    for key in keys
    if key in KEYS and key.removeprefix("logger.") not in BRIDGE_FIELDS.values()
}
BOARD = {"logger.tensorboard_dir": "{directory}/board"}
HUGE = {"optimizer.lr": 1e30}
"""The loss is NaN from step 2 on."""
SPIKES = {"anomaly.spike_warmup": 2, "anomaly.spike_threshold": 0.001, "train.train_iters": 6, "logger.log_interval": 1}
ROLLBACK = {**SPIKES, "anomaly.on_spike": "rollback", "checkpoint.save_interval": 1}
SAVES = {"checkpoint.save_interval": 2}
OTHER = {"run.name": "other", **SAVES}
PAUSED = {"train.exit_interval": 2}
LOADED = {"checkpoint.load": "{directory}/other"}


@dataclass(frozen=True)
class Case:
    """A value of a key that is not its default, beside other values where it has an effect only there."""

    key: str
    value: Any
    seen_in: str
    """The field of the outcome that shows it."""
    beside: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] | None = None
    """A run in the same directory, before this one."""
    also: dict[str, Any] = field(default_factory=dict)
    """Values of more keys whose effects are seen in the same field; other tests see each of them alone."""

    @property
    def values(self) -> dict[str, Any]:
        return {**self.beside, **self.also, self.key: self.value}


CASES = [
    Case("train.train_iters", 6, "counters"),
    Case("train.train_samples", 12, "counters", {"train.train_iters": None}),
    Case("train.num_epochs", 2.0, "counters", {"train.train_iters": None}),
    Case("train.micro_batch_size", 1, "counters"),
    Case("train.global_batch_size", 2, "counters"),
    Case("train.rampup_batch_size", [2, 2, 4], "features"),
    Case("train.step_batch_size_schedule", "0:2 4:4", "features"),
    Case("train.decrease_batch_size_if_needed", True, "ended", {"train.global_batch_size": 5}),
    Case("train.iterations_to_skip", [2], "counters"),
    Case("train.empty_unused_memory_level", 2, "features"),
    Case("train.check_weight_hash_across_dp_replicas_interval", 1, "printed"),
    Case("train.train_sync_interval", 1, "features"),
    Case("train.drop_last", False, "counters"),
    Case("train.on_nonfinite", "stop", "ended", HUGE),
    Case("train.on_nonfinite", "skip", "counters", HUGE),
    Case("train.exit_interval", 2, "ended"),
    Case("train.exit_duration_in_mins", 1e-9, "ended"),
    Case("train.exit_signal_handler", False, "surroundings"),
    Case("train.exit_signals", ["SIGUSR2"], "surroundings"),
    Case("train.exit_signal", "SIGUSR2", "surroundings"),
    Case("train.manual_gc", True, "surroundings"),
    Case("validation.eval_iters", 2, "counters"),
    Case("validation.eval_iters", 0, "events"),
    Case("validation.eval_interval", 1, "events"),
    Case("validation.start_eval_at_iter", 3, "events"),
    Case("validation.eval_global_batch_size", 8, "counters"),
    Case("validation.eval_micro_batch_size", 1, "counters"),
    Case("validation.eval_on_start", True, "events"),
    Case("validation.eval_each_epoch", True, "events"),
    Case("validation.start_eval_at_epoch", 2.0, "events", {"validation.eval_each_epoch": True}),
    Case("validation.eval_on_save", True, "events", {"validation.eval_interval": 4, **SAVES}),
    Case("validation.metric_for_best_model", "perplexity", "counters"),
    Case("validation.greater_is_better", True, "counters", {"validation.metric_for_best_model": "loss"}),
    Case("logger.log_interval", 1, "logs"),
    Case("logger.log_first_step", True, "logs"),
    Case("logger.log_on_each_epoch", True, "logs"),
    Case("logger.logging_level", 10, "surroundings"),
    Case("logger.logging_dir", "{directory}/elsewhere_logs", "files"),
    Case("logger.log_progress", True, "files"),
    Case("logger.report_to", "csv", "files"),
    Case("logger.report_names", ["hf", "bridge"], "tags", {"logger.report_to": "tensorboard"}),
    Case("logger.timing_log_level", 1, "printed"),
    Case("logger.timing_log_option", "all", "printed", {"logger.timing_log_level": 1}),
    Case("logger.log_energy", True, "features"),
    Case("logger.tensorboard_dir", "{directory}/board", "tags"),
    Case("logger.tensorboard_log_interval", 3, "tags", BOARD),
    Case("logger.skip_train_metrics_log", True, "tags", BOARD),
    Case(
        "logger.log_params_norm",
        True,
        "tags",
        BOARD,
        also={
            "logger.log_throughput_to_tensorboard": True,
            "logger.log_timers_to_tensorboard": True,
            "logger.log_loss_scale_to_tensorboard": False,
            "logger.log_validation_ppl_to_tensorboard": True,
            "logger.log_l2_norm_grad_to_tensorboard": True,
            "logger.log_runtime_to_tensorboard": True,
            "logger.log_world_size_to_tensorboard": True,
        },
    ),
    Case(
        "profiling.use_pytorch_profiler",
        True,
        "files",
        {"profiling.profile_step_start": 1, "profiling.profile_step_end": 2},
    ),
    Case("profiling.record_memory_history", True, "features"),
    Case("rng.seed", 7, "weights"),
    Case("rng.data_seed", 7, "weights"),
    Case("dataset.shuffle", False, "weights"),
    Case("checkpoint.save", "{directory}/elsewhere", "files", SAVES),
    Case("checkpoint.save_interval", 1, "files"),
    Case("checkpoint.save_each_epoch", True, "files"),
    Case("checkpoint.save_on_best", True, "decisions"),
    Case("checkpoint.save_at_end", True, "files"),
    Case("checkpoint.non_persistent_save_interval", 1, "files"),
    Case("checkpoint.non_persistent_place", "memory", "files", {"checkpoint.non_persistent_save_interval": 1}),
    Case("checkpoint.async_save", True, "events", SAVES),
    Case("checkpoint.save_optim", False, "files", SAVES),
    Case("checkpoint.save_rng", False, "files", SAVES),
    Case("checkpoint.components", ["model"], "files", SAVES),
    Case("checkpoint.most_recent_k", 1, "files", SAVES),
    Case("checkpoint.keep_every_n", 2, "files", {"checkpoint.most_recent_k": 1, "checkpoint.save_interval": 1}),
    Case(
        "checkpoint.keep_best_n",
        1,
        "files",
        {**SAVES, "checkpoint.most_recent_k": 1, "validation.greater_is_better": True},
    ),
    Case("checkpoint.load_best_model_at_end", True, "weights", {**SAVES, "validation.greater_is_better": True}),
    Case("checkpoint.certify", True, "files"),
    Case("checkpoint.on_config_change", "apply", "ended", before={**PAUSED, "optimizer.lr": 0.02}),
    Case("checkpoint.load", "{directory}/other", "events", before=OTHER),
    Case("checkpoint.ckpt_step", 2, "events", LOADED, before=OTHER),
    Case("checkpoint.load_optim", False, "weights", {**LOADED, "checkpoint.ckpt_step": 2}, before=OTHER),
    Case("checkpoint.exit_on_missing_checkpoint", True, "ended", {"checkpoint.load": "{directory}/run"}),
    Case("scheduler.override_opt_param_scheduler", True, "ended", {"optimizer.lr": 0.02}, before=PAUSED),
    Case("scheduler.use_checkpoint_opt_param_scheduler", True, "ended", {"optimizer.lr": 0.02}, before=PAUSED),
    Case("run.fresh", True, "files", before={}),
    Case("run.save_weights", False, "files"),
    Case("anomaly.on_spike", "skip", "counters", {"anomaly.spike_warmup": 1, "anomaly.spike_threshold": 0.001}),
    Case("anomaly.max_rollbacks", 0, "ended", ROLLBACK),
    Case("anomaly.rollback_lr_factor", 0.5, "decisions", ROLLBACK),
    Case("rerun_state_machine.rerun_mode", "validate_results", "features"),
    Case("rerun_state_machine.rerun_mode", "report_determinism_stats", "events"),
    Case("ft.watchdog_seconds", None, "features"),
    Case("ft.calc_ft_timeouts", True, "files", SAVES),
    Case("straggler.log_straggler", True, "printed"),
    Case("optimizer.optimizer", "sgd", "weights"),
    Case("optimizer.optimizer", "muon", "weights"),
    Case("optimizer.lr", 0.02, "weights"),
    Case("optimizer.min_lr", 0.009, "weights", {"scheduler.lr_decay_style": "linear"}),
    Case(
        "optimizer.weight_decay",
        0.5,
        "weights",
        also={"optimizer.adam_beta1": 0.5, "optimizer.adam_beta2": 0.5, "optimizer.adam_eps": 0.1},
    ),
    Case("optimizer.sgd_momentum", 0.1, "weights", {"optimizer.optimizer": "sgd"}),
    Case("optimizer.clip_grad", 0.1, "weights", {"optimizer.optimizer": "sgd"}),
    Case("optimizer.decoupled_lr", 0.1, "weights"),
    Case("optimizer.param_groups", [{"match": "*", "lr_mult": 2.0}], "weights"),
    Case("optimizer.grad_norm_skip_threshold", 0.1, "weights"),
    Case("optimizer.log_num_zeros_in_grad", True, "logs"),
    Case("optimizer.initial_loss_scale", 4.0, "logs", {"mixed_precision": "fp16_mixed"}),
    Case("optimizer.loss_scale", 4.0, "logs", {"mixed_precision": "fp16_mixed"}),
    Case("scheduler.lr_decay_style", "cosine", "weights"),
    Case("scheduler.lr_decay_iters", 2, "weights", {"scheduler.lr_decay_style": "linear"}),
    Case("scheduler.lr_warmup_iters", 2, "weights"),
    Case("scheduler.lr_warmup_init", 0.005, "weights", {"scheduler.lr_warmup_iters": 2}),
    Case(
        "scheduler.weight_decay_incr_style",
        "cosine",
        "weights",
        {
            "scheduler.start_weight_decay": 0.0,
            "scheduler.end_weight_decay": 0.9,
            "scheduler.weight_decay_incr_style": "linear",
        },
    ),
    Case("mixed_precision", "bf16_mixed", "weights"),
    Case("env_vars", {"ONSTEP_TWO_DOORS": "1"}, "surroundings"),
]
"""A run with the value differs from one without it, and both doors make the same of both."""


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = (self.layer(x).squeeze(-1) - labels).square().mean()
        return loss


ROWS = [{"x": torch.tensor([1.0, float(one)]), "labels": torch.tensor(2.0 * one)} for one in range(8)]


def small_trainer(tmp_path: Path, overrides: dict[str, Any], rows: Any = ROWS, **options: Any) -> Trainer:
    """A Trainer of one layer, 2 steps."""
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), use_cpu=True, max_steps=2, config_overrides=overrides, **options
    )
    return Trainer(Line(), args, train_dataset=ROWS, eval_dataset=rows, default_callbacks=False)


class Doors:
    """Runs through both doors, each made once."""

    def __init__(self, directory: Path, corpus: Path, cache: Path) -> None:
        self._directory, self._corpus, self._cache = directory, corpus, cache
        self._known: dict[str, Outcome] = {}

    def outcome(
        self, entry_point: Callable[..., Outcome], values: dict[str, Any], before: dict[str, Any] | None = None
    ) -> Outcome:
        """What the door makes of these values, after a run with those of `before`."""
        key = f"{entry_point.__name__} {json.dumps([values, before])}"
        if key not in self._known:
            directory = self._directory / str(len(self._known))
            directory.mkdir()
            for one in (values,) if before is None else (before, values):
                self._known[key] = entry_point(configuration(directory, self._corpus, self._cache, one))
        return self._known[key]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Doors:
    return Doors(tmp_path_factory.mktemp("doors"), corpus / "heapq.py", token_cache)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.key}={case.value}")
def test_a_key_does_the_same_through_both_doors(case: Case, doors: Doors) -> None:
    one, other = (doors.outcome(door, case.values, case.before) for door in (through_pretrain, through_trainer))
    assert differing(one, other) == []
    assert case.seen_in in differing(one, doors.outcome(through_pretrain, case.beside, case.before))


SOURCE_OF_DATA = "pretrain builds the data, Trainer is given it"
MODEL = "pretrain builds the model, Trainer is given it"
WEIGHTS = "pretrain decides by it on the type of the weights that it builds, Trainer's are as the user loaded them"
TOKENIZER = "pretrain makes the tokenizer, Trainer is given a processing class"
ONE_DOOR = {
    "run.check_memory": "a Trainer has a model of its own, whose memory is not estimated",
    "checkpoint.on_config_change": "pretrain reads it for changed files too, which a Trainer's datasets do not name",
    **dict.fromkeys(
        (
            "dataset.kind",
            "dataset.paths",
            "dataset.text_key",
            "dataset.eod_mask_loss",
            "dataset.reset_attention_mask",
            "dataset.split",
            "dataset.seq_length",
            "dataset.cache_dir",
        ),
        SOURCE_OF_DATA,
    ),
    **dict.fromkeys(("model.hf_model", "model.hf_config"), MODEL),
    **dict.fromkeys(
        ("model.recompute_granularity", "model.offload_activations", "model.fused_linear_loss"),
        "a Trainer sets it in models of transformers too, pretrain builds them with it",
    ),
    "train.torch_compile": "a Trainer compiles for the time of a run, pretrain where it places the model",
    "parallel.data_parallel_shard_size": "pretrain looks for blocks in shards before it builds the model",
    "parallel.tensor_model_parallel_size": "pretrain looks for the plan of a model before it builds it",
    "optimizer.optimizer": "pretrain looks for the package of an optimizer before it builds the model",
    **dict.fromkeys(
        (
            "optimizer.params_dtype",
            "optimizer.main_params_dtype",
            "optimizer.rounding",
            "peft.base_quantization",
            "peft.peft_scheme",
            "mixed_precision",
        ),
        WEIGHTS,
    ),
    "tokenizer.tokenizer_type": TOKENIZER,
    "tokenizer.tokenizer_model": TOKENIZER,
    "model.vocab_size": "pretrain takes it from the tokenizer, and checks the data against it",
    "checkpoint.pretrained_checkpoint": "pretrain records its revision on the Hub; a Trainer's model has a name",
    "checkpoint.resume": "a Trainer decides by it whether a run that is there goes on, as Hugging Face's argument says",
    "run.name": "a Trainer trains again into the directory that it owns",
    "logger.console": "a Trainer's constructor chooses its default callbacks by it, before any run",
    **dict.fromkeys(
        ("run.recipe", "scheduler.lr_warmup_iters"),
        "pretrain scales a recipe's warm-up to a shorter run; a Trainer starts from no recipe",
    ),
    "train.loss_weighting": "a Trainer chooses by it between shares and means, and says so",
}
"""Keys that one door reads by itself, beside what both read, and why."""

RANKS = "only several ranks read it"
CUDA = "only a GPU has it"
NVRX = "takes nvidia-resiliency-ext"
FAULT = "the process would not survive it"
UNREAD = {
    **{
        f"dataset.{name}": "of another kind of data"
        for name in (
            "weights",
            "hf_subset",
            "hf_split",
            "messages_key",
            "prompt_key",
            "response_key",
            "packing",
            *(name for name in (key.partition(".")[2] for key in KEYS) if name.startswith("stream_")),
        )
    },
    "tokenizer.vocab_size": "of another tokenizer",
    **{f"peft.{name}": "a Trainer refuses LoRA" for name in ("dim", "alpha", "dropout", "target_modules")},
    **dict.fromkeys(("train.torch_compile_backend", "train.torch_compile_mode"), "of a compiled model"),
    "train.check_optimizer_step_success": RANKS,
    **{
        f"parallel.{name}": RANKS
        for name in (
            "virtual_pipeline_model_parallel_size",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    },
    "train.skip_sync_grad_norm_across_mp": RANKS,
    **{
        f"ddp.{name}": RANKS
        for name in (
            "bucket_cap_mb",
            "find_unused_parameters",
            "broadcast_buffers",
            "gradient_as_bucket_view",
            "overlap_grad_reduce",
            "num_distributed_optimizer_instances",
            "fp8_param_gather",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "static_graph",
            "grad_reduce_in_bf16",
            "grad_reduce_in_fp32",
        )
    },
    **{f"fsdp.{name}": RANKS for name in ("wrap", "cpu_offload", "prefetch")},
    **{f"straggler.{name}": RANKS for name in ("threshold", "stop_if_detected")},
    **dict.fromkeys(
        ("straggler.straggler_ctrlr_port", "logger.tensorboard_queue_size"), "of Megatron Bridge's configurations"
    ),
    "straggler.open_port": "of configurations of version 0.4",
    "logger.log_throughput": "of the console line, which a Trainer leaves to ProgressCallback",
    **dict.fromkeys(TRACKER_KEYS, "of another tracker"),
    "logger.memory_keys": CUDA,
    "profiling.record_shapes": CUDA,
    "profiling.memory_snapshot_path": CUDA,
    "rerun_state_machine.spiky_loss_factor": "read where the forward step asks for it",
    **{f"ft.{name}": FAULT for name in ("simulated_fault_type", "simulated_fault_rank", "simulated_fault_base_delay")},
    **{key: NVRX for key in KEYS if key.startswith("nvrx_straggler.") and key != "nvrx_straggler.enabled"},
    **{f"run.{name}": "of a run in an object store" for name in ("scratch_dir", "scratch_gib", "lease_seconds")},
    "run.output_dir": "read as run.local_output_dir, which the section derives from it",
    "run.default_callbacks": "of Trainer and the command line: pretrain adds no callbacks",
}
"""Keys that none of these runs reads, and why; code that both doors share reads them where they count."""


def test_every_key_is_read_through_both_doors_or_neither(doors: Doors) -> None:
    reads: list[dict[str, set[str]]] = [{}, {}]
    for case in CASES:
        for entry_point, found in zip((through_pretrain, through_trainer), reads, strict=True):
            for key, readers in doors.outcome(entry_point, case.values, case.before).reads.items():
                found.setdefault(key, set()).update(readers)
    differ, unread = [], []
    for key in KEYS:
        one, other = (found.get(key, set()) for found in reads)
        shared = [shared_readers(one), shared_readers(other)]
        if shared[0] != shared[1] or bool(one - shared[0]) != bool(other - shared[1]):
            differ.append(key)
        elif not one:
            unread.append(key)
    assert [key for key in differ if key not in ONE_DOOR] == []
    assert [key for key in ONE_DOOR if key not in differ] == []
    assert sorted(set(unread) - {key for case in CASES for key in (case.key, *case.also)}) == sorted(UNREAD)


@pytest.mark.parametrize("entry_point", [through_pretrain, through_trainer])
@pytest.mark.parametrize(("policy", "ended"), [("stop", "CheckpointError, failed"), ("continue", "completed, failed")])
def test_final_weights_that_cannot_be_written_are_what_on_save_error_says(
    entry_point: Callable[..., Outcome], policy: str, ended: str, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    entry_point(configuration(tmp_path, corpus / "heapq.py", token_cache, PAUSED))
    (tmp_path / "run" / "model").write_text("in the way")
    (tmp_path / "run" / "config.json").mkdir()
    values = {"checkpoint.on_save_error": policy}
    assert entry_point(configuration(tmp_path, corpus / "heapq.py", token_cache, values)).ended == ended
    (tmp_path / "run" / "model").unlink()
    (tmp_path / "run" / "config.json").rmdir()
    again = entry_point(configuration(tmp_path, corpus / "heapq.py", token_cache, values))
    assert (again.ended, bool(list((tmp_path / "run").rglob("model.safetensors")))) == ("completed, completed", True)


@pytest.mark.parametrize("entry_point", [through_pretrain, through_trainer])
def test_a_tracker_that_cannot_work_is_refused_before_anything_is_built(
    entry_point: Callable[..., Outcome], doors: Doors
) -> None:
    values = {"logger.mlflow_experiment": "one", "logger.mlflow_run_name": ""}
    outcome = doors.outcome(entry_point, values)
    assert (outcome.ended, outcome.files, outcome.events) == ("ConfigError", [], [])


def test_after_training_both_evaluate_once_and_pretrain_tests_too(doors: Doors) -> None:
    values = {"validation.eval_after_training": True, "validation.eval_interval": None}
    one, other = doors.outcome(through_pretrain, values), doors.outcome(through_trainer, values)
    assert one.events.count("on_eval_end") == other.events.count("on_eval_end") == 1
    assert one.events.index("on_eval_end") > one.events.index("on_train_end")  # after the loop, not as its last step
    assert other.events.index("on_eval_end") < other.events.index("on_train_end")
    assert (one.events.count("on_test_end"), other.events.count("on_test_end")) == (1, 0)
    assert set(differing(one, other)) == {"events", "counters", "logs"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("validation.skip_train", True),
        ("checkpoint.pretrained_checkpoint", "somewhere"),
        ("peft.peft_scheme", "lora"),
    ],
)
def test_a_trainer_refuses_what_only_pretrain_can_do(key: str, value: Any, tmp_path: Path) -> None:
    overrides = {key: value} | ({"checkpoint.load": "somewhere"} if key.startswith("peft") else {})
    with pytest.raises(ConfigError, match=rf"config_overrides\['{key}'\]={value!r}"):
        small_trainer(tmp_path, overrides).train()
    assert not (tmp_path / "run").exists()


def test_without_a_run_directory_only_a_trainer_keeps_its_metrics_log(doors: Doors) -> None:
    values = {"run.name": None}
    one, other = doors.outcome(through_pretrain, values), doors.outcome(through_trainer, values)
    assert (one.files, other.files) == ([], ["trainer_logs.json"])  # Hugging Face's output_dir is always one
    assert differing(one, other) == ["files"]


def test_default_callbacks_are_a_key_of_the_trainer(tmp_path: Path) -> None:
    for wanted, count in ((True, 3), (False, 0)):
        args = TrainingArguments(output_dir=str(tmp_path), config_overrides={"run.default_callbacks": wanted})
        assert len(Trainer(Line(), args).callback_manager.callbacks) == count


def test_an_evaluation_by_itself_has_the_environment_level_and_tags_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONSTEP_TWO_DOORS", raising=False)
    overrides = {"env_vars.ONSTEP_TWO_DOORS": "1", "logger.tensorboard_dir": str(tmp_path / "board")}
    trainer = small_trainer(tmp_path, overrides, {"a": ROWS, "b": ROWS}, log_level="debug")
    log, levels = logging.getLogger("onstep"), []
    before = log.level
    trainer.callback_manager.register("on_eval_end", lambda: levels.append(log.level))
    try:
        trainer.evaluate()
        trainer.predict(ROWS)
        assert os.environ["ONSTEP_TWO_DOORS"] == "1"
    finally:
        os.environ.pop("ONSTEP_TWO_DOORS", None)
    assert set(levels) == {logging.DEBUG}
    assert log.level == before, "the level is the run's"
    assert {"lm loss validation a", "lm loss validation b", "lm loss test"} <= scalars(tmp_path / "board").keys()


@pytest.mark.parametrize("names", ["bridge", "hf,bridge"])
def test_an_evaluation_after_training_adds_to_the_trackers_of_the_run(names: str, tmp_path: Path) -> None:
    overrides = {"logger.tensorboard_dir": str(tmp_path / "board"), "run.save_weights": False}
    overrides["logger.report_names"] = names.split(",")
    trainer = small_trainer(tmp_path, overrides)
    trainer.train()
    trained = scalars(tmp_path / "board")
    trainer.evaluate()
    added = scalars(tmp_path / "board")
    assert {name: points for name, points in added.items() if name in trained} == trained
    assert [step for step, _ in added["lm loss validation"]] == [2]
