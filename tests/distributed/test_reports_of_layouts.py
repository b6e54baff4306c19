"""All trackers, logs and commands say of a divided run what they say of one process, but for times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import chdir, closing, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from onstep.cli.main import main
from tests.support.forked_processes import Processes, output_of
from tests.support.reports import Lines, close, masked, printed, reported
from tests.support.tracker_reading import KEYS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Reports = Callable[[str], dict[str, Lines]]
TENSORS, STAGES = "parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"
INTERLEAVED = ["parallel.virtual_pipeline_model_parallel_size=2", "parallel.pipeline_schedule=Interleaved1F1B"]
LAYOUTS = {
    "one": (1, []),
    "tp2 sp": (2, [TENSORS, "parallel.sequence_parallel=true"]),
    "pp2 interleaved": (2, [STAGES, *INTERLEAVED]),
    "tp2 x pp2": (4, [TENSORS, STAGES]),
    "fsdp2 x tp2": (4, [TENSORS, "parallel.data_parallel_shard_size=2"]),
}
COMMANDS = [["why"], ["why", "--step", "4"], ["logs", "summary"]]
TRACKERS = ("csv", "tensorboard", "wandb", "mlflow", "comet", "trackio")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reports]:
    """Trains a layout with all trackers and reports; gives the lines of each."""
    root = tmp_path_factory.mktemp("reports")
    text = str(Path(__file__).parents[2] / "LICENSE")

    @cache
    def of_layout(layout: str) -> dict[str, Lines]:
        ranks, keys = LAYOUTS[layout]
        place = root / layout.replace(" ", "-")
        settings = {"corpus": text, "cache": str(root / "cache"), "keys": keys}
        codes = processes.run("tests.support.jobs.equality_jobs", "reported", place, settings, ranks=ranks)
        assert codes == [0] * ranks, output_of(place)
        found = reported(place / "runs" / "run", place / "tb", root / "trackio")
        said = [line for path in place.glob("rank-*.out") for line in printed(path.read_text())]
        found["printed"] = sorted(said, key=str)
        with chdir(place):
            found |= {" ".join(words): _said([*words, "runs/run"]) for words in COMMANDS}
        return found

    with pytest.MonkeyPatch.context() as patch:
        for key in KEYS:
            patch.delenv(key, raising=False)
        patch.setenv("HOME", str(root))
        patch.setenv("TRACKIO_DIR", str(root / "trackio"))
        with closing(Processes("mlflow.tracking", "trackio.run")) as processes:
            yield of_layout


def _said(words: list[str]) -> Lines:
    out = StringIO()
    with redirect_stdout(out), pytest.raises(SystemExit) as ended:
        raise SystemExit(main(words))
    assert not ended.value.code
    return printed(out.getvalue())


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one"])
def test_a_layout_reports_what_one_process_does(reports: Reports, layout: str) -> None:
    own, single = masked(reports(layout)), masked(reports("one"))
    assert list(own) == list(single)
    for name, lines in single.items():
        assert len(own[name]) == len(lines), name
        for number, line in enumerate(lines):
            assert own[name][number] == close(line), (name, number)
    assert all(len(single[name]) > 9 for name in TRACKERS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rates_are_of_the_whole_model_over_all_ranks(reports: Reports, layout: str) -> None:
    """FLOPs of a step are those of one process, whatever its seconds; those of a device are the ranks' share."""
    ranks, _ = LAYOUTS[layout]
    steps, single = (_of_steps(reports(name)["csv"]) for name in (layout, "one"))
    assert len(steps) == 6
    for step, expected in zip(steps, single, strict=True):
        assert _flops(step) == pytest.approx(_flops(expected), rel=1e-9)
        assert step["throughput/tflops"] == pytest.approx(ranks * step["throughput/tflops/device"], rel=1e-9)
        per_token = step["total_flos"] / step["total_tokens"]
        assert step["mfu"] * 1e9 == pytest.approx(per_token * step["tokens_per_second_per_device"], rel=1e-9)
    of_window = [step for step in steps if step["throughput/tokens_per_sec"]]
    for step in of_window:
        for name in ("batches", "samples", "tokens"):
            total, device = (step[f"throughput/{of}{name}_per_sec"] for of in ("", "device/"))
            assert total == pytest.approx(ranks * device, rel=1e-9)
    assert len(of_window) == 4, "each start has one step before its first window of two"


def _of_steps(table: Lines) -> list[dict[str, Any]]:
    return [row for row in table[1:] if row["throughput/tflops"]]


def _flops(step: dict[str, Any]) -> float:
    return float(step["throughput/tflops"] * step["iteration-time"] * 1e12)
