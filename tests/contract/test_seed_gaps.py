"""What the pages of Megatron Bridge and Forgather let their readers do, with import lines replaced and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from onstep import Callback, CallbackContext, CallbackManager, TrainerCallback, pretrain
from onstep.analysis import TrainingLog, format_summary_markdown, format_summary_oneline, format_summary_text
from onstep.analysis.plots.smoothing import smooth_values
from onstep.callbacks import DivergenceDetector, JsonLogger
from onstep.config import ConfigContainer
from onstep.errors import ConfigError
from onstep.training import (
    GlobalState,
    checkpoint_and_decide_exit,
    evaluate,
    save_checkpoint_and_time,
    train,
    train_step,
    training_log,
)
from onstep.training.losses import create_masked_next_token_loss_function, masked_next_token_loss
from onstep.training.stragglers.nvrx import NVRxStragglerDetectionManager

Losses = tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]]


def mean_of(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return losses.mean(), {"lm loss": losses.mean().detach()}


def forward_step(data_iterator: Iterator[Tensor], model: nn.Module) -> Losses:
    return model(next(data_iterator)).square(), mean_of


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def rows() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(4, 2, generator=generator)


# The context of a callback


@pytest.mark.parametrize(
    "given", [SimpleNamespace(state="mine", model=[]), {"state": 1}.keys(), Mock(spec=CallbackContext), Mock()]
)
def test_fire_works_with_any_object(given: Any) -> None:
    manager, seen = CallbackManager(), []
    manager.register("on_train_start", seen.append)
    manager.register("on_train_start", lambda: seen.append("no context"))
    manager.fire("on_train_start", given)
    assert seen == [given, "no context"]


def test_a_hugging_face_callback_gets_the_attributes_of_any_object() -> None:
    seen: list[Any] = []

    class Mine(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.extend([args, state, control.should_training_stop, model])

    manager = CallbackManager()
    manager.add(Mine())
    manager.fire("on_train_start", SimpleNamespace(state=SimpleNamespace(args=1, trainer_state=2), model=["chunk"]))
    assert seen == [1, 2, False, "chunk"]


def test_losses_are_tensors_and_the_gradient_norm_is_a_number_as_in_bridge(tiny_config: ConfigContainer) -> None:
    sent: list[dict[str, float]] = []

    def numbers(losses: dict[str, Tensor]) -> dict[str, float]:
        return {name: value.item() for name, value in losses.items() if isinstance(value, Tensor)}

    class Metrics(Callback):
        def on_train_step_end(self, context: Any) -> None:
            if context.loss_dict and context.grad_norm > 0:
                assert isinstance(context.loss_dict.get("lm loss"), Tensor)
                assert f"{context.grad_norm:.2f}" == f"{float(context.grad_norm):.2f}"
                sent.append({**numbers(context.loss_dict), "grad_norm": context.grad_norm})

        def on_eval_end(self, context: Any) -> None:
            sent.append(numbers(context.total_loss_dict))

    tiny_config.train.train_iters, tiny_config.validation.eval_interval = 4, 2
    pretrain(tiny_config, callbacks=[Metrics()])
    assert len(sent) > 2
    assert all("lm loss" in record for record in sent)
    assert all(0 < value < 10 for record in json.loads(json.dumps(sent)) for value in record.values())


# Steps by hand


def test_a_step_works_again_after_an_exception_in_the_forward_step() -> None:
    (model, optimizer), state = make(), GlobalState()
    calls = iter(["fails"])

    def fragile(data_iterator: Iterator[Tensor], model: nn.Module) -> Losses:
        losses = forward_step(data_iterator, model)
        if next(calls, None):
            raise RuntimeError("not now")
        return losses

    for num_microbatches in (1, 2):
        state.num_microbatches, calls = num_microbatches, iter(["fails"])
        with pytest.raises(RuntimeError, match="not now"):
            train_step(fragile, rows(), [model], optimizer, None, state)
        result = train_step(fragile, rows(), [model], optimizer, None, state)
        assert result.skipped_iter == 0
        assert result.loss_dict["lm loss"] > 0


def test_a_step_without_an_iterator_passes_none_on() -> None:
    (model, optimizer), state = make(), GlobalState()
    made = rows()

    def own_data(data_iterator: None, model: nn.Module) -> Losses:
        assert data_iterator is None
        return model(next(made)).square(), mean_of

    assert train_step(own_data, None, [model], optimizer, None, state).skipped_iter == 0
    state.cfg.train.train_iters = 3
    train(own_data, [model], optimizer, None, None, None, state, None)
    assert state.train_state.step == 3
    state.cfg.validation.eval_iters = 2
    means, _, _ = evaluate(state, own_data, None, [model], None, state.cfg)
    assert means is not None
    assert means["lm loss"] > 0
    state.cfg.validation.eval_iters = None
    with pytest.raises(ConfigError, match=r"validation.eval_iters=None .* without data; set it"):
        evaluate(state, own_data, None, [model], None, state.cfg)


def test_the_documented_parameters_of_training_log_are_passed_by_position(capsys: pytest.CaptureFixture[str]) -> None:
    (model, _), state = make(), GlobalState()
    state.cfg.logger.log_interval, state.cfg.logger.console = 1, "bridge"
    state.train_state.step = 1
    losses = {"lm loss": torch.tensor(2.0)}
    given = (losses, {}, 0.1, None, 1.0, False, 0, 1.0, None, None, state.cfg, state, [], [model], None, None, 0, None)
    assert training_log(*given) is False
    assert "lm loss: 2.0" in capsys.readouterr().out


def test_the_masked_loss_sums_the_selected_tokens() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 1.0]])
    total, num_tokens, report = masked_next_token_loss(mask, losses)
    assert (total.item(), num_tokens.item(), report["lm loss"].tolist()) == (5.0, 2, [5.0, 2.0])
    assert not report["lm loss"].requires_grad
    other = create_masked_next_token_loss_function(mask)((losses, torch.ones(1, 3)))
    assert other[0].item() == 7.0


def test_a_section_may_be_none_as_in_bridges_configuration() -> None:
    config = ConfigContainer(straggler=None, nvrx_straggler=None)  # type: ignore[arg-type]
    assert config == ConfigContainer()
    config.straggler = None  # type: ignore[assignment]
    assert config.straggler.log_straggler is False


def test_a_warm_up_longer_than_the_schedule_is_cut(tiny_config: ConfigContainer) -> None:
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 2, 80
    rates: list[float] = []
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: rates.append(context.optimizer.param_groups[0]["lr"]))
    with pytest.warns(UserWarning, match=r"the warm-up \(80 iterations\).* it is cut to 1"):
        pretrain(tiny_config, callbacks=manager)
    assert max(rates) == tiny_config.optimizer.lr


# Saving and exits by hand


@pytest.fixture
def state(tmp_path: Path) -> Iterator[GlobalState]:
    state = GlobalState()
    state.cfg.checkpoint.save = str(tmp_path)
    yield state
    state.reset_for_restart()


def decide(state: GlobalState, step: int, data: Iterator[Tensor] | None = None) -> bool:
    model, optimizer = make()
    state.train_state.step = step
    return checkpoint_and_decide_exit(state, [model], optimizer, None, 0.0, {}, data)


def saved(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("checkpoint-*")}


def test_a_checkpoint_is_saved_at_its_interval(state: GlobalState, tmp_path: Path) -> None:
    state.cfg.checkpoint.save_interval = 2
    assert [decide(state, step, rows()) for step in (1, 2, 3, 4)] == [False] * 4
    assert saved(tmp_path) == {"checkpoint-2", "checkpoint-4"}


def test_an_exit_saves_first(state: GlobalState, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state.cfg.train.exit_interval, state.cfg.logger.console = 3, "bridge"
    assert [decide(state, step) for step in (1, 2, 3)] == [False, False, True]
    assert saved(tmp_path) == {"checkpoint-3"}
    assert "exiting program at iteration 3" in capsys.readouterr().out


def test_the_time_limit_ends_training(state: GlobalState, tmp_path: Path) -> None:
    state.cfg.train.exit_duration_in_mins = 1.0
    assert not decide(state, 1)
    state.reset_for_restart()
    state.start_time = time.time() - 61
    assert decide(state, 2)
    assert saved(tmp_path) == {"checkpoint-2"}


def test_a_signal_ends_training_as_configured(state: GlobalState, tmp_path: Path) -> None:
    state.cfg.train.exit_signal = signal.SIGUSR2
    assert not decide(state, 1)
    os.kill(os.getpid(), signal.SIGUSR2)
    handler = state.signal_handler
    assert handler is not None
    assert handler.signals_received() == [True]
    assert decide(state, 2)
    assert state.exits.decided == "signal"
    assert saved(tmp_path) == {"checkpoint-2"}


def test_a_signal_ends_no_later_training_of_the_process(state: GlobalState, tiny_config: ConfigContainer) -> None:
    state.signal_handler  # noqa: B018 - installs it
    together = GlobalState()
    together.signal_handler  # noqa: B018
    os.kill(os.getpid(), signal.SIGTERM)
    assert decide(state, 1)
    assert decide(together, 1)
    later = GlobalState()
    assert not decide(later, 1)
    os.kill(os.getpid(), signal.SIGTERM)  # a first one, not a second
    assert decide(later, 2)
    tiny_config.train.train_iters, tiny_config.scheduler.lr_warmup_iters = 2, 0
    assert pretrain(tiny_config).train_state.step == 2
    assert decide(later, 3)
    later.reset_for_restart()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_slow_gpu_ends_training(state: GlobalState, tmp_path: Path) -> None:
    class Slow(NVRxStragglerDetectionManager):
        def check_stragglers(self, global_rank: int) -> bool:
            return True

    state.nvrx_straggler_manager = Slow(state.cfg.nvrx_straggler)
    assert decide(state, 5)
    assert state.exits.decided == "straggler"
    assert saved(tmp_path) == {"checkpoint-5"}


def test_a_save_by_hand_is_durable(state: GlobalState, tmp_path: Path) -> None:
    model, optimizer = make()
    state.train_state.step = 7
    state.cfg.checkpoint.async_save = True
    save_checkpoint_and_time(state, [model], optimizer, None, 0.0, {}, train_data_iterator=rows())
    assert state.async_calls_queue.get_num_unfinalized_calls() in (0, 1)
    state.async_calls_queue.maybe_finalize_async_calls(blocking=True)
    assert state.async_calls_queue.get_num_unfinalized_calls() == 0
    assert saved(tmp_path) == {"checkpoint-7"}


def test_a_state_begins_again() -> None:
    state = GlobalState()
    state.cfg.train.train_iters = 5
    config, handler = state.cfg, state.signal_handler
    state.train_state.step = 3
    state.reset_for_restart()
    assert state.cfg is config
    assert state.train_state.step == 0
    assert state.signal_handler is not handler
    state.reset_for_restart()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_state_that_begins_again_saves_the_same_step_again(state: GlobalState, tmp_path: Path) -> None:
    state.cfg.train.exit_interval = 3
    assert decide(state, 3)
    shutil.rmtree(tmp_path / "checkpoint-3")
    state.reset_for_restart()
    assert decide(state, 3)
    assert saved(tmp_path) == {"checkpoint-3"}


# Trackers


def test_the_logger_of_tensorboard_has_the_methods_of_its_writer(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tiny_config.train.train_iters = 3
    tiny_config.logger.tensorboard_dir = str(tmp_path / "tb")

    class Histograms(Callback):
        def on_train_step_end(self, context: Any) -> None:
            weights = next(context.unwrapped_model.parameters())
            context.state.tensorboard_logger.add_histogram("weights", weights, context.step)

    pretrain(tiny_config, callbacks=[Histograms()])
    found = EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0})
    found.Reload()
    assert [event.step for event in found.Histograms("weights")] == [0, 1, 2]


# Forgather


def test_the_divergence_detector_shows_its_curve() -> None:
    detector = DivergenceDetector(warmup=0)
    detector.on_log(None, None, SimpleNamespace(), {"loss": 2.0})
    assert (detector.smoothed_loss, detector.best_smoothed_loss) == (2.0, 2.0)
    assert (detector.observation_count, detector.consecutive_above) == (1, 0)


def test_names_of_forgathers_log_tools(tmp_path: Path) -> None:
    assert JsonLogger(project="x").kwargs == {"project": "x"}
    assert smooth_values([1.0, 2.0, 3.0], window_size=2) == [1.0, 2.0, 2.5]
    assert smooth_values([1.0, 2.0], 5) == [1.0, 2.0]
    summary = {"run_name": "mine", "final_loss": 1.0}
    for formatted in (format_summary_text(summary), format_summary_markdown(summary), format_summary_oneline(summary)):
        assert "mine" in formatted
    assert "loss=" in format_summary_oneline({})
    empty = tmp_path / "trainer_logs.json"
    empty.write_text("[]")
    assert TrainingLog.from_file(empty).records == []
    assert TrainingLog(empty).records == []
    empty.write_text('[\n{"loss": 1.0}\n]')
    assert TrainingLog.from_file(empty).records == [{"loss": 1.0}]
    assert TrainingLog.from_file(empty).records != [{"loss": 2.0}]
