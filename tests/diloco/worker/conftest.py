"""Fixtures for workers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def kept_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which workers of this test keep what they could not submit."""
    monkeypatch.setenv("ONSTEP_DILOCO_WORK", str(tmp_path / "work"))
    return tmp_path / "work"
