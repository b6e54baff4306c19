"""The parts of a checkpoint that are neither model nor optimizer: progress, callbacks, the log interval, the user's."""

from __future__ import annotations

import logging
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, ExportableState, TrainerCallback, pretrain
from onstep.checkpoint import SharingPattern, StateComponent, decode_state, encode_state
from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.errors import CheckpointError, UnsupportedStateError
from onstep.record import read_records
from onstep.train_state import TrainState
from onstep.training import forward_step
from onstep.training.checkpointing.callback_states import CallbackStates
from onstep.training.compute.loss_sums import StepLoss
from onstep.training.reporting.loss_accumulator import LossAccumulator
from onstep.training.verification.fingerprint import fingerprint
from onstep.training.verification.trajectory_hash import HashChain
from tests.support.resuming import Interrupted
from tests.support.small_runs import TinyModel, run, small_state


class Counter(TrainerCallback):
    def __init__(self, patience: int = 1) -> None:
        self.patience, self.count = patience, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


class Renamed(Counter):
    pass


class Fussy(Counter):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise ValueError("what is this?")


def states_of(*callbacks: Any) -> CallbackStates:
    manager = CallbackManager()
    manager.add(list(callbacks))
    return CallbackStates(manager)


def counted(callback: Counter, count: int) -> Counter:
    callback.count = count
    return callback


def through_a_file(state: Any) -> Any:
    return decode_state(*encode_state(state))


def test_train_state_has_bridges_tensors_and_comes_back_whole() -> None:
    progress = TrainState(step=7, consumed_train_samples=2**40, floating_point_operations_so_far=1e21, do_train=True)
    progress.overrides, progress.skip_list, progress.best_metric = {"lr_factor": 0.5}, [[0, 3]], 1.25
    progress.best_model_checkpoint = "runs/a/checkpoints/checkpoint-4"
    state = progress.state_dict()
    types = {key: value.dtype for key, value in state.items() if isinstance(value, torch.Tensor)}
    assert types == {
        "step": torch.int64,
        "consumed_train_samples": torch.int64,
        "skipped_train_samples": torch.int64,
        "consumed_valid_samples": torch.int64,
        "floating_point_operations_so_far": torch.float64,
        "do_train": torch.bool,
        "do_valid": torch.bool,
        "do_test": torch.bool,
    }
    other = TrainState()
    other.load_state_dict(through_a_file(state))
    assert other == progress
    assert {type(getattr(other, one.name)) for one in fields(other)} <= {int, float, bool, str, dict, list, type(None)}
    with pytest.raises(KeyError):
        other.load_state_dict({"step": torch.tensor(3)})


def test_callbacks_find_their_states_in_any_order() -> None:
    saved = states_of(counted(Counter(1), 5), counted(Renamed(), 7)).state_dict()
    renamed, counter = Renamed(), Counter(1)
    states_of(renamed, counter).load_state_dict(saved)
    assert (counter.count, renamed.count) == (5, 7)


def test_two_of_a_class_are_told_apart_by_what_they_were_made_with() -> None:
    first, second = Counter(patience=2), Counter(patience=9)
    states = states_of(first, second)
    first.count, second.count = 20, 90  # what they are when the checkpoint is saved does not matter
    saved = states.state_dict()
    again_second, again_first = Counter(patience=9), Counter(patience=2)
    states_of(again_second, again_first).load_state_dict(saved)
    assert (again_first.count, again_second.count) == (20, 90)


@pytest.mark.parametrize(
    ("saved_with", "resumed_with"),
    [([1, 10], [1]), ([1, 10], [10]), ([1], [1, 7]), ([1], [7, 1]), ([1, 10, 20], [20, 7, 8, 1])],
)
def test_an_unchanged_one_keeps_its_state_whatever_else_of_its_class_comes_or_goes(
    saved_with: list[int], resumed_with: list[int]
) -> None:
    before = [Counter(patience) for patience in saved_with]
    states = states_of(*before)
    for one in before:
        one.count = 100 + one.patience
    after = [Counter(patience) for patience in resumed_with]
    states_of(*after).load_state_dict(through_a_file(states.state_dict()))
    assert {one.patience: one.count for one in after} == {
        patience: 100 + patience if patience in saved_with else 0 for patience in resumed_with
    }


def test_the_only_one_of_a_class_takes_its_state_with_other_values_too_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Counter(1), Counter(10)
    states = states_of(first, second)
    first.count, second.count = 5, 50
    same, other = Counter(1), Counter(11)
    with caplog.at_level(logging.WARNING):
        states_of(other, same).load_state_dict(states.state_dict())
    assert (same.count, other.count) == (5, 50)
    [text] = [record.getMessage() for record in caplog.records]
    assert "loads the state of tests.training.test_saved_states.Counter[" in text
    assert "the only one of its class" in text


def test_an_unchanged_one_says_nothing_and_an_id_without_a_digest_is_known(caplog: pytest.LogCaptureFixture) -> None:
    saved = states_of(counted(Counter(3), 0)).state_dict()
    with caplog.at_level(logging.WARNING):
        states_of(Counter(3)).load_state_dict(saved)
        old = Counter(3)
        states_of(old).load_state_dict({"tests.training.test_saved_states.Counter": {"count": 8}})
    assert old.count == 8
    assert not caplog.records


