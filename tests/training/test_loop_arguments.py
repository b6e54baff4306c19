"""What `train()` and `train_step()` take and give beyond the model: hooks of evaluations, timers, the eighth value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from onstep import Callback, CallbackManager
from onstep.checkpoint import checkpoints
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.optim import TrainingOptimizer
from onstep.training import GlobalState, _finish_train, get_num_microbatches, pretrain, train, train_step
from tests.support.recording_loggers import record_all
from tests.support.small_runs import RaggedRows, TinyModel, eval_loader, loader, run, small_state, split, sum_step


def evaluated(**hooks: Any) -> tuple[GlobalState, dict[str, Any]]:
    """Three steps with an evaluation after the second."""
    state = small_state(train_iters=3)
    state.cfg.validation.eval_interval = 2
    loggers = record_all(state)
    model = TinyModel()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(sum_step, [model], optimizer, None, loader(), eval_loader(), state, {}, **hooks)
    return state, loggers


def test_what_is_collected_at_an_evaluation_is_processed_with_step_and_writer() -> None:
    processed: list[tuple[Any, int]] = []

    def collect(model: list[torch.nn.Module]) -> float:
        assert not model[0].training
        return float(next(model[0].parameters()).detach().sum())

    def process(collected: Any, step: int, writer: Any) -> None:
        processed.append((collected, step))
        writer.add_scalar("weights", collected, step)

    _, loggers = evaluated(process_non_loss_data_func=process, non_loss_data_func=collect)
    [(collected, step)] = processed
    assert step == 2
    assert loggers["tensorboard"].curve("weights") == {2: collected}


def test_without_a_collector_the_loss_functions_are_asked_for_their_data() -> None:
    processed: list[tuple[Any, int]] = []

    def step(data_iterator: Any, model: torch.nn.Module) -> Any:
        batch = next(data_iterator)
        labels = batch["labels"].ne(-100).sum()

        def loss_function(loss: Any, non_loss_data: bool = False) -> Any:
            return int(labels) if non_loss_data else (loss, labels, {})

        return model(**batch), loss_function

    state = small_state(train_iters=2)
    state.cfg.validation.eval_interval = 2
    record_all(state)
    model = TinyModel()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train(
        step,
        [model],
        optimizer,
        None,
        loader(),
        eval_loader(),
        state,
        process_non_loss_data_func=lambda collected, step, _: processed.append((collected, step)),
    )
    first = split(RaggedRows(2), [2]).micro_batches[0]["labels"].ne(-100).sum().item()
    assert [(collected[0], at) for collected, at in processed] == [(first, 2)]


def test_a_step_gives_seven_values_and_the_eighth_on_request(tiny_config: ConfigContainer) -> None:
    state = small_state()
    model = TinyModel()
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    result = train_step(sum_step, split(RaggedRows(4), [2, 2]), [model], optimizer, None, state)
    loss_dict, skipped, should_checkpoint, should_exit, exit_code, grad_norm, num_zeros = result
    assert loss_dict.keys() == {"lm loss"}
    assert (skipped, should_checkpoint, should_exit, exit_code, num_zeros) == (0, False, False, 0, None)
    assert grad_norm is not None
    assert result.with_max_attention_logit(state) == (*result, None)


def test_the_largest_attention_logit_of_a_steps_micro_batches_is_reported(tiny_config: ConfigContainer) -> None:
    tiny_config.model.log_max_attention_logit = True
    tiny_config.train.micro_batch_size, tiny_config.train.train_iters = 2, 2
    tiny_config.scheduler.lr_warmup_iters = 0
    of_micro_batches: list[float] = []
    of_steps: list[Any] = []
    manager = CallbackManager()

    def note(context: Any) -> None:
        of_micro_batches.append(context.model[0].max_attention_logit.item())

    manager.register("on_forward_backward_end", note)
    manager.register("on_train_step_end", lambda context: of_steps.append(context.state.max_attention_logit))
    pretrain(tiny_config, callbacks=manager)
    assert len(of_micro_batches) == 4
    assert [step.item() for step in of_steps] == [max(of_micro_batches[:2]), max(of_micro_batches[2:])]


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (0, set()),
        (1, {"forward-backward", "optimizer"}),
        (2, {"forward-backward", "optimizer", "batch-generator", "forward-compute", "backward-compute"}),
    ],
)
def test_the_parts_of_a_step_are_timed_up_to_the_level(level: int, names: set[str]) -> None:
    state = small_state(train_iters=2)
    state.cfg.logger.timing_log_level = level
    run(state)
    timed = ("forward-backward", "optimizer", "batch-generator", "forward-compute", "backward-compute")
    assert {name for name in timed if state.timers(name).is_on and state.timers(name).elapsed() > 0} == names


def test_a_failed_step_leaves_no_timer_running() -> None:
    state = small_state(train_iters=2)
    state.cfg.logger.timing_log_level = 2

    def failing(data_iterator: Any, model: Any) -> Any:
        next(data_iterator)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        run(state, step=failing)
    assert not any(state.timers(name).is_running for name in ("forward-backward", "forward-compute", "batch-generator"))
    run(state)
    assert state.train_state.step == 2


def test_the_calculator_of_a_run_ends_with_it(tiny_config: ConfigContainer) -> None:
    seen: list[int] = []
    manager = CallbackManager()
    manager.register("on_test_start", lambda _: seen.append(get_num_microbatches()))
    manager.register("on_run_end", lambda _: seen.append(get_num_microbatches()))
    tiny_config.train.micro_batch_size, tiny_config.train.train_iters = 1, 1
    tiny_config.scheduler.lr_warmup_iters = 0
    pretrain(tiny_config, callbacks=manager)
    assert seen == [4, 4]
    with pytest.raises(ConfigError, match="outside of a run"):
        get_num_microbatches()


def test_finishing_makes_a_pending_save_durable(tmp_path: Path) -> None:
    class Pending:
        is_finished = False

        def finish(self) -> None:
            self.is_finished = True

    state, pending = small_state(), Pending()
    _finish_train(state, pending)
    assert pending.is_finished
    _finish_train(state, {"context": "of Megatron Bridge"})


def test_a_run_that_saves_asynchronously_has_its_last_checkpoint_when_it_returns(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "run", str(tmp_path)
    tiny_config.checkpoint.async_save, tiny_config.checkpoint.save_interval = True, 2
    pretrain(tiny_config)
    assert max(info.step for info in checkpoints(tmp_path / "run" / "checkpoints")) == 8


def sgd(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def one_cycle(optimizer: Any) -> Any:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=3)


ENDS = r"OneCycleLR ends after 3 steps \(total_steps\) and is at step 0, but the run is at step 0 of 4: .* all 4 steps"


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "message"),
    [
        (lambda _: sgd(TinyModel()), None, r"the optimizer has no parameter of TinyModel, so it would train nothing"),
        (lambda _: torch.optim.SGD, None, r"must be an object, got the class SGD itself; pass SGD\(model\.parameters"),
        (sgd, lambda _: StepLR(sgd(TinyModel()), 1), "the scheduler StepLR changes the rates of another optimizer"),
        (sgd, lambda _: StepLR, "must be an object with a step.. method, got the class StepLR itself"),
        (sgd, lambda _: "cosine", "must be an object with a step.. method, got a str"),
        (sgd, lambda _: lambda step: 0.9**step, "must be an object with a step.. method, got a function"),
        (sgd, lambda optimizer: optimizer, "must be an object with a step.. method, got a SGD"),
        (sgd, one_cycle, ENDS),
    ],
)
def test_an_optimizer_and_a_scheduler_that_cannot_train_the_model_are_refused(
    optimizer: Any, scheduler: Any, message: str
) -> None:
    model, state = TinyModel(), small_state(train_iters=4)
    given = optimizer(model)
    with pytest.raises(ConfigError, match=message):
        run(state, model=model, optimizer=given, scheduler=scheduler and scheduler(given))
    assert state.train_state.step == 0


@pytest.mark.parametrize("of_whom", ["optimizer", "scheduler"])
def test_a_single_step_refuses_what_belongs_to_another_model(of_whom: str) -> None:
    model, others = TinyModel(), sgd(TinyModel())
    optimizer = others if of_whom == "optimizer" else sgd(model)
    with pytest.raises(ConfigError, match=r"has no parameter of TinyModel|rates of another optimizer"):
        train_step(sum_step, split(RaggedRows(4), [2, 2]), [model], optimizer, StepLR(others, 1), small_state())


def test_a_schedule_as_long_as_the_rest_of_the_run_is_accepted() -> None:
    model, state = TinyModel(), small_state(train_iters=4)
    state.train_state.step = 1
    optimizer = sgd(model)
    run(state, model=model, optimizer=optimizer, scheduler=one_cycle(optimizer))
    assert state.train_state.step == 4


def test_a_configuration_in_place_of_the_state_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_state must be a GlobalState, got a ConfigContainer; pass GlobalSt"):
        train(sum_step, [TinyModel()], sgd(TinyModel()), None, loader(), None, ConfigContainer())  # type: ignore[arg-type]


def test_a_list_of_callbacks_is_accepted() -> None:
    class Noted(Callback):
        steps = 0

        def on_train_step_end(self, context: Any) -> None:
            self.steps += 1

    noted = Noted()
    run(small_state(train_iters=2), [noted])  # type: ignore[arg-type]
    assert noted.steps == 2
