"""What the tests of the control server share: a registry of their own, and a server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.control_server import Served, served


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty registry, of this process and of those that it starts."""
    with tempfile.TemporaryDirectory(prefix="onstep-") as directory:  # a short path, for Unix sockets
        monkeypatch.setenv("ONSTEP_REGISTRY", f"{directory}/registry")
        yield Path(directory) / "registry"


@pytest.fixture
def job(registry: Path) -> Iterator[Served]:
    """A served job."""
    with served() as one:
        yield one
