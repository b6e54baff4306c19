"""What a run leaves in its metrics log: fresh, continued, rolled back, evaluated only, beside another run."""

from __future__ import annotations

import inspect
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onstep import pretrain
from onstep.callbacks import GradNormLogger, JsonLogger, ParameterNormLogger
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.events import CallbackContext, CallbackManager
from onstep.record import MetricsLog, read_records


class Run:
    """Tells one JsonLogger what a loop would."""

    def __init__(self, make_state: Any, args: Any, callback: JsonLogger, **state: Any) -> None:
        self.make_state, self.args, self.callback, self.info = make_state, args, callback, state

    def notify(self, event: str, step: int, **kwargs: Any) -> None:
        state = self.make_state(step=step, **self.info)
        getattr(self.callback, event)(args=self.args, state=state, control=None, model=None, **kwargs)

    def train(self, first: int, last: int) -> dict[str, Any]:
        """Steps `first` + 1 to `last`, each logged; the state that a checkpoint at `last` holds."""
        self.notify("on_train_begin", first)
        for step in range(first + 1, last + 1):
            self.notify("on_log", step, logs={"loss": 1.0 / step})
        return json.loads(json.dumps(self.callback.state_dict()))

    def end(self, step: int) -> None:
        self.notify("on_train_end", step)
        self.notify("on_run_end", step, reason="completed", exception=None)


@pytest.fixture
def path(args: Any) -> Path:
    return Path(args.logging_dir) / "trainer_logs.json"


@pytest.fixture
def start(make_state: Any, args: Any) -> Any:
    return lambda callback, **state: Run(make_state, args, callback, **state)


def steps(path: Path) -> list[int]:
    return [record["global_step"] for record in json.loads(path.read_text())]


def files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def test_signature_is_the_documented_one() -> None:
    (parameter,) = inspect.signature(JsonLogger).parameters.values()
    assert parameter.kind is inspect.Parameter.VAR_KEYWORD


def test_everything_reported_is_recorded_as_it_happens(start: Any, path: Path) -> None:
    run = start(JsonLogger(), epoch=2)
    run.notify("on_train_begin", 0)
    assert json.loads(path.read_text()) == []
    for event, report in [
        ("on_log", {"logs": {"loss": 2.0, "peak_mem_allocated": [1, 2]}}),
        ("on_evaluate", {"metrics": {"eval_loss": 1.5, "epoch": 2.25}}),
        ("on_log", {"logs": {"train_runtime": None}}),
        ("on_predict", {"metrics": {"test_loss": 1.75}}),
    ]:
        run.notify(event, 10, **report)
        last = json.loads(path.read_text())[-1]
        head = {"timestamp": last["timestamp"], "global_step": 10, "epoch": 2.0}
        assert last == {**head, **next(iter(report.values()))}
        assert list(last)[:3] == ["timestamp", "global_step", "epoch"]
        assert last["timestamp"] > 1.7e9
    run.end(10)
    assert len(json.loads(path.read_text())) == 4


def test_validation_and_test_after_training_are_recorded(start: Any, path: Path) -> None:
    run = start(JsonLogger())
    run.train(0, 1)
    run.notify("on_train_end", 1)
    run.notify("on_evaluate", 1, metrics={"eval_loss": 1.0})
    run.notify("on_run_end", 1, reason="completed", exception=None)
    run.notify("on_evaluate", 1, metrics={"eval_loss": 0.9})
    assert [record.get("eval_loss") for record in read_records(path)] == [None, 1.0, 0.9]
    assert files(path) == ["trainer_logs.json"]


def test_keyword_arguments_are_recorded_first_and_do_not_look_like_a_step(start: Any, path: Path) -> None:
    info = {"loss": "cross entropy", "lr": 3e-4, "data": Path("corpus.txt"), "global_step": "x"}
    start(JsonLogger(**info)).train(0, 1)
    header, step = read_records(path)
    assert header.keys() == {"timestamp", "global_step", "epoch", "experiment_info"}
    assert header["experiment_info"] == {**info, "data": "corpus.txt"}
    assert header["global_step"] == 0
    assert step["loss"] == 1.0


