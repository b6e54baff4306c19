"""Builds the datasets of a configuration and splits a corpus into disjoint train, validation and test sets."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from onstep.config import DatasetConfig
from onstep.data.chat.dataset import ChatDataset, ChatFile, PackedDataset, build_chat_file
from onstep.data.chat.records import ChatFiles, ChatKeys, ChatRows, ChatSource, ChatTexts, warn_of_unread
from onstep.data.corpus.build_cache import Source
from onstep.data.corpus.documents import DocumentSource, FileSource
from onstep.data.corpus.hf_datasets import Columns, OwnSplits, RowSource, is_rows, load_own_splits
from onstep.data.corpus.indexed_file import IndexedFile
from onstep.data.corpus.text_files import default_corpus_files, find_files, find_records, unread_notes
from onstep.data.corpus.token_file import TokenFile, tokens_of
from onstep.data.corpus.tokenizers import Tokenizer
from onstep.data.streams.building import build_stream
from onstep.data.token_dataset import BlendedDataset, Boundaries, TokenDataset, TokenSource
from onstep.data.urls.local_copy import local_copy
from onstep.errors import DataError

_LOGGER = logging.getLogger(__name__)

SPLIT_NAMES = ("train", "validation", "test")

S = TypeVar("S")
T = TypeVar("T")

Splits = tuple[T, T | None, T | None]
"""Train, validation, test; None for a share of 0."""


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse the shares of train, validation and test from text such as "90,5,5" or "1"; they sum to 1.

    Raises:
        DataError: for anything but one to three numbers >= 0 with a train share > 0.
    """
    remedy = "give the shares of train, validation and test, for example '90,5,5'"
    try:
        shares = [float(part) for part in split.split(",")]
    except (ValueError, AttributeError) as error:
        raise DataError(f"split must be numbers separated by commas, got {split!r}; {remedy}") from error
    if len(shares) > 3:
        raise DataError(f"split must have at most three shares, got {split!r}; {remedy}")
    if not all(math.isfinite(share) and share >= 0 for share in shares) or shares[0] == 0:
        raise DataError(f"the shares of split must be >= 0 and that of train > 0, got {split!r}; {remedy}")
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test


def split_tokens(
    token_file: TokenSource, split: str, seq_length: int, boundaries: Boundaries | None = None
) -> Splits[TokenDataset]:
    """Train, validation and test as contiguous ranges of the file; None for a share of 0.

    No token, including label tokens, is in more than one of them.

    Args:
        token_file: the tokens to split.
        seq_length: tokens of a sample.
        boundaries: where documents begin and end, for position resets and masks; None to let attention cross them.

    Raises:
        DataError: for a bad `split`, or a range too short for one sequence.
    """

    def part(start: int, end: int) -> TokenDataset:
        return TokenDataset(token_file, start, end, seq_length, boundaries)

    return ranges(len(token_file), parse_split(split), part, f"split {split!r} of {len(token_file)} tokens")


def split_documents(
    indexed_file: IndexedFile, split: str, seq_length: int, boundaries: Boundaries | None = None
) -> Splits[TokenDataset]:
    """Train, validation and test as contiguous ranges of whole documents; None for a share of 0.

    Args:
        indexed_file: the documents to split.
        seq_length: tokens of a sample.
        boundaries: where documents begin and end, for position resets and masks; None to let attention cross them.

    Raises:
        DataError: for a bad `split`, or a range too short for one sequence.
    """

    def part(start: int, end: int) -> TokenDataset:
        first, last = indexed_file.document_start(start), indexed_file.document_start(end)
        return TokenDataset(indexed_file, first, last, seq_length, boundaries)

    count = indexed_file.num_documents
    what = f"split {split!r} of {count} documents of {indexed_file.tokens_path}"
    return ranges(count, parse_split(split), part, what)


def ranges(total: int, shares: tuple[float, float, float], part: Callable[[int, int], T], what: str) -> Splits[T]:
    """`part(start, end)` for three contiguous ranges of `total` items; None for a share of 0.

    Raises:
        DataError: whatever `part` raises, prefixed with the name of the split.
    """
    train, valid, _ = shares
    cuts = [0, round(total * train), round(total * (train + valid)), total]
    parts: list[T | None] = []
    for name, share, start, end in zip(SPLIT_NAMES, shares, cuts[:-1], cuts[1:], strict=True):
        try:
            parts.append(part(start, end) if share else None)
        except DataError as error:
            raise DataError(f"{name} share of {what}: {error}") from error
    first, second, third = parts
    assert first is not None
    return first, second, third


def split_without(split: str, *, has_valid: bool, has_test: bool) -> str:
    """The split of a corpus that has its own validation or test set, whose share is added to train."""
    train, valid, test = parse_split(split)
    own = (valid if has_valid else 0.0) + (test if has_test else 0.0)
    shares = (train + own, 0.0 if has_valid else valid, 0.0 if has_test else test)
    return ",".join(f"{100 * share:g}" for share in shares)


