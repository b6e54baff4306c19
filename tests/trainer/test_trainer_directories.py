"""A Trainer's output_dir: trained into again, shared with other files, and in use."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep import Trainer, TrainerCallback
from onstep.checkpoint import checkpoints
from onstep.errors import CheckpointError, ConfigError, RunExistsError
from onstep.events import Request
from onstep.trainer.output_dir.identity import trainer_identity
from onstep.training.runs.lock import RunLock
from tests.support.small_models import Regression, arguments, regression_rows


def trained(tmp_path: Path, rows: Any = None, *, model: Any = None, resume: Any = None, **options: Any) -> Trainer:
    """A Trainer that has trained 3 steps, with a checkpoint of each."""
    own = {name: options.pop(name) for name in ("compute_loss_func", "callbacks", "data_collator") if name in options}
    values: dict[str, Any] = {"save_steps": 1, **options}
    cls = own.pop("cls", Trainer)
    trainer = cls(
        Regression() if model is None else model,
        arguments(tmp_path, **values),
        train_dataset=regression_rows() if rows is None else rows,
        default_callbacks=False,
        **own,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: Trainer) -> list[Any]:
    return [value.tolist() for value in trainer.model.state_dict().values()]


def steps(directory: Path) -> list[int]:
    return sorted(info.step for info in checkpoints(directory))


def fail_at(step: int) -> Callable[..., None]:
    class Fails:
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                raise RuntimeError("the disk of the tracker is full")

    return Fails  # type: ignore[return-value]


def interrupted(tmp_path: Path, *, step: int = 2, **options: Any) -> None:
    with pytest.raises(RuntimeError, match="tracker"):
        trained(tmp_path, callbacks=[fail_at(step)], **options)


def warned(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.message for record in caplog.records if record.levelno >= logging.WARNING)


def test_a_script_that_is_run_twice_trains_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = trained(tmp_path)
    again = trained(tmp_path)
    assert (again.state.global_step, weights(again)) == (3, weights(first))
    assert steps(tmp_path / "run") == steps(tmp_path / "run" / "checkpoints-1") == [1, 2, 3]
    assert len((tmp_path / "run" / "decisions.jsonl").read_text().splitlines()) == 3, "those of the second run"
    [line] = [line for line in warned(caplog).splitlines() if "from scratch" in line]
    aside = tmp_path / "run" / "checkpoints-1"
    assert line == (
        f"{tmp_path / 'run'} held a run that is finished (3 steps). Training starts from scratch, and the earlier "
        f"checkpoints are now in {aside}; to continue from them instead: resume_from_checkpoint='{aside}'."
    )


def test_a_cell_without_checkpoints_is_run_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = trained(tmp_path, save_strategy="no")
    again = trained(tmp_path, save_strategy="no")
    assert (again.state.global_step, weights(again)) == (3, weights(first))
    assert warned(caplog) == ""
    assert not (tmp_path / "run" / "checkpoints-1").exists()


def test_weights_from_before_a_run_are_moved_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, saved = tmp_path / "run", {"save_strategy": "no", "config_overrides": {}}
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    written = b"a base model"
    (directory / "model.safetensors").write_bytes(written)
    for number in (1, 2):
        trained(tmp_path, **saved, learning_rate=0.1 * number)
        aside = directory / f"model-{number}"
        assert (aside / "model.safetensors").read_bytes() == written != (directory / "model.safetensors").read_bytes()
        assert (aside / "config.json").read_text() == "{}"
        assert f"{directory} held weights from before this run, which are now in {aside}" in warned(caplog)
        written = (directory / "model.safetensors").read_bytes()
    for steps_in_all in (3, 5):
        trained(tmp_path / "longer", config_overrides={}, max_steps=steps_in_all, resume=steps_in_all == 5 or None)
    assert not (tmp_path / "longer" / "run" / "model-1").exists(), "its own"


def test_other_arguments_start_a_new_run(tmp_path: Path) -> None:
    trained(tmp_path)
    assert trained(tmp_path, learning_rate=0.5).state.global_step == 3
    assert trained(tmp_path, max_steps=5).state.global_step == 5
    assert steps(tmp_path / "run" / "checkpoints-2") == [1, 2, 3]


def test_more_steps_continue_with_resume_true(tmp_path: Path) -> None:
    constant = {"lr_scheduler_type": "constant"}
    expected = trained(tmp_path / "whole", max_steps=5, **constant)
    trained(tmp_path, **constant)
    longer = trained(tmp_path, model=Regression(seed=9), max_steps=5, resume=True, **constant)
    assert (longer.state.global_step, weights(longer)) == (5, weights(expected))
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("flag", "details"), [("should_training_stop", {}), ("set", {"key": "train_iters", "value": 2})]
)
@pytest.mark.parametrize("is_steered", [True, False])
def test_what_ended_a_run_is_lifted_by_more_steps_and_named_before(
    tmp_path: Path, flag: str, details: Any, is_steered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                sent = details | ({"command_id": "1"} if is_steered else {})
                control.add_request(Request(flag, "someone", "", "", 0, sent))

    assert trained(tmp_path, callbacks=[Ends()]).state.global_step == 2
    assert trained(tmp_path, resume=True).state.global_step == 2
    assert ("ended there because after step 2 it was asked to " in warned(caplog)) is is_steered
    interrupted(tmp_path, resume=True, max_steps=5, step=3)
    assert trained(tmp_path, resume=True, max_steps=5).state.global_step == 5


def test_more_rows_of_an_epoch_lengthen_the_schedule(tmp_path: Path) -> None:
    interrupted(tmp_path)
    rows = regression_rows(24)
    assert trained(tmp_path, rows, resume=True).state.global_step == 6
    assert trained(tmp_path, regression_rows(36), resume=True).state.global_step == 6, "its one epoch is over"


def test_a_finished_run_goes_back_to_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    first = trained(tmp_path)
    for _ in range(2):
        named = trained(tmp_path, model=Regression(seed=9), resume=str(tmp_path / "run" / "checkpoint-2"))
        assert (named.state.global_step, weights(named)) == (3, weights(first))
    assert steps(tmp_path / "run" / "aside" / "branch-2") == [3]


def test_a_named_checkpoint_that_does_not_fit_the_model_moves_nothing(tmp_path: Path) -> None:
    trained(tmp_path)
    wider = Regression()
    wider.layer = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"size mismatch|shape"):
        trained(tmp_path, model=wider, resume=str(tmp_path / "run" / "checkpoint-2"))
    assert steps(tmp_path / "run") == [1, 2, 3]
    assert not (tmp_path / "run" / "aside").exists()


def test_a_checkpoint_of_another_run_is_a_start_with_other_arguments(tmp_path: Path) -> None:
    trained(tmp_path / "other")
    start = str(tmp_path / "other" / "run" / "checkpoint-3")
    longer = trained(tmp_path, max_steps=5, learning_rate=0.5, resume=start)
    assert longer.state.global_step == 5
    assert steps(tmp_path / "run") == [4, 5]


def test_resume_true_requires_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"resume_from_checkpoint=True, but .*run has no checkpoint"):
        trained(tmp_path, resume=True)
    assert not (tmp_path / "run" / "run.json").exists()


def test_resume_true_in_the_arguments_starts_a_run_where_there_is_none(tmp_path: Path) -> None:
    for steps in (3, 5):
        found = trained(tmp_path, max_steps=steps, resume_from_checkpoint=True, lr_scheduler_type="constant")
        assert found.state.global_step == steps
    assert found.state.log_history[-1]["step"] == 5
    assert not (tmp_path / "run" / "checkpoints-1").exists(), "the second one has continued the first"


@pytest.mark.parametrize("name", [None, "run", "run/checkpoint-7"])
def test_a_refused_continuation_of_foreign_files_writes_nothing(tmp_path: Path, name: str | None) -> None:
    foreign = tmp_path / "run" / "checkpoint-7"
    foreign.mkdir(parents=True)
    (foreign / "note.txt").write_text("mine")
    with pytest.raises(CheckpointError):
        trained(tmp_path, resume=True if name is None else str(tmp_path / name))
    assert not (tmp_path / "run" / "run.json").exists()
    assert trained(tmp_path).state.global_step == 3
    assert (tmp_path / "run" / "checkpoints-1" / "checkpoint-7" / "note.txt").read_text() == "mine"


def test_a_refused_continuation_leaves_a_finished_run_finished(tmp_path: Path) -> None:
    trained(tmp_path, save_strategy="no")
    (tmp_path / "run" / "checkpoint-7").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint to continue from"):
        trained(tmp_path, resume=True)
    assert trained(tmp_path).state.global_step == 3


@pytest.mark.parametrize("place", ["a file", "a directory of the system"])
def test_an_unwritable_directory_is_refused_in_the_words_of_python(tmp_path: Path, place: str) -> None:
    directory = Path("/proc") if place != "a file" else tmp_path
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .*; choose another output_dir") as error:
        trained(directory)
    assert "run.output_dir" not in str(error.value)


def test_a_mistyped_path_moves_nothing(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        trained(tmp_path, resume=str(tmp_path / "runn" / "checkpoint-3"))
    assert steps(tmp_path / "run") == [1, 2, 3]


def test_a_failed_run_is_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = trained(tmp_path / "whole")
    interrupted(tmp_path)
    again = trained(tmp_path)
    assert weights(again) == weights(expected)
    assert "from scratch" not in warned(caplog)
    assert not (tmp_path / "run" / "checkpoints-1").exists()


def doubled(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return 2 * nn.functional.mse_loss(outputs["logits"], labels)


def test_a_foreign_checkpoint_that_is_newer_is_moved_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    interrupted(tmp_path)
    (tmp_path / "run" / "checkpoint-700").mkdir()
    trained(tmp_path)
    branch = tmp_path / "run" / "aside" / "branch-1"
    assert (branch / "checkpoint-700").is_dir()
    assert f"continuing from step 1; the checkpoints after it are now in {branch}" in warned(caplog)


def test_a_failed_run_with_another_loss_starts_from_scratch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = trained(tmp_path / "whole", compute_loss_func=doubled)
    interrupted(tmp_path)
    again = trained(tmp_path, compute_loss_func=doubled)
    assert weights(again) == weights(expected)
    assert "the code of loss, model or data has changed: compute_loss_func was added" in warned(caplog)
    assert steps(tmp_path / "run" / "checkpoints-1") == [1]


def test_overwrite_output_dir_starts_from_scratch(tmp_path: Path) -> None:
    interrupted(tmp_path)
    trained(tmp_path, overwrite_output_dir=True)
    assert steps(tmp_path / "run" / "checkpoints-1") == [1]


def test_files_of_others_stay_untouched(tmp_path: Path) -> None:
    foreign = tmp_path / "run" / "checkpoint-2"
    foreign.mkdir(parents=True)
    (foreign / "pytorch_model.bin").write_bytes(b"theirs")
    for name in ("notes.txt", "latest", "identity.txt"):
        (tmp_path / "run" / name).write_text("mine")
    trained(tmp_path)
    assert steps(tmp_path / "run") == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoints-1" / "checkpoint-2" / "pytorch_model.bin").read_bytes() == b"theirs"
    for name in ("notes.txt", "latest", "identity.txt"):
        assert (tmp_path / "run" / name).read_text() == "mine"


def test_a_directory_in_use_is_refused_in_the_words_of_python(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run" / ".run.lock")
    try:
        with pytest.raises(RunExistsError, match="in use by a live process") as error:
            trained(tmp_path)
    finally:
        lock.release()
    assert "run.name" not in str(error.value)


def test_a_run_of_an_earlier_version_is_continued_where_it_is(tmp_path: Path) -> None:
    expected = trained(tmp_path / "whole")
    interrupted(tmp_path)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir()
    (run / "checkpoint-1").rename(run / "checkpoints" / "checkpoint-1")
    record = json.loads((run / "run.json").read_text())
    for key in ("layout", "launch", "identity"):
        record.pop(key, None)
    (run / "run.json").write_text(json.dumps(record))
    again = trained(tmp_path)
    assert weights(again) == weights(expected)
    assert steps(run / "checkpoints") == [1, 2, 3]


def test_digests_that_an_earlier_version_made_otherwise_are_no_difference(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = trained(tmp_path / "whole")
    interrupted(tmp_path)
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    record["identity"] = {part: digest.rpartition("-")[2] for part, digest in record["identity"].items()}
    path.write_text(json.dumps(record))
    assert weights(trained(tmp_path)) == weights(expected)
    assert "from scratch" not in warned(caplog)


def test_a_restart_by_torchrun_continues_its_own_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even with weights that are initialized without a seed."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    interrupted(tmp_path, overwrite_output_dir=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    trained(tmp_path, model=Regression(seed=5), overwrite_output_dir=True)
    assert not (tmp_path / "run" / "checkpoints-1").exists()
    trained(tmp_path, overwrite_output_dir=True)
    assert steps(tmp_path / "run" / "checkpoints-1") == [1, 2, 3]


def test_model_init_is_compared_by_what_it_makes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(seed: int, callbacks: Any = None) -> None:
        def model_init() -> nn.Module:
            model = Regression()
            nn.init.normal_(next(model.parameters()), std=seed)
            return model

        args, rows = arguments(tmp_path, save_steps=1), regression_rows()
        options = {"train_dataset": rows, "callbacks": callbacks, "default_callbacks": False}
        Trainer(None, args, model_init=model_init, **options).train()

    with pytest.raises(RuntimeError, match="tracker"):
        run(1, [fail_at(2)])
    run(1)
    assert "from scratch" not in warned(caplog)
    with pytest.raises(RuntimeError, match="tracker"):
        run(1, [fail_at(2)])
    caplog.clear()
    run(2)
    assert "the initial weights have changed" in warned(caplog)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "name",
    [
        "_get_collator_with_removed_columns",
        "_get_dataloader",
        "_get_num_items_in_batch",
        "_get_train_sampler",
        "_remove_unused_columns",
        "_set_signature_columns_if_needed",
        "_wrap_model",
        "autocast_smart_context_manager",
        "call_model_init",
        "training_step",
    ],
)
def test_a_method_that_decides_what_is_learned_is_part_of_the_identity(tmp_path: Path, name: str) -> None:
    def code_of(method: Callable[..., Any]) -> Any:
        cls = type("Own", (Trainer,), {name: method})
        trainer = cls(Regression(), arguments(tmp_path), train_dataset=regression_rows(), default_callbacks=False)
        return trainer_identity(trainer).parts["code"]

    assert code_of(lambda self, *args, **kwargs: 1) != code_of(lambda self, *args, **kwargs: 2)
