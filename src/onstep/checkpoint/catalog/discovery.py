"""Finds the checkpoints in a directory, verifies them, and reports damaged, unfinished and foreign ones."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path

from tqdm import tqdm

from onstep.checkpoint.storage.manifest import MANIFEST, Manifest, Progress, check_file, read_manifest, verify
from onstep.checkpoint.storage.store import TEMPORARY, TRASH
from onstep.checkpoint.storage.transaction import SUPERSEDED, is_held
from onstep.config.suggestions import listed
from onstep.errors import CheckpointError

logger = logging.getLogger(__name__)

BAR_BYTES = 1024**3
"""Checkpoints smaller than this are verified too quickly for a progress bar to be useful."""
MAX_ENTRIES = 100_000
"""How many files of a checkpoint are counted; those of Onstep are some per rank and component."""


def verify_shown(directory: Path, bar_bytes: int = BAR_BYTES) -> Manifest:
    """`verify` with a progress bar if the checkpoint has at least `bar_bytes`; call it on one rank.

    Raises:
        CheckpointError: naming the first file that is missing or not as it was written.
    """
    total = read_manifest(directory).size_bytes
    label = f"verifying {directory.name}"
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=total < bar_bytes) as bar:
        return verify(directory, progress=bar.update)


_SAFE_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_PICKLED_STATE = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state(_\d+)?)\.(pt|pth|bin)")
_TRAINER_STATE = "trainer_state.json"
NAMES_SHOWN = 4
"""How many names the message lists; the remaining ones are counted."""


def describe_foreign(directory: Path) -> str | None:
    """Describe a Hugging Face directory and how to use its weights; None for any other directory.

    A directory counts as one if it has weights named as by `save_pretrained`, or the state that HF Trainer saves.
    """
    try:
        names = sorted(entry for entry in os.listdir(directory) if _is_known(entry))
    except OSError:
        return None
    if not names:
        return None
    shown = listed(names, NAMES_SHOWN)
    return f"{directory} is a Hugging Face directory ({shown}), not an Onstep checkpoint. {_way(directory, names)}"


def _is_known(name: str) -> bool:
    patterns = (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _PICKLED_STATE)
    return name == _TRAINER_STATE or any(pattern.fullmatch(name) for pattern in patterns)


def _way(directory: Path, names: list[str]) -> str:
    """How to use the files that are present."""
    has_safe, has_pickled, has_state = (
        any(map(pattern.fullmatch, names)) for pattern in (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _PICKLED_STATE)
    )
    parts = ["Its pickle files are not read: a pickle can run arbitrary code."] if has_pickled or has_state else []
    load = f"AutoModelForCausalLM.from_pretrained({str(directory)!r})"
    if has_pickled and not has_safe:
        parts.append(f"If you trust it, convert it once: {load}.save_pretrained('NEW_DIR') writes safetensors.")
        load, has_safe = "AutoModelForCausalLM.from_pretrained('NEW_FOLDER')", True
    if has_safe:
        parts.append(f"To start a new run from the weights, load them with transformers, {load}, and pass the model.")
    else:
        parts.append("It holds no usable weights; give an Onstep checkpoint.")
    return " ".join(parts)


ASIDE = "aside"
"""Subdirectory for checkpoints of branches that the run has abandoned: `aside/branch-<n>/`."""
_NAME = re.compile(
    r"(?P<kind>|\.tmp-|\.superseded-|\.trash-(?:.*-)?)checkpoint-(?P<step>0|[1-9][0-9]{0,18})(?P<unique>(?:-[0-9a-f]{8})*)"
)


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that was found."""

    path: Path
    step: int
    manifest: Manifest


def checkpoints(root: Path) -> list[CheckpointInfo]:
    """All checkpoints in `root` with a valid manifest, newest step first; does not check their files.

    Raises:
        CheckpointError: if the directory cannot be listed; a missing one has no checkpoints.
    """
    found: dict[int, CheckpointInfo] = {}
    for step, path in _candidates(root):
        try:
            manifest = _manifest_of_step(path, step)
        except CheckpointError as error:
            logger.debug("Not a checkpoint: %s", error)
        else:
            found.setdefault(step, CheckpointInfo(path, step, manifest))
    return list(found.values())


def newest_verified(
    root: Path, max_step: int | None = None, report: Callable[[str], None] = logger.warning
) -> CheckpointInfo | None:
    """The newest checkpoint whose files all match its manifest, or None.

    Args:
        root: the directory of the checkpoints; it may be missing.
        max_step: only consider checkpoints up to this step.
        report: called with a message for each newer checkpoint that is rejected.

    Raises:
        CheckpointError: if the directory cannot be listed.
    """
    candidates = [found for found in _candidates(root) if max_step is None or found[0] <= max_step]
    for number, (step, path) in enumerate(candidates, start=1):
        try:
            return _verified(path, step)
        except CheckpointError as error:
            then = "falling back to the previous one" if number < len(candidates) else "and no earlier one exists"
            report(f"Checkpoint {path.name} is rejected, {then}: {error}")
    return None


