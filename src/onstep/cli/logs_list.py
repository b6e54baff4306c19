"""`onstep logs list`: the logs of a project."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from onstep.analysis.log_files import find_log_files
from onstep.analysis.run_liveness import status_of
from onstep.analysis.run_names import names_in_path
from onstep.cli.tables import date_shown, size_shown, table
from onstep.errors import ConfigError


def list_(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="A project, or a folder of runs.")] = Path(),
    model: Annotated[str | None, typer.Option(help="Only the runs of this model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: a list of objects.")] = False,
) -> None:
    """List the logs of a project, newest first.

    Those in runs/, in a Trainer's output folder and in output_models/; the first is the one that the other commands
    take when none is named.
    """
    logs = [_described(path) for path in find_log_files(folder, model)]
    if as_json:
        print(json.dumps(logs, indent=2))
    elif not logs:
        raise ConfigError(f"no logs found in {folder.absolute()}; give a project's folder or a folder of runs.")
    else:
        print("\n".join(_as_lines(logs)))


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


def _as_lines(logs: list[dict[str, Any]]) -> list[str]:
    rows = [["#", "model/run", "status", "modified", "size", "log"]]
    for number, log in enumerate(logs, 1):
        name = log["run"] if log["model"] is None else f"{log['model']}/{log['run']}"
        modified = date_shown(log["modified"])
        rows.append([str(number), name, log["status"] or "-", modified, size_shown(log["bytes"]), log["path"]])
    return table(rows, "><<<><", indent="", shrink=5)
