"""A bad step is left out, ends the run or sends it back, as the policy says; its samples are not met again."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onstep import Callback, CallbackManager
from onstep.config.parallel_sizes import ParallelSizes
from onstep.data import TrainLoader
from onstep.errors import AnomalyError, ConfigError, NonFiniteError
from onstep.events import Request
from onstep.optim import DeviceFiniteGate, TrainingOptimizer
from onstep.train_state import TrainState
from onstep.training import GlobalState
from onstep.training.anomalies.bad_samples import Findings, sharers_of
from onstep.training.anomalies.gate import AnomalyGate
from onstep.training.runs.run_dir import RunDir
from onstep.training.stages.actions import RollBack
from onstep.training.stages.agreement import write_decision
from tests.support.small_runs import LENGTH, RaggedRows, TinyModel, run, small_job, small_state


class Rows(RaggedRows):
    """Rows that carry what is wrong with them: a factor on the loss, or on its gradient."""

    def __init__(self, size: int = 12, loss: dict[int, float] | None = None, gradient: tuple[int, ...] = ()) -> None:
        super().__init__(size)
        self.loss, self.gradient = loss or {}, gradient

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = super().__getitem__(index)
        row["factor"] = torch.tensor(self.loss.get(index, 1.0))
        row["spoils_gradient"] = torch.tensor(index in self.gradient)
        return row


def data_driven_step(data_iterator: Any, model: nn.Module) -> Any:
    """Sum of losses, spoiled as the samples say, so that computing it again gives the same."""
    batch = next(data_iterator)
    loss = model(batch["tokens"], batch["labels"]) * batch["factor"].prod()
    if batch["spoils_gradient"].any():
        loss.register_hook(lambda gradient: gradient * math.nan)
    return loss, lambda value: (value, batch["labels"].ne(-100).sum(), {})


def loader(rows: Rows, **options: Any) -> TrainLoader:
    return TrainLoader(rows, micro_batch_size=2, global_batch_size=4, **options)


class Recorder(Callback):
    """Every record that trackers see, the weights around each step, and the samples of each step."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.steps: list[list[list[int]]] = []
        self.changed: list[bool] = []
        self.skipped: list[bool] = []

    def on_train_step_start(self, context: Any) -> None:
        self.steps.append(context.sample_ids)
        self.before = copy.deepcopy([context.model[0].state_dict(), context.optimizer.state_dict()])

    def on_train_step_end(self, context: Any) -> None:
        self.skipped.append(context.skipped_iter)

    def on_step_end(self, context: Any) -> None:
        after = [context.model[0].state_dict(), context.optimizer.state_dict()]
        self.changed.append(flat(self.before) != flat(after))

    def on_log(self, context: Any) -> None:
        self.records.append({**context.logs, "step": context.state.train_state.step})

    @property
    def anomalies(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "anomaly" in record]