def resolve(path: str | Path, step: int | None = None) -> CheckpointInfo:
    """The verified checkpoint that a user names: its own directory, a directory of checkpoints, or a run directory.

    Args:
        path: for a directory of checkpoints, the newest verified one is used.
        step: accept only the checkpoint of this step.

    Raises:
        CheckpointError: if there is none. For a mistyped path the message suggests similar names; for a Hugging Face
            directory it explains how to use the weights.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist{_nearby(path)}; give a checkpoint or a directory of checkpoints.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a checkpoint directory or a directory of checkpoints.")
    if os.path.lexists(path / MANIFEST):
        manifest = verify_shown(path)
        if step is not None and manifest.step != step:
            raise CheckpointError(f"{path} is a checkpoint of step {manifest.step}, not of step {step}.")
        return CheckpointInfo(path, manifest.step, manifest)
    if not any(_candidates(path)):
        if (path / "checkpoints").is_dir():
            path = path / "checkpoints"
        elif (foreign := describe_foreign(path)) is not None:
            raise CheckpointError(foreign)
    return _newest_at(path) if step is None else _step_at(path, step)


def _newest_at(root: Path) -> CheckpointInfo:
    refused: list[str] = []
    info = newest_verified(root, report=refused.append)
    if info is None:
        why = refused or [f"it has no directory checkpoint-<step>{_nearby(root / 'checkpoint-0')}"]
        raise CheckpointError(f"{root} holds no verified checkpoint: {_sentences(why)}")
    for line in refused:
        logger.warning(line)
    return info


def _step_at(root: Path, step: int) -> CheckpointInfo:
    paths = [path for found, path in _candidates(root) if found == step]
    if not paths:
        steps = ", ".join(str(info.step) for info in checkpoints(root)) or "none"
        raise CheckpointError(f"{root} has no checkpoint of step {step}; available steps: {steps}.")
    refused: list[str] = []
    for path in paths:
        try:
            return _verified(path, step)
        except CheckpointError as error:
            refused.append(f"Checkpoint {path.name} is rejected: {error}")
    raise CheckpointError(_sentences(refused))


def _verified(path: Path, step: int) -> CheckpointInfo:
    if not os.path.lexists(path / MANIFEST) and (foreign := describe_foreign(path)) is not None:
        raise CheckpointError(foreign)
    _manifest_of_step(path, step)  # cheap, and before any file is hashed
    return CheckpointInfo(path, step, verify_shown(path))


def _manifest_of_step(path: Path, step: int) -> Manifest:
    manifest = read_manifest(path)
    if manifest.step != step:
        raise CheckpointError(f"{path} has the manifest of step {manifest.step}; the directory was renamed.")
    return manifest


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """Directories named like a checkpoint, newest step first; a superseded one comes after its replacement."""
    return [(step, directory) for step, kind, directory in named_dirs(root) if kind in ("", SUPERSEDED)]


def named_dirs(root: Path) -> list[tuple[int, str, Path]]:
    """Directories in `root` named by Onstep, newest first, each with its step and the prefix that tells its kind.

    Raises:
        CheckpointError: if `root` cannot be listed; a missing one has none.
    """
    matches = [(_match(directory), directory) for directory in _dirs_in(root)]
    found = [(int(match["step"]), match["kind"], directory) for match, directory in matches if match is not None]
    return sorted(found, key=lambda each: (-each[0], each[1] != "", each[2].name))


def _dirs_in(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list {root}: {error.strerror}; check its permissions.") from error


def _sentences(texts: list[str]) -> str:
    """The texts on one line, each ending in a single period."""
    return " ".join(f"{text.rstrip('.')}." for text in texts)


def _nearby(path: Path) -> str:
    """A hint listing existing names similar to the first missing part of a path."""
    while not path.parent.is_dir():
        path = path.parent
    try:
        siblings = [name for name in os.listdir(path.parent) if not name.startswith(".")]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.6)
    return f" (near it: {', '.join(str(path.parent / name) for name in near)})" if near else ""


class EntryState(StrEnum):
    """The state of a checkpoint directory."""

    COMPLETE = "complete"
    """Its manifest is valid, and every file exists with the listed size."""
    DAMAGED = "damaged"
    """It is named like a checkpoint but is not a valid one."""
    SUPERSEDED = "moved aside"
    """Complete, but moved aside for a newer save of its step; used if that save never completed."""
    SAVING = "being saved"
    """A live process is writing it."""
    UNFINISHED = "unfinished"
    """Left by a save that died; the next start removes it."""
    DELETING = "half deleted"
    """Left by a deletion that died; the next start removes it."""


USABLE = (EntryState.COMPLETE, EntryState.SUPERSEDED)


@dataclass(frozen=True)
class Entry:
    """One checkpoint directory."""

    path: Path
    step: int
    state: EntryState
    size_bytes: int
    """Total size of the files that exist."""
    manifest: Manifest | None = None
    """None without a valid manifest."""
    reason: str = ""
    """Why it is damaged."""

    @property
    def info(self) -> CheckpointInfo | None:
        """The entry as a `CheckpointInfo`; None unless it is usable."""
        if self.manifest is None or self.state not in USABLE:
            return None
        return CheckpointInfo(self.path, self.step, self.manifest)


def inventory(root: Path) -> list[Entry]:
    """All checkpoint directories in `root`, newest step first; empty if `root` is missing. Does not hash contents.

    Raises:
        CheckpointError: if the directory cannot be listed.
    """
    return [_entry(directory, step, kind) for step, kind, directory in named_dirs(root)]


def left_branches(root: Path) -> dict[str, list[int]]:
    """Steps of the checkpoints of abandoned branches, by the branch's directory relative to `root`."""
    branches = {
        f"{ASIDE}/{branch.name}": sorted(step for step, _, _ in named_dirs(branch)) for branch in _dirs_in(root / ASIDE)
    }
    return {name: steps for name, steps in sorted(branches.items()) if steps}