@dataclass(frozen=True)
class Job:
    """Everything needed to build the datasets of a configuration."""

    config: DatasetConfig
    tokenizer: Tokenizer
    show_progress: bool
    wait_for_other: bool
    vocab_size: int | None

    @property
    def boundaries(self) -> Boundaries | None:
        """How the ends of documents are treated.

        Raises:
            DataError: if an end token is needed and the tokenizer has none.
        """
        masks, resets = self.config.eod_mask_loss, self.config.reset_attention_mask
        if not (masks or resets):
            return None
        if self.tokenizer.eos_id is None:
            raise DataError(
                "eod_mask_loss and reset_attention_mask require an end token, and the tokenizer has none; "
                "unset them, or use a tokenizer that has one"
            )
        return Boundaries(self.tokenizer.eos_id, masks_loss=masks, resets_attention=resets)

    def tokens_of(self, source: DocumentSource) -> TokenFile:
        """The token file of the documents of `source`."""
        return self._build(tokens_of, source)

    def chats_of(self, source: ChatSource, *, is_said: bool) -> ChatFile:
        """The tokens of the conversations of `source`; with `is_said`, a line says their form."""
        return self._build(partial(build_chat_file, is_said=is_said), source)

    def _build(self, make: Callable[..., T], source: Source) -> T:
        sharing = {"show_progress": self.show_progress, "wait_for_other": self.wait_for_other}
        return make(source, self.tokenizer, self.config.cache_dir, **sharing)

    def warn_of_unread(self, *, only_records: bool = False) -> None:
        """Name what is left out of `dataset.paths`, on one rank."""
        notes = [] if self.wait_for_other else unread_notes(self.config.paths, only_records=only_records)
        if notes:
            _LOGGER.warning("dataset.paths: %s", "; ".join(notes))

    def chat(self, chats: ChatFile, start: int, end: int) -> ChatDataset:
        """The sequences of a range of conversations."""
        kind = PackedDataset if self.config.packing else ChatDataset
        pad_id, warns = self.tokenizer.eos_id or 0, not self.wait_for_other
        return kind(chats, self.config.seq_length, pad_id, start=start, end=end, warns=warns)


def build_datasets(
    config: DatasetConfig,
    tokenizer: Tokenizer,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
    vocab_size: int | None = None,
) -> Splits[Any]:
    """The train, validation and test datasets that `config` describes; None for a share of 0.

    Called by every training process; see `build_token_file` for how they share the work.

    Args:
        vocab_size: the model's, to check ids of `kind=megatron` against; None means the tokenizer's.
        tokenizer: the tokenizer that encodes the texts.
        show_progress: whether a progress bar is shown.
        wait_for_other: whether another process goes first, for some seconds: the one that shows the progress bar.

    Raises:
        DataError: for data or a split that cannot be trained on.
        MissingExtraError: if the library for this kind of data is not installed.
    """
    parse_split(config.split)  # before the corpus is read, which can be slow
    if config.kind not in _BUILDERS:
        raise DataError(f"dataset.kind {config.kind!r} is unknown; choose one of {', '.join(_BUILDERS)}")
    copy = local_copy(config)
    job = Job(copy.config, tokenizer, show_progress, wait_for_other, vocab_size or tokenizer.vocab_size)
    with copy.naming_urls():
        return _BUILDERS[config.kind](job)


def _text_source(config: DatasetConfig) -> FileSource:
    """The text files of a configuration, by default those of Python's standard library."""
    files = find_files(config.paths) if config.paths else default_corpus_files()
    return FileSource(files, config.text_key)


def tokenizer_source(config: DatasetConfig, *, show_progress: bool = False) -> DocumentSource:
    """The documents to train a tokenizer on: all texts, or the training split of a dataset with splits.

    Args:
        config: the configuration of the run.
        show_progress: whether a progress bar is shown.

    Raises:
        DataError: for a kind that holds tokens, not text.
    """
    config = local_copy(config).config
    if config.kind == "text":
        return _text_source(config)
    if config.kind == "huggingface":
        return _texts(_own_splits(config, [config.text_key], show_progress)[0].train, config)
    if config.kind == "chat":
        return ChatTexts(_chat_sources(config, show_progress)[0].train)
    if config.kind == "stream":
        raise DataError("dataset.kind=stream is not read to the end for a tokenizer; set tokenizer_type")
    raise DataError(
        f"dataset.kind={config.kind} holds token ids, on which a tokenizer cannot be trained; set tokenizer_type"
    )


def chat_source(config: DatasetConfig) -> ChatSource:
    """The conversations of a configuration that are split into train, validation and test."""
    return _chat_sources(local_copy(config).config, show_progress=False)[0].train


def _text(job: Job) -> Splits[TokenDataset]:
    boundaries = job.boundaries  # may raise, so evaluate it before the corpus is read
    job.warn_of_unread()
    return split_tokens(job.tokens_of(_text_source(job.config)), job.config.split, job.config.seq_length, boundaries)


