"""What several tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked_processes import Processes
from tests.support.train_command import Command


@pytest.fixture(scope="module")
def command(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Command:
    return Command(processes, tmp_path_factory.mktemp("command"), corpus, token_cache)