def mark_resumable(entries: Iterable[Entry]) -> tuple[list[Entry], Entry | None]:
    """Verify the newest usable entry by hash, falling back as a resume does; entries that fail become damaged.

    Returns:
        The entries, in their order, and the one that a resume would use.
    """
    taken: Entry | None = None
    marked = []
    for entry in entries:
        if taken is None and entry.state in USABLE:
            try:
                verify_shown(entry.path)
            except CheckpointError as error:
                entry = replace(entry, state=EntryState.DAMAGED, reason=str(error))
            else:
                taken = entry
        marked.append(entry)
    return marked, taken


def damage(directory: Path, progress: Progress | None = None) -> list[str]:
    """Everything wrong with a checkpoint, file by file; empty if it passes verification."""
    match = _match(directory)
    try:
        manifest = read_manifest(directory) if match is None else _manifest_of_step(directory, int(match["step"]))
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, digest in manifest.files.items():
        try:
            check_file(directory, name, digest, progress)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def unlisted_files(directory: Path, manifest: Manifest) -> list[str]:
    """Files in a checkpoint that its manifest does not list; nothing reads them. Looks at `MAX_ENTRIES` at most."""
    there = sorted(name for name, _ in islice(_files_below(directory), MAX_ENTRIES))
    return [name for name in there if name != MANIFEST and name not in manifest.files]


def _entry(path: Path, step: int, kind: str) -> Entry:
    size = _size(path)
    if kind == TEMPORARY:
        is_live = is_held(path.with_name(f"{path.name}.lock"))
        return Entry(path, step, EntryState.SAVING if is_live else EntryState.UNFINISHED, size)
    if kind.startswith(TRASH):
        return Entry(path, step, EntryState.DELETING, size)
    manifest = None
    try:
        manifest = _manifest_of_step(path, step)
        for name, digest in manifest.files.items():
            check_file(path, name, digest, hashed=False)
    except CheckpointError as error:
        return Entry(path, step, EntryState.DAMAGED, size, manifest, str(error))
    return Entry(path, step, EntryState.SUPERSEDED if kind else EntryState.COMPLETE, size, manifest)


def _match(path: Path) -> re.Match[str] | None:
    """The parsed name if Onstep made it: every kind except a checkpoint itself has a unique suffix."""
    match = _NAME.fullmatch(path.name)
    return match if match is not None and bool(match["kind"]) == bool(match["unique"]) else None


def _size(directory: Path) -> int:
    """Total bytes of the files below a directory; a concurrent save may remove some in the meantime."""
    return sum(size for _, size in islice(_files_below(directory), MAX_ENTRIES))


def _files_below(directory: Path) -> Iterator[tuple[str, int]]:
    """Name relative to the directory and size of each file below it; does not follow links."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        try:
            with os.scandir(directory / prefix) as entries:
                for entry in entries:
                    name = f"{prefix}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{name}/")
                    else:
                        with suppress(FileNotFoundError):
                            yield name, entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue  # it was removed in the meantime, or cannot be read
