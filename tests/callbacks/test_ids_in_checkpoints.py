"""A checkpoint finds the callbacks that it has states of: by module, class and the plain values they are made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import onstep.callbacks as built_in
from onstep.events import CallbackManager
from onstep.training.checkpointing.callback_states import CallbackStates


def saved_id(callback: Any) -> str:
    manager = CallbackManager()
    manager.add(callback)
    (key,) = CallbackStates(manager).state_dict()
    return key


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (built_in.DivergenceDetector, "divergence_detector.DivergenceDetector[b876cfee]"),
        (built_in.EarlyStopping, "early_stopping.EarlyStopping[63eda4a1]"),
        (built_in.GradNormLogger, "grad_norm_logger.GradNormLogger[d905e156]"),
        (built_in.JsonLogger, "json_logger.JsonLogger[d905e156]"),
        (built_in.ParameterNormLogger, "parameter_norm_logger.ParameterNormLogger[ed901230]"),
        (built_in.RouterMonitor, "router_monitor.RouterMonitor[b29d9ed5]"),
        (lambda: built_in.TrackersCallback("csv"), "metric_sinks.MetricSinks[b3d6efee]"),
        (lambda: built_in.TextgenCallback(None, ["a"]), "textgen_callback.TextgenCallback[8424bede]"),
        (lambda: built_in.ResumableSummaryWriter("a"), "resumable_summary_writer.ResumableSummaryWriter[6ea1373c]"),
        (lambda: built_in.TBLogger(built_in.ResumableSummaryWriter("a")), "tb_logger.TBLogger[c461f0cd]"),
    ],
)
def test_the_id_of_a_built_in_callback_is_that_of_earlier_versions(
    make: Any, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert saved_id(make()) == f"onstep.callbacks.{key}"


class MyTrackers(built_in.TrackersCallback):
    """A subclass, which has always been known by its own name."""


def test_a_subclass_is_known_by_its_own_name() -> None:
    assert saved_id(MyTrackers("csv")).startswith(f"{__name__}.MyTrackers[")


def test_what_a_run_leaves_in_a_callback_does_not_change_its_id() -> None:
    stopping, gradients = built_in.EarlyStopping(), built_in.GradNormLogger()
    before = [saved_id(one) for one in (stopping, gradients)]
    stopping.load_state_dict({"best": 1.0, "best_step": 3, "wait_count": 2})
    stopping._is_loaded = False  # as on_train_begin leaves it
    gradients._captured.step = gradients._captured.live_step = 7
    assert [saved_id(one) for one in (stopping, gradients)] == before
