"""`onstep logs replay`: fill a tracker from the journal of a run."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from tqdm import tqdm

from onstep.analysis.logs.files import FOREIGN_FILE_NAME, name_of_place
from onstep.analysis.logs.run_status import is_locked
from onstep.analysis.logs.training_log import TrainingLog
from onstep.cli.logs.reading import find_log
from onstep.config.reporting import name_list
from onstep.errors import ConfigError, OnstepError
from onstep.metrics_log import Journal
from onstep.trackers import make_sink, recorded_run
from onstep.trackers import replay as send

BAR_DELAY_SECONDS = 0.5
_LOCAL = ("csv", "tensorboard")
"""Trackers whose files in the run's folder a live run may be writing."""


def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, its name below runs/, or a log.")],
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="csv, tensorboard, wandb, mlflow, comet or trackio.")],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where local files go; without it, the run's folder.")
    ] = None,
    names: Annotated[
        str, typer.Option(metavar="NAMES", help="What it shows: hf (train/loss), bridge (lm loss), or hf,bridge.")
    ] = "hf,bridge",
) -> None:
    """Fill a tracker from the journal of a run, completely, as a run of its own.

    For a tracker that was not there, was unreachable or dropped points while the run trained. Waits until everything is
    handed over. Of a run that is still going on, csv and tensorboard take --output: its own files are in use.
    """
    journal = find_log(run)
    sink = make_sink(to)
    shown = name_list([name.strip() for name in names.split(",")], "--names") or ()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("onstep.trackers").setLevel(logging.INFO)  # trackers say there where they record
    target = journal.parent if output is None else output
    folder = journal.parent
    is_live = to in _LOCAL and (is_locked(folder / ".run.lock") or is_locked(journal))
    if is_live and target.resolve() == folder.resolve():
        raise ConfigError(
            f"{folder} is a live run, whose files this would replace; give another folder: --output DIR, or wait for "
            f"its end."
        )
    run_sent = recorded_run(journal, target)
    if journal.name == FOREIGN_FILE_NAME:
        run_sent = dataclasses.replace(run_sent, name=name_of_place(journal).replace("/", "-"))
    bar = partial(tqdm, unit="record", leave=False, disable=None, delay=BAR_DELAY_SECONDS)
    try:
        with _as_journal(journal) as readable:
            num_sent = send(readable, sink, run_sent, names=shown, progress=bar)
    except OnstepError:
        raise
    except Exception as error:  # any tracker's own
        raise OnstepError(f"The tracker {to!r} could not be filled: {type(error).__name__}: {error}") from error
    where = getattr(sink, "location", None) or f"{to} (its local files, if any, are below {target})"
    print(f"{num_sent} records of {journal} sent to {where}")


@contextmanager
def _as_journal(path: Path) -> Iterator[Path]:
    """The journal itself; of the log of Hugging Face's Trainer a copy in the form of one, for the time being."""
    if path.name != FOREIGN_FILE_NAME:
        yield path
        return
    written = path.stat().st_mtime  # its records have no time of their own
    with tempfile.TemporaryDirectory() as folder:
        with Journal.open(Path(folder) / "trainer_logs.json") as journal:
            for record in TrainingLog.from_file(path).records:
                head = {"timestamp": written, "global_step": 0}
                journal.append({**head, **{key: value for key, value in record.items() if key != "step"}})
        yield journal.path