def test_keyword_arguments_of_a_continued_run_are_recorded_again_only_when_they_differ(start: Any, path: Path) -> None:
    first = start(JsonLogger(lr=1.0))
    state = first.train(0, 1)
    first.end(1)
    for lr in (1.0, 2.0, 2.0):
        run = start(JsonLogger(lr=lr))
        run.callback.load_state_dict(state)
        run.notify("on_train_begin", 1)
        run.end(1)
    assert [record["experiment_info"]["lr"] for record in read_records(path) if "experiment_info" in record] == [
        1.0,
        2.0,
    ]


def test_continued_run_cuts_what_the_checkpoint_does_not_know(start: Any, path: Path) -> None:
    first = start(JsonLogger())
    state = first.train(0, 3)
    assert {"log_path": str(path), "last_step": 3, "num_records": 3}.items() <= state.items()
    assert state["held_records"] == []
    first.notify("on_log", 4, logs={"loss": 9.0})  # and then it was killed
    first.callback._writer.metrics_log._release()
    run = start(JsonLogger())
    run.callback.load_state_dict(state)
    assert run.callback.state_dict() == state
    run.train(3, 5)
    assert steps(path) == [1, 2, 3, 4, 5]
    assert read_records(path)[3]["loss"] == 0.25
    assert steps(path.with_name("trainer_logs.branch-1.json")) == [4]


def test_record_of_the_checkpoint_step_written_after_it_is_cut_and_written_again(start: Any, path: Path) -> None:
    first = start(JsonLogger())
    state = first.train(0, 2)
    first.notify("on_evaluate", 2, metrics={"eval_loss": 1.0})
    first.end(2)
    run = start(JsonLogger())
    run.callback.load_state_dict(state)
    run.train(2, 3)
    assert steps(path) == [1, 2, 3]
    assert [record["eval_loss"] for record in read_records(path.with_name("trainer_logs.branch-1.json"))] == [1.0]


def test_continued_run_appends_in_the_original_directory(start: Any, args: Any, path: Path, tmp_path: Path) -> None:
    first = start(JsonLogger())
    state = first.train(0, 2)
    first.end(2)
    args.logging_dir = str(tmp_path / "elsewhere")
    run = start(JsonLogger())
    run.callback.load_state_dict(state)
    run.train(2, 3)
    assert steps(path) == [1, 2, 3]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("was_moved", [True, False])
def test_metrics_log_that_is_gone_is_begun_or_found_in_the_new_directory(
    start: Any, args: Any, path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, was_moved: bool
) -> None:
    first = start(JsonLogger())
    state = first.train(0, 2)
    first.notify("on_log", 3, logs={"loss": 9.0})
    first.end(3)
    args.logging_dir = str(tmp_path / "elsewhere")
    path.parent.rename(tmp_path / ("elsewhere" if was_moved else "lost"))
    run = start(JsonLogger())
    run.callback.load_state_dict(state)
    with caplog.at_level(logging.WARNING):
        run.train(2, 4)
    assert "to continue, is missing" in caplog.text
    assert steps(tmp_path / "elsewhere" / "trainer_logs.json") == ([1, 2, 3, 4] if was_moved else [2, 3, 4])
    if not was_moved:
        assert "2 records up to step 2 are missing" in caplog.text
        gap = read_records(tmp_path / "elsewhere" / "trainer_logs.json")[0]["missing_records"]
        assert (gap["number"], gap["after_step"], gap["up_to_step"]) == (2, None, 2)


def test_rollback_in_the_middle_of_a_run_cuts_at_once(start: Any, path: Path) -> None:
    run = start(JsonLogger())
    state = run.train(0, 2)
    run.notify("on_log", 3, logs={"loss": 7.0})
    run.callback.load_state_dict(state)
    assert steps(path) == [1, 2]
    run.notify("on_log", 3, logs={"loss": 0.5})
    assert [record["loss"] for record in read_records(path)] == [1.0, 0.5, 0.5]
    assert steps(path.with_name("trainer_logs.branch-1.json")) == [3]


def test_run_that_begins_where_a_metrics_log_is_moves_it_aside(start: Any, path: Path) -> None:
    for _ in range(3):
        run = start(JsonLogger())
        run.train(0, 2)
        run.end(2)
    assert files(path) == ["trainer_logs.1.json", "trainer_logs.2.json", "trainer_logs.json"]
    assert steps(path) == [1, 2]


