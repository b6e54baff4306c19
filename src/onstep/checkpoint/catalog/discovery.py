"""What lies in a folder of checkpoints: which are as they were written, which are not, and what others have left."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from tqdm import tqdm

from onstep.checkpoint.storage.manifest import MANIFEST, Manifest, Progress, check_file, read_manifest, verify
from onstep.checkpoint.storage.store import TEMPORARY, TRASH
from onstep.checkpoint.storage.transaction import SUPERSEDED, is_held
from onstep.config.part import listed
from onstep.errors import CheckpointError

logger = logging.getLogger(__name__)

BAR_BYTES = 1024**3
"""A checkpoint of fewer bytes is verified before anybody would have read a bar."""


def verify_shown(folder: Path, bar_bytes: int = BAR_BYTES) -> Manifest:
    """`verify` with a progress bar, if the checkpoint has at least `bar_bytes`; for one rank.

    Raises:
        CheckpointError: naming the first file that is missing or not as it was written.
    """
    total = read_manifest(folder).size_bytes
    label = f"verifying {folder.name}"
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=total < bar_bytes) as bar:
        return verify(folder, progress=bar.update)


_SAFE_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
_PICKLED_STATE = re.compile(r"(optimizer|scheduler|scaler|training_args|rng_state(_\d+)?)\.(pt|pth|bin)")
_TRAINER_STATE = "trainer_state.json"
NAMES_SHOWN = 4
"""Names that the message lists; the rest is counted."""


def describe_foreign(folder: Path) -> str | None:
    """What a Hugging Face folder is and how its weights can be used; None for any other folder.

    A folder counts as one if it has weights under the names of `save_pretrained`, or the state that its trainer saves.
    """
    try:
        names = sorted(entry for entry in os.listdir(folder) if _is_known(entry))
    except OSError:
        return None
    if not names:
        return None
    shown = listed(names, NAMES_SHOWN)
    return f"{folder} is no checkpoint of Onstep but a folder in Hugging Face's form ({shown}). {_way(folder, names)}"


def _is_known(name: str) -> bool:
    patterns = (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _PICKLED_STATE)
    return name == _TRAINER_STATE or any(pattern.fullmatch(name) for pattern in patterns)


def _way(folder: Path, names: list[str]) -> str:
    """What to do with the files that are there."""
    has_safe, has_pickled, has_state = (
        any(map(pattern.fullmatch, names)) for pattern in (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _PICKLED_STATE)
    )
    parts = ["Its pickled files are not read: reading a pickle can run any code."] if has_pickled or has_state else []
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    if has_pickled and not has_safe:
        parts.append(f"Where you trust it, convert it once: {load}.save_pretrained('NEW_FOLDER') writes safetensors.")
        load, has_safe = "AutoModelForCausalLM.from_pretrained('NEW_FOLDER')", True
    if has_safe:
        parts.append(f"To start a new run from the weights, load them with transformers, {load}, and pass the model.")
    else:
        parts.append("It holds no weights that could be used; give a checkpoint of Onstep.")
    return " ".join(parts)


ASIDE = "aside"
"""Folder, among the checkpoints, of those that belong to branches the run has left: `aside/branch-<n>/`."""
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
    """All checkpoints in `root` with a valid manifest, newest step first; their files are not looked at.

    Raises:
        CheckpointError: when the folder cannot be listed; a missing one has no checkpoints.
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
    """The newest checkpoint whose every file is as its manifest says, or None.

    Args:
        root: the folder of the checkpoints; it may be missing.
        max_step: look at checkpoints up to this step only.
        report: told of each newer one that is refused, and why.

    Raises:
        CheckpointError: when the folder cannot be listed.
    """
    candidates = [found for found in _candidates(root) if max_step is None or found[0] <= max_step]
    for number, (step, path) in enumerate(candidates, start=1):
        try:
            return _verified(path, step)
        except CheckpointError as error:
            then = "falling back to the one before" if number < len(candidates) else "and there is none before it"
            report(f"Checkpoint {path.name} is refused, {then}: {error}")
    return None


