"""Compares what a run is trained on with what it was started on: the content of its data and of its tokenizer.

`run.json` and every checkpoint record a digest of each part of the identity. The digests of the single files, by which
a changed one is named, are in `identity.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onstep.config import ConfigContainer, TokenizerConfig
from onstep.config.keys import typed_copy
from onstep.data.corpus.input_files import InputFiles, tokenizer_files
from onstep.data.urls.local_copy import input_files
from onstep.errors import DataError
from onstep.files.bounded_reading import read_json
from onstep.files.durability import replace_durably

IDENTITY_FILE = "identity.json"
"""In a run's directory; for a run without one, beside its checkpoints."""

VALUES = "values-2-"
"""Begins the digest of a part whose files are values. Digests of versions that hashed otherwise are ignored."""
_NAMED_FILES = 5
"""Changed files of one part that a message names."""

_SUBJECTS = {
    "train_data": "training data has",
    "eval_data": "evaluation data has",
    "code": "code of loss, model or data has",
    "weights": "initial weights have",
}
"""Parts of a Trainer's identity, in words."""


@dataclass(frozen=True)
class Identity:
    """The parts of what a run learns from that its configuration only names."""

    parts: Mapping[str, InputFiles] = field(default_factory=dict)
    """By name: `data`, `tokenizer`; of a Trainer `train_data`, `eval_data`, `code`, `weights`, where values stand for
    files. A part without files is absent."""
    problem: str = ""
    """Why the parts could not be determined; the set-up of the run will meet the same obstacle."""

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each part, as `run.json` and checkpoints record it."""
        return {name: part.digest for name, part in self.parts.items()}

    @property
    def read_by_all(self) -> dict[str, str]:
        """The digests that must be the same on all ranks: those of the data and the tokenizer.

        Ranks may differ in an attribute of a dataset that is a number or a name, whose entry begins with a dot, and in
        what its code refers to, such as the rank; the entry of a method ends with parentheses.
        """
        digests = {name: part.digest for name, part in self.parts.items() if name in ("data", "tokenizer")}
        for name in ("train_data", "eval_data"):
            files = self.parts[name].files if name in self.parts else {}
            digests |= {
                f"{name}: {file}": digest for file, digest in files.items() if file[0] != "." and file[-2:] != "()"
            }
        return digests

    def write(self, directory: Path) -> None:
        """Replace `identity.json` atomically."""
        parts = {name: _record_of(part) for name, part in self.parts.items()}
        replace_durably(directory / IDENTITY_FILE, json.dumps({"format": 1, **parts}, indent=1))

    def is_written(self, directory: Path) -> bool:
        """Whether `identity.json` there has the files of this identity."""
        return all(_files_of(name, part.digest, (directory,)) == part.files for name, part in self.parts.items())


def _record_of(part: InputFiles) -> dict[str, object]:
    tags = {"tags": part.tags} if part.tags else {}
    return {"digest": part.digest, "files": part.files, **tags}


Identify = Callable[[ConfigContainer], Identity]


def configured_identity(config: ConfigContainer) -> Identity:
    """The identity of a run whose data is configured. Reads all of its text and conversations."""
    try:
        found = {"data": input_files(config.dataset), "tokenizer": tokenizer_files(config.tokenizer)}
    except (DataError, OSError) as error:
        return Identity(problem=str(error))
    return Identity({name: part for name, part in found.items() if part is not None})


def remembered(identify: Identify) -> Identify:
    """The same function, which looks at the files of a configuration only once."""
    known: list[tuple[ConfigContainer, Identity]] = []

    def identity_of(config: ConfigContainer) -> Identity:
        for before, identity in known:
            if (before.dataset, before.tokenizer) == (config.dataset, config.tokenizer):
                return identity
        known.append((typed_copy(config), identify(config)))
        return known[-1][1]

    return identity_of


@dataclass(frozen=True)
class Comparison:
    """The current identity of a run, and how it differs from the recorded one."""

    current: Identity = field(default_factory=Identity)
    changed: str = ""
    """What has changed, in words; empty for nothing."""
    unknown: str = ""
    """What could not be compared and why, in words; empty for nothing."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell the user where the change does not end the run."""
        changed = f"since this run started, {self.changed}" if self.changed else ""
        return tuple(note for note in (changed, self.unknown) if note)


