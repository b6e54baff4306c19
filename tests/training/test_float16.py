"""float16 mixed precision: overflows skip steps and nothing else; what is not an overflow stays an anomaly."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep import CallbackManager, Trainer, TrainingArguments, pretrain
from onstep.config import ConfigContainer
from onstep.errors import NonFiniteError
from onstep.optim import LossScaler, TrainingOptimizer
from onstep.training import GlobalState, train_step
from tests.support.forked_processes import Processes
from tests.support.jobs.float16_jobs import Overflowing, Recorder, float16_state, recorded
from tests.support.small_runs import RaggedRows, TinyModel, mean_step, run, small_state, split, sum_step


def test_a_run_falls_from_bridges_scale_to_one_that_fits_and_learns(
    tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.validation.eval_iters, tiny_config.train.train_iters = 0, 28
    exact, half = Recorder(), Recorder()
    pretrain(tiny_config, callbacks=[exact])
    capsys.readouterr()
    tiny_config.mixed_precision, tiny_config.logger.console = "fp16_mixed", "bridge"
    pretrain(tiny_config, callbacks=[half])
    first = half.skipped.index(False)
    assert half.skipped[:first] == [True] * first
    assert first > 8
    expected = [2.0**32, *(2.0 ** (32 - fall) for fall in range(1, first))]
    assert half.scales[:first] == expected, "the first overflow costs nothing, each further one a half"
    assert not any(changed for changed, skipped in zip(half.changed, half.skipped, strict=True) if skipped)
    assert sum(half.changed) == half.skipped.count(False) - 1, "the first update has a learning rate of 0"
    moves = [rate != before for before, rate in zip([0.0, *half.rates], half.rates, strict=False)]
    assert moves == [not skipped for skipped in half.skipped], "the schedule must wait while steps overflow"
    assert all((norm is None) is skipped for norm, skipped in zip(half.norms, half.skipped, strict=True))
    assert all(math.isfinite(loss) for loss in half.losses)
    assert half.losses[-1] < half.losses[0] - 0.3
    assert half.losses[0] == pytest.approx(exact.losses[0], rel=1e-3)
    pattern = r"loss scale: (\d+\.\d) \|.*skipped iterations: +(\d+) \|.*nan iterations: +(\d+)"
    captured = [half.skipped[at : at + 4] for at in range(0, 28, 4)]
    expected_lines = [(f"{half.scales[4 * i + 3]:.1f}", str(sum(captured[i])), "0") for i in range(7)]
    assert re.findall(pattern, capsys.readouterr().out) == expected_lines
    logs = [record for record in half.logs if "loss" in record]
    assert [record["loss_scale"] for record in logs] == half.scales[3::4]
    assert logs[0]["loss"] == pytest.approx(sum(half.losses[:4]) / 4), "a skipped step's loss is in the mean"
    assert "grad_norm" not in logs[0]
    assert all(math.isfinite(record["grad_norm"]) for record in logs[5:])


def test_without_float16_nothing_tells_of_a_scale(tiny_config: ConfigContainer) -> None:
    tiny_config.validation.eval_iters = 0
    recorder = Recorder()
    pretrain(tiny_config, callbacks=[recorder])
    assert set(recorder.scales) == {1.0}
    assert not any("loss_scale" in record for record in recorder.logs)


def test_the_forward_pass_computes_in_float16_over_float32_weights() -> None:
    model, seen = TinyModel(), []
    model.out.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run(float16_state(train_iters=2), model=model)
    assert set(seen) == {torch.float16}
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("step", [sum_step, mean_step])
@pytest.mark.parametrize("sizes", [[12], [5, 4, 3]], ids=str)
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 1000.0])
def test_norm_and_update_do_not_know_the_scale(step: Any, sizes: list[int], scale: float) -> None:
    def stepped(state: GlobalState) -> tuple[float, list[torch.Tensor]]:
        model = TinyModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        result = train_step(
            step, split(RaggedRows(), sizes), [model], TrainingOptimizer(optimizer, clip_grad=0.05), None, state
        )
        return float(result.grad_norm), [p.detach() for p in model.parameters()]

    norm, weights = stepped(float16_state(scale))
    true_norm, true_weights = stepped(small_state())
    assert norm == pytest.approx(true_norm, rel=3e-3)
    for mine, theirs in zip(weights, true_weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_small_gradients_survive_by_their_scale_only() -> None:
    """2**-30 is nothing in float16; with the scale it is learnt from."""

    def tiny(data_iterator: Any, model: Any) -> Any:
        loss, function = mean_step(data_iterator, model)
        return loss * 2.0**-30, function

    norms = {}
    for scale in (1.0, 2.0**30):
        state = float16_state(scale)
        model = TinyModel()
        optimizer = TrainingOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        norms[scale] = float(train_step(tiny, split(RaggedRows(), [12]), [model], optimizer, None, state).grad_norm)
    assert norms[1.0] < norms[2.0**30] / 2
    model = TinyModel()
    model(**split(RaggedRows(), [12]).micro_batches[0], reduction="mean").backward()
    true_norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    assert norms[2.0**30] * 2.0**30 == pytest.approx(true_norm, rel=3e-3)


def test_an_overflow_in_one_micro_batch_skips_the_step_and_no_other() -> None:
    state = float16_state(train_iters=5)
    recorder = recorded(state, step=Overflowing(4))
    assert recorder.skipped == [False, True, False, False, False]
    assert recorder.changed == [True, False, True, True, True]
    assert recorder.scales == [1024.0, 512.0, 512.0, 512.0, 512.0]
    assert state.train_state.step == 5, "a skipped update counts as a step"


def test_the_schedule_waits_while_steps_overflow() -> None:
    model = TinyModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    state = float16_state(train_iters=4)
    recorder = recorded(state, step=Overflowing(2, 5), model=model, optimizer=optimizer, scheduler=scheduler)
    assert recorder.skipped == [True, False, True, False]
    assert recorder.rates == [1.0, 0.5, 0.5, 0.25]


LOWEST = [{"initial_loss_scale": 4.0, "min_loss_scale": 4.0}, {"loss_scale": 64.0}]


@pytest.mark.parametrize("settings", LOWEST, ids=["min", "constant"])
def test_an_overflow_that_no_lower_scale_can_mend_is_an_anomaly(settings: dict[str, float]) -> None:
    state = float16_state(train_iters=5)
    for name, value in settings.items():
        setattr(state.cfg.optimizer, name, value)
    with pytest.raises(NonFiniteError, match="step 3"):
        run(state, step=Overflowing(5))


def test_the_scale_falls_to_its_minimum_before_it_is_one() -> None:
    recorder = Recorder()
    manager = CallbackManager()
    manager.add(recorder)
    with pytest.raises(NonFiniteError, match="step 4"):
        run(float16_state(8.0, train_iters=9), manager, step=Overflowing(*range(1, 99)))
    assert recorder.skipped == [True] * 4
    assert recorder.scales == [4.0, 2.0, 1.0, 1.0]


def test_a_nan_loss_is_an_anomaly_at_any_scale() -> None:
    recorder, manager = Recorder(), CallbackManager()
    manager.add(recorder)
    with pytest.raises(NonFiniteError, match="step 3"):
        run(float16_state(2.0**20, train_iters=9), manager, step=Overflowing(6, loss_is_nan=True))
    assert recorder.scales[1] == recorder.scales[2], "a NaN in the data must not lower the scale"


def test_a_loss_in_float16_may_have_a_scale_beyond_float16() -> None:
    def half_loss(data_iterator: Any, model: Any) -> Any:
        loss, function = mean_step(data_iterator, model)
        return loss.half(), function

    model, state = TinyModel(), float16_state(2.0**18)
    batches, optimizer = split(RaggedRows(), [12]), torch.optim.SGD(model.parameters(), lr=0.1)
    ours = TrainingOptimizer(optimizer)
    results = [train_step(half_loss, batches, [model], ours, None, state) for _ in range(6)]
    assert [result.skipped_iter for result in results] == [1, 1, 1, 0, 0, 0]
    assert ours.get_loss_scale().item() == 2.0**15
    assert float(results[-1].grad_norm) < 10.0


class Foreign:
    """SGD in Megatron's convention, which knows nothing of float16."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.1}]
        self.seen: list[list[torch.Tensor]] = []

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def step(self) -> tuple[bool, float | None, int | None]:
        grads = [parameter.grad for parameter in self.param_groups[0]["params"]]
        self.seen.append([grad.clone() for grad in grads])
        with torch.no_grad():
            for parameter, grad in zip(self.param_groups[0]["params"], grads, strict=True):
                parameter.sub_(grad, alpha=0.1)
        return True, 1.0, None


