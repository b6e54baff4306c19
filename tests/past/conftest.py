"""A run to rewind."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep import pretrain
from tests.support.past_runs import run_config


@pytest.fixture(scope="module")
def run(corpus: Path, token_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run."""
    output_dir = tmp_path_factory.mktemp("past")
    pretrain(run_config(corpus, token_cache, output_dir))
    return output_dir / "x"
