"""`onstep data cache`: shows or empties the cache of data that was downloaded from object stores."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from onstep.analysis.text_tables import printable, table
from onstep.cli.application import application
from onstep.cli.cells import counted, date_shown, size_shown
from onstep.config import DatasetConfig
from onstep.data.urls.local_copy import url_cache
from onstep.errors import DataError

app = application(no_args_is_help=True)


@app.callback()
def data() -> None:
    """The data of runs."""


@app.command()
def cache(
    directory: Annotated[
        Path | None, typer.Option("--dir", help="The directory of the cache; default: $ONSTEP_CACHE, or the user's.")
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the files; no run may be reading them.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the files that were downloaded for URLs in `dataset.paths`: URL, size, entity tag, time, and local file."""
    found = url_cache(DatasetConfig(cache_dir=None if directory is None else str(directory)))
    entries = found.entries()
    if clear:
        try:
            found.clear()
        except OSError as error:
            raise DataError(f"{error.filename} cannot be deleted: {error.strerror}; check its permissions.") from None
    if as_json:
        print(json.dumps({"directory": str(found.directory), "files": [asdict(one) for one in entries]}, indent=1))
        return
    if entries:
        rows = [(one.url, size_shown(one.size), one.etag, date_shown(one.downloaded_at), one.file) for one in entries]
        print("\n".join(table([("URL", "SIZE", "ETAG", "DOWNLOADED", "FILE"), *rows], "<><<<", indent="", shrink=0)))
    total = size_shown(sum(one.size for one in entries))
    print(printable(f"{counted(len(entries), 'file')}, {total}, in {found.directory}{', deleted' if clear else ''}"))
