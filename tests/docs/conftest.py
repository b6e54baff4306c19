"""Where documentation examples run: an empty directory, with the token cache of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def empty_dir(tmp_path: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of an example; what it caches outlives it, and its jobs are registered there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONSTEP_CACHE", str(token_cache))
    monkeypatch.setenv("ONSTEP_REGISTRY", str(tmp_path / "registry"))
    return tmp_path
