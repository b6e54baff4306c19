"""`onstep checkpoint list|verify`: lists a directory of checkpoints and checks files against their hashes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from onstep.analysis.text_tables import printable, table, terminal_width
from onstep.checkpoint import CheckpointInfo, Retention, best, read_manifest
from onstep.checkpoint.catalog.discovery import left_branches
from onstep.checkpoint.catalog.inventory import Entry, EntryState, damage, inventory, mark_resumable, unlisted_files
from onstep.checkpoint.catalog.retention import metric_value
from onstep.cli.cells import counted, date_shown, metric_shown, size_shown
from onstep.cli.checkpoint.paths import CHECKPOINT_NAME, dir_of, locate, retention_of
from onstep.config.suggestions import listed
from onstep.errors import CheckpointError
from onstep.mirror.copies import checkpoint_copies, named, outline
from onstep.stores.urls import is_url, with_urls

_NOISE = ("epoch", "runtime", "per_second")
"""Suffixes of metrics that do not measure a checkpoint's quality."""
_METRICS_SHOWN = 3
_FILES_SHOWN = 100
"""How many bad or extra files are named; the remaining ones are counted."""


@dataclass(frozen=True)
class Listing:
    """The contents of a directory of checkpoints."""

    root: Path
    entries: list[Entry]
    taken: Entry | None
    """The one that a resume would load."""
    best: Entry | None
    retention: Retention
    branches: dict[str, list[int]]
    is_verified: bool
    """Whether checkpoints were hashed, newest first, until an intact one was found."""


def read_listing(root: Path, *, verifies: bool) -> Listing:
    """List a directory of checkpoints.

    Raises:
        CheckpointError: when the directory cannot be read.
    """
    entries = inventory(root)
    taken = next((entry for entry in entries if entry.info is not None), None)
    if verifies:
        entries, taken = mark_resumable(entries)
    by_step = {entry.step: entry for entry in reversed(entries) if entry.info is not None}
    infos = [entry.info for entry in reversed(by_step.values()) if entry.info is not None]
    retention = retention_of(sorted(infos, key=lambda info: -info.step))
    winner = best(infos, retention)
    return Listing(
        root, entries, taken, None if winner is None else by_step[winner.step], retention, left_branches(root), verifies
    )


@contextmanager
def listing_of(words: str, *, verifies: bool) -> Iterator[Listing]:
    """The listing of what `words` name; of a run in an object store, by the sizes that the store has.

    Raises:
        CheckpointError: when the directory cannot be read.
    """
    if not is_url(words):
        yield read_listing(locate(words).root, verifies=verifies)
        return
    with tempfile.TemporaryDirectory(prefix="onstep-list-") as directory:
        yield read_listing(outline(words, Path(directory)), verifies=False)


def shown_place(listing: Listing, words: str, text: str) -> str:
    """A text about a listing, with the URL of the run in place of the directory that stands for it."""
    return text.replace(str(listing.root), f"{named(words).run}/checkpoints") if is_url(words) else text


def as_json(listing: Listing) -> dict[str, Any]:
    """The listing for `--json`; see `onstep checkpoint list --help`."""
    return {
        "root": str(listing.root),
        "resumes_from": None if listing.taken is None else str(listing.taken.path),
        "best_metric": listing.retention.metric,
        "is_verified": listing.is_verified,
        "checkpoints": [_record(listing, entry) for entry in listing.entries],
        "left_branches": listing.branches,
    }


def as_lines(listing: Listing) -> list[str]:
    """The table, followed by its legend and remarks."""
    if not listing.entries:
        return [f"{listing.root} has no checkpoints.", *_branch_lines(listing)]
    total = size_shown(sum(entry.size_bytes for entry in listing.entries))
    heading = ("", "step", "date", "size", "ranks", "metrics", "state")
    rows = [heading, *(_row(listing, entry) for entry in listing.entries)]
    lines = [
        f"{listing.root}: {counted(len(listing.entries), 'directory')}, {total}",
        "",
        *table(rows, "<><>><<", indent="", shrink=5),
        "",
        *_legend(listing),
        *(f"   step {entry.step}: {entry.reason}" for entry in listing.entries if entry.reason),
        *_branch_lines(listing),
    ]
    return [printable(line) for line in lines]


