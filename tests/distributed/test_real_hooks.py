"""Forward pre-hooks of a real distributed optimizer on two ranks, whose gathers are late: nobody sees old weights.

Megatron's users have met stale or zero parameters in evaluations, saves and exports while gathers overlap
(Megatron-LM#950, #4609, #5236), and in inference and swaps of weights within a training (NVIDIA-NeMo/RL#949). In MXFP8
they met a gradient buffer with parameters in it: see tests/training/test_current_weights.py and test_mxfp8.py.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_processes import Processes

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.real_hook_jobs"
FAILURES = {
    "evaluation": "Megatron-LM#950",
    "save": "Megatron-LM#4609",
    "export": "Megatron-LM#5236",
    "inference": "NVIDIA-NeMo/RL#949",
    "reference": "NVIDIA-NeMo/RL#949",
    "replaced": "NVIDIA-NeMo/RL#949",
}
"""What reads or replaces weights while gathers are in flight; `reference` and `replaced` by `load_state_dict`."""


@pytest.fixture(scope="module")
def read(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, list[Any]]]]:
    """By rank, what is read without overlaps, and with both."""
    return processes.results(JOBS, "careless", tmp_path_factory.mktemp("careless"))


@pytest.mark.parametrize("kind", FAILURES, ids=lambda kind: f"{kind} {FAILURES[kind]}")
def test_weights_are_neither_stale_nor_missing(read: list[list[dict[str, list[Any]]]], kind: str) -> None:
    for rank, (expected, seen) in enumerate(read):
        assert seen[kind] == expected[kind]
        assert len(seen[kind]) > 1 or (kind, rank) == ("export", 1)
        if kind == "reference":
            assert len({*seen[kind]}) == 1, "the first weights, whatever the run has"
        else:
            assert all(one != two for one, two in pairwise(seen[kind])), "every update is seen"


@pytest.fixture(scope="module")
def bridge(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Bridge's functions do in a loop of one's own; the same on both ranks."""
    one, two = processes.results(JOBS, "bridge", tmp_path_factory.mktemp("bridge"))
    assert one == two
    return one


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        ("toggles", True),
        ("the first update", [0, 24, False]),  # hooks are off: it waits for its gathers
        ("hooks", 2),
        ("late after an update with hooks", True),
        ("late after hooks are off without a gather", True),
        ("late after hooks are off", False),
        ("compared", [False, 2]),  # weights of replicas, by `maybe_check_weight_hash_across_dp_replicas`
        ("saved while hooks are on", False),
        ("saved", True),
        ("hooks after a save", 2),
        ("a misfit", True),  # nothing of it is loaded
        ("copied", True),  # by `deepcopy`, with its hooks
        ("a failed update", [1, 120, True]),  # no sample moves the schedule
    ],
)
def test_bridges_functions_do_with_real_objects_what_its_own_tests_say_of_mocks(
    bridge: dict[str, Any], fact: str, expected: Any
) -> None:
    assert bridge[fact] == expected


def test_hooks_of_all_chunks_are_toggled_and_frozen_parameters_have_none(processes: Processes, tmp_path: Path) -> None:
    for on, off in processes.results(JOBS, "chunks", tmp_path):
        assert ["embed" in one for one in on] == [True, False]
        assert all("out" in one for one in on)
        assert off == [[], []]
