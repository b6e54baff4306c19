"""`onstep logs summary`: what a run came to."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from onstep.analysis.export import export
from onstep.analysis.log_files import find_log_files
from onstep.analysis.summary import Summary, compute_summary_statistics
from onstep.analysis.summary_formats import (
    ONE_LINE_HEADER,
    format_summary_json,
    format_summary_markdown,
    format_summary_one_line,
    format_summary_text,
)
from onstep.analysis.training_log import TrainingLog
from onstep.cli.log_paths import find_log
from onstep.errors import ConfigError, DataError


class Format(StrEnum):
    """How `summary` prints."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "md"
    ONE_LINE = "one-line"


def summary(
    path: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A log, a run's folder, or its name; default: the newest.")
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.TEXT,
    everything: Annotated[bool, typer.Option("--all", help="All logs of the project, newest first.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there instead of printing.")
    ] = None,
    tables: Annotated[
        list[Path] | None,
        typer.Option(
            "--export",
            metavar="FILE",
            help="Also write all records as a table: FILE.csv or FILE.parquet; may be given again.",
        ),
    ] = None,
) -> None:
    """Sum a run up: last and best losses, gradient norm, learning rate, speed.

    Of a running, crashed or damaged log what can be read is summed up; what was left out is told on stderr.
    """
    if everything and path is not None:
        print(f"warning: --all takes every log of the project; {path} is ignored", file=sys.stderr)
    if everything and tables:
        raise ConfigError("--export writes one log; name it, without --all.")
    logs = _all_logs() if everything else [TrainingLog.from_file(find_log(path))]
    text = _shown([compute_summary_statistics(log) for log in logs], form, with_header=everything)
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(f"{text}\n", encoding="utf-8")
        print(f"summary of {len(logs)} log(s): {output}", file=sys.stderr)
    for table in tables or []:
        print(f"all {logs[0].num_records} records of {logs[0].log_path}: {export(logs[0], table)}", file=sys.stderr)


def _all_logs() -> list[TrainingLog]:
    """The logs that can be read; what cannot is told on stderr."""
    logs = []
    for path in find_log_files(Path()):
        try:
            logs.append(TrainingLog.from_file(path))
        except (DataError, OSError) as error:
            print(f"skipped: {error}", file=sys.stderr)
    if not logs:
        raise ConfigError(f"no logs found in {Path().absolute()}; go to a project's folder, or name a log.")
    return logs


def _shown(summaries: list[Summary], form: Format, *, with_header: bool) -> str:
    if form is Format.JSON:
        return format_summary_json(summaries[0] if len(summaries) == 1 else summaries)
    if form is Format.ONE_LINE:
        header = [ONE_LINE_HEADER] if with_header else []
        return "\n".join([*header, *map(format_summary_one_line, summaries)])
    as_text = format_summary_markdown if form is Format.MARKDOWN else format_summary_text
    return "\n\n".join(map(as_text, summaries))