def compare(recorded: object, current: Identity, *directories: Path, without: Collection[str] = ()) -> Comparison:
    """Compare the digests that `run.json` or a manifest recorded with the current identity.

    Args:
        recorded: as found there; anything but digests by part counts as no record.
        directories: where to look for the `identity.json` that belongs to the record.
        without: parts that do not matter.
    """
    if current.problem:
        return Comparison(current, unknown=f"its data could not be compared with what it trained on: {current.problem}")
    before = _digests(recorded)
    changed = [
        _change(name, current.parts.get(name), _files_of(name, before[name], directories))
        for name in before
        if name not in without and before[name] != current.digests.get(name)
    ]
    missing = [] if before else list(current.parts)  # a part without a record had no files: that it has is configured
    words = " and ".join(subject(name).rpartition(" ")[0] for name in missing)
    unknown = (
        f"this run has no record of its {words} (an earlier version started it), so it could not be "
        f"compared with what it trained on"
    )
    return Comparison(current, "; ".join(changed), unknown if missing else "")


def trains_on_others(recorded: object, current: Mapping[str, str]) -> bool:
    """Whether these digests are of other training data than the recorded ones; False without a record of it."""
    before = _digests(recorded)
    return any(name in before and before[name] != current.get(name) for name in ("data", "train_data"))


def changed_tokenizer(config: TokenizerConfig, recorded: object) -> str:
    """A note for those who use weights with the tokenizer that a run names, if its files are not those of the run.

    Args:
        config: the tokenizer of the run.
        recorded: the digests in its `run.json` or in the checkpoint's manifest.
    """
    try:
        current = tokenizer_files(config)
    except DataError:
        return ""  # opening the tokenizer fails with the same error
    before = _digests(recorded).get("tokenizer")
    if current is None or before in (None, current.digest):
        return ""
    return (
        f"the tokenizer in {config.tokenizer_model} has changed since the weights were trained with it, so its tokens "
        f"may have other meanings now; restore its files"
    )


def _digests(recorded: object) -> dict[str, str]:
    found = recorded if isinstance(recorded, dict) else {}
    return {
        name: digest
        for name, digest in found.items()
        if isinstance(digest, str) and (name not in _SUBJECTS or digest.startswith(VALUES))
    }


def _files_of(name: str, digest: str, directories: tuple[Path, ...]) -> dict[str, str] | None:
    """The files of a part as recorded with this digest; None if no record of them is left."""
    for directory in directories:
        try:
            content = read_json(directory / IDENTITY_FILE)
        except (OSError, DataError):
            continue
        part = content.get(name) if isinstance(content, dict) else None
        if isinstance(part, dict) and part.get("digest") == digest and isinstance(part.get("files"), dict):
            return {str(file): str(one) for file, one in part["files"].items()}
    return None


def _change(name: str, current: InputFiles | None, before: dict[str, str] | None) -> str:
    now: Mapping[str, Any] = {} if current is None else current.files
    if before is None:
        return f"the {subject(name)} changed ({IDENTITY_FILE}, which would tell the files, is missing or damaged)"
    words = [
        *(f"{file} was changed" for file in now if file in before and now[file] != before[file]),
        *(f"{file} was added" for file in now if file not in before),
        *(f"{file} was removed" for file in before if file not in now),
    ]
    if not words:
        return f"the {subject(name)} changed: its files are read in another order"
    more = f", and {len(words) - _NAMED_FILES} more" if len(words) > _NAMED_FILES else ""
    return f"the {subject(name)} changed: {', '.join(words[:_NAMED_FILES])}{more}"


def subject(name: str) -> str:
    """A part of the identity in words, with its verb: "data has"."""
    return _SUBJECTS.get(name, f"{name} has")


def ways_to_continue(policy: str) -> str:
    """What to type to continue although something has changed."""
    note = " `keep` is about values of the configuration and cannot restore files." if policy == "keep" else ""
    return (
        "Restore the files, or continue on them as they are now with --on-config-change apply (in Python: "
        f'checkpoint.on_config_change="apply").{note}'
    )
