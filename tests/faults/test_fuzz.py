"""Changed files of every format end in a result or a message: no raw error, no hang over 10 s, no growth over 1 GB."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.support.faults.fuzz import planted
from tests.support.faults.fuzz.changes import RUNS_WITHOUT_END, make_enormous
from tests.support.faults.fuzz.formats import FORMATS, Format, doors_of
from tests.support.faults.fuzz.honest_files import make_all
from tests.support.faults.fuzz.one_input import Limits, Outcome, through_doors

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory by Linux' proc"),
]

FEW, MANY = 2, 400
"""Inputs of each format."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The honest files of all formats, written by a process whose clocks stand still; in memory where there is some."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else tmp_path_factory.getbasetemp()))
    writer = multiprocessing.get_context("forkserver").Process(target=make_all, args=(root / "made",))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    yield (root / "made").rename(root / "honest")
    shutil.rmtree(root)


def place_of(form: Format, honest: Path) -> Path:
    """An empty place where the honest files were written, as a run knows where it is."""
    place = honest.parent / "made" / form.honest
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(exist_ok=True)
    return place


def unwanted(outcomes: list[Outcome], fine: tuple[str, ...] = ("read", "refused")) -> str:
    return "\n\n".join(f"{one.verdict}: {one.door}: {one.error}" for one in outcomes if one.verdict not in fine)


def check_changed(name: str, honest: Path, examples: int) -> None:
    """Change honest files in many ways, and read them by the doors of the format."""
    form = FORMATS[name]

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        place = place_of(form, honest)
        form.copy_honest(honest, place, data.draw(st.sampled_from(form.variants)) if form.variants else None)
        note(form.change(data.draw, place))
        rolls = [data.draw(st.integers(1, 100)) for _ in form.doors]
        chosen = [number for number, roll in enumerate(rolls) if roll > 100 * (1 - form.doors[number].share)]
        assert not unwanted(through_doors(doors_of, name, chosen, place, Limits()))

    check()


@pytest.mark.process
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.slow
def test_honest_files_are_read_through_every_door(name: str, honest: Path) -> None:
    form = FORMATS[name]
    for variant in dict.fromkeys(form.variants or (None,)):
        place = place_of(form, honest)
        form.copy_honest(honest, place, variant)
        outcomes = through_doors(doors_of, name, [*range(len(form.doors))], place, Limits())
        assert len(outcomes) == len(form.doors)
        assert not unwanted(outcomes, ("read",))


@pytest.mark.process
@pytest.mark.parametrize("name", FORMATS)
def test_a_few_changed_files_of_every_format_end_in_a_result_or_a_message(name: str, honest: Path) -> None:
    check_changed(name, honest, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FORMATS)
def test_many_changed_files_end_in_a_result_or_a_message(name: str, honest: Path) -> None:
    check_changed(name, honest, MANY)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", RUNS_WITHOUT_END)
@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.files])
def test_an_enormous_file_ends_in_a_result_or_a_message(name: str, run: bytes | None, honest: Path) -> None:
    form = FORMATS[name]
    place = place_of(form, honest)
    form.copy_honest(honest, place, form.variants[0] if form.variants else None)
    make_enormous(form.found(place)[0][0], run)
    assert not unwanted(through_doors(doors_of, name, [*range(len(form.doors))], place, Limits()))


PLANTED = {
    "raw error": "raw error",
    "error of a library": "raw error",
    "panic": "raw error",
    "printed traceback": "raw error",
    "no message": "raw error",
    "crash": "raw error",
    "hang": "hang",
    "busy hang": "hang",
    "growth": "growth",
    "too much memory": "growth",
    "refused": "refused",
    "refused by a command": "refused",
    "error of the disk": "refused",
    "read": "read",
}


@pytest.mark.process
@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_hangs_and_growths_are_found(name: str, tmp_path: Path) -> None:
    place = tmp_path / "here"
    place.mkdir()
    limits = Limits(seconds=1, growth_bytes=100 << 20)
    (found,) = through_doors(planted.doors_of, name, [0], place, limits)
    assert found.verdict == PLANTED[name], found.error
    assert found.error or name == "read"
    if name == "crash":
        assert "SIGSEGV" in found.error
