"""Which checkpoints there are, which of them are as they were written, and folders that other trainers wrote."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from onstep.checkpoint.manifest import MANIFEST, Manifest, read_manifest, verify
from onstep.checkpoint.transaction import SUPERSEDED
from onstep.config.part import listed
from onstep.errors import CheckpointError

BAR_BYTES = 1024**3
"""A checkpoint of fewer bytes is verified before anybody would have read a bar."""


def verify_shown(folder: Path, bar_bytes: int = BAR_BYTES) -> Manifest:
    """`verify` with a progress bar, if the checkpoint has at least `bar_bytes`; for one rank.

    Raises:
        CheckpointError: naming the first file that is missing or not as it was written.
    """
    total = read_manifest(folder).size_bytes
    with tqdm(
        total=total, desc=f"verifying {folder.name}", unit="B", unit_scale=True, disable=total < bar_bytes
    ) as bar:

        def show(count: int) -> None:
            bar.update(count)

        return verify(folder, progress=show)


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
    return f"{folder} is no checkpoint of Onstep but a folder in Hugging Face's form ({shown}). {_way(folder)}"


def _is_known(name: str) -> bool:
    patterns = (_SAFE_WEIGHTS, _PICKLED_WEIGHTS, _PICKLED_STATE)
    return name == _TRAINER_STATE or any(pattern.fullmatch(name) for pattern in patterns)


def _way(folder: Path) -> str:
    """What to do with the files that are there."""
    names = os.listdir(folder)
    is_pickled = any(_PICKLED_WEIGHTS.fullmatch(name) or _PICKLED_STATE.fullmatch(name) for name in names)
    parts = ["Its pickled files are not read: reading a pickle can run any code."] if is_pickled else []
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
    has_safe = any(_SAFE_WEIGHTS.fullmatch(name) for name in names)
    if not has_safe and any(_PICKLED_WEIGHTS.fullmatch(name) for name in names):
        parts.append(f"Where you trust it, convert it once: {load}.save_pretrained('NEW_FOLDER') writes safetensors.")
        load, has_safe = "AutoModelForCausalLM.from_pretrained('NEW_FOLDER')", True
    if has_safe:
        parts.append(f"To start a new run from the weights, load them with transformers, {load}, and pass the model.")
    else:
        parts.append("It holds no weights that could be used; give a checkpoint of Onstep.")
    return " ".join(parts)


logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,18})")
_MOVED_ASIDE = re.compile(re.escape(SUPERSEDED) + r"checkpoint-(0|[1-9][0-9]{0,18})-[0-9a-f]{8}")


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


def _candidates(root: Path) -> Iterator[tuple[int, Path]]:
    """Folders named like a checkpoint, newest step first; one moved aside comes after the one that took its place."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed ({error.strerror}); see to its permissions.") from error
    matches = [(_CHECKPOINT.fullmatch(name) or _MOVED_ASIDE.fullmatch(name), name) for name in names]
    found = [(int(match[1]), name) for match, name in matches if match is not None]
    for step, name in sorted(found, key=lambda item: (-item[0], item[1].startswith("."), item[1])):
        yield step, root / name


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
