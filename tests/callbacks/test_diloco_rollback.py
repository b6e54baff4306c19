"""One site of a DiLoCo run is not rolled back alone: that is refused by name, wherever it is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from onstep import Trainer, TrainerCallback
from onstep.callbacks import DiLoCoCallback, DivergenceDetector
from onstep.diloco.client import DiLoCoClient
from onstep.diloco.server import DiLoCoServer
from onstep.errors import AnomalyError, ConfigError
from onstep.events import Request
from tests.support.small_models import Regression, arguments, regression_rows

REASON = "one site of a DiLoCo run cannot be rolled back alone"


@pytest.fixture(autouse=True)
def tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONSTEP_DILOCO_TOKENS", str(tmp_path / "tokens"))


def new_server() -> DiLoCoServer:
    return DiLoCoServer(Regression(), num_workers=1, dylu_base_sync_every=3, port=0)


def counts(server: DiLoCoServer) -> Any:
    with DiLoCoClient(server.address) as client:
        return client.get_status()["counts"]


def decisions(directory: Path) -> list[dict[str, Any]]:
    (path,) = directory.rglob("decisions.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


class RollsBack(TrainerCallback):
    """Requests a rollback after the fourth step, once."""

    is_done = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4 and not self.is_done:
            self.is_done = True
            control.rollback("a test")


def train(directory: Path, *callbacks: Any, **options: Any) -> nn.Module:
    trainer = Trainer(
        Regression(),
        arguments(directory, **{"max_steps": 6, "learning_rate": 0.1, "save_steps": 2, **options}),
        train_dataset=regression_rows(16),
        callbacks=list(callbacks),
        default_callbacks=False,
    )
    trainer.train()
    model: nn.Module = trainer.model
    return model


@pytest.mark.parametrize("key", ["anomaly.on_spike", "train.on_nonfinite"])
def test_a_policy_that_rolls_back_is_refused_before_anything_is_built(key: str, tmp_path: Path) -> None:
    with new_server() as server:
        with pytest.raises(ConfigError, match=f"{key}.*rollback'? is not possible: {REASON}"):
            train(tmp_path / "run", DiLoCoCallback(server.address), config_overrides={key: "rollback"})
        assert counts(server).get("joins", 0) == 0


def test_a_detector_that_rolls_back_is_refused_before_training(tmp_path: Path) -> None:
    with new_server() as server, pytest.raises(ConfigError, match=f"action='rollback' is not possible: {REASON}"):
        train(tmp_path / "run", DiLoCoCallback(server.address), DivergenceDetector(action="rollback"))


def test_a_rollback_that_a_callback_requests_ends_the_run_and_the_server_counts_each_step_once(tmp_path: Path) -> None:
    with new_server() as server:
        with pytest.raises(AnomalyError, match=f"step 4 must be undone .a test., but {REASON}"):
            train(tmp_path / "run", DiLoCoCallback(server.address), RollsBack())
        assert counts(server)["steps"] == 3


def test_an_operators_rollback_is_refused_and_the_training_continues(tmp_path: Path) -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                control.add_request(Request("rollback", "operator", "", "", 0, {"command_id": "1"}))

    with new_server() as server:
        train(tmp_path / "run", DiLoCoCallback(server.address), Asks())
        assert counts(server)["steps"] == 6
    refused = [one["details"]["why"] for one in decisions(tmp_path) if one["flag"] == "refused"]
    assert [REASON in why for why in refused] == [True]


def test_the_same_configuration_rolls_back_where_it_trains_alone(tmp_path: Path) -> None:
    train(tmp_path / "run", DiLoCoCallback(""), RollsBack())
    assert "rolled_back" in [one.get("flag") for one in decisions(tmp_path)]
