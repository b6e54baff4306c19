"""What TensorBoard is given: which scalars at which steps, and which texts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onstep.callbacks.tb_logger import TBLogger, TBScalar, default_tb_scalars
from onstep.errors import ConfigError


class Pages:
    """Keeps what a SummaryWriter is given."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.unflushed = False

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert type(scalar_value) is float
        self.scalars.append((tag, scalar_value, global_step))
        self.unflushed = True

    def add_text(self, tag: str, text_string: str, global_step: int) -> None:
        self.texts.append((tag, text_string, global_step))
        self.unflushed = True

    def flush(self) -> None:
        self.unflushed = False


class Run:
    """Tells one TBLogger what a loop would."""

    def __init__(self, make_state: Any, args: Any, **options: Any) -> None:
        self.pages = Pages()
        self.callback = TBLogger(self.pages, **options)
        self.make_state, self.args = make_state, args

    def notify(self, event: str, step: int, info: dict[str, Any] | None = None, **kwargs: Any) -> list[Any]:
        """The scalars that this call adds."""
        before = len(self.pages.scalars)
        state = self.make_state(step=step, **(info or {}))
        getattr(self.callback, event)(args=self.args, state=state, control=None, **kwargs)
        assert not self.pages.unflushed
        return self.pages.scalars[before:]


@pytest.fixture
def start(make_state: Any, args: Any) -> Any:
    return lambda **options: Run(make_state, args, **options)


def test_default_scalars_are_the_documented_ones() -> None:
    assert list(default_tb_scalars()) == ["train-loss", "learning-rate", "grad-norm", "eval-loss", "eval-perplexity"]


def test_logs_and_evaluations_become_scalars(start: Any) -> None:
    run = start()
    logs = {"loss": 2.0, "grad_norm": 0.5, "learning_rate": 1e-3, "tokens": 7}
    assert run.notify("on_log", 4, logs=logs) == [
        ("train-loss", 2.0, 4),
        ("learning-rate", 1e-3, 4),
        ("grad-norm", 0.5, 4),
    ]
    assert run.notify("on_evaluate", 5, metrics={"eval_loss": 2.0}) == [
        ("eval-loss", 2.0, 5),
        ("eval-perplexity", math.exp(2.0), 5),
    ]
    assert run.notify("on_evaluate", 6, metrics={"eval_loss": 1e4})[1] == ("eval-perplexity", math.inf, 6)


def test_deltas_are_laid_over_the_defaults(start: Any) -> None:
    run = start(
        scalars={
            "grad-norm": None,
            "train-loss": {"transform": lambda value, metrics: value + metrics["epoch"]},
            "eval-perplexity": {"transform": None},
            "tok-per-sec": {},
            "hot": TBScalar("hot", "tokens", lambda value, metrics: None if value < 9 else value),
        }
    )
    logs = {"loss": 2.0, "epoch": 0.5, "grad_norm": 1.0, "tok_per_sec": 80, "tokens": 7, "eval_loss": 1.0}
    assert run.notify("on_log", 1, logs=logs) == [
        ("train-loss", 2.5, 1),
        ("eval-loss", 1.0, 1),
        ("eval-perplexity", 1.0, 1),
        ("tok-per-sec", 80.0, 1),
    ]
    assert ("hot", 10.0, 2) in run.notify("on_log", 2, logs={"tokens": 10})


def test_a_list_shows_its_largest_number_unless_there_is_a_transform(start: Any) -> None:
    run = start(scalars={"peak": {"source": "peak_mem"}, "least": {"source": "peak_mem", "transform": _least}})
    assert run.notify("on_log", 1, logs={"peak_mem": [3, 9, 4]}) == [("peak", 9.0, 1), ("least", 3.0, 1)]
    assert run.notify("on_log", 2, logs={"loss": "high", "grad_norm": []}) == []


def _least(value: list[float], metrics: Any) -> float:
    return min(value)


def test_a_second_evaluation_at_a_step_adds_only_what_is_new(start: Any) -> None:
    run = start(scalars={"eval-other-loss": {}})
    run.notify("on_evaluate", 5, metrics={"eval_loss": 2.0})
    assert run.notify("on_evaluate", 5, metrics={"eval_loss": 3.0, "eval_other_loss": 4.0}) == [
        ("eval-other-loss", 4.0, 5)
    ]
    assert run.notify("on_evaluate", 6, metrics={"eval_loss": 3.0})[0] == ("eval-loss", 3.0, 6)


def test_after_a_rollback_the_undone_steps_are_written_anew(start: Any) -> None:
    run = start()
    run.notify("on_evaluate", 6, metrics={"eval_loss": 2.0})
    run.notify("on_checkpoint_load", 4)
    assert run.notify("on_evaluate", 6, metrics={"eval_loss": 3.0})[0] == ("eval-loss", 3.0, 6)


def test_a_step_that_was_left_out_is_a_text_and_no_point(start: Any) -> None:
    run = start()
    assert run.notify("on_log", 3, logs={"anomaly": "non-finite loss", "loss": math.nan}) == []
    assert run.notify("on_log", 3, logs={"loss": 2.0}) == [("train-loss", 2.0, 3)]
    (text,) = run.pages.texts
    assert text == ("anomaly", "```\nanomaly: non-finite loss\nloss: nan\n```", 3)