@pytest.mark.parametrize("sizes", [[12], [5, 4, 3]], ids=str)
def test_a_foreign_optimizer_gets_gradients_without_the_scale(sizes: list[int]) -> None:
    seen = []
    for state in (small_state(), float16_state()):
        model = TinyModel()
        optimizer = Foreign(model)
        train_step(sum_step, split(RaggedRows(), sizes), [model], optimizer, None, state)
        seen.append(optimizer.seen[0])
    for exact, half in zip(*seen, strict=True):
        # float16 has 11 bits, and kernels differ in where they round to it
        torch.testing.assert_close(half, exact, rtol=3e-2, atol=5e-4)


def test_a_foreign_optimizer_never_sees_an_overflow() -> None:
    model = TinyModel()
    optimizer, state = Foreign(model), float16_state(train_iters=5)
    recorder = recorded(state, step=Overflowing(3), model=model, optimizer=optimizer)
    assert recorder.skipped == [False, True, False, False, False]
    assert len(optimizer.seen) == 4
    assert all(grad.isfinite().all() for grads in optimizer.seen for grad in grads)
    assert state.foreign_scaler is not None
    assert state.foreign_scaler.scale == 512.0
    with pytest.raises(NonFiniteError, match="step 2"):
        run(float16_state(1.0, train_iters=5), step=Overflowing(3), model=model, optimizer=optimizer)