def test_second_training_of_one_instance_continues_or_begins_anew(start: Any, path: Path) -> None:
    run = start(JsonLogger())
    run.train(0, 2)
    run.end(2)
    run.train(2, 3)
    run.end(3)
    assert steps(path) == [1, 2, 3]
    run.train(0, 1)
    assert steps(path) == [1]
    assert steps(path.with_name("trainer_logs.1.json")) == [1, 2, 3]


def test_evaluation_before_training_stays_in_the_metrics_log(start: Any, path: Path) -> None:
    run = start(JsonLogger())
    run.notify("on_evaluate", 0, metrics={"eval_loss": 4.0})
    run.notify("on_run_end", 0, reason="completed", exception=None)
    run.train(0, 1)
    assert [record.get("eval_loss") for record in read_records(path)] == [4.0, None]
    assert files(path) == ["trainer_logs.json"]


def test_evaluating_a_checkpoint_adds_to_the_metrics_log_and_cuts_nothing(start: Any, path: Path) -> None:
    first = start(JsonLogger())
    first.train(0, 3)
    first.end(3)
    run = start(JsonLogger())
    run.callback.load_state_dict({"log_path": str(path), "last_step": 2})
    run.notify("on_evaluate", 2, metrics={"eval_loss": 1.0})
    run.notify("on_run_end", 2, reason="completed", exception=None)
    assert steps(path) == [1, 2, 3, 2]
    assert files(path) == ["trainer_logs.json"]


def test_state_before_anything_was_recorded(start: Any, path: Path) -> None:
    callback = JsonLogger()
    assert callback.state_dict() == {"log_path": None, "last_step": -1, "num_records": 0}
    callback.load_state_dict({"log_path": None, "last_step": -1})
    start(callback).train(0, 1)
    assert steps(path) == [1]


def test_unreadable_metrics_log_is_kept_when_a_run_continues(start: Any, path: Path) -> None:
    first = start(JsonLogger())
    state = first.train(0, 2)
    first.end(2)
    path.write_text("all is lost")
    run = start(JsonLogger())
    run.callback.load_state_dict(state)
    run.train(2, 3)
    gap, record = read_records(path)
    assert gap["missing_records"]["number"] == 2
    assert record["global_step"] == 3
    assert path.with_name("trainer_logs.unreadable-1.json").read_text() == "all is lost"


def test_unreadable_metrics_log_is_kept_when_a_run_begins(start: Any, path: Path) -> None:
    path.parent.mkdir()
    path.write_text("all is lost")
    start(JsonLogger()).train(0, 1)
    assert steps(path) == [1]
    assert path.with_name("trainer_logs.1.json").read_text() == "all is lost"


@pytest.mark.parametrize("first_event", ["on_train_begin", "on_evaluate"])
def test_second_live_run_in_a_directory_records_in_a_file_of_its_own(
    start: Any, path: Path, caplog: pytest.LogCaptureFixture, first_event: str
) -> None:
    one, other = start(JsonLogger()), start(JsonLogger())
    one.train(0, 2)
    if first_event == "on_train_begin":
        other.train(0, 1)
    else:
        other.notify("on_evaluate", 1, metrics={"eval_loss": 1.0})
    one.notify("on_log", 3, logs={"loss": 1.0})
    assert steps(path) == [1, 2, 3]
    assert steps(path.with_name("trainer_logs.1.json")) == [1]
    assert other.callback.state_dict()["log_path"].endswith("trainer_logs.1.json")
    assert "another live run" in caplog.text


def test_no_logging_dir_means_no_metrics_log(start: Any, args: Any, tmp_path: Path) -> None:
    args.logging_dir = None
    run = start(JsonLogger())
    run.train(0, 1)
    run.end(1)
    assert list(tmp_path.iterdir()) == []


def test_arguments_that_know_no_logging_dir_have_an_output_dir(make_state: Any, tmp_path: Path) -> None:
    Run(make_state, SimpleNamespace(output_dir=str(tmp_path)), JsonLogger()).train(0, 1)
    assert steps(tmp_path / "trainer_logs.json") == [1]


