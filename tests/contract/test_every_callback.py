"""The contract of every built-in callback, over all that the package has."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis.logs.samples_log import FILE_NAME
from onstep.checkpoint import decode_state, encode_state
from onstep.record import read_records, without_wall_clock
from tests.support.contract.every_callback import discovered, make
from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks, check_same

NAMES = sorted(discovered())
STATEFUL = [name for name in NAMES if hasattr(discovered()[name], "state_dict")]
Whole = Callable[..., dict[str, Any]]
DOCS = Path(__file__).parents[2] / "docs"
JOBS = "tests.support.jobs.contract_jobs"
WALL_CLOCK_STATES = ("TrackersCallback", "ThroughputMonitor")
"""Callbacks whose state holds measured times."""
SAME_ON_ALL_RANKS = (
    "InfoCallback",
    "LearningRateMonitor",
    "PrinterCallback",
    "ProfilerCallback",
    "ProgressCallback",
    "TraceMalloc",
)
"""Callbacks that use nothing of other ranks."""

TRACERS = ("ProfilerCallback", "TraceMalloc")
"""Callbacks that slow down whatever runs beside them."""
RUN = [name for name in NAMES if name != "LmEvalCallback"]
"""Without the one that requires lm-eval, of which tests/heavy holds the same."""
TOGETHER = tuple(name for name in RUN if name not in TRACERS)
ALONE_OR_TOGETHER = [
    TOGETHER,
    *(pytest.param((name,), marks=[] if name in TRACERS else pytest.mark.slow) for name in RUN),
]
"""All callbacks in one run, and in the long sweeps each by itself, which says whose fault it is."""


def of_names(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else "all"


def is_of_one_rank(name: str) -> bool:
    """Whether a run on two ranks shows nothing that one rank does not."""
    return name in SAME_ON_ALL_RANKS or getattr(discovered()[name], "ranks", "all") == "main"


def test_all_callbacks_are_found() -> None:
    files = {path.stem for path in Path(inspect.getfile(discovered()["JsonLogger"])).parent.glob("[a-z]*.py")}
    modules = {one.__module__ for one in discovered().values()}
    assert {module.rpartition(".")[2] for module in modules if module.startswith("onstep.callbacks.")} == files
    elsewhere = {
        "onstep.console.info",
        "onstep.console.printer",
        "onstep.console.progress",
        "onstep.trackers.trackers_callback",
        "onstep.training.serving.trainer_control_callback",
    }
    assert modules - {f"onstep.callbacks.{file}" for file in files} == elsewhere


@pytest.mark.parametrize("name", NAMES)
def test_it_can_be_made_without_touching_anything(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert type(make(name, tmp_path / "own")[0]).__name__ == name
    assert not list(tmp_path.rglob("*")), "a constructor must not write"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_documented(name: str) -> None:
    kind = discovered()[name]
    documentation = inspect.getdoc(kind) or ""
    assert len(documentation) > 80
    for parameter in list(inspect.signature(kind).parameters):
        assert re.search(rf"\b{parameter}\b", documentation), f"{name} does not say what {parameter} is"
    rows = [line for line in (DOCS / "callbacks" / "index.md").read_text().splitlines() if line.startswith("|")]
    assert any(f"[`{name}`]" in row for row in rows)


@pytest.mark.parametrize("name", STATEFUL)
def test_its_state_goes_through_a_checkpoint_s_codec_into_a_new_one(name: str, tmp_path: Path) -> None:
    one, other = make(name, tmp_path / "own")[0], make(name, tmp_path / "own")[0]
    tensors, tree = encode_state(one.state_dict())
    other.load_state_dict(decode_state(tensors, json.loads(json.dumps(tree))))
    assert encode_state(other.state_dict())[1] == tree


@pytest.fixture(scope="module")
def ranks(processes: Processes, corpus: Path, token_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Starts runs of the jobs of `contract_jobs.py`."""
    directory = tmp_path_factory.mktemp("contract")
    return Ranks(processes, directory, JOBS, corpus=str(corpus), cache=str(token_cache))


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> dict[int, dict[str, Any]]:
    """What a run without the callback learns, by number of ranks."""
    return {number: ranks.finish(f"plain-{number}", "run", ranks=number, names=[]) for number in (1, 2)}


@pytest.fixture(scope="module")
def whole(ranks: Ranks) -> Whole:
    """The outcome of the first of two runs in a row with callbacks, each of which is told of its end twice."""
    return cache(lambda *names: ranks.finish(f"{of_names(names)}-whole", "twice", ranks=1, names=list(names)))


def calls(ranks: Ranks, name: str) -> dict[str, Any]:
    return dict(json.loads((ranks.directory / name / "states-0.json").read_text()))


@pytest.mark.distributed
@pytest.mark.parametrize("names", ALONE_OR_TOGETHER, ids=of_names)
def test_a_second_run_in_a_row_learns_the_same(
    names: tuple[str, ...], whole: Whole, ranks: Ranks, plain: dict[int, dict[str, Any]]
) -> None:
    check_learned(whole(*names), plain[1], of_names(names))
    runs = ranks.directory / f"{of_names(names)}-whole" / "runs"
    first, second = (read_records(runs / run / "trainer_logs.json") for run in ("run", "second"))
    assert [one.get("loss") for one in first] == [one.get("loss") for one in second]


