"""Decides what of a run is committed to the Hub, and when, and keeps the files as they are until then."""

from __future__ import annotations

import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from onstep.files.links import link, link_tree
from onstep.hub.repository import Repository
from onstep.hub.uploads import Upload, Uploads

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

logger = logging.getLogger(__name__)

STRATEGIES = ("end", "every_save", "checkpoint", "all_checkpoints")
"""When the Hub gets what: the final weights only; those of each checkpoint, too; also the newest whole checkpoint, as
`last-checkpoint`; or every whole checkpoint, under its own name."""
LAST_CHECKPOINT = "last-checkpoint"
_STAGED = ".tmp-hub-"
"""Prefix of a directory with links to the files of an upload; what has this prefix is in no upload and no mirror."""
_WEIGHTS = (
    *("model*.safetensors", "model.safetensors.index.json", "adapter_model*.safetensors", "pytorch_model*"),
    *("adapter_config.json", "config.json", "generation_config.json", "training_args.*"),
)
_BESIDE = (
    *(
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab*",
        "merges.txt",
        "chat_template*",
        "*.model",
    ),
    *("*processor_config.json", "preprocessor_config.json"),
)
_OF_THE_RUN = (
    *(".*", "_*", "checkpoint-*", "checkpoints", "checkpoints-*", "aside", "model-[0-9]*", "latest", "*.lock", "*.tmp"),
    *("run.json", "identity.json", "decisions.jsonl", "record*.jsonl", "record*.index"),
)
"""What a directory holds for Onstep alone; some of it says on which machine, and with which command, a run was made."""


