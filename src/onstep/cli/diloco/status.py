"""`onstep diloco status`: shows rounds and workers of a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any

import typer

from onstep.analysis.text_tables import printable, table
from onstep.cli.diloco.options import DEFAULT_SERVER, CaFile, Server, TokenFile, connect

Found = Mapping[str, Any]


def status(
    server: Server = DEFAULT_SERVER,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every two seconds, until Ctrl-C.")] = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Show the rounds, workers and counts of a server."""
    with connect(server, token_file, ca_file) as client:
        while True:
            found = client.get_status()
            print(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)), flush=True)
            if not watch:
                return
            time.sleep(2.0)
            print()


def lines(found: Found) -> list[str]:
    """The status as text, of all servers that share the parameters."""
    return [line for one in (found, *_list(found, "shares")) for line in _of_one(one)]


def _of_one(found: Found) -> list[str]:
    number = found.get("num_shares")
    share = "" if number == 1 else f"share {found.get('share')} of {number}, "
    up = timedelta(seconds=round(float(found.get("uptime_seconds", 0))))
    rates = f"outer lr {found.get('outer_lr')}, momentum {found.get('outer_momentum')}"
    shown = [
        f"{share}run {found.get('run_id')}: {found.get('status')}, {found.get('mode')}, "
        f"round {found.get('sync_round')}, step {found.get('step')}, up {up}",
        f"  {found.get('num_registered')} of {found.get('num_workers')} workers (quorum {found.get('min_workers')}), "
        f"every {found.get('sync_every')} steps, {found.get('codec')}, {rates}",
    ]
    if found.get("disk_error"):
        shown.append(f"  waiting for the disk: {found['disk_error']}")
    for number, one in enumerate(_list(found, "rounds")):
        shown.append(f"  fragment {number}: {_round(one)}")
    workers = found.get("workers")
    if isinstance(workers, dict) and workers:
        shown += table([("WORKER", "HOST", "STEP", "STEPS/S", "SEEN"), *map(_worker, workers.items())], "<<>>>")
    counts = found.get("counts")
    if isinstance(counts, dict) and counts:
        shown.append("  " + ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in sorted(counts.items())))
    return [printable(line) for line in shown]


def _round(one: Found) -> str:
    arrived, missing = _list(one, "arrived"), _list(one, "missing")
    text = f"version {one.get('version')}, {len(arrived)} submissions"
    if missing:
        text += f", waiting for {', '.join(map(str, missing[:5]))}{' ...' if len(missing) > 5 else ''}"
    left = one.get("seconds_to_deadline")
    return text if left is None else f"{text}, at most {float(left):.0f} s more"


def _worker(item: tuple[str, Any]) -> tuple[str, ...]:
    name, one = item
    speed, silent = one.get("steps_per_second"), one.get("silent_seconds")
    return (
        str(name),
        str(one.get("hostname", "")),
        str(one.get("step", "")),
        f"{speed:.3g}" if isinstance(speed, float | int) and speed else "",
        f"{silent:.0f} s ago" if isinstance(silent, float | int) else "",
    )


def _list(found: Found, key: str) -> list[Any]:
    value = found.get(key)
    return value if isinstance(value, list) else []
