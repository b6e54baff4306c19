"""What the norm loggers record of a run, and what they leave alone."""

from __future__ import annotations

import inspect
import json
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onstep import Trainer, TrainerCallback, TrainingArguments
from onstep.callbacks.grad_norm_logger import GradNormLogger
from onstep.callbacks.json_logger import JsonLogger
from onstep.callbacks.parameter_norm_logger import ParameterNormLogger, WeightNormLogger
from onstep.errors import ConfigError
from onstep.record import read_records

GRADIENTS, PARAMETERS = "gradient_norms.json", "parameter_norms.json"
LOGGERS = (WeightNormLogger, GradNormLogger, ParameterNormLogger)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 16, (12,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens, "labels": tokens.roll(-1)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.out = nn.Embedding(16, 8), nn.Dropout(0.2), nn.Linear(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.drop(self.embed(tokens)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def trainer(
    directory: Path,
    callbacks: list[Any],
    model: nn.Module | None = None,
    optimizers: Any = (None, None),
    **arguments: Any,
) -> Trainer:
    values: dict[str, Any] = {
        "output_dir": str(directory / "run"),
        "max_steps": 7,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.1,
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 5,
        **arguments,
    }
    rows = Rows()
    return Trainer(
        model or Model(),
        TrainingArguments(**values),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=callbacks,
        optimizers=optimizers,
        default_callbacks=False,
    )


def records(directory: Path, name: str) -> list[dict[str, Any]]:
    return read_records(next((directory / "run").rglob(name)))


def steps(directory: Path, name: str) -> list[int]:
    return [record["global_step"] for record in records(directory, name)]


def norms_of(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(tensor.detach().double().norm()) for name, tensor in tensors.items()}


class Truth(TrainerCallback):
    """Keeps clones of what the loggers must have measured; spoils gradients after the update where asked to."""

    def __init__(self) -> None:
        self.gradients: dict[int, dict[str, float]] = {}
        self.weights: dict[int, dict[str, float]] = {}
        self.epochs: dict[int, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        gradients = {name: one.grad for name, one in model.named_parameters()}
        self.gradients[state.global_step + 1] = norms_of(gradients)

    def on_log_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = norms_of(dict(model.named_parameters()))

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = norms_of(dict(model.named_parameters()))
        self.epochs[state.global_step] = state.epoch


class Asks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate |= state.global_step == 5


def test_signatures_are_the_documented_ones() -> None:
    assert not inspect.signature(GradNormLogger).parameters
    assert not inspect.signature(WeightNormLogger).parameters
    defaults = {name: one.default for name, one in inspect.signature(ParameterNormLogger).parameters.items()}
    assert defaults == {"log_norms": True, "log_spectral_norms": True, "power_iter_steps": 10}


def test_each_evaluated_step_is_recorded_with_the_gradients_of_its_own_update(tmp_path: Path) -> None:
    truth = Truth()
    trainer(tmp_path, [GradNormLogger(), truth, Asks()], max_grad_norm=0.05).train()
    found = records(tmp_path, GRADIENTS)
    assert [record["global_step"] for record in found] == [3, 5, 6, 7], "5 was asked for, 7 is the last"
    for record in found:
        assert list(record) == ["timestamp", "global_step", "epoch", "grad_norms"]
        assert record["epoch"] == truth.epochs[record["global_step"]]
        assert list(record["grad_norms"]) == ["embed.weight", "out.weight", "out.bias"]
        assert record["grad_norms"] == pytest.approx(truth.gradients[record["global_step"]], rel=1e-6)
        assert math.hypot(*record["grad_norms"].values()) == pytest.approx(0.05, rel=1e-3), "clipped"


class Spoils(torch.optim.SGD):
    """As some optimizers do, uses the gradients as working memory."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.fill_(9.0)


def test_foreseen_steps_are_measured_before_an_optimizer_may_change_gradients(tmp_path: Path) -> None:
    truth, model = Truth(), Model()
    spoils = Spoils(model.parameters(), lr=0.1)
    trainer(tmp_path, [GradNormLogger(), truth], model, optimizers=(spoils, None)).train()
    assert float(model.out.bias.grad[0]) == 9.0
    for record in records(tmp_path, GRADIENTS):
        assert record["grad_norms"] == pytest.approx(truth.gradients[record["global_step"]], rel=1e-6)


def test_parameter_norms_of_each_evaluated_step(tmp_path: Path) -> None:
    truth, model = Truth(), Model()
    trainer(tmp_path, [ParameterNormLogger(), truth], model).train()
    found = records(tmp_path, PARAMETERS)
    assert [record["global_step"] for record in found] == [3, 6, 7]
    for record in found:
        assert list(record) == ["timestamp", "global_step", "epoch", "norms", "spectral_norms"]
        assert record["norms"] == pytest.approx(truth.weights[record["global_step"]], rel=1e-6)
    exact = {
        name: float(torch.linalg.matrix_norm(one.detach(), 2))
        for name, one in model.named_parameters()
        if one.dim() > 1
    }
    exact["out.bias"] = float(model.out.bias.detach().abs().max())
    assert found[-1]["spectral_norms"] == pytest.approx(exact, rel=0.01)
    assert list(found[-1]["spectral_norms"]) == ["embed.weight", "out.weight", "out.bias"]


@pytest.mark.parametrize("kind", ["norms", "spectral_norms"])
def test_either_kind_may_be_left_out(tmp_path: Path, kind: str) -> None:
    wanted = {"log_norms": kind == "norms", "log_spectral_norms": kind == "spectral_norms"}
    trainer(tmp_path, [ParameterNormLogger(**wanted)]).train()
    assert list(records(tmp_path, PARAMETERS)[0])[3:] == [kind]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"power_iter_steps": 0}, "power_iter_steps must be an integer >= 1, got 0"),
        ({"power_iter_steps": 1.5}, "power_iter_steps must be an integer >= 1, got 1.5"),
        ({"power_iter_steps": True}, "power_iter_steps must be an integer >= 1, got True"),
        ({"log_norms": False, "log_spectral_norms": False}, "are both False"),
        ({"log_norms": "a"}, "log_norms must be True or False, got 'a'"),
        ({"log_spectral_norms": 1}, "log_spectral_norms must be True or False, got 1"),
    ],
)
def test_arguments_that_record_nothing_or_have_another_type_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParameterNormLogger(**wrong)


def test_weight_norm_is_in_every_logged_step_wherever_the_callback_stands(tmp_path: Path) -> None:
    truth = Truth()
    trainer(tmp_path, [JsonLogger(), truth, WeightNormLogger()]).train()
    logged = {one["global_step"]: one["weight_norm"] for one in records(tmp_path, "trainer_logs.json") if "loss" in one}
    assert list(logged) == [2, 4, 6]
    assert logged == pytest.approx({step: math.hypot(*truth.weights[step].values()) for step in logged}, rel=1e-6)


def test_a_run_with_them_ends_with_the_same_bits_and_random_numbers(tmp_path: Path) -> None:
    ends = []
    for name, callbacks in [("without", []), ("with", [make() for make in LOGGERS])]:
        model = Model()
        trainer(tmp_path / name, callbacks, model).train()
        ends.append(([one.detach().clone() for one in model.parameters()], torch.get_rng_state()))
    (weights, random), (weights_with, random_with) = ends
    assert all(torch.equal(one, other) for one, other in zip(weights, weights_with, strict=True))
    assert torch.equal(random, random_with)


class Reads(TorchFunctionMode):
    """The current event whenever values were read from the device."""

    NAMES = ("tolist", "item", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")

    def __init__(self) -> None:
        super().__init__()
        self.moment: Any = None
        self.found: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.moment is not None and getattr(func, "__name__", "") in self.NAMES:
            self.found.append(self.moment)
        return func(*args, **(kwargs or {}))


class Watched:
    """One callback, with a note of the current event while it is called."""

    def __init__(self, callback: Any, reads: Reads) -> None:
        self._callback, self._reads = callback, reads

    def wrap(self) -> Any:
        for event in ("on_pre_optimizer_step", "on_eval_start", "on_evaluate", "on_log_step", "on_train_begin"):
            setattr(self._callback, event, self._noted(event, getattr(self._callback, event)))
        return self._callback

    def _noted(self, event: str, handler: Any) -> Any:
        def noted(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self._reads.moment = (event, state.global_step)
            handler(args=args, state=state, control=control, **kwargs)
            self._reads.moment = None

        return noted


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (GradNormLogger, [("on_evaluate", 3), ("on_evaluate", 5), ("on_evaluate", 6), ("on_evaluate", 7)]),
        (lambda: ParameterNormLogger(log_spectral_norms=False), [("on_evaluate", step) for step in (3, 5, 6, 7)]),
        (WeightNormLogger, [("on_log_step", 2), ("on_log_step", 4), ("on_log_step", 6)]),
    ],
)
def test_the_device_is_read_once_an_evaluation_or_logged_step(tmp_path: Path, make: Any, expected: list[Any]) -> None:
    reads = Reads()
    with reads:
        trainer(tmp_path, [Watched(make(), reads).wrap(), Asks()]).train()
    assert reads.found == expected


def test_spectral_norms_read_a_few_times_in_all(tmp_path: Path) -> None:
    reads, model = Reads(), nn.Sequential(*[nn.Linear(30, 30) for _ in range(40)])
    logger = ParameterNormLogger(log_norms=False)
    args, watched = SimpleNamespace(logging_dir=str(tmp_path)), Watched(logger, reads).wrap()
    for step in (1, 2):
        state = SimpleNamespace(is_world_process_zero=True, global_step=step, epoch=0.0)
        with reads:
            watched.on_evaluate(args=args, state=state, control=None, model=model)
    counts = [reads.found.count(("on_evaluate", step)) for step in (1, 2)]
    assert all(1 < count < 12 for count in counts), "and not for each of 40 matrices"


def test_an_evaluation_after_training_is_recorded_once_a_step(tmp_path: Path) -> None:
    one = trainer(tmp_path, [make() for make in LOGGERS], eval_steps=2, max_steps=3)
    one.train()
    one.evaluate()
    one.evaluate()
    assert steps(tmp_path, GRADIENTS) == steps(tmp_path, PARAMETERS) == [2, 3]


def test_an_evaluation_alone_has_parameters_and_no_gradients(tmp_path: Path) -> None:
    one = trainer(tmp_path, [make() for make in LOGGERS])
    one.evaluate()
    assert steps(tmp_path, PARAMETERS) == [0]
    assert not [*(tmp_path / "run").rglob(GRADIENTS)]


def test_one_instance_serves_two_runs(tmp_path: Path) -> None:
    callbacks = [make() for make in LOGGERS]
    for name in ("first", "second"):
        trainer(tmp_path / name, callbacks).train()
        for file in (GRADIENTS, PARAMETERS):
            assert steps(tmp_path / name, file) == [3, 6, 7]
    for callback in callbacks[1:]:
        callback.on_run_end(None, None, None)
        callback.on_run_end(None, None, None)


@pytest.mark.parametrize("make", [GradNormLogger, ParameterNormLogger])
def test_state_survives_json_but_for_tensors_and_names_the_file(tmp_path: Path, make: Any) -> None:
    callback = make()
    trainer(tmp_path, [callback]).train()
    state = callback.state_dict()
    other = make()
    other.load_state_dict(state)
    assert str(other.state_dict()) == str(state)
    assert state["writer"]["last_step"] == 7
    json.dumps(state["writer"])


@pytest.mark.parametrize(("make", "file"), [(GradNormLogger, GRADIENTS), (ParameterNormLogger, PARAMETERS)])
def test_a_continued_run_keeps_to_the_file_of_its_checkpoint(
    tmp_path: Path, make_state: Any, make: Any, file: str
) -> None:
    args, model = SimpleNamespace(logging_dir=str(tmp_path / "first")), nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()

    def step_and_evaluate(logger: Any, step: int) -> None:
        logger.on_pre_optimizer_step(args, make_state(step=step - 1), None, model=model)
        logger.on_eval_start(args, make_state(step=step), None, model=model)
        logger.on_evaluate(args, make_state(step=step), None, model=model)

    killed = make()
    killed.on_train_begin(args, make_state(step=0), None, model=model)
    step_and_evaluate(killed, 1)
    state = killed.state_dict()
    step_and_evaluate(killed, 2)
    killed.on_run_end(args, make_state(step=2), None)
    logger, args = make(), SimpleNamespace(logging_dir=str(tmp_path / "second"))
    logger.load_state_dict(state)
    logger.on_train_begin(args, make_state(step=2), None, model=model)
    step_and_evaluate(logger, 3)
    assert [one["global_step"] for one in read_records(tmp_path / "first" / file)] == [1, 3]
    assert not (tmp_path / "second").exists()


def test_a_fused_optimizer_leaves_no_gradients_to_see(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger, model = GradNormLogger(), nn.Linear(2, 2)
    args = SimpleNamespace(logging_dir=str(tmp_path), fuse_optim_with_backward=True)
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, epoch=0.0, eval_steps=1, max_steps=1)
    with caplog.at_level(logging.WARNING):
        logger.on_train_begin(args, state, None)
    logger.on_pre_optimizer_step(args, state, None, model=model)
    logger.on_eval_start(args, state, None, model=model)
    logger.on_evaluate(args, state, None, model=model)
    assert "records nothing: with fuse_optim_with_backward" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_all_meta", [True, False])
def test_parameters_without_values_are_named_once_and_the_others_recorded(
    tmp_path: Path, make_state: Any, caplog: pytest.LogCaptureFixture, is_all_meta: bool
) -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta" if is_all_meta else "cpu"))
    args, logs = SimpleNamespace(logging_dir=str(tmp_path)), {}
    loggers = {"on_evaluate": ParameterNormLogger(), "on_log_step": WeightNormLogger()}
    for event, logger in loggers.items():
        for step in (1, 2):
            getattr(logger, event)(args, make_state(step=step), None, model=model, logs=logs)
        logger.on_run_end(args, make_state(step=2), None)
    assert sum("0.weight (on the meta device)" in message for message in caplog.messages) == 2, "one a callback"
    assert ("weight_norm" in logs) is not is_all_meta
    path = tmp_path / PARAMETERS
    assert path.exists() is not is_all_meta
    if not is_all_meta:
        assert list(read_records(path)[0]["norms"]) == ["1.weight", "1.bias"]


def test_several_chunks_are_recorded_together(tmp_path: Path, make_state: Any) -> None:
    args = SimpleNamespace(logging_dir=str(tmp_path))
    model = [nn.ModuleDict({"first": nn.Linear(2, 2)}), nn.ModuleDict({"second": nn.Linear(2, 2)})]
    logger = ParameterNormLogger()
    logger.on_evaluate(args, make_state(step=1), None, model=model)
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert list(read_records(tmp_path / PARAMETERS)[0]["norms"]) == names


def test_without_a_logging_directory_nothing_is_recorded(tmp_path: Path, make_state: Any) -> None:
    args, model = SimpleNamespace(logging_dir=None), nn.Linear(2, 2)
    for logger in (GradNormLogger(), ParameterNormLogger()):
        for event in ("on_train_begin", "on_pre_optimizer_step", "on_evaluate", "on_run_end"):
            getattr(logger, event)(args, make_state(step=1), None, model=model)
        assert logger.state_dict()["writer"]["log_path"] is None


def test_other_ranks_write_nothing(tmp_path: Path, make_state: Any) -> None:
    args, model = SimpleNamespace(logging_dir=str(tmp_path)), nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    for logger in (GradNormLogger(), ParameterNormLogger()):
        for event in ("on_train_begin", "on_pre_optimizer_step", "on_evaluate", "on_run_end"):
            getattr(logger, event)(args, make_state(step=event == "on_evaluate", rank=1), None, model=model)
    assert list(tmp_path.iterdir()) == []


class Rare(nn.Module):
    """Weights of rare types beside those that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.learns = Model()
        self.waves = nn.Parameter(torch.full((3, 4), 3 + 4j), requires_grad=False)
        self.small = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, **batch: Tensor) -> Any:
        return self.learns(**batch)


def test_complex_and_float8_weights_are_recorded(tmp_path: Path) -> None:
    trainer(tmp_path, [ParameterNormLogger(), WeightNormLogger()], Rare()).train()
    for record in records(tmp_path, PARAMETERS):
        assert record["norms"]["waves"] == pytest.approx(5 * 12**0.5)
        assert record["spectral_norms"]["waves"] == pytest.approx(5 * 12**0.5), "of rank 1"
        assert record["norms"]["small"] == 4.0
        assert record["spectral_norms"]["small"] == pytest.approx(4.0)


@pytest.mark.parametrize("kind", [GradNormLogger, ParameterNormLogger])
def test_a_directory_that_cannot_be_written_ends_it_before_training(kind: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    truth = Truth()
    with pytest.raises(ConfigError, match=r"cannot write to logging_dir .*/file/logs.*choose another"):
        trainer(tmp_path, [kind(), truth], logging_dir=str(tmp_path / "file" / "logs")).train()
    assert not truth.gradients