def test_a_name_counts_more_than_values_and_two_names_are_never_the_same() -> None:
    def with_name(name: str, patience: int) -> Counter:
        counter = Counter(patience)
        counter.state_key = name  # type: ignore[attr-defined]
        return counter

    first, second = with_name("train", 1), with_name("test", 2)
    states = states_of(first, second)
    first.count, second.count = 10, 20
    again, unknown = with_name("train", 2), with_name("other", 1)
    states_of(unknown, again).load_state_dict(states.state_dict())
    assert (again.count, unknown.count) == (10, 0)


def test_an_id_begins_with_the_class_and_is_the_same_in_every_process() -> None:
    [key] = states_of(Counter(patience=4)).state_dict()
    assert key == "tests.training.test_saved_states.Counter[17912c27]"


def test_an_exportable_one_is_known_by_its_arguments_and_one_with_slots_by_its_order() -> None:
    class Exportable(TrainerCallback):
        def __init__(self, patience: int) -> None:
            self.patience, self.seen = patience, 0

        def state(self) -> dict[str, Any]:
            return {"args": {"patience": self.patience}, "attributes": {"seen": self.seen}}

        @classmethod
        def from_state(cls, state: dict[str, Any]) -> Exportable:
            return cls(**state["args"])

    class Slotted:
        __slots__ = ("count",)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pass

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    used, other, slotted = Exportable(2), Exportable(3), Slotted()
    used.seen, other.seen, slotted.count = 20, 30, 7
    saved = states_of(used, other, slotted).state_dict()
    again, new = Exportable(2), Slotted()
    new.count = 0
    states_of(new, again).load_state_dict(saved)
    assert (again.seen, new.count) == (20, 7)


def test_two_equal_ones_are_told_apart_by_their_order_and_names() -> None:
    saved = states_of(counted(Counter(), 1), counted(Counter(), 1)).state_dict()
    assert len(saved) == 2
    one, other = Counter(), Counter()
    one.state_key, other.state_key = "train", "test"  # type: ignore[attr-defined]
    keys = list(states_of(one, other).state_dict())
    assert [key.partition("[")[2] for key in keys] == ["train]", "test]"]


def test_missing_and_unclaimed_states_are_reported_by_name(caplog: pytest.LogCaptureFixture) -> None:
    saved = states_of(counted(Counter(), 5)).state_dict()
    renamed = Renamed()
    with caplog.at_level(logging.WARNING):
        states_of(renamed).load_state_dict(saved)
    assert renamed.count == 0
    assert "no state for callback tests.training.test_saved_states.Renamed, which starts afresh" in caplog.text
    assert "a state for callback tests.training.test_saved_states.Counter, which this run does not have" in caplog.text


def test_a_callback_that_refuses_its_state_is_named() -> None:
    saved = states_of(Fussy()).state_dict()
    with pytest.raises(
        CheckpointError, match=r"tests\.training\.test_saved_states\.Fussy cannot load its state.*what is this"
    ):
        states_of(Fussy()).load_state_dict(saved)


@pytest.mark.parametrize("num_steps", [1, 5, 63, 64, 100])
def test_an_interval_that_is_saved_in_the_middle_reports_the_same_bits(num_steps: int) -> None:
    def steps() -> list[tuple[StepLoss, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        return [
            (
                StepLoss(
                    torch.rand((), generator=generator),
                    float(index % 3 + 1),
                    torch.tensor(index),
                    {"aux": torch.rand((), generator=generator)} if index % 2 else {},
                ),
                torch.rand((), generator=generator),
            )
            for index in range(130)
        ]

    whole, first, second = LossAccumulator(), LossAccumulator(), LossAccumulator()
    for loss, norm in steps():
        whole.add(loss, norm, True)
    for loss, norm in steps()[:num_steps]:
        first.add(loss, norm, True)
    second.load_state_dict(through_a_file(first.state_dict()))
    for loss, norm in steps()[num_steps:]:
        second.add(loss, norm, True)
    assert second.flush() == whole.flush()


def test_a_fingerprint_sees_a_single_bit() -> None:
    tensors = [torch.randn(100), torch.randn(3, 3).to(torch.bfloat16), torch.zeros(0)]
    before = fingerprint(tensors)
    assert fingerprint([one.clone() for one in tensors]) == before
    assert fingerprint([*reversed(tensors)]) != before
    tensors[0].view(torch.int32)[50] ^= 1
    assert fingerprint(tensors) != before


@pytest.mark.parametrize("changes", [{0: 1, 1: -1}, {0: 1, 1: -2, 2: 1}, {0: -(2**31), 7: -(2**31)}, {40000: 256}])
def test_a_fingerprint_sees_changes_that_add_up_to_nothing(changes: dict[int, int]) -> None:
    words = torch.arange(100_000, dtype=torch.int32)
    before = fingerprint([words.view(torch.float32)])
    for position, change in changes.items():
        words[position] += change
    assert fingerprint([words.view(torch.float32)]) != before


def test_a_trajectory_hash_is_a_chain(tmp_path: Path) -> None:
    model, optimizer = torch.nn.Linear(2, 2), torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)

    def chain(ids: list[int]) -> str:
        chain = HashChain(None, World())
        for one in ids:
            chain.extend(one, [one], optimizer, torch.tensor(1.0), [model])
        return chain.chain

    assert chain([1, 2, 3]) == chain([1, 2, 3])
    assert chain([1, 2, 3]) != chain([2, 1, 3])
    assert chain([]) == ""


@pytest.fixture
def named(tiny_config: ConfigContainer, tmp_path: Path) -> ConfigContainer:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path / "runs")
    tiny_config.train.train_iters, tiny_config.checkpoint.save_interval = 4, 2
    tiny_config.validation.eval_iters = 0
    return tiny_config


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(named: ConfigContainer) -> None:
    class Hoarder(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"model": torch.nn.Linear(1, 1)}

    steps: list[int] = []
    manager = CallbackManager()
    manager.add(Hoarder())
    manager.register("on_train_step_start", lambda context: steps.append(1))
    with pytest.raises(UnsupportedStateError, match=r"callbacks.*Hoarder.*model"):
        pretrain(named, callbacks=manager)
    assert steps == []


