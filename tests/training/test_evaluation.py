"""Validation and test: token-weighted means, nothing left changed, events and output as documented."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.data import EvalLoader
from onstep.training import evaluate, evaluate_and_print_results
from onstep.training.reporting.timers import Clock
from tests.support.recording_loggers import record_all
from tests.support.small_runs import RaggedRows, TinyModel, eval_loader, mean_step, run, small_state, stack, sum_step


def reference(model: nn.Module, rows: Any) -> float:
    """The mean over all labels, in float64."""
    exact = TinyModel(dtype=torch.float64)
    exact.load_state_dict(model.state_dict())
    batch = stack([rows[index] for index in range(len(rows))])
    with torch.no_grad():
        return float(exact(**batch, reduction="mean"))


def of(
    model: nn.Module, data: Any, step: Any = sum_step, eval_iters: int | None = None, **words: Any
) -> dict[str, Any]:
    state = small_state()
    state.cfg.validation.eval_iters = eval_iters
    means, _, hit_limit = evaluate(state, step, data, [model], None, state.cfg.model, **words)
    assert hit_limit is False
    assert means is None or all(value.ndim == 0 for value in means.values())
    return state.evaluated.last_metrics


@pytest.mark.parametrize("step", [sum_step, mean_step])
@pytest.mark.parametrize("micro", [1, 3, 4])
def test_the_loss_is_the_mean_over_all_labels(step: Any, micro: int) -> None:
    model, rows = TinyModel(), RaggedRows(11, empty=(4,))
    metrics = of(model, EvalLoader(rows, micro_batch_size=micro, num_microbatches=2), step)
    assert metrics["eval_loss"] == pytest.approx(reference(model, rows), rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(math.exp(metrics["eval_loss"]))


@pytest.mark.parametrize("step", [sum_step, mean_step])
def test_the_loss_of_data_without_a_label_is_nan_and_is_warned_of(step: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = RaggedRows(5, empty=tuple(range(5)))
    metrics = of(TinyModel(), EvalLoader(rows, micro_batch_size=2), step)
    assert math.isnan(metrics["eval_loss"])
    assert math.isnan(metrics["eval_perplexity"])
    assert "the eval data has no label to compute a loss from in 5 samples (all are -100)" in caplog.text


def test_a_hopeless_perplexity_is_held_at_the_exponent_20() -> None:
    model = TinyModel()
    with torch.no_grad():
        model.out.bias[:8] = 1000.0
    assert of(model, eval_loader())["eval_perplexity"] == math.exp(20)


@pytest.mark.parametrize(("eval_iters", "batches"), [(None, 3), (2, 2), (9, 3), (0, 0)])
def test_as_many_batches_are_read_as_asked_for(eval_iters: int | None, batches: int) -> None:
    manager, captured = CallbackManager(), []
    manager.register("on_eval_step_end", lambda context: captured.append(1))
    manager.register("on_eval_end", lambda context: captured.append(context.total_loss_dict))
    metrics = of(TinyModel(), eval_loader(), eval_iters=eval_iters, callback_manager=manager)
    assert captured[:-1] == [1] * batches
    assert ("eval_loss" in metrics) is (batches > 0)
    assert list(captured[-1]) == (["lm loss"] if batches else [])


@pytest.mark.parametrize(("eval_iters", "left"), [(None, 0), (2, 1)])
def test_a_raw_iterator_gives_its_next_batches(eval_iters: int | None, left: int) -> None:
    rows, model = RaggedRows(6), TinyModel()
    batches = iter([stack([rows[i], rows[i + 1]]) for i in (0, 2, 4)])
    metrics = of(model, batches, eval_iters=eval_iters)
    assert len(list(batches)) == left
    assert metrics["eval_loss"] == pytest.approx(reference(model, RaggedRows(6 - 2 * left)), rel=1e-6)


def test_each_evaluation_starts_at_the_same_place() -> None:
    model, data = TinyModel(), eval_loader()
    assert of(model, data, eval_iters=2)["eval_loss"] == of(model, data, eval_iters=2)["eval_loss"]


class WithDropout(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.frozen.eval()


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_mode_back(fails: bool) -> None:
    model, seen = WithDropout(), []

    def step(data_iterator: Any, model: Any) -> Any:
        seen.append([module.training for module in model.modules()])
        if fails:
            raise RuntimeError("broken")
        return sum_step(data_iterator, model)

    before = [module.training for module in model.modules()]
    assert sorted(set(before)) == [False, True]
    if fails:
        with pytest.raises(RuntimeError, match="broken"):
            of(model, eval_loader(), step)
    else:
        of(model, eval_loader(), step)
    assert [module.training for module in model.modules()] == before
    assert not any(seen[0]), "everything evaluates in eval mode"


def test_evaluations_do_not_change_the_training() -> None:
    def weight(eval_interval: int | None) -> torch.Tensor:
        state = small_state(train_iters=5)
        state.cfg.validation.eval_interval = eval_interval
        return run(state, valid=eval_loader()).embed.weight.detach()

    assert torch.equal(weight(None), weight(1))


def test_a_test_fires_the_events_of_a_test() -> None:
    manager, captured = CallbackManager(), []
    for kind in ("eval", "test"):
        for event in ("start", "step_start", "step_end", "end"):
            manager.register(f"on_{kind}_{event}", lambda context: captured.append(context.event))
    metrics = of(TinyModel(), eval_loader(4), callback_manager=manager, is_test=True)
    steps = ["on_test_step_start", "on_test_step_end"]
    assert captured == ["on_test_start", *steps, *steps, "on_test_end"]
    assert "test_loss" in metrics
    assert not any(key.startswith("eval") for key in metrics)


def printed(capsys: pytest.CaptureFixture[str], prints: bool) -> str:
    state = small_state()
    state.cfg.logger.console = "bridge" if prints else "default"
    evaluate_and_print_results(state, "iteration 5", sum_step, eval_loader(), [TinyModel()], state.cfg.model)
    return capsys.readouterr().out


def test_the_result_is_printed_between_two_rules(capsys: pytest.CaptureFixture[str]) -> None:
    title, took, rule, line, rule_again, _ = printed(capsys, True).split("\n")
    assert title == "(min, max) time across ranks (ms):"
    assert re.fullmatch(r"    evaluate \.{39}: \(\d+\.\d\d, \d+\.\d\d\)", took)
    number = r"\d\.\d{6}E[+-]\d\d"
    assert re.fullmatch(
        rf" validation loss at iteration 5 \| lm loss value: {number} \| lm loss PPL: {number} \| ", line
    )
    assert rule == rule_again == "-" * (len(line) + 1)
    assert printed(capsys, False) == ""


@pytest.mark.parametrize("level", ["default", "bridge"])
def test_blocks_and_lines_are_bridges_where_asked_for(
    tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str], level: str
) -> None:
    tiny_config.logger.console = level
    pretrain(tiny_config)
    output = capsys.readouterr().out
    blocks = re.findall(r"^ validation loss at (.+?) \|", output, re.MULTILINE)
    expected = ["iteration 5", "iteration 8 on validation set", "iteration 8 on test set"]
    assert blocks == (expected if level == "bridge" else [])
    assert len(re.findall(r"consumed samples", output)) == (2 if level == "bridge" else 0)


LINE = (
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        8/       8 \| consumed samples:           32 \|"
    r" elapsed time per iteration \(ms\): \d+\.\d \| learning rate: \d\.\d{6}E-\d\d \| global batch size:     4 \|"
    r" lm loss: \d\.\d{6}E\+00 \| loss scale: 1\.0 \| grad norm: \d+\.\d{3} \|"
    r" number of skipped iterations:   0 \| number of nan iterations:   0 \|"
)


def test_the_line_of_a_logged_step_has_bridges_fields(
    tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.logger.console = "bridge"
    pretrain(tiny_config)
    assert re.search(f"^{LINE}$", capsys.readouterr().out, re.MULTILINE)


def evaluated(config: ConfigContainer) -> list[tuple[str, int]]:
    """The evaluations and tests of a run, with the step after which each was made."""
    manager, captured = CallbackManager(), []
    for kind in ("eval", "test"):
        name = f"on_{kind}_end"
        manager.register(name, lambda context: captured.append((context.event[3:7], context.state.train_state.step)))
    pretrain(config, callbacks=manager)
    return captured


def test_validation_and_test_follow_the_training(tiny_config: ConfigContainer) -> None:
    tiny_config.validation.eval_interval = 4
    assert evaluated(tiny_config) == [("eval", 4), ("eval", 8), ("eval", 8), ("test", 8)]


def test_nothing_is_evaluated_after_training_where_that_is_not_wanted(tiny_config: ConfigContainer) -> None:
    tiny_config.validation.eval_after_training = False
    assert evaluated(tiny_config) == [("eval", 5)]
    tiny_config.validation.eval_interval = None
    assert evaluated(tiny_config) == []


def test_evaluation_may_start_before_training_and_later_than_its_interval(tiny_config: ConfigContainer) -> None:
    validation = tiny_config.validation
    validation.eval_on_start, validation.eval_interval, validation.start_eval_at_iter = True, 2, 5
    validation.eval_after_training = False
    assert evaluated(tiny_config) == [("eval", 0), ("eval", 6), ("eval", 8)]


def test_a_run_that_only_evaluates_takes_no_length_and_no_learning_rate(tiny_config: ConfigContainer) -> None:
    tiny_config.validation.skip_train = True
    tiny_config.train.train_iters = tiny_config.optimizer.lr = None
    tiny_config.validation.eval_after_training = False
    assert evaluated(tiny_config) == [("eval", 0), ("test", 0)]


@pytest.mark.parametrize(("first", "expected"), [(None, [3, 6, 9]), (2, [6, 9]), (2.5, [9])])
def test_each_epoch_may_be_evaluated_from_some_epoch_on(first: float | None, expected: list[int]) -> None:
    manager, state, captured = CallbackManager(), small_state(train_iters=9), []
    state.cfg.validation.eval_each_epoch, state.cfg.validation.start_eval_at_epoch = True, first
    manager.register("on_eval_end", lambda context: captured.append(context.state.train_state.step))
    run(state, manager, valid=eval_loader())
    assert captured == expected


def test_a_logging_interval_does_not_count_the_time_of_evaluations() -> None:
    clock = iter(range(1_000_000))
    state = small_state(train_iters=1)
    state.clock = Clock(elapsed=lambda: float(next(clock)))

    def slow_step(data_iterator: Any, model: nn.Module) -> Any:
        if not model.training:
            for _ in range(10_000):
                next(clock)
        return sum_step(data_iterator, model)

    state.cfg.validation.eval_interval = 1
    run(state, step=slow_step, valid=eval_loader())
    assert next(clock) - state.interval.start < 1000


def test_verbose_says_how_much_is_evaluated_and_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    state = small_state()
    state.cfg.validation.eval_iters = 3
    evaluate(state, sum_step, eval_loader(6), [TinyModel()], None, state.cfg.model, verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        "Evaluating on 12 samples",
        *(f"Evaluating iter {number}/3" for number in (1, 2, 3)),
    ]


def test_a_time_limit_ends_an_evaluation_with_nothing_but_the_modes_put_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state, model = small_state(), TinyModel()
    manager, captured = CallbackManager(), []
    for event in ("on_eval_start", "on_eval_step_start", "on_eval_end"):
        manager.register(event, lambda context: captured.append(context.event))
    state.cfg.train.exit_duration_in_mins = 1
    state.exits.start(state.cfg.train.exit_duration_in_mins, state.start_time)
    state.exits.deadline = 0.0
    given = (sum_step, eval_loader(6), [model], None, state.cfg.model)
    assert evaluate(state, *given, callback_manager=manager) == (None, None, True)
    assert "Exiting during evaluation, timelimit reached" in capsys.readouterr().out
    assert captured == ["on_eval_start", "on_eval_step_start"]
    assert model.training
    loggers = record_all(state)
    assert evaluate_and_print_results(state, "x", sum_step, eval_loader(), [model], state.cfg.model) is None
    assert all(not logger.tags for logger in loggers.values())
    state.exits.deadline, state.exits.decided = None, None
    means, _, is_over = evaluate(state, *given)
    assert means is not None
    assert not is_over


def test_a_run_whose_last_evaluation_runs_out_of_time_is_paused_and_makes_it_again(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "run", str(tmp_path)
    tiny_config.train.exit_duration_in_mins = 100
    manager, captured = CallbackManager(), []

    def hurry(context: Any) -> None:
        if context.state.ending.training == "after":
            context.state.exits.deadline = 0.0

    manager.register("on_eval_start", hurry)
    manager.register("on_run_end", lambda context: captured.append(context.reason))
    pretrain(tiny_config, callbacks=manager)
    status = json.loads((tmp_path / "run" / "run.json").read_text())["status"]
    assert (captured, status) == (["stopped"], "paused")
    again = evaluated(tiny_config)
    assert again == [("eval", 8), ("test", 8)]


@pytest.mark.parametrize("kind", ["hook", "loss function"])
def test_data_that_is_no_loss_reaches_the_function_that_processes_it(kind: str) -> None:
    state, model, seen = small_state(), TinyModel(), []
    state.train_state.step = 5
    loggers = record_all(state)

    def step(data_iterator: Any, chunk: Any) -> Any:
        batch = next(data_iterator)

        def loss_function(output: Any, non_loss_data: bool = False) -> Any:
            if non_loss_data:
                return batch["tokens"].shape
            return output, batch["labels"].ne(-100).sum(), {}

        return chunk(**batch), loss_function

    hook = {"non_loss_data_func": lambda chunks: chunks[0]} if kind == "hook" else {}
    evaluate_and_print_results(
        state,
        "x",
        step,
        eval_loader(6),
        [model],
        state.cfg.model,
        process_non_loss_data_func=lambda *given: seen.append(given),
        **hook,
    )
    collected = model if kind == "hook" else [(2, 12)]
    assert seen == [(collected, 5, loggers["tensorboard"])]


def test_an_iterator_that_has_run_dry_is_named(caplog: pytest.LogCaptureFixture) -> None:
    state = small_state(train_iters=4)
    state.cfg.validation.eval_interval, state.cfg.validation.eval_iters = 2, 3
    rows = RaggedRows(6)
    batches = iter([stack([rows[index], rows[index + 1]]) for index in (0, 2, 4)])
    run(state, valid=batches)
    losses = ["eval_loss" in record for record in state.info.log_history if "eval_runtime" in record]
    assert losses == [True, False]
    assert "the eval data has no batches left at step 4, so there is no loss: an iterator is read only" in caplog.text
