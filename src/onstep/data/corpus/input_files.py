"""Lists the files that a configuration trains on, with digests of their content, so that a change can be named."""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onstep.config import DatasetConfig, TokenizerConfig
from onstep.data.corpus.documents import FileSource, no_text
from onstep.data.corpus.file_digests import content_digest, sampled_digest
from onstep.data.corpus.hf_datasets import files_of, is_rows
from onstep.data.corpus.hub_names import check_exists
from onstep.data.corpus.indexed_file import paths_of
from onstep.data.corpus.not_text import has_content
from onstep.data.corpus.stream_files import find_stream
from onstep.data.corpus.text_files import default_corpus_files, find_files, find_records, is_jsonl
from onstep.data.corpus.tokenizer_library import FILES
from onstep.errors import DataError

_SAMPLED_BLOCK_BYTES = 256 * 1024
"""Of a file that training does not read from end to end, 64 such blocks are hashed: all of it up to 16 MiB."""


_FIRST_FILES = 1000
"""Of each directory or glob, so many files are looked at before anything else is done."""


@dataclass(frozen=True)
class InputFiles:
    """Files in the order in which they are read."""

    digest: str
    """Of their content and order. Names do not matter, except where training depends on them."""
    files: dict[str, str]
    """A digest of each file, by its name relative to where the files lie, or by its URL."""
    tags: dict[str, str] = field(default_factory=dict)
    """The entity tag of each file that has a URL."""


def dataset_files(config: DatasetConfig) -> InputFiles | None:
    """The files of `dataset.paths`; None if it names only datasets on the Hub, which have no files of their own.

    Text and conversations are hashed in full, as building their tokens does anyway. Of Megatron's files and of those
    that the `datasets` library reads, the size and up to 16 MiB are hashed; of those of a stream, names and sizes.

    Raises:
        DataError: if a file does not exist or cannot be read.
    """
    reads_rows = config.kind == "huggingface" or (config.kind == "chat" and any(map(is_rows, config.paths)))
    if config.kind == "stream":
        return _listed(find_stream(config.paths, subset=config.hf_subset, split=config.hf_split).train)
    if config.kind == "megatron":
        files = [file for path in config.paths for file in paths_of(path)]
        return _sampled(files, config.paths, names_matter=False)
    if reads_rows:
        return _sampled([file for path in config.paths for file in files_of(path)], config.paths, names_matter=True)
    if config.kind == "chat":
        return _whole(find_records(config.paths), config.paths)
    files = find_files(config.paths) if config.paths else default_corpus_files()
    return _whole(files, config.paths or [os.path.commonpath(files)])


def check_first_files(config: DatasetConfig) -> None:
    """Refuse paths that do not exist, and texts and conversations that cannot be trained on, after a quick look.

    Raises:
        DataError: as `find_files` and `check_exists`, and for texts that are all empty.
    """
    if config.kind in ("stream", "huggingface"):
        for path in (*config.paths, *config.stream_validation_paths):
            check_exists(path)
    if config.kind not in ("text", "chat") or not config.paths:
        return
    try:
        files = find_files(config.paths, at_most=_FIRST_FILES)
    except DataError:
        if config.kind == "chat" and any(map(is_rows, config.paths)):  # which the `datasets` library reads
            return
        raise
    if config.kind == "text" and not any(map(has_content, files)):
        files = find_files(config.paths)
        if not any(map(has_content, files)):
            raise DataError(no_text(FileSource(files, config.text_key).name))


def tokenizer_files(config: TokenizerConfig) -> InputFiles | None:
    """The files of `tokenizer.tokenizer_model`; None for a tokenizer without files of its own.

    Raises:
        DataError: if a file cannot be read.
    """
    if config.tokenizer_model is None:
        return None
    path = Path(os.path.expanduser(config.tokenizer_model))
    files = [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
    return _sampled(files, [str(path)], names_matter=True)


def _listed(names: Sequence[str]) -> InputFiles:
    """Files of a stream, of which only names and, of local ones, sizes are known: it may be larger than the disk."""
    local = [Path(name) for name in names if "://" not in name]
    sizes = []
    for file in local:
        try:
            sizes.append(f"{file.stat().st_size} bytes")
        except OSError as error:
            raise _unreadable(file, error) from error
    found = dict(zip(_names(local, list(map(str, local))), sizes, strict=True)) if local else {}
    files = found | {name: "remote" for name in names if "://" in name}
    digest = hashlib.blake2b("\n".join(f"{name}\0{size}" for name, size in files.items()).encode(), digest_size=16)
    return InputFiles(digest.hexdigest(), files)


def _whole(files: Sequence[Path], paths: Sequence[str]) -> InputFiles:
    """Files that are read from end to end, as JSONL or as they are."""
    digests = []
    for file in files:
        try:
            _, content = content_digest(file)
        except OSError as error:
            raise _unreadable(file, error) from error
        digests.append(f"{'jsonl' if is_jsonl(file) else 'text'} {content[:16].hex()}")
    return _input_files(files, digests, paths, names_matter=False)


def _sampled(files: Sequence[Path], paths: Sequence[str], *, names_matter: bool) -> InputFiles | None:
    digests = []
    for file in files:
        try:
            digests.append(sampled_digest(file, _SAMPLED_BLOCK_BYTES))
        except OSError as error:
            raise _unreadable(file, error) from error
    return _input_files(files, digests, paths, names_matter) if files else None


def _input_files(files: Sequence[Path], digests: list[str], paths: Sequence[str], names_matter: bool) -> InputFiles:
    named = list(zip(_names(files, paths), digests, strict=True))
    whole = hashlib.blake2b(digest_size=16)
    for name, digest in named:
        whole.update(f"{name if names_matter else ''}\0{digest}\n".encode())
    return InputFiles(whole.hexdigest(), dict(named))


def _names(files: Iterable[Path], paths: Sequence[str]) -> list[str]:
    """The files' names relative to the directory that everything in `paths` lies in."""
    base = base_of(paths)
    return [os.fsencode(os.path.relpath(file, base)).decode("utf-8", "backslashreplace") for file in files]


def base_of(paths: Sequence[str]) -> str:
    """The directory that everything in `paths` lies in, to which the names of files are relative.

    Args:
        paths: files, directories and globs.
    """
    return os.path.commonpath([os.path.dirname(_without_pattern(path)) for path in paths])


def _without_pattern(path: str) -> str:
    """The absolute path, up to the first part with a wildcard."""
    given = Path(os.path.expanduser(path)).absolute()
    if given.exists():
        return str(given)
    first = next((at for at, part in enumerate(given.parts) if glob.has_magic(part)), len(given.parts))
    return str(Path(*given.parts[:first]))


def _unreadable(file: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {file}: {error.strerror or error}; restore it, or check its permissions")