def _row(listing: Listing, entry: Entry) -> Sequence[str]:
    manifest = entry.manifest
    state = entry.state.value
    if manifest is None:
        return ("", str(entry.step), "-", size_shown(entry.size_bytes), "-", "-", state)
    if entry.info is not None and not manifest.persistent:
        state += ", temporary"
    return (
        "->" if entry is listing.taken else "",
        str(entry.step),
        date_shown(manifest.created_at),
        size_shown(entry.size_bytes),
        str(manifest.world_size),
        _metrics(listing, entry),
        state,
    )


def _metrics(listing: Listing, entry: Entry) -> str:
    """The metric that ranks checkpoints, marked if it is the best; then others, as far as space allows."""
    assert entry.manifest is not None
    metrics, bare = entry.manifest.metrics, listing.retention.metric.removeprefix("eval_")
    others = [name for name in metrics if not name.endswith(_NOISE) and name.removeprefix("eval_") != bare]
    value = metric_value(CheckpointInfo(entry.path, entry.step, entry.manifest), bare)
    mark = " *" if entry is listing.best else ""
    first = [] if value is None else [f"{bare} {metric_shown(value)}{mark}"]
    width = terminal_width()
    room = _METRICS_SHOWN if width is None or width >= 100 else 1
    return "  ".join([*first, *(f"{name} {metric_shown(metrics[name])}" for name in others)][:room]) or "-"


def _legend(listing: Listing) -> list[str]:
    lines = []
    if listing.taken is None:
        lines.append("   None of these checkpoints can be resumed from.")
    else:
        checked = "verified" if listing.is_verified else "not hashed"
        lines.append(f"-> A resume loads this one ({checked}).")
    if listing.best is not None:
        lines.append(f" * Best by {listing.retention.metric}.")
    if any(entry.state in (EntryState.UNFINISHED, EntryState.DELETING) for entry in listing.entries):
        lines.append("   Unfinished and half-deleted checkpoints are unusable; the next start of the run removes them.")
    return lines


def _branch_lines(listing: Listing) -> list[str]:
    return [
        f"   {listing.root / name}: {counted(len(steps), 'checkpoint')} of a branch that the run abandoned "
        f"(steps {', '.join(map(str, steps))})"
        for name, steps in listing.branches.items()
    ]


def _record(listing: Listing, entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "step": entry.step,
        "path": str(entry.path),
        "state": entry.state.value,
        "reason": entry.reason or None,
        "size_bytes": entry.size_bytes,
        "created_at": None if manifest is None else manifest.created_at,
        "run_id": None if manifest is None else manifest.run_id,
        "ranks": None if manifest is None else manifest.world_size,
        "persistent": None if manifest is None else manifest.persistent,
        "metrics": None if manifest is None else manifest.metrics,
        "is_best": entry is listing.best,
        "is_resumed_from": entry is listing.taken,
    }


def dirs_to_verify(words: str, *, everything: bool) -> list[Path]:
    """The newest checkpoint, or the one that is named; with `everything`, all in the same directory.

    Raises:
        CheckpointError: when no checkpoint is found.
    """
    if not everything:
        return [dir_of(words)]
    root = checkpoint_copies(words, every=True) / "checkpoints" if is_url(words) else locate(words).root
    directories = [entry.path for entry in inventory(root) if CHECKPOINT_NAME.fullmatch(entry.path.name)]
    if not directories:
        raise CheckpointError(f"{root} has no checkpoints to verify; name a run or a directory of checkpoints.")
    return directories


def is_intact(directory: Path) -> bool:
    """Hash a checkpoint, with a progress bar on a terminal, and print what is wrong with it."""
    name = with_urls(str(directory))
    try:
        manifest = read_manifest(directory)
    except CheckpointError as error:
        print(f"{name}: BAD\n  {printable(with_urls(str(error)))}")
        return False
    with tqdm(
        total=manifest.size_bytes, desc=directory.name, unit="B", unit_scale=True, leave=False, disable=None, delay=0.5
    ) as bar:

        def show(count: int) -> None:
            bar.update(count)

        problems = damage(directory, show)
    files = counted(len(manifest.files), "file")
    if problems:
        print(f"{name}: BAD, {len(problems)} of {files}" if len(problems) > 1 else f"{name}: BAD")
    else:
        print(f"{name}: good, {files}, {size_shown(manifest.size_bytes)}")
    for line in problems[:_FILES_SHOWN]:
        print(f"  {printable(line)}")
    if len(problems) > _FILES_SHOWN:
        print(f"  ... and {len(problems) - _FILES_SHOWN} more")
    extra = unlisted_files(directory, manifest)
    if extra:
        print(f"  extra files: {printable(listed(extra, _FILES_SHOWN))}; not in the manifest, never read")
    return not problems