@pytest.mark.distributed
@pytest.mark.parametrize("names", ALONE_OR_TOGETHER, ids=of_names)
def test_killed_and_resumed_it_ends_as_if_nothing_had_happened(
    names: tuple[str, ...], whole: Whole, ranks: Ranks
) -> None:
    kills = (6, 10) if set(names) & set(STATEFUL) else (6,)
    check_resumed(ranks, list(names), kills, whole(*names), f"{of_names(names)}-whole", ranks_of_run=1)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RUN if not is_of_one_rank(name)])
def test_so_does_each_alone_on_two_ranks(name: str, ranks: Ranks, plain: dict[int, dict[str, Any]]) -> None:
    expected = ranks.finish(f"{name}-two", "run", ranks=2, names=[name])
    check_learned(expected, plain[2], name)
    check_resumed(ranks, [name], (6,), expected, f"{name}-two", ranks_of_run=2)


@pytest.mark.distributed
def test_so_do_all_together_on_two_ranks(ranks: Ranks, plain: dict[int, dict[str, Any]]) -> None:
    names = list(TOGETHER)
    expected = ranks.finish("all", "run", ranks=2, names=names)
    check_learned(expected, plain[2], "one of all")
    check_resumed(ranks, names, (6,), expected, "all", ranks_of_run=2)


LAYERS = "model.num_layers=4"
DIVIDED = {
    "interleaved": ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"],
    "v": ["parallel.pipeline_model_parallel_size=2", "parallel.pipeline_schedule=ZBVZeroBubble"],
    "tensors": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("layout", DIVIDED)
def test_all_together_say_of_a_divided_model_what_they_say_of_a_whole_one(layout: str, ranks: Ranks) -> None:
    """Metrics, norms and texts; and killed and resumed they end as if nothing had happened."""
    names, words = list(TOGETHER), [LAYERS, *DIVIDED[layout]]
    one = ranks.finish(f"of-one-{layout}", "run", ranks=1, names=names, words=[LAYERS])
    found = ranks.finish(f"in-{layout}", "run", ranks=2, names=names, words=words)
    assert found["journal"] == close(one["journal"])
    here, there = (ranks.directory / name / "runs" / "run" for name in (f"in-{layout}", f"of-one-{layout}"))
    for file in ("gradient_norms.json", "parameter_norms.json"):
        written, expected = ([without_wall_clock(line) for line in read_records(run / file)] for run in (here, there))
        assert expected
        assert written == close(expected), file
    assert texts_in(here) == texts_in(there) != []
    check_resumed(ranks, names, (6,), found, f"in-{layout}", ranks_of_run=2, words=words)


def texts_in(run: Path) -> list[Any]:
    lines = map(json.loads, (run / FILE_NAME).read_text().splitlines())
    return [[line["step"], line["prompt"], line["text"]] for line in lines]


def close(value: Any) -> Any:
    """The same with room for rounding in each float."""
    if isinstance(value, dict):
        return {key: close(one) for key, one in value.items()}
    if isinstance(value, list):
        return [close(one) for one in value]
    return pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value


def check_learned(found: dict[str, Any], plain: dict[str, Any], name: str) -> None:
    assert found["weights"] == plain["weights"], f"{name} changes what is learned"
    assert found["files"] == plain["files"], f"{name} changes the random state"


def check_resumed(
    ranks: Ranks,
    names: list[str],
    kills: tuple[int, ...],
    expected: dict[str, Any],
    whole: str,
    *,
    ranks_of_run: int,
    **settings: Any,
) -> None:
    """Check that a run that is killed at these steps ends as the one called `whole`."""
    killed = f"{whole}-killed"
    for step in kills:
        assert -9 in ranks.start(killed, "run", ranks=ranks_of_run, names=names, dies_at=step, **settings)
    check_same(ranks.finish(killed, "run", ranks=ranks_of_run, names=names, **settings), expected)
    found, states = calls(ranks, killed), calls(ranks, whole)
    for name in found.keys() - set(WALL_CLOCK_STATES):
        assert without_paths(found[name], killed) == without_paths(states[name], whole), name
    assert found.keys() == states.keys()


def without_paths(states: Any, name: str) -> str:
    """The states as text, with the run's directory named alike, and without the hash of a log, which has times."""
    without_times = json.loads(json.dumps(states), object_hook=lambda entries: {**entries, "log_digest": None})
    return json.dumps(without_times, sort_keys=True).replace(f"/{name}/", "/run/")


@pytest.mark.parametrize("names", ALONE_OR_TOGETHER, ids=of_names)
def test_they_work_in_the_trainer_with_evaluations_before_and_after_training(
    names: tuple[str, ...], ranks: Ranks
) -> None:
    run = f"{of_names(names)}-trainer"
    codes = ranks.start(run, "trainer", ranks=1, names=list(names), own="run/own")
    assert codes == [0], ranks.output(run)
    found = next((ranks.directory / run).rglob("trainer_logs.json"))
    assert any(record["global_step"] == 9 for record in read_records(found))
