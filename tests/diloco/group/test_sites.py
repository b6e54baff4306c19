"""Sites of a process group are as workers of a server, end with a clear line, and resume to the bit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.callbacks import DiLoCoCallback
from onstep.diloco import DiLoCoClient, DiLoCoServer
from onstep.diloco.outer import nesterov_sgd
from onstep.diloco.protocol.messages import Settings
from onstep.errors import ConfigError
from tests.diloco.worker.crew import small_model, train_crew
from tests.support.forked_processes import Processes, output_of

JOBS = "tests.support.jobs.sites_jobs"


@pytest.mark.parametrize(("ranks", "codec"), [(2, "fp32"), (3, "int8")])
def test_sites_have_the_same_bits_after_each_round_and_are_as_workers_of_a_server(
    ranks: int, codec: str, processes: Processes, tmp_path: Path
) -> None:
    settings = Settings(num_workers=ranks, min_workers=ranks, sync_every=3)
    with DiLoCoServer(
        small_model(dtype=torch.float32),
        settings=settings,
        outer_optimizer_factory=nesterov_sgd,
        port=0,
        token="secret",
    ) as server:
        crew = train_crew(
            lambda: DiLoCoClient(server.address, token="secret"), ranks, 12, dtype=torch.float32, codec=codec
        )
    options = {"every": 3, "steps": 12, "codec": codec, "is_default_group": ranks == 2}
    found = processes.results(JOBS, "own_loop", tmp_path, options, ranks=ranks)
    assert all(one == found[0] for one in found)
    for name, value in crew[0][0].items():
        torch.testing.assert_close(torch.tensor(found[0][-1][name]), value, rtol=0, atol=1e-6)


def test_processes_meet_again_at_the_same_address_and_all_hear_which_cannot_resume(
    processes: Processes, tmp_path: Path
) -> None:
    found = processes.results(JOBS, "twice", tmp_path)
    assert found[0] == found[1]
    assert found[0][0] == found[0][1]
    assert (
        "site 1 cannot resume: its checkpoint was saved with a different model or other fragments than the 2"
        in found[0][2]
    )


def run(processes: Processes, folder: Path, ranks: int = 2, **settings: Any) -> list[Any]:
    given = {"layout": "one", "steps": 8, "directory": str(folder.parent / folder.name.partition("+")[0]), **settings}
    return processes.results(JOBS, "trainer", folder, given, ranks=ranks)


@pytest.mark.parametrize("options", [{}, pytest.param({"fragments": 2, "overlap": 1}, marks=pytest.mark.slow)])
def test_a_killed_site_ends_the_others_with_a_line_and_all_resume_to_the_bit(
    options: dict[str, Any], processes: Processes, tmp_path: Path
) -> None:
    expected = run(processes, tmp_path / "whole", **options)
    assert expected[0] == expected[1]
    settings = {"layout": "one", "steps": 8, "directory": str(tmp_path / "killed"), "dies_at": 4, **options}
    children = processes.start(JOBS, "trainer", tmp_path / "killed", settings, ranks=2)
    assert [child.wait() for child in children] == [1, -signal.SIGKILL], output_of(tmp_path / "killed")
    words = (tmp_path / "killed" / "rank-0.out").read_text()
    assert "SiteLostError: site 0 of 2 waits for the others in vain, so this round is in no site's model" in words
    assert run(processes, tmp_path / "killed+", resume=True, **options) == expected


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "distopt"])
def test_sites_of_two_ranks_in_fragments_are_as_sites_of_one(layout: str, processes: Processes, tmp_path: Path) -> None:
    options = {"fragments": 2, "overlap": 1}
    expected = run(processes, tmp_path / "one", **options)
    found = run(processes, tmp_path / layout, ranks=4, layout=layout, **options)
    for one in found:
        for name, value in expected[0].items():
            torch.testing.assert_close(torch.tensor(one[name]), torch.tensor(value), rtol=0, atol=1e-9)


def test_a_group_and_a_server_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="group of sites needs no server, but there is one as well, host:1"):
        DiLoCoCallback("host:1", group="tcp://host:2?rank=0&world_size=2")
