"""Features of the loop: how they are built, the order they are called in, what they keep, what they may not do."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from onstep.checkpoint import checkpoints
from onstep.events.dispatch import NO_OP
from onstep.optim import TrainingOptimizer
from onstep.trainer.feature import TrainerFeature
from onstep.training import GlobalState, loop
from onstep.training.compute.step import Step
from onstep.training.feature import HOOKS, Feature, Features, Interruption, Work
from onstep.training.features import FEATURES, RUN, SECTIONS, SETUP, STEP, TRAINING
from onstep.training.loop import Loop
from onstep.training.run import Run
from onstep.training.stages.job import Job
from tests.support.forked_processes import Processes
from tests.support.small_runs import TinyModel, run, small_job, small_state, sum_step
from tests.support.whole_runs import Ranks

NAMES = [kind.name for kind in FEATURES]


class Counter(Feature[Job]):
    name = "counter"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return True

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self.steps, self.computed = 0, list[int]()

    def after_count(self, step: Step) -> None:
        self.steps += 1

    def wrap_compute(self, compute: Callable[[Step], None]) -> Callable[[Step], None]:
        def noted(step: Step) -> None:
            compute(step)
            self.computed.append(step.number)

        return noted


def test_a_feature_of_ones_own_needs_20_lines_and_no_change_of_the_loop() -> None:
    assert len(inspect.getsource(Counter).splitlines()) <= 20
    assert "Counter" not in inspect.getsource(loop)
    state = small_state(train_iters=3)
    job = small_job(state)
    with state.features.open((*TRAINING, Counter), job, state.world):
        Loop(job).train()
        counter = state.features.find(Counter)
    assert counter is not None
    assert (counter.steps, counter.computed, state.train_state.step) == (3, [1, 2, 3], 3)


class Noting(Feature[Job]):
    """Notes whatever happens to it; each class has a list that all share."""

    seen: list[str]
    gives = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return True

    def note(self, what: str) -> None:
        self.seen.append(f"{what} {self.name}")

    @contextmanager
    def session(self) -> Iterator[None]:
        self.note("open")
        try:
            yield
        except BaseException as error:
            self.note(type(error).__name__)
            raise
        finally:
            self.note("close")

    def begin(self) -> None:
        self.note("begin")

    def ready(self) -> None:
        self.note("ready")

    def before_iteration(self) -> None:
        self.note("before")

    def admits(self, step: Step) -> bool:
        self.note("admits")
        return self.gives

    def after_iteration(self, step: Step) -> None:
        self.note("after")

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        self.note(f"{work} in")
        yield
        self.note(f"{work} out")

    def wrap_step(self, train_step: Callable[[Step], None]) -> Callable[[Step], None]:
        def noted(step: Step) -> None:
            self.note("enter")
            train_step(step)
            self.note("leave")

        return noted


def noting(seen: list[str], *names: str, **members: Any) -> list[type[Noting]]:
    """A feature of each name, which note into `seen`."""
    return [type(name, (Noting,), {"name": name, "seen": seen, **members}) for name in names]


def test_hooks_wrappers_and_sessions_follow_the_table() -> None:
    seen: list[str] = []
    state = small_state(train_iters=1)
    job = small_job(state)
    one, two, three = noting(seen, "one", "two", "three")
    with state.features.open((one, *TRAINING, two, three), job, state.world):
        Loop(job).train()
        with state.features.pause("compare"):
            seen.append("compared")
    names = ("one", "two", "three")
    assert seen == [
        *(f"open {name}" for name in names),
        *(f"begin {name}" for name in names),
        *(f"ready {name}" for name in names),
        *(f"before {name}" for name in names),
        *(f"enter {name}" for name in names),
        *(f"admits {name}" for name in names),
        *(f"leave {name}" for name in reversed(names)),
        *(f"after {name}" for name in names),
        *(f"compare in {name}" for name in names),
        "compared",
        *(f"compare out {name}" for name in reversed(names)),
        *(f"close {name}" for name in reversed(names)),
    ]


def test_sessions_close_in_reverse_and_see_the_error() -> None:
    seen: list[str] = []
    state = small_state(train_iters=3)

    def failing(data_iterator: Any, model: Any) -> Any:
        if state.train_state.step == 1:
            raise ValueError("the second step")
        return sum_step(data_iterator, model)

    job = small_job(state, step=failing)
    with (
        pytest.raises(ValueError, match="the second step"),
        state.features.open((*noting(seen, "one"), *TRAINING, *noting(seen, "two")), job, state.world),
    ):
        Loop(job).train()
    assert seen[-4:] == ["ValueError two", "close two", "ValueError one", "close one"]
    assert "leave one" in seen


def test_a_session_that_cannot_open_closes_those_before_it() -> None:
    seen: list[str] = []

    class Broken(Noting):
        name = "broken"

        def session(self) -> AbstractContextManager[Any]:
            raise OSError("no such device")

    state = small_state()
    job = small_job(state)
    with (
        pytest.raises(OSError, match="no such device"),
        state.features.open((*noting(seen, "one"), Broken, *noting(seen, "three")), job, state.world),
    ):
        pass
    assert seen == ["open one", "OSError one", "close one"]


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False), (True, True)])
def test_every_gate_is_asked_and_one_no_keeps_the_update_out(first: bool, second: bool) -> None:
    seen: list[str] = []
    state = small_state(train_iters=1)
    job = small_job(state)
    weights = [parameter.detach().clone() for parameter in job.model[0].parameters()]
    table = (*noting(seen, "one", gives=first), *noting(seen, "two", gives=second))
    with state.features.open((*TRAINING, *table), job, state.world):
        Loop(job).train()
    assert [entry for entry in seen if entry.startswith("admits")] == ["admits one", "admits two"]
    are_same = all(torch.equal(old, new) for old, new in zip(weights, job.model[0].parameters(), strict=True))
    assert are_same is not (first and second)
    assert job.last is not None
    assert job.last.applied is (first and second)
    assert state.train_state.step == 1


class Stopping(Counter):
    """Notes the norm of the gradients that are about to be applied, and clears them."""

    name = "stopping"

    def before_update(self, step: Step) -> None:
        assert not step.applied
        parameters = list(self.host.model[0].parameters())
        self.norm = float(torch.nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None]))
        self.norm_before_clipping = float(step.grad_norm or 0.0)
        for one in parameters:
            one.grad = None


def test_a_feature_stands_between_clipping_and_the_update() -> None:
    state = small_state(train_iters=1)
    model = TinyModel()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), clip_grad=0.01)
    job = small_job(state, model, optimizer)
    with state.features.open((*TRAINING, Stopping), job, state.world):
        Loop(job).train()
        stopping = state.features.find(Stopping)
    assert stopping is not None
    assert stopping.norm == pytest.approx(0.01, rel=1e-3)
    assert stopping.norm_before_clipping > 0.01
    assert all(torch.equal(old, new) for old, new in zip(weights, model.parameters(), strict=True))


class Off(Counter):
    name = "off"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return False

    def __init__(self, host: Job) -> None:
        raise AssertionError("a feature that is off is not built")


def test_a_feature_that_is_off_is_not_built_and_costs_nothing() -> None:
    state = small_state(train_iters=1)
    job = small_job(state)
    with state.features.open((Off,), job, state.world):
        assert state.features.find(Off) is None
        assert state.features.built == []
        hooks = [hook for hook in HOOKS if hook not in ("session", "admits", "pause")]
        assert all(getattr(state.features, hook) is NO_OP for hook in hooks)
        compute = state.features.wrap("compute", NO_OP)
        assert compute is NO_OP
        Loop(job).train()
    assert state.train_state.step == 1


def test_a_table_that_is_opened_again_builds_what_is_open_no_second_time() -> None:
    seen: list[str] = []
    state = small_state()
    job = small_job(state)
    table = noting(seen, "one")
    with state.features.open(table, job, state.world), state.features.open(table, job, state.world):
        assert [one.name for one in state.features.built] == ["one"]
    assert seen == ["open one", "close one"]
    with state.features.open(table, job, state.world):
        assert [one.name for one in state.features.built] == ["one"]
    assert seen == ["open one", "close one"] * 2


class Kept(Feature[Run]):
    """Has a state, which is the same on all ranks."""

    name, has_state = "kept", True

    @classmethod
    def wanted(cls, host: Run) -> bool:
        return True

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self.steps = list[int]()
        self.at_begin: list[int] | None = None

    def begin(self) -> None:
        self.at_begin = list(self.steps)

    def after_count(self, step: Step) -> None:
        self.steps.append(step.number)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class KeptPerRank(Kept):
    name, per_rank = "kept_per_rank", True


def test_states_are_in_checkpoints_under_their_names_and_come_back(tmp_path: Path) -> None:
    def trained(iterations: int) -> tuple[GlobalState, list[Kept]]:
        state = small_state(train_iters=iterations)
        state.cfg.checkpoint.save = str(tmp_path / "checkpoints")
        state.cfg.checkpoint.on_config_change = "apply"
        with state.features.open((Kept, KeptPerRank), state, state.world):
            run(state)
            return state, [one for one in state.features.built if isinstance(one, Kept)]

    _, first = trained(2)
    assert [one.at_begin for one in first] == [[], []]
    state, second = trained(5)
    assert state.train_state.step == 5
    assert [one.at_begin for one in second] == [[1, 2], [1, 2]]
    assert [one.steps for one in second] == [[1, 2, 3, 4, 5]] * 2
    newest = max(checkpoints(tmp_path / "checkpoints"), key=lambda info: info.step)
    texts = {path.relative_to(newest.path).parts[0]: path.read_text() for path in newest.path.rglob("*.json")}
    assert '"kept"' in texts["loop"]
    assert '"kept_per_rank"' not in texts["loop"]
    assert '"kept_per_rank"' in texts["rank"]
    assert '"kept"' not in texts["rank"]


def test_states_are_told_apart_by_what_ranks_share() -> None:
    features = Features()
    state = small_state()
    features.build((Kept, KeptPerRank), state, state.world)
    assert list(features.states(per_rank=False)) == ["kept"]
    assert list(features.states(per_rank=True)) == ["kept_per_rank"]


def test_the_table_is_its_parts_and_has_each_name_once() -> None:
    assert (*SETUP, *RUN, *SECTIONS, *TRAINING) == FEATURES
    assert len(set(NAMES)) == len(NAMES)
    assert not {"meter", "scaler"} & set(NAMES), "those are the loop's own in checkpoints"
    assert set(STEP) <= set(TRAINING)
    assert sorted(STEP, key=TRAINING.index) == list(STEP)


@pytest.mark.parametrize("kind", [*FEATURES, TrainerFeature], ids=[*NAMES, TrainerFeature.name])
def test_a_feature_overrides_what_the_loop_calls(kind: type[Feature[Any]]) -> None:
    own = {name: member for name, member in vars(kind).items() if inspect.isfunction(member)}
    wrappers = {name.removeprefix("wrap_") for name in own if name.startswith("wrap_")}
    assert wrappers <= set(get_args(Work))
    meant = {name for name in own if re.match("(before|after|add_to|rolled)_", name)}
    assert meant <= set(HOOKS)
    for name in set(own) & set(HOOKS):
        expected = list(inspect.signature(getattr(Feature, name)).parameters)
        assert list(inspect.signature(own[name]).parameters) == expected, name
    assert hasattr(kind, "state_dict") == hasattr(kind, "load_state_dict")
    assert wrappers | (set(own) & set(HOOKS)), "it does something"


def test_hooks_are_those_that_the_composition_has() -> None:
    features = Features()
    called = set(HOOKS) - {"session", "pause"}
    assert called == {name for name in vars(features) if name in HOOKS}
    assert set(HOOKS) <= set(dir(Feature))


@pytest.fixture(scope="module")
def ranks(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return Ranks(processes, tmp_path_factory.mktemp("features"), "tests.support.jobs.feature_jobs")


def results(ranks: Ranks, name: str) -> list[Any]:
    return [json.loads((ranks.directory / name / f"result-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.distributed
def test_a_collective_feature_that_one_rank_wants_is_built_on_all(ranks: Ranks) -> None:
    assert ranks.start("wishes", "wishes") == [0, 0], ranks.output("wishes")
    first, second = results(ranks, "wishes")
    assert first["agreed"] == second["agreed"] == [[1, 0], [1, 1], [1, 1]]
    assert (first["has_alone"], second["has_alone"]) == (False, True)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["fragile", "closed"])
def test_a_feature_that_cannot_be_built_or_opened_on_one_rank_ends_all(kind: str, ranks: Ranks) -> None:
    assert ranks.start(kind, "fragile", kind=kind) == [0, 0], ranks.output(kind)
    first, second = results(ranks, kind)
    assert (first["step"], second["step"]) == (0, 0)
    assert second["told"] == "no such device"
    assert "could not be set up on another rank" in first["told"]


@pytest.mark.distributed
@pytest.mark.parametrize("failing", [[0, 1], [1]])
def test_after_an_error_a_session_starts_no_collective(failing: list[int], ranks: Ranks) -> None:
    name = f"error_{len(failing)}"
    assert ranks.start(name, "error", failing=failing) == [0, 0], ranks.output(name)
    for rank, result in enumerate(results(ranks, name)):
        assert result["step"] == 1
        if rank in failing:
            assert result["told"] == "ValueError"
            [text] = result["refused"]
            assert re.match(f"World.agree was called on rank {rank} of 2 after ValueError", text)
        else:
            assert (result["told"], result["refused"]) == ("RuntimeError", [])
