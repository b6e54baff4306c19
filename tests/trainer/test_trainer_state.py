"""What callbacks set on `state` and `control` in a run, what checkpoints keep of it, and which keywords they get."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers

from onstep import ExportableState, Trainer, TrainerCallback, TrainerState
from tests.support.forked_processes import Processes, output_of
from tests.support.small_models import Regression, arguments, causal_rows, quiet, qwen, regression_rows


class At(TrainerCallback):
    """Calls a function at the end of one step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act(state, control)


def setting(name: str, value: Any) -> Any:
    return lambda state, control: setattr(state, name, value)


def trained(tmp_path: Path, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
    rows = regression_rows(12)
    trainer = quiet(Regression(), arguments(tmp_path, **options), rows, eval_dataset=rows, callbacks=list(callbacks))
    with suppress(Interruption):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


class Interruption(RuntimeError):
    """Ends a run as a crash does."""


def crash(state: Any, control: Any) -> None:
    raise Interruption


def test_a_number_of_steps_set_by_a_callback_ends_the_run_there(tmp_path: Path) -> None:
    def steps_of(trainer_class: Any, args: Any, base: type) -> tuple[int, int]:
        class Ends(base):  # type: ignore[misc, valid-type]
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 1:
                    state.max_steps = 2

        trainer = trainer_class(Regression(), args, train_dataset=regression_rows(12), callbacks=[Ends()])
        trainer.train()
        return int(trainer.state.global_step), int(trainer.state.max_steps)

    theirs = transformers.TrainingArguments(
        str(tmp_path / "theirs"), use_cpu=True, report_to="none", save_strategy="no", per_device_train_batch_size=2
    )
    ours = arguments(tmp_path, per_device_train_batch_size=2)
    reference = steps_of(transformers.Trainer, theirs, transformers.TrainerCallback)
    assert steps_of(Trainer, ours, TrainerCallback) == reference == (2, 2)


def test_an_interval_set_by_a_callback_holds_from_then_on(tmp_path: Path) -> None:
    logged: list[int] = []

    class Logs(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            logged.append(state.global_step)

    options = {"max_steps": 8, "logging_steps": 1}
    trained(tmp_path, At(2, setting("logging_steps", 3)), Logs(), **options)

    assert logged == [1, 2, 3, 6, 8]


def test_the_intervals_are_those_of_the_arguments(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, logging_steps=2, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=6, max_steps=3
    )

    state = trainer.state
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (2, 3, 6)
    assert state.num_train_epochs == 1
    assert isinstance(state.num_train_epochs, int)


def test_intervals_without_effect_are_shown_as_in_transformers(tmp_path: Path) -> None:
    """So that `state.global_step % state.save_steps` is no division by zero."""
    strategies = {"logging_strategy": "epoch", "save_strategy": "no", "eval_strategy": "epoch"}
    options = {**strategies, "save_steps": 0.5, "per_device_train_batch_size": 4, "num_train_epochs": 1}
    seen: list[Any] = []

    def noting(base: type) -> Any:
        class Notes(base):  # type: ignore[misc, valid-type]
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen.append((state.logging_steps, state.eval_steps, state.save_steps, state.num_train_epochs))

        return Notes()

    rows = regression_rows(12)
    theirs = transformers.TrainingArguments(str(tmp_path / "theirs"), use_cpu=True, report_to="none", **options)
    transformers.Trainer(
        Regression(), theirs, train_dataset=rows, eval_dataset=rows, callbacks=[noting(transformers.TrainerCallback)]
    ).train()
    trained(tmp_path, noting(TrainerCallback), **options)

    assert seen == [(500, 500, 2, 1)] * 2


def test_attributes_of_a_state_live_and_continue_with_the_checkpoint(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Counts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.my_count = getattr(state, "my_count", 0) + 1
            seen.append(state.my_count)
            control.should_foo = seen[-1]

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(("saved", state.my_count, control.should_foo))

    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trained(tmp_path, Counts(), At(3, crash), **options)
    first, seen[:] = list(seen), []
    trained(tmp_path, Counts(), resume=True, **options)

    assert first == [1, 2, ("saved", 2, 2), 3]
    assert seen == [3, 4, ("saved", 4, 4)]


class Bare(TrainerCallback, ExportableState):
    """Its state has no attributes."""

    def __init__(self, size: int = 1) -> None:
        self.size = size

    def state(self) -> dict[str, Any]:
        return {"args": {"size": self.size}}


class Counting(Bare):
    def __init__(self, size: int = 1) -> None:
        super().__init__(size)
        self.count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"size": self.size}, "attributes": {"count": self.count}}


def test_exportable_states_are_saved_shown_and_restored(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first = trained(tmp_path, Bare(7), Counting(5), At(3, crash), **options)

    assert first.state.stateful_callbacks == {
        "Bare": {"args": {"size": 7}},
        "Counting": {"args": {"size": 5}, "attributes": {"count": 3}},
        "TrainerControl": {"args": first.control.state()["args"], "attributes": {}},
    }
    again = Counting(5)
    trainer = trained(tmp_path, Bare(7), again, resume=True, **options)
    assert again.count == 4
    trainer.state.save_to_json(str(tmp_path / "trainer_state.json"))
    saved = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
    assert saved.stateful_callbacks["Counting"] == {"args": {"size": 5}, "attributes": {"count": 4}}
    assert dataclasses.asdict(saved) == json.loads((tmp_path / "trainer_state.json").read_text())
    assert dataclasses.asdict(saved) == dataclasses.asdict(trainer.state)


def keywords_of(trainer_class: Any, args: Any, base: type, **options: Any) -> dict[str, set[str]]:
    """The keywords that each event brings in a run with an evaluation, a save and a prediction."""
    seen: dict[str, set[str]] = {}

    def noting(event: str) -> Any:
        def note(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            given = {name for name, value in kwargs.items() if value is not None}
            seen[event] = seen.get(event, given) & given

        return note

    events = [name for name in dir(transformers.TrainerCallback) if name.startswith("on_")]
    recorder = type("Recorder", (base,), {name: noting(name) for name in events})()
    rows = regression_rows(12)
    trainer = trainer_class(Regression(), args, train_dataset=rows, eval_dataset=rows, callbacks=[recorder], **options)
    trainer.train()
    trainer.predict(rows)
    return seen


def test_every_event_brings_the_keywords_that_it_has_in_transformers(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "num_train_epochs": 1,
        "logging_steps": 1,
    }
    theirs = transformers.TrainingArguments(
        str(tmp_path / "theirs"), use_cpu=True, report_to="none", disable_tqdm=True, **options
    )
    ours = arguments(tmp_path, **options)
    processor = {"processing_class": Processor()}
    reference = keywords_of(transformers.Trainer, theirs, transformers.TrainerCallback, **processor)
    got = keywords_of(Trainer, ours, TrainerCallback, **processor, default_callbacks=False)

    assert reference.keys() == got.keys()
    missing = {event: sorted(names - got[event]) for event, names in reference.items() if names - got[event]}
    assert missing == {}
    further = set[str]().union(*(got[event] - names for event, names in reference.items()))
    known = {"trainer", "tokenizer", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"}
    own = {"grad_norm", "checkpoint_step", "checkpoint_path", "total_loss_dict"}
    assert further <= known | own


@pytest.mark.parametrize("workers", [0, 1])
def test_callbacks_read_the_loaders_as_in_transformers(tmp_path: Path, workers: int) -> None:
    def seen_by(trainer_class: Any, args: Any, base: type) -> list[Any]:
        seen: list[Any] = []

        def note(loader: Any) -> None:
            batches = [batch["x"].tolist() for batch in loader]
            seen.append((len(loader), len(loader.dataset), batches))

        class Reads(base):  # type: ignore[misc, valid-type]
            def on_step_end(self, args: Any, state: Any, control: Any, train_dataloader: Any, **kwargs: Any) -> None:
                note(train_dataloader)

            def on_prediction_step(
                self, args: Any, state: Any, control: Any, eval_dataloader: Any, **kwargs: Any
            ) -> None:
                note(eval_dataloader)

            def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
                if "loss" in logs:
                    seen.append(round(logs["loss"], 5))

        rows = regression_rows(10)
        trainer_class(Regression(), args, train_dataset=rows, eval_dataset=rows[:6], callbacks=[Reads()]).train()
        return seen

    options: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 1,
        "eval_strategy": "epoch",
        "logging_steps": 1,
        "learning_rate": 0.05,
        "train_sampling_strategy": "sequential",
        "dataloader_num_workers": workers,
        "save_strategy": "no",
    }
    theirs = transformers.TrainingArguments(str(tmp_path / "theirs"), use_cpu=True, report_to="none", **options)
    reference = seen_by(transformers.Trainer, theirs, transformers.TrainerCallback)

    assert seen_by(Trainer, arguments(tmp_path, **options), TrainerCallback) == reference
    assert len(reference) == 3 + 3 + 2


class Processor:
    """Saves itself as nothing."""

    def save_pretrained(self, directory: str) -> None:
        """Nothing to save."""


@pytest.mark.parametrize("name", ["EarlyStoppingCallback", "PrinterCallback", "ProgressCallback"])
def test_callbacks_that_derive_from_those_of_transformers_run(tmp_path: Path, name: str, capsys: Any) -> None:
    base: Any = getattr(transformers, name)

    class Mine(base):  # type: ignore[misc]
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_train_end(args, state, control, **kwargs)
            state.ended = True

    trainer = trained(
        tmp_path,
        Mine(),
        eval_strategy="epoch",
        save_strategy="epoch",
        metric_for_best_model="loss",
        load_best_model_at_end=True,
    )

    assert trainer.state.ended


def test_the_tensorboard_callback_of_transformers_writes_its_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))

    trained(tmp_path, transformers.integrations.TensorBoardCallback, logging_steps=1)

    assert list((tmp_path / "events").rglob("events.out.tfevents.*"))


SCRIPT = """
from pathlib import Path
from onstep import Trainer, TrainerCallback
from tests.support.small_models import Regression, arguments, regression_rows

out = Path.cwd()


class OneRank(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 0 and state.global_step == 1:
            state.max_steps = 3


args = arguments(out, max_steps=6, per_device_train_batch_size=2)
trainer = Trainer(Regression(), args, train_dataset=regression_rows(24), callbacks=[OneRank()], default_callbacks=False)
trainer.train()
state = trainer.state
told = (state.global_step, state.max_steps, state.is_world_process_zero, state.is_local_process_zero)
(out / f"{args.process_index}.txt").write_text(repr(told))
"""


@pytest.mark.distributed
def test_what_one_rank_sets_holds_on_all(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)

    codes = processes.run("tests.support.jobs.script_jobs", "script", tmp_path, {"script": "script.py"}, ranks=2)

    assert codes == [0, 0], output_of(tmp_path)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == [
        "(3, 3, True, True)",
        "(3, 3, False, False)",
    ]


@pytest.mark.parametrize(("kind", "from_checkpoint"), [("no", False), ("no", True), ("all", False)])
def test_a_callback_may_count_tokens_in_the_state_as_in_transformers(
    tmp_path: Path, kind: str, from_checkpoint: bool
) -> None:
    rows = causal_rows(8)
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "logging_steps": 3,
        "save_strategy": "epoch",
        "include_num_input_tokens_seen": kind,
        "use_cpu": True,
    }

    def counting(base: Any) -> tuple[Any, list[int]]:
        seen: list[int] = []

        class Counts(base):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                state.num_input_tokens_seen += 7
                if kind == "no":
                    seen.append(state.num_input_tokens_seen)

            def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                seen.append(state.num_input_tokens_seen)

        return Counts(), seen

    callback, expected = counting(transformers.TrainerCallback)
    args = transformers.TrainingArguments(str(tmp_path / "theirs"), report_to="none", disable_tqdm=True, **options)
    transformers.Trainer(qwen(), args, train_dataset=rows, callbacks=[callback]).train()

    callback, found = counting(TrainerCallback)
    given = arguments(tmp_path, **options)
    quiet(qwen(), given, rows, callbacks=[callback]).train()
    if from_checkpoint:
        assert found == expected
        del found[4:]
        resumed = quiet(qwen(), given, rows, callbacks=[callback])
        resumed.train(resume_from_checkpoint=str(Path(given.output_dir) / "checkpoint-4"))
    assert found == expected
