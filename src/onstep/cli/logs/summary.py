"""`onstep logs summary|compare|list`: summarizes, compares and lists runs."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from onstep.analysis.logs.export_tables import export
from onstep.analysis.logs.files import find_log_files, names_in_path
from onstep.analysis.logs.run_status import status_of
from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.reports.summary import Summary, compute_summary_statistics
from onstep.analysis.reports.summary_formats import (
    ONE_LINE_HEADER,
    format_summary_json,
    format_summary_markdown,
    format_summary_oneline,
    format_summary_text,
)
from onstep.analysis.text_tables import table
from onstep.cli.application import Labels
from onstep.cli.cells import date_shown, size_shown
from onstep.cli.completed_words import complete_runs
from onstep.cli.logs.lookup import find_log, read_logs
from onstep.errors import ConfigError, DataError
from onstep.stores.urls import is_url


class Format(StrEnum):
    """Output formats of `summary`."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "md"
    ONE_LINE = "one-line"


def summary(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            autocompletion=complete_runs,
            help="A log, a run's directory or name; default: the newest log.",
        ),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    everything: Annotated[bool, typer.Option("--all", help="Summarize all logs of the project, newest first.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file instead of printing.")
    ] = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option(
            "--export",
            metavar="FILE",
            help="Also write all records as a table: FILE.csv or FILE.parquet; repeatable.",
        ),
    ] = None,
) -> None:
    """Summarize a run: last and best losses, gradient norm, learning rate, throughput.

    Works on logs of running and crashed runs too. Damaged records are skipped and reported on stderr.
    """
    if everything and path is not None:
        print(f"warning: --all summarizes every log of the project; {path} is ignored", file=sys.stderr)
    if everything and tables:
        raise ConfigError("--export writes a single log; name the log and drop --all.")
    logs = _all_logs() if everything else [TrainingLog.from_file(find_log(path))]
    text = _shown([compute_summary_statistics(log) for log in logs], form, with_header=everything)
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(f"{text}\n", encoding="utf-8")
        print(f"summary of {len(logs)} log(s): {output}", file=sys.stderr)
    for target in tables or []:
        print(f"all {logs[0].num_records} records of {logs[0].log_path}: {export(logs[0], target)}", file=sys.stderr)


def _all_logs() -> list[TrainingLog]:
    """The readable logs; the others are reported on stderr."""
    logs = []
    for path in find_log_files(Path()):
        try:
            logs.append(TrainingLog.from_file(path))
        except (DataError, OSError) as error:
            print(f"skipped: {error}", file=sys.stderr)
    if not logs:
        raise ConfigError(f"no logs found in {Path().absolute()}; change to a project's directory, or name a log.")
    return logs


def _shown(summaries: list[Summary], form: Format, *, with_header: bool) -> str:
    if form is Format.JSON:
        return format_summary_json(summaries[0] if len(summaries) == 1 else summaries)
    if form is Format.ONE_LINE:
        header = [ONE_LINE_HEADER] if with_header else []
        return "\n".join([*header, *map(format_summary_oneline, summaries)])
    as_text = format_summary_markdown if form is Format.MARKDOWN else format_summary_text
    return "\n\n".join(map(as_text, summaries))


def compare(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH PATH ...",
            autocompletion=complete_runs,
            help="Logs, run directories, names below runs/, or a directory of runs (all of them).",
        ),
    ],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="text, md or json.")] = "text",
    labels: Labels = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
) -> None:
    """Compare runs: last and best values side by side, and the configuration keys that differ."""
    from onstep.analysis.reports.comparison import compare_runs, format_comparison

    logs = read_logs(paths, labels or [], expand=True)
    if len(logs) < 2:
        raise ConfigError(f"a comparison requires at least two runs, got {logs[0].log_path}.")
    text = format_comparison(compare_runs(logs), form)
    if output is None:
        print(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text + "\n", encoding="utf-8")
    print(output)


def list_(
    directory: Annotated[
        str, typer.Argument(metavar="[DIR]", help="A project's directory, or a directory of runs; also a URL.")
    ] = ".",
    model: Annotated[str | None, typer.Option(help="Only the runs of this model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of objects.")] = False,
) -> None:
    """List the logs of a project, newest first.

    Searches runs/, Trainer output directories and output_models/. The first log listed is the default of the other
    commands.
    """
    place = Path(directory)
    if is_url(directory):
        from onstep.mirror.copies import copy_of_runs

        place = copy_of_runs(directory)
    logs = [_described(path) for path in find_log_files(place, model)]
    if as_json:
        print(json.dumps(logs, indent=2))
    elif not logs:
        where = directory if is_url(directory) else Path(directory).absolute()
        raise ConfigError(f"no logs found in {where}; name a project's directory or a directory of runs.")
    else:
        rows = [["#", "model/run", "status", "modified", "size", "log"]]
        for number, log in enumerate(logs, 1):
            name = log["run"] if log["model"] is None else f"{log['model']}/{log['run']}"
            modified = date_shown(log["modified"])
            rows.append([str(number), name, log["status"] or "-", modified, size_shown(log["bytes"]), log["path"]])
        print("\n".join(table(rows, "><<<><", indent="", shrink=5)))


def _described(path: Path) -> dict[str, Any]:
    run_name, model_name = names_in_path(path)
    status = path.stat()
    return {
        "run": run_name or path.absolute().parent.name,
        "model": model_name,
        "status": status_of(path),
        "modified": datetime.fromtimestamp(status.st_mtime).astimezone().isoformat(timespec="seconds"),
        "bytes": status.st_size,
        "path": str(path),
    }
