"""Options of the optimizer and its schedule in whole runs: through both doors, interrupted, and in the log."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onstep import CallbackManager, Trainer, TrainerCallback, TrainingArguments, pretrain
from onstep.config import ConfigContainer, OptimizerConfig, apply_overrides
from onstep.errors import CheckpointError, ConfigError, RunExistsError
from onstep.metrics import calc_params_l2_norm
from onstep.metrics.norms.parameter_norms import parameter_norms, total_norm
from onstep.optim import MuonWithAdamW, OptimizerParamScheduler, TrainingOptimizer, build_optimizer
from onstep.training import GlobalState
from onstep.training.checkpointing.saved_states import SchedulerPosition
from onstep.training.compute.loss_sums import StepLoss
from onstep.training.interval_log.bridge_log import BridgeLog
from onstep.training.reporting.loss_accumulator import LossAccumulator
from onstep.training.stages.record import decoupled_learning_rate, learning_rate
from tests.support.recording_loggers import record_all
from tests.support.resuming import compare, start
from tests.support.small_runs import TinyModel, run, small_state


@pytest.fixture
def make(tiny_config: ConfigContainer, corpus: Path, tmp_path: Path) -> Any:
    def made(name: str, *words: str) -> ConfigContainer:
        config = copy.deepcopy(tiny_config)
        config.run.name, config.run.output_dir = name, str(tmp_path / "runs")
        config.dataset.paths = [str(corpus / "colorsys.py")]
        config.train.train_iters = 6
        config.model.num_layers, config.model.hidden_size = 1, 16
        config.validation.eval_iters = 0
        config.checkpoint.save_interval, config.checkpoint.certify = 2, True
        apply_overrides(config, list(words))
        return config

    return made


def rates(config: ConfigContainer) -> list[float]:
    """The learning rate that each step of a run was made with."""
    manager, seen = CallbackManager(), []
    manager.register("on_train_step_start", lambda context: seen.append(learning_rate(context.optimizer)))
    pretrain(config, callbacks=manager)
    return seen


OPTIONS = [
    "optimizer.optimizer=muon optimizer.muon_nesterov=false",
    "optimizer.optimizer=muon optimizer.decoupled_lr=0.01 optimizer.decoupled_min_lr=0.001",
    "optimizer.param_groups=[{match: '*norm*', lr_mult: 0.1}, {match: 'layers.*', max_lr: 0.002, wd_mult: 0.5}]",
    "optimizer.grad_norm_skip_threshold=1.5 optimizer.log_num_zeros_in_grad=true",
]


@pytest.mark.parametrize("words", OPTIONS)
def test_a_run_that_dies_ends_as_the_one_that_nobody_touched(make: Any, words: str) -> None:
    keys = re.split(r" (?=optimizer\.)", words)
    compare(lambda name: make(name, *keys), [("on_step_end", 3), ("on_step_end", 2)])


def test_another_way_of_grouping_does_not_fit_a_checkpoint(make: Any) -> None:
    start(make("one", "optimizer.decoupled_lr=0.01"), dies_at=("on_step_end", 3))
    with pytest.raises(CheckpointError, match=r"with optimizer\.decoupled_lr set only if it was"):
        pretrain(make("one", "optimizer.decoupled_lr=null", "checkpoint.on_config_change=apply"))
    entry = "optimizer.param_groups=[{match: '*norm*', lr_mult: 0.1}]"
    with pytest.raises(RunExistsError, match=r"optimizer\.param_groups is"):
        pretrain(make("one", "optimizer.decoupled_lr=0.01", entry, "checkpoint.on_config_change=apply"))


def test_a_decoupled_rate_that_is_applied_on_resume_holds_from_the_next_step(make: Any) -> None:
    start(make("one", "optimizer.decoupled_lr=0.01"), dies_at=("on_step_end", 3))
    manager, seen = CallbackManager(), []
    manager.register("on_train_step_start", lambda context: seen.append(decoupled_learning_rate(context.optimizer)))
    pretrain(
        make("one", "optimizer.decoupled_lr=0.02", "checkpoint.on_config_change=apply"),
        callbacks=manager,
    )
    whole, expected = CallbackManager(), []
    whole.register("on_train_step_start", lambda context: expected.append(decoupled_learning_rate(context.optimizer)))
    pretrain(make("other", "optimizer.decoupled_lr=0.02"), callbacks=whole)
    assert seen == expected[2:]


class TestTheScheduleOfARunThatGoesOn:
    OTHER = ("optimizer.lr=0.5", "scheduler.lr_decay_style=constant", "scheduler.lr_warmup_iters=0")

    def test_another_is_refused(self, make: Any) -> None:
        start(make("run"), dies_at=("on_step_end", 3))
        with pytest.raises(RunExistsError, match=r"optimizer\.lr is .* there and 0\.5 here"):
            pretrain(make("run", *self.OTHER))

    def test_todays_holds_where_it_overrides(self, make: Any) -> None:
        start(make("run"), dies_at=("on_step_end", 3))
        again = make("run", *self.OTHER, "scheduler.override_opt_param_scheduler=true")
        assert rates(again) == [0.5] * 4

    def test_that_of_the_checkpoint_holds_where_it_is_used(self, make: Any) -> None:
        whole = rates(make("whole"))
        start(make("run"), dies_at=("on_step_end", 3))
        again = make("run", *self.OTHER, "scheduler.use_checkpoint_opt_param_scheduler=true")
        assert rates(again) == whole[2:]

    def test_so_does_what_only_the_configuration_knows_of_it(self, make: Any) -> None:
        first = ("scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_iters=3")
        whole = rates(make("whole", *first))
        start(make("run", *first), dies_at=("on_step_end", 3))
        other = (first[0], "scheduler.lr_wsd_decay_iters=1", "scheduler.use_checkpoint_opt_param_scheduler=true")
        assert rates(make("run", *other)) == whole[2:]

    def test_neither_says_anything_of_other_changes(self, make: Any) -> None:
        start(make("run"), dies_at=("on_step_end", 3))
        for option in ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"):
            with pytest.raises(RunExistsError, match=r"train\.loss_weighting is"):
                pretrain(make("run", *self.OTHER, f"scheduler.{option}=true", "train.loss_weighting=samples"))

    def test_one_that_no_configuration_tells_of_is_refused_by_its_state(self, make: Any) -> None:
        """As with a checkpoint of a hand-made run, or data that has grown under a run by epochs."""
        optimizer = torch.optim.SGD(TinyModel().parameters(), lr=1.0)

        def scheduler(max_lr: float, **options: bool) -> OptimizerParamScheduler:
            return OptimizerParamScheduler(
                optimizer,
                init_lr=0.0,
                max_lr=max_lr,
                min_lr=0.0,
                lr_warmup_steps=0,
                lr_decay_steps=100,
                lr_decay_style="linear",
                start_wd=0.0,
                end_wd=0.0,
                wd_incr_steps=0,
                wd_incr_style="constant",
                **{"use_checkpoint_opt_param_scheduler": False, **options},
            )

        saved = scheduler(1.0)
        saved.step(50)
        state = SchedulerPosition(saved).state_dict()
        with pytest.raises(ConfigError, match=r"max_lr must be 1\.0, as in the checkpoint, got 3\.0"):
            SchedulerPosition(scheduler(3.0)).load_state_dict(state)
        for options, rate in [
            ({"override_opt_param_scheduler": True}, 1.5),
            ({"use_checkpoint_opt_param_scheduler": True}, 0.5),
        ]:
            loaded = scheduler(3.0, **options)
            loaded.step(7)  # what was counted before does not add up
            SchedulerPosition(loaded).load_state_dict(state)
            assert (loaded.num_steps, loaded.get_lr({})) == (50, rate)

    def test_both_ways_at_once_are_refused(self, make: Any) -> None:
        with pytest.raises(ConfigError, match="are both true"):
            pretrain(
                make(
                    "run",
                    "scheduler.override_opt_param_scheduler=true",
                    "scheduler.use_checkpoint_opt_param_scheduler=true",
                )
            )


class Recording:
    """What a run shows of each step."""

    def __init__(self) -> None:
        self.manager = CallbackManager()
        self.skipped: list[bool] = []
        self.norms: list[float] = []
        self.rates: list[float] = []
        self.weights: list[torch.Tensor] = []
        self.manager.register("on_train_step_end", self.note)

    def note(self, context: Any) -> None:
        self.skipped.append(context.skipped_iter)
        self.norms.append(float(context.grad_norm))
        self.rates.append(learning_rate(context.optimizer) or 0.0)
        self.weights.append(torch.cat([p.detach().flatten() for p in context.model[0].parameters()]))


def spiking_step(*calls: int, factor: float = 1000.0) -> Any:
    """The mean of a micro-batch, far too large in the given calls."""
    count = iter(range(1, 1_000))

    def step(data_iterator: Any, model: Any) -> Any:
        loss = model(**next(data_iterator), reduction="mean")
        if next(count) in calls:
            loss.register_hook(lambda gradient: gradient * factor)
        return loss, lambda loss: (loss, {})

    return step


def scheduled(optimizer: Any, samples: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.1,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=samples,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def limited(**train_fields: Any) -> GlobalState:
    state = small_state(train_iters=5, **train_fields)
    state.cfg.optimizer.grad_norm_skip_threshold = 50.0
    state.cfg.logger.log_interval = 5
    return state


def test_a_step_above_the_threshold_is_skipped_counted_and_does_not_move_the_schedule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    state, recording, model = limited(), Recording(), TinyModel()
    state.cfg.logger.console = "bridge"
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    run(
        state,
        recording.manager,
        step=spiking_step(5, 6),
        model=model,
        optimizer=inner,
        scheduler=scheduled(inner, 20),
    )
    assert recording.skipped == [False, False, True, False, False]
    assert recording.norms[2] > 50 > recording.norms[3]
    assert torch.equal(recording.weights[2], recording.weights[1])
    assert not torch.equal(recording.weights[3], recording.weights[2])
    assert recording.rates == pytest.approx([0.08, 0.06, 0.06, 0.04, 0.02])
    assert state.train_state.step == 5
    assert "number of skipped iterations:   1 |" in capsys.readouterr().out


def captured(state: GlobalState, *calls: int) -> dict[str, Any]:
    """The record of a run's five steps, of which those of some micro-batches are far too large."""
    manager, logs, model = CallbackManager(), [], TinyModel()
    manager.register("on_log_step", lambda context: logs.append(context.logs))
    run(state, manager, step=spiking_step(*calls), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    [record] = logs
    return dict(record)


def test_skipped_steps_are_in_the_record_where_there_are_any(caplog: pytest.LogCaptureFixture) -> None:
    assert "skipped_steps" not in captured(limited())
    assert captured(limited(), 5, 6)["skipped_steps"] == 1
    assert not caplog.messages
    assert captured(limited(), *range(1, 11))["skipped_steps"] == 5
    [message] = [one for one in caplog.messages if "were skipped" in one]
    assert "all 5 steps up to step 5" in message
    assert "raise optimizer.grad_norm_skip_threshold=50" in message


def test_zeros_are_in_the_record_where_they_are_counted() -> None:
    state = limited()
    assert "num_zeros" not in captured(state)
    state, seen = limited(), []
    state.cfg.optimizer.log_num_zeros_in_grad = True
    manager, logs, model = CallbackManager(), [], TinyModel()
    manager.register(
        "on_pre_optimizer_step", lambda context: seen.append(sum(int((p.grad == 0).sum()) for p in model.parameters()))
    )
    manager.register("on_log_step", lambda context: logs.append(context.logs["num_zeros"]))
    run(state, manager, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert seen[-1] > 0
    assert logs == seen[-1:]
    assert isinstance(logs[0], int)


def test_zeros_are_saved_with_the_interval() -> None:
    accumulator, loaded = LossAccumulator(), LossAccumulator()
    accumulator.add(StepLoss(torch.tensor(1.0), 1, None, {}), None, successful=True, num_zeros=torch.tensor(7))
    loaded.load_state_dict(accumulator.state_dict())
    report = loaded.flush()
    assert report is not None
    assert report.num_zeros == 7
    old = {key: value for key, value in accumulator.state_dict().items() if key != "num_zeros"}
    loaded.load_state_dict(old)
    report = loaded.flush()
    assert report is not None
    assert report.num_zeros is None


def test_the_anomaly_gate_judges_first() -> None:
    state, recording, model = limited(on_nonfinite="skip"), Recording(), TinyModel()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    run(state, recording.manager, step=spiking_step(3, factor=float("inf")), model=model, optimizer=inner)
    assert recording.skipped == [False, True, False, False, False]
    assert state.train_state.num_skips == 1, "an anomaly"
    state, model = limited(on_nonfinite="skip"), TinyModel()
    run(state, step=spiking_step(3, 4), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert state.train_state.num_skips == 0, "too large is none"


def test_an_optimizer_of_megatrons_kind_is_not_asked_for_a_step_above_the_threshold() -> None:
    class Foreign:
        def __init__(self, model: torch.nn.Module) -> None:
            self.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]
            self.steps = 0

        def zero_grad(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = None

        def step(self) -> tuple[bool, float, int]:
            self.steps += 1
            return True, 1.0, 3

    state, recording, model = limited(), Recording(), TinyModel()
    optimizer = Foreign(model)
    run(state, recording.manager, step=spiking_step(5, 6), model=model, optimizer=optimizer)
    assert recording.skipped == [False, False, True, False, False]
    assert optimizer.steps == 4


def test_zeros_reach_the_console_as_a_whole_number(capsys: pytest.CaptureFixture[str]) -> None:
    state, model, counts = small_state(train_iters=2), TinyModel(), []
    state.cfg.optimizer.log_num_zeros_in_grad = True
    state.cfg.logger.log_interval = 2
    state.cfg.logger.console = "bridge"
    manager = CallbackManager()

    def count(context: Any) -> None:
        counts.append(sum(int((p.grad == 0).sum()) for p in context.model[0].parameters()))

    manager.register("on_pre_optimizer_step", count)
    run(state, manager, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert counts[1] > 0
    assert f" num zeros: {counts[1]} |" in capsys.readouterr().out


def test_the_rates_of_the_log_are_of_the_layers_and_of_the_embedding(make: Any) -> None:
    manager, seen = CallbackManager(), []

    def note(context: Any) -> None:
        seen.append((context.logs["learning_rate"], decoupled_learning_rate(context.optimizer)))

    manager.register("on_log_step", note)
    config = make("run", "optimizer.lr=0.01", "optimizer.decoupled_lr=0.05", "scheduler.lr_decay_style=constant")
    pretrain(config, callbacks=manager)
    assert seen[0] == (0.01, 0.05)


def test_trackers_get_the_decoupled_rate_and_the_zeros() -> None:
    state, model, zeros = small_state(train_iters=3), TinyModel(), []
    config = OptimizerConfig(optimizer="sgd", lr=0.1, decoupled_lr=0.3, log_num_zeros_in_grad=True)
    optimizer = build_optimizer([model], config)
    loggers, manager = record_all(state), CallbackManager()
    manager.register(
        "on_pre_optimizer_step", lambda context: zeros.append(sum(int((p.grad == 0).sum()) for p in model.parameters()))
    )
    run(state, manager, model=model, optimizer=optimizer)
    board = loggers["tensorboard"]
    assert set(board.curve("learning-rate").values()) == {0.1}
    assert set(board.curve("decoupled-learning-rate").values()) == {0.3}
    assert [*board.curve("num-zeros").values()] == zeros
    assert "decoupled-learning-rate" not in loggers["wandb"].tags


def test_a_rate_is_that_of_the_last_group_that_is_not_decoupled() -> None:
    class Grouped:
        def __init__(self, *groups: dict[str, Any]) -> None:
            self.param_groups = list(groups)

    one, other = {"params": [1], "lr": 0.1}, {"params": [2], "lr": 0.2, "is_decoupled_lr": True}
    empty = {"params": [], "lr": 0.9}
    assert (learning_rate(Grouped(one, other, empty)), decoupled_learning_rate(Grouped(one, other))) == (0.1, 0.2)
    assert learning_rate(Grouped(other)) == 0.2
    assert decoupled_learning_rate(Grouped(one)) is None
    assert learning_rate(Grouped({**one, "lr": 0.0}, other)) == 0.0


def test_the_norm_of_the_log_is_that_of_the_documented_function() -> None:
    state, model = small_state(), TinyModel()
    state.cfg.logger.log_params_norm = True
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters()))
    job: Any = SimpleNamespace(run=state, model=[model], optimizer=optimizer)
    reported = BridgeLog(job)._params_norm(is_logged=True)
    assert isinstance(reported, torch.Tensor)
    assert float(reported) == calc_params_l2_norm([model], state.cfg.model)
    assert float(reported) == pytest.approx(total_norm(parameter_norms(model)), rel=1e-14)


def test_groups_of_the_configuration_do_not_go_with_an_optimizer_of_the_users(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        config_overrides={"optimizer.decoupled_lr": 0.1},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, arguments, train_dataset=[{"input": torch.ones(2)}], optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match=r"\['optimizer\.decoupled_lr'\]=0\.1 groups the parameters"):
        trainer.train()


def test_muon_comes_through_hugging_faces_door_by_its_key(tmp_path: Path) -> None:
    class Rows(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Any]:
            tokens = torch.arange(6) + index % 3
            return {"tokens": tokens, "labels": tokens + 1}

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.middle, self.lm_head = (
                torch.nn.Embedding(16, 8),
                torch.nn.Linear(8, 8),
                torch.nn.Linear(8, 16),
            )

        def forward(self, tokens: Any, labels: Any) -> dict[str, Any]:
            logits = self.lm_head(self.middle(self.embed(tokens)))
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        config_overrides={"optimizer.optimizer": "muon"},
    )
    made: list[type] = []

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            made.append(type(optimizer.optimizer))

    trainer = Trainer(model=Model(), args=arguments, train_dataset=Rows(), callbacks=[Look()])
    trainer.train()
    assert made == [MuonWithAdamW]
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < 0.8 * losses[0]


def test_muon_does_not_go_with_an_optimizer_of_the_users(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        config_overrides={"optimizer.optimizer": "muon"},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, arguments, train_dataset=[{"input": torch.ones(2)}], optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match=r"\['optimizer\.optimizer'\]='muon' configures an optimizer"):
        trainer.train()
