"""Callbacks as `callbacks=` names them."""

from __future__ import annotations

import pytest

from onstep.callbacks import RouterMonitor
from onstep.cli.config import load_callback
from onstep.errors import ConfigError


def test_a_built_in_callback_without_its_module_is_answered_with_the_whole_name() -> None:
    with pytest.raises(ConfigError, match=r"write callbacks=\[onstep.callbacks:RouterMonitor\]"):
        load_callback("RouterMonitor")
    with pytest.raises(ConfigError, match=r"named module:Class, got 'Mine'\.$"):
        load_callback("Mine")
    assert isinstance(load_callback("onstep.callbacks:RouterMonitor"), RouterMonitor)