def test_a_torch_optimizer_of_the_users_is_scaled_too() -> None:
    model = TinyModel()
    recorder = recorded(
        float16_state(train_iters=3),
        step=Overflowing(3),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert recorder.scales == [1024.0, 512.0, 512.0]


def test_a_run_that_loads_its_state_goes_on_with_the_same_bits() -> None:
    """Model and optimizer state alone carry scale and counters: overflows and a doubling follow the cut."""

    def built() -> tuple[TinyModel, TrainingOptimizer]:
        model = TinyModel()
        scaler = LossScaler(2.0**12, window=3, hysteresis=2)
        return model, TrainingOptimizer(torch.optim.AdamW(model.parameters(), lr=0.01), scaler=scaler)

    def steps(model: TinyModel, optimizer: TrainingOptimizer, first: int, last: int) -> list[tuple[int, float]]:
        captured = []
        for step in range(first, last):
            bad = Overflowing(*([1] if step in (1, 5, 6) else []), step=mean_step)
            result = train_step(bad, split(RaggedRows(), [12]), [model], optimizer, None, float16_state())
            captured.append((result.skipped_iter, optimizer.get_loss_scale().item()))
        return captured

    model, optimizer = built()
    expected = steps(model, optimizer, 0, 14)
    assert len({scale for _, scale in expected}) > 2
    for cut in (2, 4, 6, 8):
        first = built()
        captured = steps(*first, 0, cut)
        saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
        second = built()
        second[0].load_state_dict(saved[0])
        second[1].load_state_dict(saved[1])
        assert captured + steps(*second, cut, 14) == expected
        pairs = zip(model.parameters(), second[0].parameters(), strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("spelling", [{"fp16": True}, {"mixed_precision": "fp16"}], ids=str)
def test_the_trainers_scale_is_that_of_torch_and_the_first_skipped_step_is_explained(
    spelling: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Overflows(TinyModel):
        calls = 0

        def forward(self, tokens: Any, labels: Any) -> Any:
            self.calls += 1
            loss = super().forward(tokens, labels, reduction="mean")
            if self.calls in (2, 3):
                loss.register_hook(lambda gradient: gradient * math.inf)
            return {"loss": loss}

    theirs, scales = torch.amp.GradScaler("cpu"), []
    for is_bad in (False, True, True, False):
        scales.append(theirs.get_scale())
        theirs.scale(torch.ones(()))
        theirs._per_optimizer_states[0]["found_inf_per_device"] = {torch.device("cpu"): torch.tensor(float(is_bad))}
        theirs.update()
    args = TrainingArguments(str(tmp_path / "run"), max_steps=4, use_cpu=True, logging_steps=1, **spelling)
    recorder = Recorder()
    trainer = Trainer(Overflows(), args, train_dataset=RaggedRows(64), callbacks=[recorder])
    trainer.train()
    assert recorder.skipped == [False, True, True, False]
    assert [scales[0], *[record["loss_scale"] for record in recorder.logs if "loss" in record][:3]] == scales
    config = trainer.global_state.cfg.optimizer
    assert (config.loss_scale_window, scales[0]) == (theirs.get_growth_interval(), 65536.0)
    told = [one.getMessage() for one in caplog.records if "overflow in float16" in one.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(
        "step 2 is skipped: its gradients overflow in float16. The loss scale, 32768 for the next"
    )


@pytest.mark.parametrize("spelling", [{"fp16": True}, {"mixed_precision": "fp16"}], ids=str)
def test_the_trainer_trains_in_float16(spelling: dict[str, Any], tmp_path: Path) -> None:
    class Rows(RaggedRows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            row = super().__getitem__(index)
            return {"tokens": row["tokens"], "labels": row["labels"]}

    class Model(TinyModel):
        def forward(self, tokens: Any, labels: Any) -> Any:
            return {"loss": super().forward(tokens, labels, reduction="mean")}

    args = TrainingArguments(
        str(tmp_path / "run"),
        max_steps=6,
        use_cpu=True,
        logging_steps=2,
        disable_tqdm=True,
        config_overrides={"optimizer.initial_loss_scale": 2.0**10},
        **spelling,
    )
    recorder, at_start = Recorder(), CallbackManager()
    scales: list[float] = []
    at_start.register(
        "on_train_start", lambda context: scales.append(context.optimizer.state_dict()["scaler"]["scale"])
    )
    at_start.add(recorder)
    Trainer(Model(), args, train_dataset=Rows(), callbacks=at_start).train()
    assert scales == [1024.0], "the scaler must be there before a checkpoint is loaded"
    assert recorder.skipped == [False] * 6
    assert [record["loss_scale"] for record in recorder.logs if "loss" in record] == [1024.0] * 3
    assert recorder.losses[-1] < recorder.losses[0]


@pytest.mark.distributed
def test_an_overflow_on_one_rank_skips_the_step_on_all(processes: Processes, tmp_path: Path) -> None:
    one, other = processes.results("tests.support.jobs.float16_jobs", "overflow", tmp_path)
    assert one["skipped"] == other["skipped"] == [False, True, False, False]
    assert one["scales"] == other["scales"] == [1024.0, 512.0, 512.0, 512.0]
    assert one["norms"] == other["norms"]
    assert one["weights"] == other["weights"]


@pytest.mark.distributed
def test_a_model_in_shards_trains_in_float16_as_one_process(processes: Processes, tmp_path: Path) -> None:
    jobs = "tests.support.jobs.float16_jobs"
    [alone] = processes.results(jobs, "shards", tmp_path / "one", {"overflows": False}, ranks=1)
    for found in processes.results(jobs, "shards", tmp_path / "two", {"overflows": False}):
        assert found["skipped"] == alone["skipped"] == [False] * 4
        assert found["losses"] == pytest.approx(alone["losses"], rel=2e-3)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-2)


@pytest.mark.distributed
def test_an_overflow_in_the_shards_of_one_rank_skips_the_step_on_all(processes: Processes, tmp_path: Path) -> None:
    one, other = processes.results("tests.support.jobs.float16_jobs", "shards", tmp_path, {"overflows": True})
    assert one == other
    assert one["skipped"] == [False, True, False, False]
    assert one["scales"] == [1024.0, 512.0, 512.0, 512.0]