class Pusher:
    """The uploads of one run, on rank 0.

    Args:
        uploads: to the repository.
        strategy: one of `STRATEGIES`.
        always: whether an upload is also queued while the one before is unfinished; else the save is skipped, and its
            files come with a later one.
    """

    def __init__(self, uploads: Uploads, strategy: str, *, always: bool) -> None:
        self.uploads, self._strategy, self._always = uploads, strategy, always
        self._prefix = f"{_STAGED}{secrets.token_hex(4)}-"
        self._lock = Lock()
        """Held while the three below change, which the threads of the uploads do too."""
        self._newest: dict[str, Path] = {}
        """The whole checkpoints that the Hub is to have in the end, by their names there."""
        self._due: dict[str, Path] = {}
        """Those of them that it lacks, and that no upload has."""
        self._under_way: dict[Path, dict[str, Path]] = {}
        """Those of uploads that have not ended, by the directories of their files."""

    def take_over(self, directory: Path, checkpoints: Sequence[Path] = ()) -> None:
        """Delete what the uploads of a process that was killed have left; its checkpoints are then due.

        Args:
            directory: where it had its uploads; this process holds it.
            checkpoints: those that are still there, oldest first.
        """
        left = [path for path in directory.glob(f"{_STAGED}*") if not path.name.startswith(self._prefix)]
        for path in left:
            shutil.rmtree(path, ignore_errors=True)
        for checkpoint in checkpoints if left else ():
            self.note(checkpoint)

    def is_due(self) -> bool:
        """Whether a save that ends now is uploaded."""
        return self._strategy != "end" and (self._always or self.uploads.is_done())

    def note(self, checkpoint: Path) -> None:
        """A checkpoint was committed: if it is uploaded as a whole, it is due until the Hub has it.

        Args:
            checkpoint: its directory.
        """
        name = {"checkpoint": LAST_CHECKPOINT, "all_checkpoints": checkpoint.name}.get(self._strategy)
        if name is not None:
            with self._lock:
                self._newest[name] = self._due[name] = checkpoint

    def push_checkpoint(self, checkpoint: Path, message: str, extra: Iterable[Path] = ()) -> Future[CommitInfo] | None:
        """Upload a committed checkpoint, as the strategy says, in the background; None if it is gone by now.

        Args:
            checkpoint: its directory, which may be deleted as soon as this returns.
            message: of the commit.
            extra: further files, which are copied and committed beside the weights.
        """
        place = self._stage(checkpoint.parent)
        try:
            if not link_tree(checkpoint, place / "newest"):
                shutil.rmtree(place)
                return None
            files = {path.name: path for path in weights_in(place / "newest")}
            for path in extra:
                files[path.name] = Path(shutil.copy2(path, place / path.name))
            due = self._missing()[1]
            self._add_whole(place, files, due, checkpoint)
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return self._submit(Upload(files, message, place, _cleared(files)), due)

    def push_directory(
        self, directory: Path, message: str, repository: Repository | None = None, *, warns: bool = True
    ) -> Future[CommitInfo]:
        """Upload what a run's directory holds beside its checkpoints: weights and what belongs to them.

        Args:
            directory: the directory; its weights are not written again before the upload has ended.
            message: of the commit.
            repository: elsewhere than the run's.
            warns: see `Uploads.submit`.
        """
        place = self._stage(directory)
        try:
            kept = place / "directory"
            shutil.copytree(directory, kept, ignore=shutil.ignore_patterns(*_OF_THE_RUN), copy_function=_keep)
            files = {path.relative_to(kept).as_posix(): path for path in _files(kept)}
            unsure, due = self._missing()
            self._add_whole(place, files, {**unsure, **due})
        except OSError:
            shutil.rmtree(place, ignore_errors=True)
            raise
        settled = due if repository is None else {}  # elsewhere they are copies
        return self._submit(Upload(files, message, place, _cleared(files), repository), settled, warns=warns)

    def _missing(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Whole checkpoints that uploads which have not ended are to bring, and those that are due, each by name."""
        with self._lock:
            return {name: path for one in self._under_way.values() for name, path in one.items()}, dict(self._due)

    def _add_whole(
        self, place: Path, files: dict[str, Path], whole: Mapping[str, Path], newest: Path | None = None
    ) -> None:
        """Add whole checkpoints that are still there.

        Args:
            place: the directory of the upload.
            files: what it commits, to which they are added.
            whole: the checkpoints, by their names on the Hub.
            newest: the one whose files the upload has already.
        """
        for name, path in whole.items():
            linked = place / ("newest" if path == newest else f"whole-{name}")
            if path == newest or link_tree(path, linked):
                files |= {f"{name}/{one.relative_to(linked).as_posix()}": one for one in _files(linked)}
            elif name in self._due:
                logger.warning("%s was deleted before it was uploaded, as save_total_limit says", path)

    def _submit(self, upload: Upload, included: dict[str, Path], *, warns: bool = True) -> Future[CommitInfo]:
        def settle(done: Future[CommitInfo]) -> None:
            with self._lock:
                lacking = self._under_way.pop(upload.staged)
                if done.exception() is not None:  # a newer one of the same name has taken its place, or it is due again
                    self._due |= {name: path for name, path in lacking.items() if self._newest[name] == path}

        with self._lock:
            self._due = {name: path for name, path in self._due.items() if included.get(name) != path}
            self._under_way[upload.staged] = included
        future = self.uploads.submit(upload, warns=warns)
        future.add_done_callback(settle)
        return future

    def _stage(self, directory: Path) -> Path:
        return Path(tempfile.mkdtemp(prefix=self._prefix, dir=directory))


def weights_in(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint by which other programs load its model: weights, configuration, tokenizer."""
    return sorted({path for name in (*_WEIGHTS, *_BESIDE) for path in checkpoint.glob(name) if path.is_file()})


def _cleared(files: Iterable[str]) -> str | None:
    """The directory in the repository of which older files are deleted."""
    return LAST_CHECKPOINT if any(path.startswith(f"{LAST_CHECKPOINT}/") for path in files) else None


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file())


def _keep(source: str, target: str) -> None:
    """Link weights, which are large, and copy what may be written to meanwhile, such as a log."""
    if source.endswith(".safetensors"):
        link(source, target)
    else:
        shutil.copy2(source, target)