@pytest.mark.parametrize("components", [None, ["model", "callbacks"]])
def test_a_callback_that_cannot_give_its_state_fails_the_save(
    named: ConfigContainer, components: list[str] | None
) -> None:
    class Breaks(Counter):
        def state_dict(self) -> dict[str, Any]:
            if self.count:
                raise ValueError("no state")
            return {}

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.count += 1

    named.checkpoint.components = components
    named.checkpoint.save_interval = 1
    with pytest.raises(CheckpointError, match=r"no state.*'Breaks'.*fix its state_dict, or remove the callback"):
        pretrain(named, forward_step, callbacks=[Breaks()])


def test_a_forward_step_and_a_callback_may_bring_states_of_their_own(named: ConfigContainer) -> None:
    class Step:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, data_iterator: Any, model: Any) -> Any:
            self.calls += 1
            return forward_step(data_iterator, model)

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.calls = state_dict["calls"]

    class WithComponents(TrainerCallback):
        def __init__(self) -> None:
            self.counter = Counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.counter.count += 1
            if state.global_step == 3 and dies:
                raise Interrupted

        def state_components(self) -> list[StateComponent]:
            return [StateComponent("counter", self.counter, SharingPattern.GLOBAL)]

    dies = True
    with pytest.raises(Interrupted):
        pretrain(named, Step(), callbacks=[WithComponents()])
    dies = False
    step, callback = Step(), WithComponents()
    pretrain(named, step, callbacks=[callback])
    assert (step.calls, callback.counter.count) == (4, 4)


def test_a_loop_that_is_called_by_itself_continues_too(tmp_path: Path) -> None:
    def trained(directory: str, dies_at: int | None = None) -> tuple[TinyModel, list[int]]:
        steps: list[int] = []
        manager = CallbackManager()

        def note(context: Any) -> None:
            steps.append(context.state.train_state.step)
            if context.state.train_state.step == dies_at:
                raise Interrupted

        manager.register("on_step_end", note)
        model = TinyModel()
        state = small_state(train_iters=6)
        state.cfg.checkpoint.save, state.cfg.checkpoint.save_interval = str(tmp_path / directory), 2
        if dies_at is None:
            run(state, manager, model=model)
        else:
            with pytest.raises(Interrupted):
                run(state, manager, model=model)
        return model, steps

    whole, _ = trained("whole")
    trained("killed", dies_at=3)
    again, steps = trained("killed")
    assert steps == [3, 4, 5, 6]
    torch.testing.assert_close(again.state_dict(), whole.state_dict(), rtol=0, atol=0)


def test_an_exportable_state_saved_by_version_0_4_still_loads() -> None:
    class Counts(TrainerCallback, ExportableState):
        count = 0

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"count": self.count}}

    manager, counts = CallbackManager(), Counts()
    manager.add(counts)
    states = CallbackStates(manager)
    (key,) = states.state_dict()

    states.load_state_dict({key: {"count": 5}})
    assert counts.count == 5
    states.load_state_dict({key: {"args": {}, "attributes": {"count": 6}}})
    assert states.state_dict() == {key: {"args": {}, "attributes": {"count": 6}}}


def test_a_chain_begins_where_a_run_with_hashes_of_an_older_version_continues(
    named: ConfigContainer, caplog: pytest.LogCaptureFixture
) -> None:
    named.train.deterministic = True
    pretrain(named)
    chains = Path(named.run.output_dir) / "mine" / "certificate"
    chains.mkdir()
    (chains / "rank_0.json").write_text("[]")
    named.train.train_iters, named.checkpoint.certify, named.checkpoint.on_config_change = 6, True, "apply"
    pretrain(named)
    assert [record["step"] for record in read_records(chains / "chain.json")] == [5, 6]
    assert "begins after step 4: the earlier steps have a hash for each rank, by an older version" in caplog.text
    assert (chains / "rank_0.json").exists()
