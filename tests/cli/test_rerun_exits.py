"""`onstep train` with `rerun_mode=validate_results`: exit codes 16 and 17, what is saved before them, and going on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onstep.checkpoint import newest_verified
from onstep.checkpoint.format.decoding import decode_state
from onstep.checkpoint.format.tensor_file import read_tensors
from tests.support.forked_processes import output_of
from tests.support.train_command import Command

ONE, OTHER = "node-1/gpu-0", "node-2/gpu-0"
VALIDATE = "rerun_state_machine.rerun_mode=validate_results"


@pytest.fixture(scope="module")
def whole(command: Command) -> dict[str, Any]:
    """The run without any rerun."""
    assert command.start("whole", "checkpoint.save_interval=1", "checkpoint.most_recent_k=-1") == 0, output_of(
        command.directory / "whole"
    )
    return command.outcome("whole")


def injected(kind: str) -> list[str]:
    rerun = "rerun_state_machine."
    return [VALIDATE, f"{rerun}error_injection_rate=9", f"{rerun}error_injection_type={kind}"]


def said(command: Command, name: str) -> str:
    """What the process printed that ended last."""
    [path] = (command.directory / name).glob("rank-0.out")
    text = path.read_text()
    path.unlink()
    return text


def component(command: Command, name: str, step: int, key: str) -> Any:
    """A component of this rank in the checkpoint of a step."""
    directory = command.run(name) / "checkpoints" / f"checkpoint-{step}" / key
    tensors = directory / "rank_0.safetensors"
    document = json.loads((directory / "rank_0.json").read_text())
    return decode_state(read_tensors(tensors) if tensors.exists() else {}, document)


def test_a_mode_that_finds_nothing_changes_nothing(command: Command, whole: dict[str, Any]) -> None:
    assert command.start("healthy", VALIDATE) == 0
    assert command.outcome("healthy") == whole


def test_a_transient_error_leaves_with_17_and_saves_nothing(command: Command, whole: dict[str, Any]) -> None:
    words = injected("transient_error")
    assert command.start("transient", *words, device=ONE) == 17
    text = said(command, "transient")
    assert "recomputing the step on the same device" in text
    assert "transient" in text
    assert "Traceback" not in text
    assert not list((command.run("transient") / "checkpoints").glob("checkpoint-*"))
    assert command.start("transient", VALIDATE, "--on-config-change", "apply") == 0, said(command, "transient")
    assert command.outcome("transient") == whole


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("persistent_error", "node-1/gpu-0 has a persistent fault"),
        ("correct_result", "the result is correct"),
    ],
)
@pytest.mark.slow
def test_what_is_reproduced_saves_and_leaves_with_16_until_another_device_tells(
    command: Command, whole: dict[str, Any], kind: str, verdict: str
) -> None:
    words = injected(kind)
    assert command.start(kind, *words, device=ONE) == 16
    assert "restart on another device" in said(command, kind)
    [step] = command.steps(kind)
    assert step > 0, "the error is to come in the middle of the run"
    for key in ("rng", "dataset"):
        found, expected = (component(command, name, step, key) for name in (kind, "whole"))
        assert repr(found) == repr(expected), f"{key} is not that of before the step"

    assert command.start(kind, *words, device=ONE) == 16
    assert "the same device again" in said(command, kind)
    assert command.steps(kind) == [step]

    assert command.start(kind, *words, device=OTHER) == 17
    assert verdict in said(command, kind)
    assert command.steps(kind) == [step]
    assert command.status(kind) == "paused"

    healthy = ["rerun_state_machine.rerun_mode=disabled", "--on-config-change", "apply"]
    assert command.start(kind, *healthy) == 0, said(command, kind)
    assert "are not recomputed" in said(command, kind)
    assert command.outcome(kind) == whole
    newest = newest_verified(command.run(kind) / "checkpoints")
    assert newest is not None
    assert newest.step == 9


def test_of_a_stream_the_place_before_the_step_is_saved_for_any_number_of_ranks(command: Command) -> None:
    rows = command.directory / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"the text of row {one} " * 20}) + "\n" for one in range(200)))
    words = [*injected("persistent_error"), "dataset.kind=stream", f"dataset.paths=[{rows}]"]
    assert command.start("stream", *words, device=ONE) == 16, said(command, "stream")
    [step] = command.steps("stream")
    saved = command.run("stream") / "checkpoints" / f"checkpoint-{step}" / "dataset"
    assert [path.name for path in saved.iterdir()] == ["state.json"], "it is not the same on all ranks"