def flat(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    return [flat(value) for value in state] if isinstance(state, list) else state


def watched(callbacks: list[Any] | None = None) -> tuple[Recorder, CallbackManager]:
    recorder, manager = Recorder(), CallbackManager()
    manager.add([recorder, *(callbacks or [])])
    return recorder, manager


def adam_run(state: GlobalState, manager: CallbackManager, rows: Rows, **options: Any) -> nn.Module:
    model = options.pop("model", None) or TinyModel()
    optimizer = options.pop("optimizer", None) or TrainingOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    data = options.pop("data", None) or loader(rows)
    return run(state, manager, step=data_driven_step, data=data, model=model, optimizer=optimizer, **options)


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_skip_leaves_out_one_update_and_names_exactly_the_bad_micro_batch(how: str) -> None:
    rows = Rows(loss={5: math.nan}) if how == "loss" else Rows(gradient=(5,))
    state, (recorder, manager) = small_state(train_iters=9, on_nonfinite="skip"), watched()
    state.cfg.logger.log_interval = 9
    adam_run(state, manager, rows)

    bad_step = next(number for number, ids in enumerate(recorder.steps, 1) if 5 in ids[0] + ids[1])
    guilty = next(ids for ids in recorder.steps[bad_step - 1] if 5 in ids)
    assert bad_step <= 3
    assert recorder.changed == [step != bad_step for step in range(1, 10)]
    assert recorder.skipped == [step == bad_step for step in range(1, 10)]
    progress = state.train_state
    assert progress.skip_list == [[0, one] for one in sorted(guilty)]
    assert (progress.step, progress.num_skips, progress.skipped_train_samples) == (9, 1, 4)
    [record] = recorder.anomalies
    assert (record["step"], record["action"], record["sample_ids"]) == (bad_step, "skip", sorted(guilty))
    assert record["anomaly"] == f"non-finite {how}"
    assert math.isnan(record["loss"] if how == "loss" else record["grad_norm"])
    assert f"rank 0, micro-batch {recorder.steps[bad_step - 1].index(guilty)}" in record["where"]
    [interval] = [record for record in recorder.records if "loss" in record and "anomaly" not in record]
    assert math.isfinite(interval["loss"])
    assert math.isfinite(state.mean_loss())


def test_a_sample_left_out_is_not_met_in_any_later_epoch() -> None:
    state, (recorder, manager) = small_state(num_epochs=6, on_nonfinite="skip"), watched()
    state.info.max_steps = 100
    adam_run(state, manager, Rows(20, loss={5: math.nan, 11: math.inf}))
    [first, *rest] = [record["sample_ids"] for record in recorder.anomalies]
    gone = {one for ids in (first, *rest) for one in ids}
    assert {5, 11} <= gone
    assert state.train_state.num_skips == len(rest) + 1 <= 2
    later = {one for step in recorder.steps[5:] for ids in step for one in ids}
    assert later == set(range(20)) - gone


def test_a_recomputed_gradient_leaves_the_random_state_alone() -> None:
    states: dict[str, list[Any]] = {"end": [], "after": []}
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: states["end"].append(torch.get_rng_state()))
    manager.register("on_step_end", lambda context: states["after"].append(torch.get_rng_state()))

    class Dropping(TinyModel):
        def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
            hidden = torch.nn.functional.dropout(self.embed(tokens), 0.5)
            return cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten(), reduction=reduction)

    state = small_state(train_iters=3, on_nonfinite="skip")
    adam_run(state, manager, Rows(gradient=(5,)), model=Dropping())
    assert state.train_state.num_skips == 1
    assert all(torch.equal(a, b) for a, b in zip(states["end"], states["after"], strict=True))
    assert not torch.equal(states["end"][0], states["end"][1])


def test_raise_names_the_micro_batch_whose_gradient_alone_is_bad() -> None:
    recorder, manager = watched()
    with pytest.raises(NonFiniteError) as raised:
        adam_run(small_state(train_iters=3), manager, Rows(gradient=(5,)))
    [bad] = [ids for step in recorder.steps for ids in step if 5 in ids]
    [place] = [number for step in recorder.steps for number, ids in enumerate(step) if ids == bad]
    assert f"rank 0, micro-batch {place}: gradient norm nan, sample ids {bad}. train.on_nonfinite" in str(raised.value)


