"""`onstep logs report`: an interactive page about one run or several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH ...]",
            help="Logs, run folders, names below runs/, or a folder of runs for all of them; default the newest run.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The HTML file; default in tmp/.")] = None,
    labels: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="A name for each run; may be given once for each.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="The heading of the page.")] = None,
    edit: Annotated[bool, typer.Option("--edit", "-e", help="Open the page in $VISUAL, $EDITOR or a browser.")] = False,
    show: Annotated[bool, typer.Option(help="Open the page in the browser.")] = False,
) -> None:
    """Write a page with a chart for each metric, a summary and the differences of the configurations.

    One HTML file that works without a network. Needs plotly: pip install 'onstep[reports]'
    """
    from onstep.analysis.plots_order import natural_order
    from onstep.analysis.report import write_report
    from onstep.cli.logs_reading import file_prefix, hand_over, output_path, read_logs

    logs = natural_order(read_logs(paths or [], labels or [], expand=True))
    target = output_path(output, None, f"{file_prefix(logs)}report", known=("html", "htm"))
    write_report(logs, target, title)
    hand_over(target, edit=edit, show=show)