def resolve(path: str | Path, step: int | None = None) -> CheckpointInfo:
    """The verified checkpoint that a user names: its own folder, or a folder of checkpoints, or a run's folder.

    Args:
        path: for a folder of checkpoints, the newest verified one is taken.
        step: take the checkpoint of this step and no other.

    Raises:
        CheckpointError: when there is none; a mistyped path is answered with the names nearby, the folder of another
            trainer with what can be done with it.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist{_nearby(path)}; give a checkpoint or a folder of checkpoints.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder of a checkpoint or of checkpoints.")
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
        why = refused or [f"it has no folder checkpoint-<step>{_nearby(root / 'checkpoint-0')}"]
        raise CheckpointError(f"{root} holds no verified checkpoint: {_sentences(why)}")
    for line in refused:
        logger.warning(line)
    return info


def _step_at(root: Path, step: int) -> CheckpointInfo:
    paths = [path for found, path in _candidates(root) if found == step]
    if not paths:
        steps = ", ".join(str(info.step) for info in checkpoints(root)) or "none"
        raise CheckpointError(f"{root} holds no checkpoint of step {step}; it has those of steps: {steps}.")
    refused: list[str] = []
    for path in paths:
        try:
            return _verified(path, step)
        except CheckpointError as error:
            refused.append(f"Checkpoint {path.name} is refused: {error}")
    raise CheckpointError(_sentences(refused))


def _verified(path: Path, step: int) -> CheckpointInfo:
    if not os.path.lexists(path / MANIFEST) and (foreign := describe_foreign(path)) is not None:
        raise CheckpointError(foreign)
    _manifest_of_step(path, step)  # cheap, and before any file is hashed
    return CheckpointInfo(path, step, verify_shown(path))


def _manifest_of_step(path: Path, step: int) -> Manifest:
    manifest = read_manifest(path)
    if manifest.step != step:
        raise CheckpointError(f"{path} has the manifest of step {manifest.step}; the folder was renamed.")
    return manifest


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """Folders named like a checkpoint, newest step first; one moved aside comes after the one that took its place."""
    return [(step, folder) for step, kind, folder in named_folders(root) if kind in ("", SUPERSEDED)]


def named_folders(root: Path) -> list[tuple[int, str, Path]]:
    """The folders in `root` under names of ours, each with its step and the prefix that says what it is, newest first.

    Raises:
        CheckpointError: when `root` cannot be listed; a missing one has none.
    """
    matches = [(_match(folder), folder) for folder in _folders_in(root)]
    found = [(int(match["step"]), match["kind"], folder) for match, folder in matches if match is not None]
    return sorted(found, key=lambda each: (-each[0], each[1] != "", each[2].name))


def _folders_in(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed ({error.strerror}); see to its permissions.") from error


def _sentences(texts: list[str]) -> str:
    """The texts in one line, each with one full stop at its end."""
    return " ".join(f"{text.rstrip('.')}." for text in texts)


def _nearby(path: Path) -> str:
    """A hint of names like the last existing part of a path."""
    while not path.parent.is_dir():
        path = path.parent
    try:
        siblings = [name for name in os.listdir(path.parent) if not name.startswith(".")]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.6)
    return f" (near it: {', '.join(str(path.parent / name) for name in near)})" if near else ""


class EntryState(StrEnum):
    """What a folder is."""

    COMPLETE = "complete"
    """Its manifest is valid, and every file is there with its size."""
    DAMAGED = "damaged"
    """It has the name of a checkpoint, but is none."""
    SUPERSEDED = "moved aside"
    """Whole, and making way for a newer save of its step; used if that never came."""
    SAVING = "being saved"
    """A live process writes it."""
    UNFINISHED = "unfinished"
    """Left by a save that died; the next start removes it."""
    DELETING = "half deleted"
    """Left by a deletion that died; the next start removes it."""


USABLE = (EntryState.COMPLETE, EntryState.SUPERSEDED)


@dataclass(frozen=True)
class Entry:
    """One folder."""

    path: Path
    step: int
    state: EntryState
    size_bytes: int
    """Of the files that are there."""
    manifest: Manifest | None = None
    """None where there is no valid one."""
    reason: str = ""
    """Why it is damaged."""

    @property
    def info(self) -> CheckpointInfo | None:
        """As the rest of the package knows checkpoints; None unless it is usable."""
        if self.manifest is None or self.state not in USABLE:
            return None
        return CheckpointInfo(self.path, self.step, self.manifest)


def inventory(root: Path) -> list[Entry]:
    """What lies in `root`, newest step first; of a missing folder nothing. Contents are not hashed.

    Raises:
        CheckpointError: when the folder cannot be listed.
    """
    return [_entry(folder, step, kind) for step, kind, folder in named_folders(root)]


def left_branches(root: Path) -> dict[str, list[int]]:
    """Steps of the checkpoints of branches that the run has left, by the branch's folder in `root`."""
    branches = {
        f"{ASIDE}/{branch.name}": sorted(step for step, _, _ in named_folders(branch))
        for branch in _folders_in(root / ASIDE)
    }
    return {name: steps for name, steps in sorted(branches.items()) if steps}


def mark_resumable(entries: Iterable[Entry]) -> tuple[list[Entry], Entry | None]:
    """Hash the newest usable entry, falling back as a resume does; those that fail become damaged.

    Returns:
        The entries, in their order, and the one that a resume would take.
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


def damage(folder: Path, progress: Progress | None = None) -> list[str]:
    """What is wrong with a checkpoint, each file on its own; empty if it is verified."""
    match = _match(folder)
    try:
        manifest = read_manifest(folder) if match is None else _manifest_of_step(folder, int(match["step"]))
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, digest in manifest.files.items():
        try:
            check_file(folder, name, digest, progress)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files in a checkpoint that its manifest does not list; nothing reads them."""
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
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
    """What the name says, if it is one of ours: all but a checkpoint itself end in something unique."""
    match = _NAME.fullmatch(path.name)
    return match if match is not None and bool(match["kind"]) == bool(match["unique"]) else None


def _size(folder: Path) -> int:
    """Bytes of the files below a folder; a save in progress may take some away meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total
