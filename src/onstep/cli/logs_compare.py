"""`onstep logs compare`: runs side by side with the differences of their configurations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onstep.errors import ConfigError


def compare(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH PATH ...", help="Logs, run folders, names below runs/, or a folder of runs for all of them."
        ),
    ],
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="text, md or json.")] = "text",
    labels: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="A name for each run; may be given once for each.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file.")] = None,
) -> None:
    """Compare runs: last and best values side by side, and the keys of the configuration that differ."""
    from onstep.analysis.comparison import compare_runs
    from onstep.analysis.comparison_formats import format_comparison
    from onstep.cli.logs_reading import read_logs

    logs = read_logs(paths, labels or [], expand=True)
    if len(logs) < 2:
        raise ConfigError(f"a comparison needs two runs or more, got {logs[0].log_path}.")
    text = format_comparison(compare_runs(logs), form)
    if output is None:
        print(text)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text + "\n", encoding="utf-8")
    print(output)