def test_a_step_that_cannot_be_computed_again_still_names_its_samples(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def fragile(data_iterator: Any, model: nn.Module) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("only once")
        return data_driven_step(data_iterator, model)

    with pytest.raises(NonFiniteError, match="every local loss was finite"):
        run(small_state(train_iters=1), step=fragile, data=loader(Rows(gradient=tuple(range(12)))))
    assert "RuntimeError: only once" in caplog.text


def test_samples_are_those_of_the_ranks_that_share_them() -> None:
    """Two pipelines of two stages: ranks 0 and 2 have the first half of the samples."""
    sharers = sharers_of(ParallelSizes(pp=2, dp_replicate=2))
    assert sharers_of(ParallelSizes(dp_shard=2, tp=2)) == [[0, 1], [2, 3]]
    assert str(Findings([], [[[4, 5]], [[6]]], sharers=sharers)).endswith(
        "in the backward pass of ranks 0, 2, sample ids [[4, 5]]; ranks 1, 3, sample ids [[6]]"
    )
    assert str(Findings([], [[[4, 5]], [[6]]])).endswith(" of rank 0, sample ids [[4, 5]]; rank 1, sample ids [[6]]")


def test_buffers_go_back_to_before_a_skipped_step() -> None:
    class Normed(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(LENGTH)

        def forward(self, tokens: Tensor, labels: Tensor, reduction: str = "sum") -> Tensor:
            hidden = self.norm(self.embed(tokens) * (math.nan if (tokens == -1).any() else 1.0))
            return cross_entropy(self.out(hidden).flatten(0, 1), labels.flatten(), reduction=reduction)

    class Broken(Rows):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = super().__getitem__(index)
            row["factor"] = torch.tensor(math.nan if index == 5 else 1.0)
            return row

    state, (recorder, manager) = small_state(train_iters=3, on_nonfinite="skip"), watched()
    model = adam_run(state, manager, Broken(), model=Normed())
    assert recorder.changed.count(False) == 1
    assert int(model.norm.num_batches_tracked) == 2 * 2  # type: ignore[union-attr, arg-type]


class Megatronish:
    """An optimizer that is none of torch's; it applies whatever it is given."""

    def __init__(self, model: nn.Module) -> None:
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)
        self.param_groups = self.inner.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> tuple[bool, float, None]:
        self.inner.step()
        return True, 1.0, None

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


@pytest.mark.parametrize("on_spike", ["ignore", "skip"])
def test_a_foreign_optimizer_is_not_handed_a_bad_step_either(on_spike: str) -> None:
    state, (recorder, manager) = small_state(train_iters=6, on_nonfinite="skip"), watched()
    state.cfg.anomaly.on_spike = on_spike
    model = TinyModel()
    adam_run(state, manager, Rows(gradient=(5,)), model=model, optimizer=Megatronish(model))
    assert state.train_state.num_skips == 1
    assert recorder.changed.count(False) == 1
    assert recorder.anomalies[0]["anomaly"] == "non-finite gradient"


@pytest.mark.parametrize("gate", ["host", "device"])
def test_stop_ends_the_run_without_the_update_and_says_so_everywhere(gate: str, tmp_path: Path) -> None:
    model = TinyModel()
    torch_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    device_gate = DeviceFiniteGate(torch.device("cpu")) if gate == "device" else None
    optimizer = TrainingOptimizer(torch_optimizer, gate=device_gate)
    state, (recorder, manager) = small_state(train_iters=30, on_nonfinite="stop"), watched()
    state.run_dir = RunDir(tmp_path)
    reasons: list[str] = []
    manager.register("on_run_end", lambda context: reasons.append(context.reason))
    adam_run(state, manager, Rows(loss={5: math.nan}), model=model, optimizer=optimizer)

    bad_step = next(number for number, ids in enumerate(recorder.steps, 1) if 5 in ids[0] + ids[1])
    assert recorder.changed == [step < bad_step for step in range(1, len(recorder.changed) + 1)]
    assert bad_step <= state.train_state.step <= bad_step + (10 if gate == "device" else 0)
    assert (state.ending.was_stopped, reasons, state.ending.by_anomaly) == (True, ["stopped"], True)
    assert state.ending.stopped_by is not None
    assert state.ending.stopped_by.author == "anomaly gate"
    [record] = recorder.anomalies
    assert record["action"] == "stop"
    assert math.isnan(record["loss"])
    assert state.train_state.skip_list == []
    [row] = [json.loads(line) for line in state.run_dir.decisions.read_text().splitlines()]
    assert (row["flag"], row["author"], row["details"]["bad_step"]) == (
        "should_training_stop",
        "anomaly gate",
        bad_step,
    )


def test_a_run_that_nothing_ended_has_done_what_it_was_told() -> None:
    state = small_state(train_iters=2, on_nonfinite="stop")
    run(state)
    assert state.ending.by_anomaly is False


def spiky_rows(size: int = 240, spikes: tuple[int, ...] = (150,)) -> Rows:
    return Rows(size, loss=dict.fromkeys(spikes, 1000.0))


def spiky_state(on_spike: str, **fields: Any) -> GlobalState:
    state = small_state(train_iters=60, **fields)
    state.cfg.anomaly.on_spike, state.cfg.anomaly.spike_warmup = on_spike, 10
    return state


def test_a_spike_is_left_out_with_all_samples_of_its_step() -> None:
    state, (recorder, manager) = spiky_state("skip"), watched()
    adam_run(state, manager, spiky_rows(), data=loader(spiky_rows(), shuffle=False))
    [record] = recorder.anomalies
    bad_step = 150 // 4 + 1
    assert record["anomaly"].startswith("spike: loss ")
    assert (record["step"], record["sample_ids"]) == (bad_step, [148, 149, 150, 151])
    assert recorder.changed == [step != bad_step for step in range(1, 61)]
    assert record["where"].startswith("worst: sample 150 (loss ")
    assert record["where"].count("sample") == 3
    assert state.train_state.skip_list == [[0, 148], [0, 149], [0, 150], [0, 151]]
    watch = state.features.find(AnomalyGate)
    assert watch is not None
    measured = [step for step, _ in watch.state_dict()["spikes"]["window"]["loss"]]
    assert measured == [step for step in range(1, 61) if step != bad_step]


def test_spikes_raise_stop_or_are_ignored_as_the_policy_says() -> None:
    with pytest.raises(AnomalyError, match=r"spike: loss .* at step 38; worst: sample 150 .* anomaly\.on_spike"):
        adam_run(spiky_state("raise"), watched()[1], spiky_rows(), data=loader(spiky_rows(), shuffle=False))
    state = spiky_state("stop")
    adam_run(state, watched()[1], spiky_rows(), data=loader(spiky_rows(), shuffle=False))
    assert (state.train_state.step, state.ending.by_anomaly) == (38, True)
    state = spiky_state("ignore")
    adam_run(state, watched()[1], spiky_rows(), data=loader(spiky_rows(), shuffle=False))
    assert (state.train_state.step, state.train_state.num_skips) == (60, 0)


def test_a_healthy_run_has_no_spike_and_trains_the_same_bits_as_without_looking() -> None:
    weights = []
    for on_spike in ("ignore", "raise"):
        model = adam_run(spiky_state(on_spike), watched()[1], Rows(240))
        weights.append(flat(dict(model.state_dict())))
    assert weights[0] == weights[1]


def test_a_nan_raises_although_spikes_are_skipped() -> None:
    with pytest.raises(NonFiniteError, match="micro-batch"):
        adam_run(spiky_state("skip"), watched()[1], Rows(loss={5: math.nan}))


def test_more_skips_than_allowed_fail_and_all_of_them_are_named() -> None:
    state, (recorder, manager) = small_state(train_iters=9, on_nonfinite="skip"), watched()
    state.cfg.anomaly.max_skips = 2
    with pytest.raises(AnomalyError) as raised:
        adam_run(state, manager, Rows(loss=dict.fromkeys(range(12), math.nan)))
    message = str(raised.value)
    assert message.startswith("3 skips exceed anomaly.max_skips=2")
    assert all(f"non-finite loss at step {step}" in message for step in (1, 2, 3))
    assert len(recorder.anomalies) == 3


def test_rollback_without_a_checkpoint_names_the_remedy() -> None:
    with pytest.raises(
        AnomalyError, match=r"no verified checkpoint of step \d or earlier exists.*checkpoint\.save_interval"
    ):
        adam_run(small_state(train_iters=9, on_nonfinite="rollback"), watched()[1], Rows(loss={5: math.nan}))


def made_watch(**anomaly: Any) -> tuple[GlobalState, AnomalyGate]:
    state = small_state(train_iters=9)
    for name, value in anomaly.items():
        setattr(state.cfg.anomaly, name, value)
    return state, AnomalyGate(small_job(state))


def test_what_a_rollback_must_not_undo_is_carried_into_the_loaded_progress() -> None:
    left = TrainState(step=15, epoch=2, samples_in_epoch=12, steps_in_epoch=3, consumed_train_samples=60)
    left.skip_list, left.num_skips, left.num_rollbacks = [[1, 7], [2, 3]], 4, 1
    left.overrides = {"log_interval": 3, "lr_factor": 0.5}
    run = small_state(train_iters=9)
    run.train_state, run.cfg.anomaly.rollback_lr_factor = left, 0.5
    rollback = RollBack.at(run, Request("rollback", "anomaly gate", ""))
    left.epoch = 9  # the loop goes on with the same object
    loaded = TrainState(step=10, epoch=1, samples_in_epoch=20, consumed_train_samples=40, skipped_train_samples=4)
    loaded.overrides = {"eval_interval": 5}

    rollback.carry_over(loaded)

    assert rollback.last_good_step == 14
    assert (loaded.step, loaded.epoch, loaded.samples_in_epoch, loaded.steps_in_epoch) == (10, 2, 12, 3)
    assert (loaded.consumed_train_samples, loaded.skipped_train_samples) == (60, 24)
    assert (loaded.num_skips, loaded.num_rollbacks, loaded.skip_list) == (4, 1, [[1, 7], [2, 3]])
    assert loaded.overrides == {"log_interval": 3, "lr_factor": 0.25}


def test_rollbacks_are_counted_over_loads_of_older_states_and_bounded(tmp_path: Path) -> None:
    state, watch = made_watch(max_rollbacks=2, rollback_lr_factor=0.5)
    state.run_dir = RunDir(tmp_path)
    old_watch, old_progress = watch.state_dict(), copy.deepcopy(state.train_state)
    for count in (1, 2):
        request, left = Request("rollback", "anomaly gate", "", f"spike {count}"), state.train_state
        left.step, left.num_rollbacks = 5 + count, left.num_rollbacks + 1
        watch.before_rollback(left.step, request)
        rollback = RollBack.at(state, request)
        state.train_state = copy.deepcopy(old_progress)
        watch.load_state_dict(old_watch)
        rollback.carry_over(state.train_state)
        write_decision(state, rollback.record(state.train_state.step))
        watch.rolled_back(left.step, request)
        assert state.train_state.num_rollbacks == count
        assert state.train_state.overrides == {"lr_factor": 0.5**count}
    state.train_state.num_rollbacks = 3
    with pytest.raises(AnomalyError) as raised:
        watch.before_rollback(8, Request("rollback", "anomaly gate", "", "spike 3"))
    assert all(f"spike {count}" in str(raised.value) for count in (1, 2, 3))
    rows = [json.loads(line) for line in state.run_dir.decisions.read_text().splitlines()]
    assert [(row["flag"], row["reason"], row["details"]["to_step"]) for row in rows] == [
        ("rolled_back", "spike 1", 0),
        ("rolled_back", "spike 2", 0),
    ]


def test_a_resumed_watch_finds_the_spike_that_the_first_would_have_found() -> None:
    class Keep(Callback):
        def on_step_end(self, context: Any) -> None:
            if context.state.train_state.step == 30:
                watch = context.state.features.find(AnomalyGate)
                assert watch is not None
                self.state = json.loads(json.dumps(watch.state_dict()))

    keep = Keep()
    adam_run(spiky_state("skip"), watched([keep])[1], Rows(240))
    _, watch = made_watch(on_spike="skip", spike_warmup=10)
    watch.load_state_dict(keep.state)
    assert watch.state_dict() == keep.state
    assert len(keep.state["spikes"]["window"]["loss"]) == 30


@pytest.mark.parametrize(
    "event", ["on_forward_backward_start", "on_forward_backward_end", "on_substep_end", "on_pre_optimizer_step"]
)
def test_a_callback_may_have_its_step_left_out(event: str, tmp_path: Path) -> None:
    def asker(context: Any) -> None:
        if context.state.train_state.step + 1 == 2:
            context.control.skip("no good")

    state, (recorder, manager) = small_state(train_iters=4), watched()
    state.cfg.anomaly.max_skips = 1
    state.run_dir = RunDir(tmp_path)
    manager.register(event, asker)
    adam_run(state, manager, Rows(40))
    assert recorder.changed == [True, False, True, True]
    ids = sorted(one for micro in recorder.steps[1] for one in micro)
    assert state.train_state.skip_list == [[0, one] for one in ids]
    assert (state.train_state.num_skips, state.train_state.skipped_train_samples) == (0, 4)
    [row] = [json.loads(line) for line in state.run_dir.decisions.read_text().splitlines()]
    assert (row["step"], row["flag"], row["event"], row["reason"]) == (2, "skip", event, "no good")
    assert row["details"]["sample_ids"] == ids
    assert recorder.anomalies[0]["anomaly"].startswith("asked to skip the update by")


def test_a_skip_that_is_asked_for_too_late_is_refused() -> None:
    manager = CallbackManager()
    manager.register("on_train_step_end", lambda context: context.control.skip())
    with pytest.raises(
        ConfigError,
        match=r"control\.skip\(\) must be called before the update of the step, got a call during 'on_train_step_end'",
    ):
        run(small_state(train_iters=1), manager)


def test_a_rollback_that_a_callback_asks_for_undoes_the_step_it_was_asked_in() -> None:
    manager = CallbackManager()

    def ask(context: Any) -> None:
        if context.state.train_state.step == 3:
            context.control.rollback("diverging")

    manager.register("on_step_end", ask)
    with pytest.raises(AnomalyError, match=r"step 3 must be undone \(diverging\).*checkpoint of step 2 or earlier"):
        run(small_state(train_iters=4), manager)


def test_data_without_ids_is_skipped_in_this_pass_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows = Rows(loss=dict.fromkeys((2, 3), math.nan))
    reader = loader(rows, shuffle=False)
    micro_batches = [reader.read(1).micro_batches[0] for _ in range(6)]  # type: ignore[union-attr]
    state = small_state(train_iters=3, on_nonfinite="skip")
    run(state, step=data_driven_step, data=iter(micro_batches + micro_batches[1:2] * 2))
    assert (state.train_state.num_skips, state.train_state.skip_list) == (1, [])
    assert sum("no sample ids" in message for message in caplog.messages) == 1
