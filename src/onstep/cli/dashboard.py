"""`onstep dashboard`: opens the page over finished and running runs in a browser."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from onstep.cli.browser import opens_in_browser
from onstep.cli.completed_words import complete_runs


def dashboard(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUNS ...]",
            autocompletion=complete_runs,
            help="Run directories, logs, or directories of runs; default: runs/ and every running job with control.",
        ),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port; default: the first free one from 8900, 0: any.")] = None,
    host: Annotated[str, typer.Option(help="Address to bind; beyond loopback, others reach the page.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show finished and running runs on one page, and steer those that run with control.

    The page opens with a link that works once, within a minute; Enter makes another one. Ctrl-C ends it.
    """
    from onstep.control.dashboard.dashboard import Dashboard
    from onstep.control.dashboard.server import serve

    with Dashboard(runs or None) as jobs, serve(jobs, host, port) as served:
        number = len(jobs.jobs())
        print(f"Dashboard with {number} {'run' if number == 1 else 'runs'} at {served.url} (Ctrl-C ends it)")
        link = served.new_link()
        print(f"Open within a minute, works once: {link}", flush=True)
        if browser:
            opens_in_browser(link)
        _wait(served.new_link)


def _wait(new_link: Callable[[], str]) -> None:
    """Wait for Ctrl-C; Enter prints another link."""
    try:
        if sys.stdin is not None and sys.stdin.isatty():
            while sys.stdin.readline():
                print(f"Open within a minute, works once: {new_link()}", flush=True)
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        print()
