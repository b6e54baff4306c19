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
from onstep.console.formats import format_si

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
    """The status as text."""
    up = timedelta(seconds=round(float(found.get("uptime_seconds", 0))))
    rates = f"outer lr {found.get('outer_lr')}, momentum {found.get('outer_momentum')}"
    shown = [
        f"run {found.get('run_id')}: {found.get('status')}, {found.get('mode')}, "
        f"round {found.get('sync_round')}, step {found.get('step')}, up {up}",
        f"  {found.get('num_registered')} of {found.get('num_workers')} workers (quorum {found.get('min_workers')}), "
        f"every {found.get('sync_every')} steps{_overlap(found)}, {found.get('codec')}, {rates}",
    ]
    shown += _progress(found)
    if found.get("disk_error"):
        shown.append(f"  waiting for the disk: {found['disk_error']}")
    if kept := _list(found, "kept_versions"):
        shown.append(f"  versions to go back to: {', '.join(map(str, kept))}")
    for one in _list(found, "held_back")[-3:]:
        shown.append(f"  held back from version {one.get('version')}: {one.get('worker')}, {one.get('reason')}")
    rounds = _list(found, "rounds")
    for number, one in enumerate(rounds):
        shown.append(f"  {f'fragment {number}, ' if len(rounds) > 1 else ''}{_round(one)}")
    workers = found.get("workers")
    if isinstance(workers, dict) and workers:
        shown += table([("WORKER", "HOST", "STEP", "STEPS/S", "SEEN"), *map(_worker, workers.items())], "<<>>>")
    shown += [
        f"  {name} {one['why']} ({timedelta(seconds=round(one['seconds']))} ago)"
        for name, one in (found.get("gone") or {}).items()
    ]
    shown += _lost(found)
    counts = found.get("counts")
    if isinstance(counts, dict) and counts:
        shown.append("  " + ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in sorted(counts.items())))
    return [printable(line) for line in shown]


def _overlap(found: Found) -> str:
    fragments, steps = found.get("num_fragments", 1), found.get("overlap_steps")
    parts = f" in {fragments} fragments" if fragments > 1 else ""
    parts += "" if steps is None else f", merged after {steps}"
    return parts + (", eager" if found.get("eager") else "")


def _progress(found: Found) -> list[str]:
    """Loss over tokens, throughput, and when the next round is expected."""
    speed, left, history = found.get("tokens_per_second"), found.get("seconds_to_next_round"), _list(found, "history")
    losses = [one for one in history if isinstance(one.get("loss"), float)]
    parts = [f"{format_si(float(found.get('tokens', 0)))} tokens"]
    empty, quorum = found.get("seconds_without_workers"), found.get("min_workers", 0)
    if isinstance(empty, float):
        parts.append(f"no worker has been there for {timedelta(seconds=round(empty))}")
    elif found.get("num_registered", 0) < quorum:
        parts.append(f"no round until {quorum} workers are there")
    if isinstance(speed, float):
        parts.append(f"{format_si(speed)} tokens a second")
    if isinstance(left, float):
        parts.append(f"next round in about {left:.0f} s" if left else "next round due")
    shown = ["  " + ", ".join(parts)]
    if losses:
        chosen = losses[:: max(1, (len(losses) - 1) // 7 + 1)]
        chosen += [losses[-1]] if chosen[-1] is not losses[-1] else []
        since = f" from round {history[0]['version']} on" if history[0].get("version", 1) > 1 else ""
        shown.append(
            f"  loss{since}: " + ", ".join(f"{one['loss']:.4f} at {format_si(one['tokens'])}" for one in chosen)
        )
    return shown


def _lost(found: Found) -> list[str]:
    """The steps that no round has, by their reason, and those of workers that are gone."""
    lost, gone = found.get("lost_steps") or {}, found.get("open_steps_of_others") or {}
    shown = ["  lost steps: " + ", ".join(f"{steps} {reason}" for reason, steps in lost.items())] if lost else []
    if gone:
        named = ", ".join(f"{steps} of {worker}" for worker, steps in gone.items())
        shown.append(f"  steps in no round of workers that are gone: {named}")
    return shown


def _round(one: Found) -> str:
    arrived, missing = _list(one, "arrived"), _list(one, "missing")
    text = (
        f"round {int(one.get('version', 0)) + 1}: {len(arrived)} of {len(arrived) + len(missing)} submissions are there"
    )
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