def test_the_run_is_described_at_its_start(start: Any) -> None:
    run = start(experiment_info={"idea": "larger batches"})
    run.notify("on_train_begin", 0, {"num_processes": 2})
    (experiment, info) = run.pages.texts
    assert experiment == ("experiment", "```\nidea: larger batches\n```", 0)
    assert info[0] == "training_info"
    assert "max_steps: 100\n" in info[1]
    assert "total_train_batch_size: 16\n" in info[1]
    written = start(experiment_info="**bold**")
    written.notify("on_train_begin", 0)
    assert written.pages.texts[0] == ("experiment", "**bold**", 0)


def test_a_continued_run_writes_only_what_has_changed(start: Any) -> None:
    first = start(experiment_info={"idea": 1})
    first.notify("on_train_begin", 0)
    again, changed = start(experiment_info={"idea": 1}), start(experiment_info={"idea": 2})
    for run in (again, changed):
        run.callback.load_state_dict(first.callback.state_dict())
        run.notify("on_train_begin", 30)
    assert again.pages.texts == []
    assert changed.pages.texts == [("experiment", "```\nidea: 2\n```", 31)]
    first.notify("on_train_begin", 0)
    assert [tag for tag, _, _ in first.pages.texts] == ["experiment", "training_info"] * 2, "a run of its own"


def test_a_continued_run_shows_an_evaluation_of_its_step_once(start: Any) -> None:
    first, again = start(), start()
    first.notify("on_evaluate", 30, metrics={"eval_loss": 2.0})
    again.callback.load_state_dict(first.callback.state_dict())
    again.notify("on_train_begin", 30)
    assert again.notify("on_evaluate", 30, metrics={"eval_loss": 2.0}) == []
    assert again.notify("on_evaluate", 31, metrics={"eval_loss": 2.0}) != []


def test_a_continued_run_does_not_repeat_what_a_killed_one_has_shown_after_its_checkpoint(start: Any) -> None:
    run = start()
    run.pages.tags_at = lambda step: {"eval-loss"} if step == 30 else set()
    run.notify("on_train_begin", 30)
    assert run.notify("on_evaluate", 30, metrics={"eval_loss": 0.0}) == [("eval-perplexity", 1.0, 30)]


def test_texts_of_a_continued_run_stand_at_its_first_new_step(start: Any) -> None:
    run = start()
    run.notify("on_train_begin", 30)
    assert [(tag, step) for tag, _, step in run.pages.texts] == [("training_info", 31)]


def test_results_are_written_down_at_the_end_if_there_are_any(start: Any) -> None:
    run = start()
    for rank in (0, 1):
        run.notify("on_train_end", 8, {"rank": rank})
    assert run.pages.texts == []
    run.notify("on_train_end", 8, {"log_history": [{"loss": 2.0}, {"train_runtime": 1.5}]})
    assert run.pages.texts == [("train_results", "```\ntrain_runtime: 1.5\n```", 8)]


def test_other_ranks_write_nothing(start: Any) -> None:
    run = start(experiment_info={"a": 1})
    other = {"rank": 1, "log_history": [{"loss": 2.0}]}
    run.notify("on_train_begin", 0, other)
    run.notify("on_log", 1, other, logs={"loss": 1.0})
    run.notify("on_evaluate", 1, other, metrics={"eval_loss": 1.0})
    run.notify("on_train_end", 1, other)
    assert run.pages.scalars == run.pages.texts == []


def test_markdown_is_a_fenced_block_whatever_is_in_it() -> None:
    assert TBLogger.mapping_as_markdown({"a": 1, "b": "x"}) == "```\na: 1\nb: x\n```"
    fenced = TBLogger.mapping_as_markdown({"code": "```python\n1\n```"})
    assert fenced.startswith("````\n")
    assert fenced.endswith("\n````")


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"has no field 'sauce'. Did you mean 'source'"):
        TBLogger(Pages(), {"a": {"sauce": "loss"}})
    with pytest.raises(TypeError, match="scalar 'a' must be a dictionary"):
        TBLogger(Pages(), {"a": "loss"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="pass ResumableSummaryWriter"):
        TBLogger("runs/tb")
    with pytest.raises(TypeError, match="must be a SummaryWriter"):
        TBLogger(SimpleNamespace())


def test_a_number_too_large_for_a_float_is_infinite_and_what_is_no_number_is_left_out(start: Any) -> None:
    run = start(scalars={"a": {}, "b": {}, "c": {}, "d": {}})
    logs = {"a": 10**400, "b": [1, -(10**400)], "c": 1 + 2j, "d": np.str_("text")}
    assert run.notify("on_log", 1, logs=logs) == [("a", math.inf, 1), ("b", 1.0, 1)]
    assert run.notify("on_log", 2, logs={"a": -(10**400)}) == [("a", -math.inf, 2)]


def test_a_transform_that_fails_is_named_once_and_ends_nothing(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = start(scalars={"ratio": {"source": "loss", "transform": lambda loss, logs: loss / logs["tokens"]}})
    for step in (1, 2):
        assert run.notify("on_log", step, logs={"loss": 1.0}) == [("train-loss", 1.0, step)]
    assert run.notify("on_log", 3, logs={"loss": 1.0, "tokens": 2})[-1] == ("ratio", 0.5, 3)
    (message,) = caplog.messages
    assert "'ratio'" in message
    assert "KeyError('tokens')" in message
