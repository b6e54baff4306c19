"""What `GlobalState` shows of the features, at every event, before a training and outside of one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager
from onstep.distributed import World
from onstep.errors import CheckpointError, CollectiveAfterErrorError
from onstep.events import EVENTS
from onstep.processes.heartbeat import HEARTBEAT
from onstep.training import EnergyMonitor, RerunStateMachine, StragglerDetector, run_job
from onstep.training.feature import Feature
from onstep.training.features import TRAINING
from onstep.training.stages.job import Job
from tests.support.small_runs import RaggedRows, TinyModel, run, small_state, stack


class Client:
    """Records the sections that it gets."""

    def __init__(self) -> None:
        self.sections: list[str] = []

    def start_section(self, name: str) -> None:
        self.sections.append(f"+{name}")

    def end_section(self, name: str) -> None:
        self.sections.append(f"-{name}")


def test_the_last_loss_is_there_at_every_event_of_a_run() -> None:
    seen: dict[str, Any] = {}
    manager = CallbackManager()
    for event in EVENTS:
        manager.register(
            event.name, lambda c, name=event.name: seen.setdefault(name, []).append(c.state.last_step_loss)
        )
    state = small_state(train_iters=2)
    run(state, manager)
    first, second = (float(loss.value()) for loss in seen["on_train_step_end"])
    assert [None if one is None else float(one.value()) for one in seen["on_train_step_start"]] == [None, first]
    assert state.last_step_loss is not None
    assert float(state.last_step_loss.value()) == second


def test_sections_go_to_a_client_of_the_callers() -> None:
    state, client = small_state(train_iters=3), Client()
    state.rank_monitor_client = client
    run(state)
    assert client.sections == ["+step", "-step"] * 2, "the first step is not timed"
    assert state.rank_monitor_client is client


def test_what_a_run_measures_is_there_before_it_trains() -> None:
    state = small_state()
    assert isinstance(state.rerun_state_machine, RerunStateMachine)
    assert state.energy_monitor is None
    state.cfg.straggler.log_straggler = state.cfg.logger.log_energy = True
    assert isinstance(state.straggler_timer, StragglerDetector)
    assert isinstance(state.energy_monitor, EnergyMonitor)
    assert state.straggler_timer is state.straggler_timer
    machine = RerunStateMachine()
    state.rerun_state_machine = machine
    assert state.rerun_state_machine is machine


def test_the_end_of_training_is_not_fired_where_it_never_began(tmp_path: Path) -> None:
    class Forgetful:
        def step(self, increment: int) -> None: ...

    state, captured, manager = small_state(train_iters=1), [], CallbackManager()
    state.cfg.checkpoint.save = str(tmp_path)
    for event in ("on_train_start", "on_exception", "on_train_end", "on_run_end"):
        manager.register(event, lambda context: captured.append(context.event))
    with pytest.raises((CheckpointError, AttributeError)):
        run(state, manager, scheduler=Forgetful())
    assert captured == ["on_exception", "on_run_end"]


def test_the_watchdogs_limit_begins_when_every_feature_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    phases: list[str] = []

    class SlowToBegin(Feature[Job]):
        name = "slow"

        @classmethod
        def wanted(cls, host: Job) -> bool:
            return True

        def begin(self) -> None:
            phases.append(HEARTBEAT.phase)

    monkeypatch.setattr(run_job, "TRAINING", (*TRAINING, SlowToBegin))
    manager = CallbackManager()
    manager.register("on_step_begin", lambda: phases.append(HEARTBEAT.phase))
    run(small_state(train_iters=1), manager)
    assert phases == ["setup", "training"]


def test_collectives_are_refused_only_while_an_error_is_on_its_way() -> None:
    world = World(rank=0, size=2, device=torch.device("cpu"))
    with world.error_scope():
        with suppress(ValueError), world.no_collectives_after_an_error():
            raise ValueError("broken")
        with pytest.raises(CollectiveAfterErrorError):
            world.agree([1])
    with pytest.raises(ValueError, match="process group"):
        world.agree([1])


def test_the_experts_of_hand_made_steps_go_on_from_step_to_step() -> None:
    from onstep.optim import TrainingOptimizer
    from onstep.training import train_step
    from tests.support.expert_runs import moe_model, sum_step
    from tests.support.small_runs import split

    model, state = moe_model(), small_state(batch=8, micro=4)
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    counts = []
    for _ in range(2):
        train_step(sum_step, split(RaggedRows(8), [4, 4]), [model], optimizer, None, state)
        assert state.experts is not None
        assert state.experts.interval is not None
        counts.append(float(state.experts.interval[:4].sum()))
    assert counts == [8 * 12 * 2, 2 * 8 * 12 * 2]


def test_hand_made_steps_are_measured_for_the_report_of_stragglers(capsys: pytest.CaptureFixture[str]) -> None:
    from onstep.optim import TrainingOptimizer
    from onstep.training import train_step
    from tests.support.small_runs import split, sum_step

    model, state = TinyModel(), small_state()
    state.cfg.straggler.log_straggler = True
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train_step(sum_step, split(RaggedRows(4), [2, 2]), [model], optimizer, None, state)
    timer = state.straggler_timer
    assert isinstance(timer, StragglerDetector)
    assert len(timer._forward.pairs) == 2
    timer.report(0.0, 1)
    assert capsys.readouterr().out.startswith("straggler report")


def test_a_second_training_of_a_state_has_a_stage_losses_and_an_ending_of_its_own() -> None:
    state, rows = small_state(train_iters=6), RaggedRows()
    stopping = CallbackManager()
    stopping.register("on_step_end", lambda context: context.control.stop("enough"))
    run(state, stopping, data=iter([stack([rows[0], rows[1]])] * 2))
    assert (state.train_state.step, state.ending.was_stopped) == (1, True)
    run(state, data=iter([stack([rows[0], rows[1]])] * 4))
    assert (state.train_state.step, state.stage.data_exhausted, state.ending.was_stopped) == (3, True, False)
    run(state)
    assert (state.train_state.step, state.stage.data_exhausted, state.ending.stopped_by) == (6, False, None)
