"""Every name, parameter, default, key and file of the page "Trainer Callbacks"."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import onstep.callbacks as callbacks
from onstep import TrainerCallback, pretrain
from onstep.config import ConfigContainer
from onstep.record import read_records
from tests.support.contract.the_page import (
    ATTRIBUTES,
    EVENTS,
    FINAL_METRICS,
    KEYWORDS,
    METHODS,
    PARAMETERS,
    REQUIRED,
    STATEFUL,
    STEP_COLUMNS,
    TB_TAGS,
    WRITER_METHODS,
)
from tests.support.small_configs import small_pretrain_config


def parameters_of(name: str) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(getattr(callbacks, name).__init__).parameters)
    found.pop("self")
    return found


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_documented_class_can_be_imported_and_is_a_trainer_callback(name: str) -> None:
    assert name in callbacks.__all__
    assert issubclass(getattr(callbacks, name), TrainerCallback)
    assert isinstance(inspect.getattr_static(getattr(callbacks, name), "name"), property)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_have_the_documented_order_and_defaults(name: str) -> None:
    found = parameters_of(name)
    documented = PARAMETERS[name]
    assert list(found)[: len(documented)] == list(documented)
    for parameter, default in documented.items():
        expected = inspect.Parameter.empty if default is REQUIRED else default
        assert found[parameter].default == expected, parameter
        assert type(found[parameter].default) is type(expected), parameter
        assert found[parameter].kind is not inspect.Parameter.KEYWORD_ONLY, parameter
    for own in list(found)[len(documented) :]:
        assert found[own].kind is inspect.Parameter.KEYWORD_ONLY, f"{own} is ours: it must not be given by position"
        assert found[own].default is not inspect.Parameter.empty


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name, methods in METHODS.items() for method in methods]
)
def test_a_documented_method_is_the_class_s_own(name: str, method: str) -> None:
    assert method in vars(getattr(callbacks, name))


@pytest.mark.parametrize("name", STATEFUL)
def test_a_class_is_stateful_where_the_page_says_so(name: str) -> None:
    kind = getattr(callbacks, name)
    assert callable(kind.state_dict)
    assert callable(kind.load_state_dict)


def test_the_base_class_has_the_documented_events_and_a_name() -> None:
    for event in EVENTS:
        handler = inspect.signature(getattr(TrainerCallback, event)).parameters
        assert list(handler)[1:4] == ["args", "state", "control"], event
        assert any(one.kind is inspect.Parameter.VAR_KEYWORD for one in handler.values()), event

    class Mine(TrainerCallback):
        pass

    assert Mine().name == "Mine"


def test_handlers_get_the_documented_keywords(tiny_config: ConfigContainer) -> None:
    seen: dict[str, set[str]] = {}

    class Notes(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["on_train_begin"] = set(kwargs)

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["on_log"] = set(kwargs)

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen["on_evaluate"] = set(kwargs)

    pretrain(tiny_config, callbacks=[Notes()])
    for event in ("on_train_begin", "on_log", "on_evaluate"):
        assert set(KEYWORDS) <= seen[event], event
    assert "logs" in seen["on_log"]
    assert "metrics" in seen["on_evaluate"]


def test_columns_and_final_metrics_are_the_documented_ones_in_order() -> None:
    assert tuple(callbacks.default_step_columns()) == STEP_COLUMNS
    assert tuple(callbacks.default_final_metrics()) == FINAL_METRICS


def test_the_writer_hands_on_the_documented_methods() -> None:
    for method in WRITER_METHODS:
        assert callable(getattr(callbacks.ResumableSummaryWriter, method)), method


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_documented_attributes_are_there(name: str) -> None:
    made = getattr(callbacks, name)()
    for attribute in ATTRIBUTES[name]:
        assert hasattr(made, attribute), attribute


def test_old_names_of_the_divergence_detector_mean_the_same_class() -> None:
    for alias in ("DualTimeScaleDivergenceDetector", "DualWindowDivergenceDetector"):
        assert getattr(callbacks, alias) is callbacks.DivergenceDetector


@pytest.fixture(scope="module")
def documented_run(corpus: Path, token_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The logging directory of a run with every callback that leaves a file, at its documented defaults."""
    directory = tmp_path_factory.mktemp("documented")
    config = small_pretrain_config(corpus, token_cache)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 8, 2, 2
    config.validation.eval_interval, config.validation.eval_iters = 4, 2
    config.logger.log_interval, config.logger.logging_dir = 2, str(directory)
    writer = callbacks.ResumableSummaryWriter(str(directory / "tensorboard"))
    pretrain(
        config,
        callbacks=[
            callbacks.DefaultMetrics(peak_hardware_flops=1e12),
            callbacks.JsonLogger(experiment="documented"),
            callbacks.GradNormLogger(),
            callbacks.ParameterNormLogger(),
            callbacks.WeightNormLogger(),
            callbacks.TBLogger(writer, experiment_info={"who": "we"}),
            callbacks.TextgenCallback(writer, ["def "], max_new_tokens=4),
            callbacks.ProfilerCallback(output_dir=str(directory / "profiles")),
            writer,
        ],
    )
    return directory


def test_the_metrics_log_has_the_documented_file_and_keys(documented_run: Path) -> None:
    records = read_records(documented_run / "trainer_logs.json")
    assert json.loads((documented_run / "trainer_logs.json").read_text()) == records
    for record in records:
        assert {"timestamp", "global_step", "epoch"} <= set(record)
    training = [record for record in records if "loss" in record]
    assert [record["global_step"] for record in training] == [2, 4, 6, 8]
    assert {"grad_norm", "max_grad_norm", "learning_rate", "tokens", "total_tokens", "total_flos"} <= set(training[0])
    assert "mfu" in training[0]
    assert "weight_norm" in training[0]
    assert {"tok_per_sec", "mfu"} <= set(training[1])
    assert any("eval_loss" in record for record in records)
    assert any("train_runtime" in record for record in records)
    assert records[0]["experiment_info"] == {"experiment": "documented"}


@pytest.mark.parametrize(
    ("file", "keys"),
    [("gradient_norms.json", ("grad_norms",)), ("parameter_norms.json", ("norms", "spectral_norms"))],
)
def test_diagnostic_files_have_the_documented_names_and_keys(documented_run: Path, file: str, keys: Any) -> None:
    records = json.loads((documented_run / file).read_text())
    assert len(records) >= 2
    for record in records:
        assert {"timestamp", "global_step", "epoch", *keys} <= set(record)
        for key in keys:
            assert len(record[key]) > 5
            assert all(isinstance(value, float) for value in record[key].values())


def test_tensorboard_has_the_documented_tags(documented_run: Path) -> None:
    events = EventAccumulator(str(documented_run / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    assert set(TB_TAGS) <= set(events.Tags()["scalars"])
    assert [point.step for point in events.Scalars("train-loss")] == [2, 4, 6, 8]
    texts = {tag.removesuffix("/text_summary") for tag in events.Tags()["tensors"]}
    assert {"experiment", "training_info", "train_results", "eval-text"} <= texts


def test_the_profiler_leaves_a_trace_for_each_rank(documented_run: Path) -> None:
    trace = json.loads((documented_run / "profiles" / "real_training_rank0.json").read_text())
    assert trace["traceEvents"]
