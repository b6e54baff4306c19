"""What the tests of the control server share: a registry of their own, and a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.control_server import Served, served


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty registry, of this process and of those that it starts."""
    monkeypatch.setenv("ONSTEP_REGISTRY", str(tmp_path / "registry"))
    return tmp_path / "registry"


@pytest.fixture
def job(registry: Path) -> Iterator[Served]:
    """A served job."""
    with served() as one:
        yield one
