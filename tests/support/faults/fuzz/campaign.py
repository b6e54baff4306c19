"""Runs many inputs, a forked child for each, and counts what came of them."""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.faults.fuzz.formats import FORMATS, Format
from tests.support.faults.fuzz.honest_files import make_all
from tests.support.faults.fuzz.one_input import Limits, live

VERDICTS = ("read", "refused", "growth", "hang", "raw error")
"""What can come of an input, the worst last."""
IMPORTED = (
    "torch", "torch._dynamo", "matplotlib.figure", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
    "PIL.PngImagePlugin", "omegaconf", "transformers", "transformers.models.auto.tokenization_auto", "tokenizers",
    "safetensors.torch", "jinja2", "pyarrow.parquet", "onstep", "onstep.analysis.plots.plots",
    "onstep.analysis.plots.heatmap", "onstep.analysis.reports.report", "onstep.callbacks",
    "onstep.cli.generation.generate", "onstep.cli.logs.replay", "onstep.cli.logs.summary", "onstep.cli.logs.tail",
    "onstep.cli.main", "onstep.cli.plot",
    "onstep.cli.checkpoint.group", "onstep.cli.checkpoint.diff", "onstep.cli.checkpoint.export",
    "onstep.cli.checkpoint.listing", "onstep.cli.recipes", "onstep.cli.train", "onstep.cli.why",
    "onstep.cli.why_features", "onstep.data", "onstep.models", "onstep.trainer", "onstep.trackers.services.csv_tracker",
    "onstep.trackers.services.tensorboard_tracker", "torch.utils.tensorboard",
)  # fmt: skip
"""What the inputs need, which takes longer to import than to use."""


@dataclass(frozen=True)
class Finding:
    """An input of which something came that must not."""

    verdict: str
    format: str
    seed: int
    index: int
    door: str
    error: str
    where: str
    """The innermost frames, the last call first."""
    change: str
    """What was done to the honest files."""

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python -m tests.support.faults.fuzz {self.format!r} --seed {self.seed} --index {self.index}"

    @property
    def kind(self) -> tuple[str, ...]:
        """What several findings of one cause have in common."""
        return self.verdict, self.error.partition(":")[0], self.where.partition(" < ")[0]


