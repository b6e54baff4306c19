"""The passes of a pipeline are read from traces, drawn, and compared with what their order alone would do."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis.pipeline_traces import Pass, PipelineStep, read_steps
from onstep.cli.main import main
from onstep.config.pipelines import Part, name_of_pass
from onstep.errors import DataError

LASTS: dict[str, float] = {"forward": 1.0, "backward": 2.0, "input gradient": 1.0, "weight gradient": 1.0}
NAMES: dict[str, Part] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
ONE_BY_ONE = ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
"""1F1B, as the guide has it."""
FILL_AND_DRAIN = [f"{s}F0 {s}F1 {s}F2 {s}F3 {s}B0 {s}B1 {s}B2 {s}B3" for s in (0, 1)]
IN_A_V = [
    "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
    "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
]


def step_of(order: list[str]) -> PipelineStep:
    """A step of which only the order is known, and how long passes last."""
    return PipelineStep([[_pass(word) for word in words.split()] for words in order])


def _pass(word: str) -> Pass:
    part = NAMES[word[1]]
    return Pass(part, int(word[2:]), int(word[0]), 0.0, LASTS[part])


def later(one: Pass) -> Pass:
    """The same pass, as long, after twice the time."""
    return replace(one, begin=2 * one.begin, end=one.begin + one.end)


def write(directory: Path, rank: int, steps: list[PipelineStep], *, packed: bool = False) -> Path:
    """A trace of a rank as torch's profiler writes it, with an evaluation and other marks."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    start = 0.0
    for number, step in enumerate(steps):
        of_user = {"ph": "X", "cat": "user_annotation"}
        events.append(of_user | {"name": f"step {number}", "ts": start * 1e6, "dur": step.seconds * 1e6})
        for one in step.ranks[rank]:
            name = name_of_pass(one.part, one.stage, one.micro_batch)
            events.append(of_user | {"name": name, "ts": (start + one.begin) * 1e6, "dur": (one.end - one.begin) * 1e6})
        start += step.seconds + 1
        events.append(of_user | {"name": name_of_pass("forward", rank, 0), "ts": start * 1e6, "dur": 5.0})
        start += 1
    text = json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": events[::-1]}).encode()
    path = directory / f"rank-{rank}.json{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(text) if packed else text)
    return path


@pytest.mark.parametrize(
    ("order", "idle"), [(ONE_BY_ONE, 1 / 4), (FILL_AND_DRAIN, 1 / 4), (IN_A_V, 2 / 48)], ids=["1F1B", "GPipe", "ZBV"]
)
def test_the_order_alone_idles_as_the_formula_says(order: list[str], idle: float) -> None:
    """(p - 1) / m; of the V, a unit at the start of the second rank and one at the end of the first."""
    step = step_of(order).in_order()
    assert step.idle == pytest.approx(idle)
    assert step.busy == [sum(LASTS[NAMES[word[1]]] for word in words.split()) for words in order]


def test_what_is_sent_after_the_next_pass_is_waited_for(tmp_path: Path) -> None:
    """Rank 1 has micro-batch 1 only after the backward pass of micro-batch 0, which torch pairs with its forward."""
    order = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    step = step_of(order).in_order()
    paired = PipelineStep(
        [[replace(one, is_sent_late=one == step.ranks[0][1]) for one in step.ranks[0]], step.ranks[1]]
    )
    assert [one.begin for one in step.ranks[1]] == [1, 2, 4, 5]
    assert [one.begin for one in paired.in_order().ranks[1]] == [1, 2, 6, 7]
    path = write(tmp_path, 0, [step])
    trace = json.loads(path.read_text())
    of_pair = {"ph": "X", "cat": "user_annotation", "name": "PP:(0F1;0B0)OVERLAP_F_B"}
    trace["traceEvents"].append(of_pair | {"ts": 1e6, "dur": 6e6})
    path.write_text(json.dumps(trace))
    write(tmp_path, 1, [step])
    [read] = read_steps([tmp_path])
    assert [one.is_sent_late for one in read.ranks[0]] == [False, True, False, False]


def test_steps_are_read_from_the_traces_of_all_ranks(tmp_path: Path) -> None:
    ideal = step_of(ONE_BY_ONE).in_order()
    slow = PipelineStep([[later(one) for one in passes] for passes in ideal.ranks])
    write(tmp_path, 1, [ideal, slow], packed=True)
    write(tmp_path, 0, [ideal, slow])
    first, second = read_steps([tmp_path])
    assert [[(one.part, one.micro_batch, one.stage) for one in passes] for passes in first.ranks] == [
        [(one.part, one.micro_batch, one.stage) for one in passes] for passes in ideal.ranks
    ]
    assert first.idle == pytest.approx(0.25, abs=1e-6)
    assert second.idle == pytest.approx(slow.idle, abs=1e-6)
    assert second.in_order().idle == pytest.approx(0.25, abs=1e-6)


def test_traces_that_are_not_those_of_one_pipeline_are_refused(tmp_path: Path) -> None:
    step = step_of(ONE_BY_ONE).in_order()
    first, second = write(tmp_path, 0, [step]), write(tmp_path, 1, [step])
    with pytest.raises(DataError, match="no trace has stage 0; pass those of all ranks"):
        read_steps([second])
    with pytest.raises(DataError, match="both have stage 0"):
        read_steps([first, first, second])
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    with pytest.raises(DataError, match=r"other\.json has no passes of a pipeline"):
        read_steps([tmp_path])
    for text in ("[]", "{", '{"traceEvents": [{"ph": "X", "cat": "user_annotation"}]}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(DataError, match=r"other\.json is not a trace of torch's profiler"):
            read_steps([tmp_path / "other.json"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no trace in"):
        read_steps([tmp_path / "empty"])
    with pytest.raises(DataError, match="what backward 0 of stage 0 follows is missing"):
        PipelineStep([step.ranks[0], step.ranks[1][2:]]).in_order()


def test_a_pipeline_is_plotted_with_what_it_idles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = step_of(IN_A_V).in_order()
    traces = [str(write(tmp_path, rank, [step])) for rank in (0, 1)]
    picture = tmp_path / "picture.svg"
    assert main(["plot", "pipeline", *traces, "-o", str(picture), "--title", "A V"]) == 0
    said = capsys.readouterr().out
    assert "1 steps of 2 ranks. In a typical one, of 25.000 s, passes last 24.000, 24.000 s" in said
    assert "idle for 4.2% of that time" in said
    drawn = {part.split("-->")[0].strip() for part in picture.read_text().split("<!--")[1:]}
    assert {"A V", "rank 0", "rank 1", "3", "gradients of weights, second"} <= drawn
    assert main(["plot", "pipeline", traces[0]]) != 0
    assert "no trace has stage 1" in capsys.readouterr().err