def test_other_ranks_write_nothing(start: Any, tmp_path: Path) -> None:
    run = start(JsonLogger(), rank=1)
    run.train(0, 2)
    run.notify("on_evaluate", 2, metrics={"eval_loss": 1.0})
    run.end(2)
    assert list(tmp_path.iterdir()) == []


def test_manager_tells_a_json_logger(make_state: Any, args: Any, path: Path) -> None:
    manager = CallbackManager()
    manager.add(JsonLogger(name="run"))
    view = SimpleNamespace(args=args, trainer_state=make_state(step=3))
    manager.fire("on_train_start", CallbackContext(state=view, model=[None]))
    manager.fire("on_log", CallbackContext(state=view, model=[None], logs={"loss": 1.0}))
    manager.fire("on_eval_end", CallbackContext(state=view, model=[None], metrics={"eval_loss": 2.0}))
    manager.fire("on_test_end", CallbackContext(state=view, model=[None], metrics={"test_loss": 3.0}))
    manager.fire("on_run_end", CallbackContext(state=view, model=[None], reason="completed"))
    header, *records = read_records(path)
    assert header["experiment_info"] == {"name": "run"}
    assert [[*record][3] for record in records] == ["loss", "eval_loss", "test_loss"]


def test_records_wait_for_room_on_a_full_disk(
    start: Any, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = start(JsonLogger())
    run.train(0, 2)
    append = MetricsLog.append_encoded

    def full(self: MetricsLog, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MetricsLog, "append_encoded", full)
    run.notify("on_log", 3, logs={"loss": 0.5})
    run.notify("on_log", 4, logs={"loss": 0.5})
    assert steps(path) == [1, 2]
    assert sum("records are kept in memory" in message for message in caplog.messages) == 1
    monkeypatch.setattr(MetricsLog, "append_encoded", append)
    run.notify("on_log", 5, logs={"loss": 0.5})
    assert steps(path) == [1, 2, 3, 4, 5]
    run.end(5)


@pytest.mark.parametrize("first", [0, 2])
def test_a_directory_in_the_place_of_the_metrics_log_is_renamed(start: Any, path: Path, first: int) -> None:
    path.mkdir(parents=True)
    (path / "thesis.tex").write_text("years of work")
    start(JsonLogger()).train(first, 3)
    assert steps(path)[-1] == 3
    assert (path.with_name("trainer_logs.unreadable-1.json") / "thesis.tex").read_text() == "years of work"


def test_an_evaluation_alone_renames_a_directory_too(start: Any, path: Path) -> None:
    path.mkdir(parents=True)
    start(JsonLogger()).notify("on_evaluate", 1, metrics={"eval_loss": 1.0})
    assert steps(path) == [1]


def test_a_directory_that_cannot_be_written_is_named_with_a_remedy(start: Any, args: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    args.logging_dir = str(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot write to logging_dir .*file'? \(.*\); choose another"):
        start(JsonLogger()).train(0, 1)


def test_what_json_cannot_hold_is_recorded_as_text(start: Any, path: Path) -> None:
    circular: dict[str, Any] = {}
    circular["self"] = circular
    run = start(JsonLogger(by_pair={("a", "b"): 1}, circular=circular))
    state = run.train(0, 1)
    run.notify("on_log", 2, logs={"loss": 0.5, "pairs": {(1, 2): 3.0}, "circular": circular})
    run.end(2)
    header, _, record = read_records(path)
    assert header["experiment_info"]["by_pair"] == {"('a', 'b')": 1}
    assert record["loss"] == 0.5
    assert record["pairs"] == {"(1, 2)": 3.0}
    again = JsonLogger(by_pair={("a", "b"): 1}, circular=circular)
    again.load_state_dict(state)
    start(again).train(1, 2)
    assert steps(path) == [0, 1, 2], "the same arguments are recorded once"


@pytest.mark.parametrize("kind", [JsonLogger, GradNormLogger, ParameterNormLogger])
def test_a_callback_that_cannot_record_anything_says_so(
    tiny_config: ConfigContainer, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    tiny_config.train.train_iters = 3
    pretrain(tiny_config, callbacks=[kind()])
    named = [record.message for record in caplog.records if record.message.startswith(kind.__name__)]
    assert len(named) == 1
    assert re.match(r"\w+ (writes|records) nothing: the run has no directory", named[0])