def _megatron(job: Job) -> Splits[Any]:
    config, boundaries = job.config, job.boundaries
    files = [IndexedFile(path, job.vocab_size) for path in config.paths]
    if not files:
        raise DataError("dataset.paths is empty; kind=megatron requires the prefixes of .bin and .idx files")
    train, valid, test = zip(
        *(split_documents(file, config.split, config.seq_length, boundaries) for file in files), strict=True
    )
    blend = train[0] if len(files) == 1 else BlendedDataset(train, config.weights)
    return blend, _blend_to_evaluate(job, "validation", valid), _blend_to_evaluate(job, "test", test)


def _blend_to_evaluate(job: Job, name: str, datasets: Sequence[TokenDataset | None]) -> Any:
    """A blend without repeated samples, for evaluation; None for a share of 0."""
    present = [dataset for dataset in datasets if dataset is not None]
    if len(present) < 2:
        return present[0] if present else None
    blend, total = BlendedDataset(present, job.config.weights, repeats=False), sum(map(len, present))
    if len(blend) < total and not job.wait_for_other:
        _LOGGER.info("by dataset.weights, the %s set is a blend of %d of its %d samples", name, len(blend), total)
    return blend


def _huggingface(job: Job) -> Splits[Any]:
    config, boundaries = job.config, job.boundaries
    own, split = _own_splits(config, [config.text_key], job.show_progress)
    tokens = job.tokens_of(_texts(own.train, config))
    splits = split_tokens(tokens, split, config.seq_length, boundaries)

    def all_of(rows: Any) -> TokenDataset:
        return split_tokens(job.tokens_of(_texts(rows, config)), "1", config.seq_length, boundaries)[0]

    return _with_own_sets(splits, own, all_of)


def _chat(job: Job) -> Splits[Any]:
    config = job.config
    own, split = _chat_sources(config, job.show_progress)
    if isinstance(own.train, ChatFiles):
        job.warn_of_unread(only_records=True)
    chats = job.chats_of(own.train, is_said=True)
    what = f"split {split!r} of {len(chats)} conversations"
    splits = ranges(len(chats), parse_split(split), lambda start, end: job.chat(chats, start, end), what)

    def all_of(source: ChatSource) -> ChatDataset:
        own_chats = job.chats_of(source, is_said=False)
        return job.chat(own_chats, 0, len(own_chats))

    return _with_own_sets(splits, own, all_of)


def _stream(job: Job) -> Splits[Any]:
    is_told = not job.wait_for_other
    return build_stream(job.config, job.tokenizer, job.boundaries, parse_split(job.config.split), is_told=is_told)


def _with_own_sets(splits: Splits[T], own: OwnSplits[S], all_of: Callable[[S], T]) -> Splits[T]:
    """The splits, with the data's own evaluation sets, where it has them, in place of shares."""
    train, valid, test = splits
    return train, valid if own.valid is None else all_of(own.valid), test if own.test is None else all_of(own.test)


def _own_splits(config: DatasetConfig, columns: Columns, show_progress: bool) -> tuple[OwnSplits[Any], str]:
    """A dataset's splits, with own evaluation sets only if `split` has a share for them; and how to split the first."""
    own = load_own_splits(
        config.paths, subset=config.hf_subset, split=config.hf_split, columns=columns, show_progress=show_progress
    )
    _, valid, test = parse_split(config.split)
    own = replace(own, valid=own.valid if valid else None, test=own.test if test else None)
    return own, split_without(config.split, has_valid=own.valid is not None, has_test=own.test is not None)


def _texts(rows: Any, config: DatasetConfig) -> RowSource:
    return RowSource(rows, config.text_key, ", ".join(config.paths))


def _chat_sources(config: DatasetConfig, show_progress: bool) -> tuple[OwnSplits[ChatSource], str]:
    """Conversations to train on and those of the data's own validation and test splits; and how to split the first."""
    keys = ChatKeys(config.messages_key, config.prompt_key, config.response_key)
    if not any(is_rows(path) for path in config.paths):
        _check_not_rows(config)
        return OwnSplits(ChatFiles(find_records(config.paths), keys), None, None), config.split
    own, split = _own_splits(config, keys.columns, show_progress)
    name = ", ".join(config.paths)
    if show_progress:
        warn_of_unread(own.dropped, name)
    valid, test = (None if rows is None else ChatRows(rows, keys, name) for rows in (own.valid, own.test))
    return OwnSplits(ChatRows(own.train, keys, name), valid, test), split


def _check_not_rows(config: DatasetConfig) -> None:
    """Refuse keys of the `datasets` library for JSONL files, which are read without it."""
    for name in ("hf_split", "hf_subset"):
        value = config.changed().get(name)
        if value is not None:
            raise DataError(
                f"dataset.{name}={value!r} selects from a dataset with splits, but dataset.paths={config.paths} are "
                "JSONL files, all of which are read; drop it"
            )


_BUILDERS: dict[str, Callable[[Job], Splits[Any]]] = {
    "text": _text,
    "megatron": _megatron,
    "huggingface": _huggingface,
    "chat": _chat,
    "stream": _stream,
}
