"""A run that is interrupted anywhere, as often as one likes, ends as the one that nobody touched."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.checkpoint import checkpoints
from onstep.checkpoint.saving import write_durably
from onstep.config import ConfigContainer, apply_overrides
from onstep.errors import CheckpointError, RunExistsError
from onstep.record import read_records, without_wall_clock
from tests.support.resuming import Interrupted, compare, outcome, start

Make = Callable[..., ConfigContainer]
IN_MEMORY = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a file system in memory")


@pytest.fixture
def make(tiny_config: ConfigContainer, corpus: Path, tmp_path: Path) -> Make:
    """Configurations of 11 steps with 6 steps an epoch: dropout, two micro-batches, logs and evaluations between."""

    def made(name: str, *words: str) -> ConfigContainer:
        import copy

        config = copy.deepcopy(tiny_config)
        config.run.name, config.run.output_dir = name, str(tmp_path / "runs")
        config.dataset.paths = [str(corpus / "colorsys.py")]
        config.dataset.seq_length = config.model.seq_length = 64
        config.train.global_batch_size, config.train.micro_batch_size, config.train.train_iters = 8, 4, 11
        config.model.num_layers, config.model.hidden_size = 1, 16
        config.model.hidden_dropout = config.model.attention_dropout = 0.1
        config.logger.log_interval, config.validation.eval_interval, config.validation.eval_iters = 3, 4, 1
        config.checkpoint.save_interval, config.checkpoint.certify, config.checkpoint.most_recent_k = 2, True, -1
        apply_overrides(config, list(words))
        return config

    return made


def test_it_may_die_after_any_step(make: Make) -> None:
    """One run that dies after each of its steps: an even one is saved after the event, so the next start repeats it."""
    compare(make, [("on_step_end", number) for number in (1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3)])


@pytest.mark.parametrize(
    "events",
    [
        ("on_forward_backward_start", "on_train_step_end", "on_log_step", "on_log"),
        ("on_eval_step_end", "on_eval_end", "on_checkpoint_save_start", "on_checkpoint_save"),
        ("on_epoch_end", "on_final_metrics", "on_train_end", "on_test_end"),
    ],
)
def test_it_may_die_in_a_forward_pass_an_evaluation_a_log_or_a_save(make: Make, events: tuple[str, ...]) -> None:
    compare(make, [(event, 1) for event in events])


@pytest.mark.parametrize(
    "words",
    [
        "checkpoint.async_save=true",
        "mixed_precision=bf16_mixed",
        "mixed_precision=fp16_mixed optimizer.initial_loss_scale=1e9 optimizer.loss_scale_window=3",
        pytest.param("optimizer.optimizer=sgd", marks=pytest.mark.slow),
        "dataset.num_workers=2",
        "train.drop_last=false train.train_iters=null train.num_epochs=2",
        "checkpoint.save_interval=null checkpoint.save_each_epoch=true validation.eval_each_epoch=true",
        pytest.param(
            "checkpoint.save_interval=5 validation.eval_each_epoch=true logger.log_on_each_epoch=true",
            marks=pytest.mark.slow,
        ),
        "checkpoint.save_interval=11 checkpoint.save_at_end=false checkpoint.non_persistent_save_interval=3",
        pytest.param(
            "checkpoint.save_interval=11 checkpoint.save_at_end=false checkpoint.non_persistent_save_interval=3 "
            "checkpoint.non_persistent_place=memory",
            marks=IN_MEMORY,
        ),
        pytest.param("train.manual_gc=true validation.eval_on_start=true", marks=pytest.mark.slow),
    ],
)
def test_it_may_die_with_every_kind_of_run(make: Make, words: str) -> None:
    def configured(name: str) -> ConfigContainer:
        return make(name, *words.split())

    compare(configured, [("on_step_end", 4), ("on_step_end", 5), ("on_step_end", 3)])


@IN_MEMORY
def test_the_newest_state_is_in_memory_until_the_run_is_over(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_slowly(*given: Any) -> Any:  # so that the state of step 6 is not written yet when the run dies
        time.sleep(1.0)
        return write_durably(*given)

    monkeypatch.setattr("onstep.checkpoint.memory_checkpoints.write_durably", write_slowly)
    words = ("checkpoint.save_interval=4", "checkpoint.non_persistent_save_interval=3", "checkpoint.async_save=true")
    config = make("kept", *words, "checkpoint.non_persistent_place=memory")
    start(config, dies_at=("on_step_end", 8))
    assert [info.step for info in checkpoints(tmp_path / "runs" / "kept" / "checkpoints")] == [4]
    (there,) = Path("/dev/shm").glob(f"onstep-{os.geteuid()}-kept-*")
    assert [path.name for path in there.glob("[!.]*")] == ["checkpoint-6"]
    begun: list[int] = []
    manager = CallbackManager()
    manager.register("on_checkpoint_load", lambda context: begun.append(context.checkpoint_step))
    pretrain(config, callbacks=manager)
    assert begun == [6]
    assert not there.exists()


@IN_MEMORY
def test_a_finished_run_leaves_nothing_in_memory_even_if_its_end_is_not_saved(make: Make) -> None:
    words = ("checkpoint.save_interval=null", "checkpoint.save_at_end=false", "checkpoint.certify=false")
    in_memory = ("checkpoint.non_persistent_save_interval=3", "checkpoint.non_persistent_place=memory")
    pretrain(make("over", *words, *in_memory))
    assert list(Path("/dev/shm").glob(f"onstep-{os.geteuid()}-over-*")) == []


def test_the_comparison_is_red_where_the_random_state_is_left_out(make: Make) -> None:
    def configured(name: str) -> ConfigContainer:
        return make(name, "checkpoint.save_rng=false")

    with pytest.raises(AssertionError):
        compare(configured, [("on_step_end", 7)])


def test_a_run_that_dies_before_its_first_checkpoint_starts_anew(make: Make) -> None:
    compare(make, [("on_step_end", 1), ("on_forward_backward_start", 1)])


def test_a_plain_resume_warns_of_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    start(make("quiet", "checkpoint.certify=false"), dies_at=("on_step_end", 3))
    caplog.clear()
    start(make("quiet", "checkpoint.certify=false"))
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []


def test_early_stopping_stays_decided(make: Make) -> None:
    class StopAtFour:
        def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
            if state.global_step == 4:  # type: ignore[attr-defined]
                control.should_training_stop = True  # type: ignore[attr-defined]

    config = make("stopped")
    manager = CallbackManager()
    manager.add([JsonLogger(), StopAtFour()])

    def die(context: object) -> None:
        raise Interrupted

    manager.register("on_train_end", die)
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)
    state = pretrain(config, callbacks=[JsonLogger()])  # without the callback that stopped it
    assert state.train_state.step == 4
    assert state.ending.ended == "stopped"


def test_a_finished_run_can_be_extended(make: Make) -> None:
    first = make("longer", "scheduler.lr_decay_iters=14")
    start(first)
    longer = make("longer", "scheduler.lr_decay_iters=14", "train.train_iters=14")
    with pytest.raises(RunExistsError, match=r"train\.train_iters is 11 there and 14 here.*--on-config-change apply"):
        pretrain(longer)
    longer.checkpoint.on_config_change = "apply"
    whole = make("whole", "scheduler.lr_decay_iters=14", "train.train_iters=14")
    expected = outcome(whole, start(whole))
    found = outcome(longer, start(longer))
    assert found["weights"] == expected["weights"]
    assert found["certificates"] == expected["certificates"]


def test_the_stored_values_are_kept_where_that_is_asked_for(make: Make) -> None:
    config = make("kept")
    start(config, dies_at=("on_step_end", 5))
    other = make("kept", "optimizer.lr=0.5", "checkpoint.on_config_change=keep")
    whole = make("whole")
    expected = outcome(whole, start(whole))
    assert outcome(other, start(other))["weights"] == expected["weights"]


def test_a_step_may_be_chosen_and_newer_checkpoints_are_kept_aside(make: Make) -> None:
    config = make("chosen")
    start(config, dies_at=("on_step_end", 9))
    again = make("chosen", "checkpoint.ckpt_step=4")
    steps: list[int] = []
    manager = CallbackManager()
    manager.add(JsonLogger())
    manager.register("on_checkpoint_load", lambda context: steps.append(context.checkpoint_step))
    pretrain(again, callbacks=manager)
    assert steps == [4]
    root = Path(config.run.output_dir) / "chosen" / "checkpoints"
    assert {info.step for info in checkpoints(root)} == {2, 4, 6, 8, 10, 11}
    aside = sorted(path.name for path in root.rglob("checkpoint-*") if path.parent != root and path.is_dir())
    assert aside == ["checkpoint-6", "checkpoint-8"]


def test_a_mistyped_checkpoint_is_an_error(make: Make, tmp_path: Path) -> None:
    config = make("typo", f"checkpoint.load={tmp_path / 'runs' / 'nothing'}")
    with pytest.raises(CheckpointError, match="does not exist"):
        pretrain(config)
    with pytest.raises(CheckpointError, match=r"checkpoint.ckpt_step=7: .* does not exist"):
        pretrain(make("typo", "checkpoint.ckpt_step=7"))


def test_a_checkpoint_below_the_home_directory_may_be_named_with_a_tilde(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    start(make("first"), dies_at=("on_step_end", 5))
    steps: list[int] = []
    manager = CallbackManager()
    manager.register("on_checkpoint_load", lambda context: steps.append(context.checkpoint_step))
    pretrain(make("second", "checkpoint.load=~/runs/first"), callbacks=manager)
    assert steps == [4]


def test_another_runs_checkpoint_may_be_continued(make: Make, tmp_path: Path) -> None:
    first = make("first")
    start(first, dies_at=("on_step_end", 9))
    second = make("second", f"checkpoint.load={tmp_path / 'runs' / 'first'}", "checkpoint.ckpt_step=8")
    start(make("whole"))
    before = (tmp_path / "runs" / "first" / "trainer_logs.json").read_bytes()
    start(second)
    directories = [tmp_path / "runs" / name for name in ("whole", "second")]
    assert len({(directory / "model" / "model.safetensors").read_bytes() for directory in directories}) == 1
    whole_metrics_log, forked = (read_records(directory / "trainer_logs.json") for directory in directories)
    assert [without_wall_clock(one) for one in forked] == [without_wall_clock(one) for one in whole_metrics_log]
    assert (tmp_path / "runs" / "first" / "trainer_logs.json").read_bytes() == before, "the other run is left alone"


def test_checkpoints_that_are_all_damaged_are_an_error_not_a_fresh_start(make: Make) -> None:
    config = make("damaged")
    start(config, dies_at=("on_step_end", 5))
    root = Path(config.run.output_dir) / "damaged" / "checkpoints"
    for info in checkpoints(root):
        (info.path / "model" / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints .* can be used"):
        pretrain(config)


def test_a_damaged_checkpoint_is_skipped_with_the_reason(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    whole = make("whole")
    expected = outcome(whole, start(whole))
    config = make("damaged")
    start(config, dies_at=("on_step_end", 7))
    path = Path(config.run.output_dir) / "damaged" / "checkpoints" / "checkpoint-6" / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        found = outcome(config, start(config))
    assert "checkpoint-6 is rejected" in caplog.text
    assert found["weights"] == expected["weights"]
    assert found["certificates"] == expected["certificates"]


def test_a_second_process_is_kept_out_of_a_running_run(make: Make) -> None:
    config = make("busy")
    refused: list[str] = []

    def enter(context: object) -> None:
        with pytest.raises(RunExistsError, match="live process") as caught:
            pretrain(config)
        refused.append(str(caught.value))

    manager = CallbackManager()
    manager.register("on_train_start", enter)
    pretrain(config, callbacks=manager)
    assert len(refused) == 1


def test_a_start_that_fails_does_not_open_the_run_to_another_configuration(make: Make) -> None:
    config = make("guarded")
    manager = CallbackManager()
    manager.register("on_step_end", lambda context: _die_at(context, 5))
    with pytest.raises(Interrupted):
        pretrain(config, callbacks=manager)  # without a metrics log
    start(make("guarded"), dies_at=("on_data_init_start", 1))
    with pytest.raises(RunExistsError, match=r"optimizer\.lr is .* there and 0\.5 here"):
        pretrain(make("guarded", "optimizer.lr=0.5"))
    assert pretrain(config).train_state.step == 11


def _die_at(context: Any, step: int) -> None:
    if context.state.train_state.step == step:
        raise Interrupted


def test_the_configuration_of_another_runs_checkpoint_is_compared(make: Make, tmp_path: Path) -> None:
    start(make("first"), dies_at=("on_step_end", 9))
    load = f"checkpoint.load={tmp_path / 'runs' / 'first'}"
    with pytest.raises(
        CheckpointError, match=r"was saved with a different configuration: optimizer\.lr is .* and 0\.5 here"
    ):
        pretrain(make("second", load, "optimizer.lr=0.5"))
    with pytest.raises(CheckpointError, match=r"optimizer\.optimizer is 'adam' there and 'sgd' here.*does not fit"):
        pretrain(make("third", load, "optimizer.optimizer=sgd", "checkpoint.on_config_change=apply"))
    state = pretrain(make("fourth", load, "optimizer.lr=0.5", "checkpoint.on_config_change=apply"))
    assert state.train_state.step == 11


def test_a_run_without_a_name_is_compared_with_its_checkpoints_too(make: Make, tmp_path: Path) -> None:
    def unnamed(*words: str) -> ConfigContainer:
        config = make("unnamed", f"checkpoint.save={tmp_path / 'checkpoints'}", *words)
        config.run.name = None
        return config

    assert pretrain(unnamed("train.exit_interval=6")).train_state.step == 6
    with pytest.raises(CheckpointError, match=r"optimizer\.lr is"):
        pretrain(unnamed("optimizer.lr=0.5"))
    assert pretrain(unnamed()).train_state.step == 11


@pytest.mark.parametrize("what", ["file", "empty", "damaged"])
def test_a_start_that_cannot_be_used_is_an_error(make: Make, tmp_path: Path, what: str) -> None:
    place = tmp_path / "place"
    if what == "file":
        place.write_text("")
    else:
        place.mkdir()
    if what == "damaged":
        start(make("first"), dies_at=("on_step_end", 3))
        place = tmp_path / "runs" / "first" / "checkpoints" / "checkpoint-2"
        (place / "model" / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError):
        pretrain(make("second", f"checkpoint.load={place}"))


@pytest.mark.parametrize("words", ["checkpoint.components=[model,trainer]", "checkpoint.save_optim=false"])
def test_the_learning_rate_goes_on_where_the_schedule_was_not_saved(make: Make, words: str) -> None:
    whole, rates = make("whole", words), []
    load_optim = "checkpoint.load_optim=false"

    def note(context: Any) -> None:
        rates.append(context.optimizer.param_groups[0]["lr"])

    manager = CallbackManager()
    manager.register("on_step_end", note)
    pretrain(whole, callbacks=manager)
    expected, rates[:] = list(rates), []
    start(make("killed", words), dies_at=("on_step_end", 7))
    source = Path(whole.run.output_dir) / "killed"
    pretrain(make("again", words, f"checkpoint.load={source}", load_optim), callbacks=manager)
    assert rates == expected[-len(rates) :]
    assert len(rates) == 5


@pytest.mark.parametrize(
    ("words", "lacking", "remedy"),
    [
        ("checkpoint.components=[optimizer,scheduler,trainer,dataset,rng]", "model", "start again: run.fresh=true"),
        ("checkpoint.components=[model,optimizer]", "trainer", "its weights: run.fresh=true checkpoint.finetune=true"),
        ("checkpoint.components=[model]", "optimizer, trainer", "its weights: run.fresh=true"),
        ("checkpoint.components=[model,trainer]", "optimizer", "checkpoint.load_optim=false"),
        ("checkpoint.save_optim=false", "optimizer", "checkpoint.load_optim=false"),
    ],
)
def test_a_run_does_not_continue_from_checkpoints_that_lack_its_progress(
    make: Make, words: str, lacking: str, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    without_chain = "checkpoint.certify=false"
    pretrain(make("less", words, without_chain, "train.exit_interval=2"))
    assert f"cannot continue from its checkpoints: they have no {lacking} (checkpoint." in caplog.text
    with pytest.raises(CheckpointError, match=f"checkpoint-2 has no {lacking}; .*{remedy}"):
        pretrain(make("less", words, without_chain))


def test_a_run_that_an_anomaly_stopped_is_not_finished(make: Make, tmp_path: Path) -> None:
    def poisoned(context: Any) -> None:
        if context.state.train_state.step == 4:
            for parameter in context.model[0].parameters():
                parameter.grad.fill_(float("nan"))

    def run(*words: str) -> Any:
        manager = CallbackManager()
        manager.add(JsonLogger())
        manager.register("on_forward_backward_end", poisoned)
        return pretrain(make("poisoned", *words), callbacks=manager)

    for _ in range(2):
        assert run("train.on_nonfinite=stop").ending.by_anomaly, "it comes to the same step again"
    record = json.loads((tmp_path / "runs" / "poisoned" / "run.json").read_text())
    assert record["status"] == "failed"
    assert "non-finite" in record["error"]
    state = run("train.on_nonfinite=skip", "checkpoint.on_config_change=apply")
    assert (state.train_state.step, state.train_state.num_skips) == (11, 1)
