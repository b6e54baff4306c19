"""`onstep control open`: opens the page of a job in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from typing import Annotated

import typer

from onstep.cli.control.options import Job, Remote, TokenFile
from onstep.cli.control.target import find_target


def open_(
    job: Job = None,
    link: Annotated[bool, typer.Option("--link", help="Print the link only.")] = False,
    remote: Remote = None,
    token_file: TokenFile = None,
) -> None:
    """Open the page of a job in a browser.

    The link works once, within a minute; it contains no token. It is printed if there is no browser.
    """
    target = find_target(job, remote, token_file)
    url = target.client.login_link(target.job_id)
    if link or not _has_display() or not webbrowser.open(url):
        print(url)


def _has_display() -> bool:
    """Whether a browser would have a window; one in the terminal does not run the page's code."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
