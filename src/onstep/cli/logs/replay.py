"""`onstep logs replay`: fills a tracker from the metrics log of a run."""

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
from onstep.cli.completed_words import complete_runs
from onstep.cli.logs.lookup import find_log
from onstep.config.trackers import TRACKERS, name_list
from onstep.errors import ConfigError, OnstepError
from onstep.record import MetricsLog
from onstep.record.kinds import FILE_NAME
from onstep.trackers import can_complete, complete, make_tracker, recorded_options, recorded_run
from onstep.trackers import replay as send

BAR_DELAY_SECONDS = 0.5


def replay(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", autocompletion=complete_runs, help="A run's directory, its name below runs/, or a log file."
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="NAME", help=f"One of {', '.join(TRACKERS)}.")],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to write local files; default: the run's directory.")
    ] = None,
    names: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Metric names to send: hf (train/loss), bridge (lm loss), or hf,bridge. A tracker that has the run "
            "already keeps the names that it shows.",
        ),
    ] = "hf,bridge",
) -> None:
    """Send a tracker what it lacks of a run, and wait until everything is delivered.

    Use it when a tracker was not configured or was unreachable during training. A run with a record is continued in the
    tracker, as by the next start of the run. The metrics log of an older one, a log file, and a run that is still
    training are sent whole, as a new run; csv and tensorboard then require --output while the run's own files are in
    use.
    """
    metrics_log = find_log(run)
    tracker = make_tracker(to)
    shown = name_list([name.strip() for name in names.split(",")], "--names") or ()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("onstep.trackers").setLevel(logging.INFO)  # where trackers log their location
    target = metrics_log.parent if output is None else output
    directory = metrics_log.parent
    is_live = getattr(tracker, "takes_back", False) and (is_locked(directory / ".run.lock") or is_locked(metrics_log))
    if is_live and target.resolve() == directory.resolve():
        raise ConfigError(
            f"{directory} is a live run, and this would replace its files; write elsewhere with --output DIR, or wait "
            f"until the run has ended."
        )
    is_of_run = output is None and not Path(run).is_file() and can_complete(directory, to)
    if is_of_run and not is_locked(directory / ".run.lock"):
        with _named_errors(to):
            tracker = make_tracker(to, **recorded_options(directory, to))
            num_sent = complete(directory, tracker, shown)
        where = getattr(tracker, "location", None) or to
        sent = f"{num_sent} lines of {directory / FILE_NAME} sent to {where}"
        print(sent if num_sent else f"{where} has all of {directory / FILE_NAME} already.")
        return
    run_sent = recorded_run(metrics_log, target)
    if metrics_log.name == FOREIGN_FILE_NAME:
        run_sent = dataclasses.replace(run_sent, name=name_of_place(metrics_log).replace("/", "-"))
    bar = partial(tqdm, unit="record", leave=False, disable=None, delay=BAR_DELAY_SECONDS)
    with _named_errors(to), _as_metrics_log(metrics_log) as readable:
        num_sent = send(readable, tracker, run_sent, names=shown, progress=bar)
    where = getattr(tracker, "location", None) or f"{to} (local files, if any, are in {target})"
    print(f"{num_sent} records of {metrics_log} sent to {where}")


@contextmanager
def _named_errors(tracker: str) -> Iterator[None]:
    """Name the tracker in an error of its package."""
    try:
        yield
    except OnstepError:
        raise
    except Exception as error:  # trackers raise exceptions of many types
        raise OnstepError(f"cannot send to the tracker {tracker!r}: {type(error).__name__}: {error}") from error


@contextmanager
def _as_metrics_log(path: Path) -> Iterator[Path]:
    """The metrics log itself; for a log of Hugging Face's Trainer, a temporary copy in the format of a metrics log."""
    if path.name != FOREIGN_FILE_NAME:
        yield path
        return
    written = path.stat().st_mtime  # its records have no timestamps
    with tempfile.TemporaryDirectory() as directory:
        with MetricsLog.open(Path(directory) / "trainer_logs.json") as metrics_log:
            for record in TrainingLog.from_file(path).records:
                head = {"timestamp": written, "global_step": 0}
                metrics_log.append({**head, **{key: value for key, value in record.items() if key != "step"}})
        yield metrics_log.path
