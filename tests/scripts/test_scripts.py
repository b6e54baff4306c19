"""Scripts written for `transformers` run under Onstep with one import line changed, and leave the same behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scripts.harness.cases import CASES, SCRIPTS, Case
from tests.scripts.harness.comparison import differences
from tests.support.forked_processes import Processes, output_of

JOBS = "tests.scripts.harness.jobs"


@pytest.fixture(scope="module")
def server(processes: Processes) -> Processes:
    """The process server with what the scripts import."""
    processes.load("transformers", "transformers.trainer", "datasets", "peft", JOBS)
    return processes


@pytest.fixture(scope="module")
def inputs(server: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("scripts")
    assert server.run(JOBS, "inputs", directory / "log", {"directory": str(directory)}) == [0], output_of(
        directory / "log"
    )
    return directory


def outcomes(
    server: Processes, case: Case, inputs: Path, directory: Path, lost: tuple[str, ...] = (), ranks: int = 1
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the script leaves behind under `transformers` and under Onstep, which run at the same time.

    Args:
        lost: directories in the script's `output_dir` that are removed before it starts.
    """
    children = {}
    for library in ("transformers", "onstep"):
        settings = {
            "library": library,
            "script": str(case.path),
            "arguments": case.command_line(inputs),
            "model_class": case.model_class,
            "base": case.base.format(inputs=inputs),
            "lost": lost,
        }
        children[library] = server.start(JOBS, "script", directory / library, settings, ranks=ranks)
    for library, started in children.items():
        assert [child.wait() for child in started] == [0] * ranks, output_of(directory / library)
    theirs, ours = (json.loads((directory / library / "result-0.json").read_text()) for library in children)
    return theirs, ours


def losses(outcome: dict[str, Any]) -> list[float]:
    return [record["loss"] for record in outcome["state"]["log_history"] if "loss" in record]


@pytest.mark.parametrize("name", CASES)
def test_a_script_gives_the_same_with_one_import_line_changed(
    name: str, server: Processes, inputs: Path, tmp_path: Path
) -> None:
    """The same losses, metrics, files and weights, wherever tools look for them."""
    theirs, ours = outcomes(server, CASES[name], inputs, tmp_path)
    print(f"{name}: {losses(theirs)[-1]:.7f} {losses(ours)[-1]:.7f} {theirs['seconds']:.2f} {ours['seconds']:.2f}")
    assert not differences(theirs, ours)
    assert losses(theirs)[-1] < losses(theirs)[0] - 0.02, "the run must learn, or equality says little"
    assert abs(losses(theirs)[-1] - losses(ours)[-1]) < 1e-4


LIKE_ONE = ("clm", "summarization", "weighted")
"""Scripts that do on two ranks what others here do."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", ["qa", "lora", "llava", *(pytest.param(name, marks=pytest.mark.slow) for name in LIKE_ONE)]
)
@pytest.mark.slow
def test_a_script_gives_the_same_on_two_ranks(name: str, server: Processes, inputs: Path, tmp_path: Path) -> None:
    """As started by torchrun. Not for BERT's own losses: Hugging Face multiplies them by the ranks, by mistake."""
    assert not differences(*outcomes(server, CASES[name], inputs, tmp_path, ranks=2))


def test_a_script_continues_from_the_checkpoint_that_it_finds(server: Processes, inputs: Path, tmp_path: Path) -> None:
    """As after a crash: the second start has the losses of a run that was never interrupted."""
    case = replace(CASES["clm"], arguments=f"{CASES['clm'].arguments} --save_steps 4")
    whole = outcomes(server, case, inputs, tmp_path)
    again = outcomes(server, case, inputs, tmp_path, lost=("checkpoint-8",))
    for before, after in zip(whole, again, strict=True):
        assert losses(after) == pytest.approx(losses(before), abs=1e-6)
        assert after["last_checkpoint"] == before["last_checkpoint"] == "checkpoint-8"
    # train_loss is the mean over the whole run here, as without the interruption; there, over the steps since
    assert not [one for one in differences(*again) if "train_loss" not in one]
    assert again[1]["state"]["log_history"][-1]["train_loss"] == whole[1]["state"]["log_history"][-1]["train_loss"]


def test_each_script_is_run() -> None:
    assert {case.path for case in CASES.values()} == set(SCRIPTS.glob("run_*.py"))
    assert len(set(SCRIPTS.glob("run_*.py"))) == 12
