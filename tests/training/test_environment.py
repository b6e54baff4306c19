"""Variables of the environment that a configuration sets."""

from __future__ import annotations

import pytest

from onstep.config import ConfigContainer
from onstep.training import pretrain


def test_a_variable_that_is_set_already_stays_and_is_named(
    tiny_config: ConfigContainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ONSTEP_TEST_A", "mine")
    monkeypatch.setenv("ONSTEP_TEST_B", "same")
    tiny_config.env_vars = {"ONSTEP_TEST_A": "secret", "ONSTEP_TEST_B": "same"}
    tiny_config.train.train_iters = 3
    pretrain(tiny_config)
    named = [record.message for record in caplog.records if "env_vars" in record.message]
    assert named == ["env_vars.ONSTEP_TEST_A has no effect: the environment of the process has another value"]