@dataclass
class Outcome:
    """What came of the inputs."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """By format: "inputs", and each verdict."""
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """By format."""

    def table(self) -> str:
        """The counts by format, as text."""
        columns = ("inputs", *VERDICTS)
        rows = [("format", *columns, "CPU s")]
        for name, count in (*self.counts.items(), ("all", sum(self.counts.values(), Counter()))):
            seconds = sum(self.cpu_seconds.values()) if name == "all" else self.cpu_seconds.get(name, 0.0)
            rows.append((name, *(str(count[column]) for column in columns), f"{seconds:.1f}"))
        return "\n".join(f"{row[0]:<24}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in rows)

    def classes(self) -> list[tuple[int, Finding]]:
        """One finding of each kind with the number of its like, the most frequent first."""
        number = Counter(one.kind for one in self.findings)
        first = {one.kind: one for one in reversed(self.findings)}
        return [(count, first[kind]) for kind, count in number.most_common()]


@dataclass
class _Child:
    """An input that is being read."""

    form: Format
    index: int
    pid: int
    pipe: int
    place: Path
    since: float
    """When it last reported."""
    seconds_before: float = 0.0
    """Its processor time by then."""
    waits: int = 0
    """How often in a row it was seen waiting."""
    text: bytes = b""
    hung: bool = False


def shares(total: int, names: Iterable[str]) -> list[tuple[Format, int]]:
    """The inputs of each format by its weight, in turns, so that any part of them has all formats."""
    chosen = [FORMATS[name] for name in names]
    weight = sum(form.weight for form in chosen)
    numbers = {form.name: math.ceil(total * form.weight / weight) for form in chosen}
    inputs = [
        ((index + 0.5) / numbers[form.name], form, index) for form in chosen for index in range(numbers[form.name])
    ]
    return [(form, index) for _, form, index in sorted(inputs, key=lambda one: one[0])]


class Campaign:
    """Reads inputs, some at once.

    Args:
        seed: of all inputs.
        at_once: number of children that live at the same time.
        shows: print findings as they come.
        is_verbose: print what comes of every door, with whole tracebacks.
    """

    def __init__(
        self,
        seed: int,
        at_once: int = 2,
        limits: Limits | None = None,
        *,
        shows: bool = False,
        is_verbose: bool = False,
    ) -> None:
        self._seed = seed
        self._at_once = at_once
        self._limits = limits or Limits()
        self._shows = shows
        self._is_verbose = is_verbose
        self._cpu_seconds: Counter[str] = Counter()
        self._directory = Path(tempfile.mkdtemp(prefix="onstep-fuzz-", dir=_memory()))
        self._honest = self._directory / "honest"

    def prepare(self, make: Callable[[Path], None] = make_all, imported: Iterable[str] = IMPORTED) -> None:
        """Import what the inputs need, and write the honest files in a child, whose threads and clocks are its own."""
        for name in imported:
            importlib.import_module(name)
        child = os.fork()
        if child == 0:
            _quietly(make, self._honest, log=self._directory / "honest.log")
        if os.waitpid(child, 0)[1]:
            raise RuntimeError((self._directory / "honest.log").read_text()[-4000:])
        gc.freeze()

    def run(self, inputs: Iterable[tuple[Format, int]]) -> Outcome:
        """Read all inputs. A door that hung is tried again alone, since the machine may have been busy."""
        began, outcome = time.monotonic(), Outcome()
        suspects = []
        for child, results in self._ended(iter(inputs), self._at_once):
            if child.hung:
                suspects.append((child.form, child.index))
            else:
                self._count(child, results, outcome)
        for child, results in self._ended(iter(suspects), 1):
            self._count(child, results, outcome)
        outcome.cpu_seconds = dict(self._cpu_seconds)
        order = list(FORMATS)
        outcome.counts = dict(sorted(outcome.counts.items(), key=lambda one: one[0] in order and order.index(one[0])))
        outcome.seconds = time.monotonic() - began
        return outcome

    def close(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _ended(
        self, inputs: Iterator[tuple[Format, int]], at_once: int
    ) -> Iterator[tuple[_Child, list[dict[str, Any]]]]:
        living: dict[int, _Child] = {}
        poll = select.poll()
        while True:
            while len(living) < at_once and (following := next(inputs, None)) is not None:
                child = self._fork(*following)
                living[child.pipe] = child
                poll.register(child.pipe, select.POLLIN | select.POLLHUP)
            if not living:
                return
            for pipe, _ in poll.poll(100):
                child = living[pipe]
                if data := os.read(pipe, 1 << 16):
                    child.text += data
                    child.since, child.seconds_before = time.monotonic(), _state_of(child.pid)[1]
                    continue
                poll.unregister(pipe)
                os.close(pipe)
                del living[pipe]
                yield child, self._results(child)
                shutil.rmtree(child.place.parent, ignore_errors=True)
            for child in living.values():
                if not child.hung and self._hangs(child):
                    child.hung = True
                    os.killpg(child.pid, signal.SIGKILL)

    def _hangs(self, child: _Child) -> bool:
        """Whether a door takes too long: by its processor time, since the machine may be busy, or because it waits."""
        if time.monotonic() - child.since < self._limits.seconds:
            return False
        state, seconds = _state_of(child.pid)
        child.waits = child.waits + 1 if state in "SD" else 0
        return child.waits > 5 or seconds - child.seconds_before > self._limits.seconds

    def _fork(self, form: Format, index: int) -> _Child:
        place = Path(tempfile.mkdtemp(dir=self._directory)) / "here"
        place.mkdir()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            os.close(reading)
            _quietly(
                live,
                form,
                self._seed,
                index,
                self._honest,
                place,
                writing,
                self._limits,
                log=place.parent / "harness.txt",
            )
        os.setpgid(pid, pid)
        os.close(writing)
        return _Child(form, index, pid, reading, place, time.monotonic())

    def _results(self, child: _Child) -> list[dict[str, Any]]:
        """What the child reported, and how it ended."""
        _, status, usage = os.wait4(child.pid, 0)
        self._cpu_seconds[child.form.name] += usage.ru_utime + usage.ru_stime
        code = os.waitstatus_to_exitcode(status)
        said = [json.loads(line) for line in child.text.splitlines()]
        if code == 0:
            return said
        if child.hung:
            stacks = child.place.parent / "stacks.txt"
            said.append(
                {"verdict": "hang", "error": f"no answer in {self._limits.seconds:g} s", "where": _innermost(stacks)}
            )
        elif code < 0:
            said.append({"verdict": "raw error", "error": f"killed by {signal.Signals(-code).name}", "where": ""})
        else:
            log = (child.place.parent / "harness.txt").read_text().splitlines()
            said.append(
                {"verdict": "raw error", "error": f"in the fuzzer itself: {log[-1]}", "where": " < ".join(log[-4:-1])}
            )
        return said

    def _add(self, found: Finding, outcome: Outcome) -> None:
        """Keep a finding, and print it at once if it is the first of its kind."""
        if self._shows and found.kind not in (one.kind for one in outcome.findings):
            print(f"found: {describe(found)}", flush=True)
        outcome.findings.append(found)

    def _count(self, child: _Child, said: list[dict[str, Any]], outcome: Outcome) -> None:
        change, door, verdicts = "", "making the input", ["read"]
        for one in said:
            change, door = one.get("made", change), one.get("door", door)
            if "verdict" not in one:
                continue
            if self._is_verbose:
                print(f"{child.form.name} {child.index}: {change[:300]}")
                print(f"  {door}: {one['verdict']}: {one['error'].strip()}")
                print(one.get("trace", ""), end="")
            verdicts.append(one["verdict"])
            if one["verdict"] not in ("read", "refused") or (child.index < 0 and one["verdict"] != "read"):
                place = (child.form.name, self._seed, child.index, door)
                self._add(Finding(one["verdict"], *place, one["error"], one.get("where", ""), change), outcome)
        count = outcome.counts.setdefault(child.form.name, Counter())
        count["inputs"] += 1
        count[max(verdicts, key=VERDICTS.index)] += 1


def describe(one: Finding) -> str:
    """A finding as text."""
    return f"{one.verdict}: {one.error}\n  at {one.where}\n  {one.door}; {one.change[:300]}\n  {one.command}"


def _state_of(pid: int) -> tuple[str, float]:
    """R if it runs or could, S or D if it waits; and its processor time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory() -> Path | None:
    """A directory in memory where there is one."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK) else None


def _innermost(stacks: Path) -> str:
    """The innermost frames of Onstep that a hanging process wrote."""
    lines = stacks.read_text(errors="replace").splitlines() if stacks.exists() else []
    frames = [line.strip().removeprefix("File ") for line in lines if line.lstrip().startswith("File ")]
    own = [
        frame.partition("/onstep/")[2].replace('", line ', ":").replace(" in ", " ")
        for frame in frames
        if "/onstep/" in frame
    ]
    first = [Path(frames[0].split('"')[1]).name + frames[0].rpartition('"')[2]] if frames else []
    return " < ".join([*first, *own[:4]])


def _quietly(act: Any, *arguments: Any, log: Path) -> None:
    """Act in a forked child and end it; what it prints, and what goes wrong, is in the log."""
    code = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        act(*arguments)
        code = 0
    except BaseException:  # noqa: BLE001 - a child must never go on as a second parent
        os.write(output, traceback.format_exc().encode())
    finally:
        os._exit(code)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain values."""
    counts = {
        name: {column: count[column] for column in ("inputs", *VERDICTS)} for name, count in outcome.counts.items()
    }
    findings = [{**asdict(one), "command": one.command} for one in outcome.findings]
    return {"counts": counts, "findings": findings, "seconds": outcome.seconds}


def show(outcome: Outcome) -> None:
    """Print the counts and one finding of each kind."""
    print(outcome.table())
    print(f"{outcome.seconds:.0f} s")
    for number, one in outcome.classes():
        print(f"\n{number} x {describe(one)}")
    sys.stdout.flush()
