"""The cluster of the tests, and the runs that they start on it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes
from tests.support.slurm_cluster import MISSING, Cluster, is_installed, running_cluster
from tests.support.slurm_runs import SlurmRuns
from tests.support.tracker_reading import without_keys
from tests.support.train_command import SMALL


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes, of which a job takes two."""
    if not is_installed():
        pytest.skip(MISSING)
    directory = Path(tempfile.mkdtemp(prefix="onstep-slurm-"))
    try:
        with running_cluster(directory, num_nodes=3) as cluster:
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def runs(
    cluster: Cluster,
    processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
    corpus: Path,
    token_cache: Path,
) -> Iterator[SlurmRuns]:
    root = tmp_path_factory.mktemp("slurm")
    words = [*SMALL, f"dataset.paths=[{corpus}]", f"dataset.cache_dir={token_cache}", "logger.log_interval=1"]
    with pytest.MonkeyPatch.context() as patch:
        without_keys(patch, root)
        yield SlurmRuns(cluster, processes, root, [*words, "checkpoint.save_interval=2", "logger.report_to=csv"])


@pytest.fixture(scope="module")
def whole(runs: SlurmRuns) -> dict[str, Any]:
    """The run that nobody disturbs."""
    return runs.undisturbed("whole")
