"""What is logged of the parameter groups, and under which names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from onstep import CallbackManager, JsonLogger, pretrain
from onstep.callbacks.learning_rate_monitor import LearningRateMonitor
from onstep.config import ConfigContainer
from onstep.record import read_records


def groups(*extras: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"params": [torch.nn.Parameter(torch.zeros(1))], **extra} for extra in extras]


@pytest.fixture
def logged(make_state: Any) -> Any:
    def log(optimizer: Optimizer | None, rank: int = 0, **options: bool) -> dict[str, Any]:
        logs: dict[str, Any] = {}
        callback = LearningRateMonitor(**options)
        callback.on_log_step(args=None, state=make_state(rank=rank), control=None, logs=logs, optimizer=optimizer)
        return logs

    return log


def test_each_of_several_groups_has_its_own_key(logged: Any) -> None:
    optimizer = SGD(groups({"lr": 0.5}, {"lr": 0.25}), lr=1.0)
    assert logged(optimizer) == {"learning_rate/0": 0.5, "learning_rate/1": 0.25}


def test_named_groups_go_by_their_names_and_equal_names_differ(logged: Any) -> None:
    optimizer = SGD(groups({"lr": 0.5, "name": "head"}, {"lr": 0.25, "name": "body"}), lr=1.0)
    optimizer.param_groups[1]["name"] = "head"
    assert logged(optimizer) == {"learning_rate/head": 0.5, "learning_rate/head-2": 0.25}
    assert logged(SGD(groups({"name": "all"}), lr=1.0)) == {"learning_rate/all": 1.0}


def test_a_single_group_without_a_name_adds_nothing_unless_asked(logged: Any) -> None:
    optimizer = AdamW(groups({}), lr=0.1, betas=(0.8, 0.9), weight_decay=0.01)
    assert logged(optimizer) == {}
    assert logged(optimizer, log_momentum=True, log_weight_decay=True) == {"momentum": 0.8, "weight_decay": 0.01}


def test_momentum_and_weight_decay_of_several_groups(logged: Any) -> None:
    optimizer = SGD(groups({"momentum": 0.9}, {"weight_decay": 0.1}), lr=1.0)
    found = logged(optimizer, log_momentum=True, log_weight_decay=True)
    assert found == {
        "learning_rate/0": 1.0,
        "momentum/0": 0.9,
        "weight_decay/0": 0,
        "learning_rate/1": 1.0,
        "momentum/1": 0,
        "weight_decay/1": 0.1,
    }


def test_rates_that_are_tensors_become_numbers(logged: Any) -> None:
    found = logged(AdamW(groups({"lr": torch.tensor(0.5)}, {}), lr=1.0))
    assert type(found["learning_rate/0"]) is float


def test_only_rank_0_and_only_with_an_optimizer(logged: Any) -> None:
    optimizer = SGD(groups({}, {}), lr=1.0)
    assert logged(optimizer, rank=1) == logged(None) == {}


def test_the_rates_of_a_run_are_in_its_metrics_log(tiny_config: ConfigContainer, tmp_path: Any) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "run", str(tmp_path)
    manager = CallbackManager()
    manager.add([JsonLogger(), LearningRateMonitor(log_weight_decay=True)])
    pretrain(tiny_config, callbacks=manager)
    records = [one for one in read_records(tmp_path / "run" / "trainer_logs.json") if "loss" in one]
    assert [one["global_step"] for one in records] == [4, 8]
    for one in records:
        assert one["learning_rate/0"] == one["learning_rate/1"] == one["learning_rate"]
        assert (one["weight_decay/0"] > 0, one["weight_decay/1"]) == (True, 0.0)
