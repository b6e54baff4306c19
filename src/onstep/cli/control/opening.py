"""`onstep control open`: opens the page of a job in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from onstep.cli.browser import opens_in_browser
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
    if link or not opens_in_browser(url):
        print(url)
