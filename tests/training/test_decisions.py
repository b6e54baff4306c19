"""What was decided is on record, crash or not; values that were set are in force from the next step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onstep import CallbackManager, pretrain
from onstep.config import ConfigContainer
from onstep.errors import DataError
from onstep.events import Request
from onstep.training.runs.run_dir import RunDir
from onstep.training.stages.agreement import write_decision
from tests.support.small_runs import run, small_state


@pytest.mark.parametrize("left", [b"", b'{"step": 1}\n', b'{"step": 1, "fl'])
def test_a_torn_last_line_costs_only_itself(tmp_path: Path, left: bytes) -> None:
    state = small_state()
    state.run_dir = RunDir(tmp_path)
    state.run_dir.decisions.write_bytes(left)
    state.train_state.step = 7
    write_decision(state, Request("skip", "gate", "", "NaN", 0, {"loss": float("nan")}))
    write_decision(state, Request("skip", "gate", "", "again"))
    text = state.run_dir.decisions.read_bytes()
    assert text.startswith(left)
    rows = [json.loads(line) for line in text.splitlines()[-2:]]
    assert [(row["step"], row["reason"]) for row in rows] == [(7, "NaN"), (7, "again")]
    assert len(text.splitlines()) == 2 + bool(left)


def test_only_rank_0_of_a_run_with_a_directory_writes(tmp_path: Path) -> None:
    state = small_state()
    write_decision(state, Request("skip", "gate", ""))
    state.run_dir, state.world.rank = RunDir(tmp_path), 1
    write_decision(state, Request("skip", "gate", ""))
    assert not state.run_dir.decisions.exists()


def test_a_value_that_is_set_holds_from_the_next_step_until_it_is_taken_back() -> None:
    seen: list[tuple[Any, Any]] = []

    def ask(context: Any) -> None:
        overrides = context.state.train_state.overrides
        seen.append((overrides.get("log_interval"), overrides.get("lr_factor")))
        if len(seen) == 2:
            context.control.set("log_interval", 7)
            context.control.set("lr_factor", 0.5)
        if len(seen) == 3:
            context.control.set("log_interval", None)

    state, manager = small_state(train_iters=4), CallbackManager()
    state.cfg.logger.log_interval = 100
    manager.register("on_train_step_start", ask)
    run(state, manager)
    assert seen == [(None, None), (None, None), (7, 0.5), (None, 0.5)]
    assert state.train_state.overrides == {"lr_factor": 0.5}


def test_a_directory_in_the_place_of_the_decisions_is_named_on_resume(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    tiny_config.train.exit_interval = 2
    pretrain(tiny_config)
    decisions = tmp_path / "mine" / "decisions.jsonl"
    decisions.rename(tmp_path / "kept")
    decisions.mkdir()
    with pytest.raises(DataError, match=r"decisions\.jsonl cannot be read \(Is a directory\).*move what is there away"):
        pretrain(tiny_config)
    decisions.rmdir()
    (tmp_path / "kept").rename(decisions)
    assert pretrain(tiny_config).train_state.step == 4


def flipped(lines: list[bytes], at: int) -> list[bytes]:
    changed = lines[at].replace(b'"step": ', b'"step": 1', 1)
    assert changed != lines[at]
    return [*lines[:at], changed, *lines[at + 1 :]] if at >= 0 else [*lines[:-1], changed]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda lines: lines, ""),
        (lambda lines: [*lines, b'{"torn'], ""),
        (lambda lines: flipped(lines, 1), "line 2 was changed"),
        (lambda lines: flipped(lines, -1), "was changed"),
        (lambda lines: [*lines[:-1], lines[-1].replace(b'"digest"', b'"digesT"')], "was changed"),
        (lambda lines: [lines[0], *lines[2:]], "line 2 was changed, or lines before it are lost"),
        (lambda lines: [lines[0], *lines], "line 2 was changed, or lines before it are lost, doubled"),
        (lambda lines: lines[:1], "has lost lines"),
    ],
    ids=["none", "torn", "first bit", "last bit", "digest", "lost", "doubled", "cut"],
)
def test_a_file_of_decisions_that_is_not_as_it_was_written_is_named_on_resume(
    tiny_config: ConfigContainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, said: str
) -> None:
    tiny_config.run.name, tiny_config.run.output_dir = "mine", str(tmp_path)
    tiny_config.train.exit_interval, tiny_config.checkpoint.save_interval = 3, 1
    pretrain(tiny_config)
    path = tmp_path / "mine" / "decisions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 3
    path.write_bytes(b"".join(damage(lines)))
    caplog.clear()
    assert pretrain(tiny_config).train_state.step == 6
    warned = " ".join(one.getMessage() for one in caplog.records if "decisions.jsonl" in one.getMessage())
    assert said in warned
    assert bool(warned) is bool(said)
