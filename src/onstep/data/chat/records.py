"""Reads conversations from files and datasets and validates them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from onstep.data.chat.forms import (
    OF_PROMPTS,
    ChatForm,
    Message,
    recognised,
    recognised_columns,
    text_of,
    turn,
    with_role,
)
from onstep.data.corpus.build_cache import Source
from onstep.data.corpus.documents import MAX_RECORD_BYTES, Document, add_file, first_keys, read_record
from onstep.data.corpus.hf_datasets import fingerprint_of, rows_of
from onstep.data.corpus.reading_bar import reading_bar
from onstep.errors import DataError
from onstep.files.bounded_reading import brief, read_lines

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class ChatKeys:
    """The keys under which a record holds its conversation: a list of messages, or a prompt and its answer.

    With the default keys, records of the other `FORMS` are recognised, too.
    """

    messages: str = "messages"
    """The field with a list of messages."""
    prompt: str = "prompt"
    """The field with the prompt."""
    response: str = "response"
    """The field with the response."""

    def read(self, record: Mapping[str, Any], place: str) -> list[Message]:
        """The messages of a record.

        Args:
            record: one record of a file.

        Raises:
            DataError: with `place`, for a record of no known form, for malformed messages or for invalid text.
        """
        form = self.form_of(record)
        if form is None:
            raise DataError(
                f"{place} has neither {self.messages!r} nor both {self.prompt!r} and {self.response!r} (its keys: "
                f"{first_keys(record)}); set dataset.messages_key, or dataset.prompt_key and dataset.response_key"
            )
        is_list = form.required == (self.messages,)
        where = f"{place}: {self.messages!r}" if is_list else f"{place}: {form.name}"
        messages = _checked(form.read(record, place), where)
        _check_text(messages, place)
        return messages

    def form_of(self, record: Mapping[str, Any]) -> ChatForm | None:
        """The form of a record; None if it has none.

        Args:
            record: one record of a file.
        """
        for form in self._own_forms:
            if all(record.get(key) is not None for key in form.required):
                return form
        return recognised(record) if self == ChatKeys() else None

    def columns(self, names: Sequence[str]) -> tuple[str, ...]:
        """The columns to read of a dataset with these.

        Args:
            names: the columns of a data set.
        """
        own = (self.messages, self.prompt, self.response)
        if any(set(form.required) <= set(names) for form in self._own_forms) or self != ChatKeys():
            return own
        form = recognised_columns(names)
        return own if form is None else form.keys

    @property
    def _own_forms(self) -> tuple[ChatForm, ChatForm]:
        return (
            ChatForm("messages", (self.messages,), (), lambda record, place: record[self.messages]),
            ChatForm("prompt and response", (self.prompt, self.response), (), self._pair),
        )

    def _pair(self, record: Mapping[str, Any], place: str) -> list[Message]:
        return turn(text_of(record, self.prompt, place), text_of(record, self.response, place))


@dataclass
class ChatNotes:
    """What a source of conversations holds, found while it is read; kept with its tokens, to be said at every start."""

    forms: dict[str, int] = field(default_factory=dict)
    """Number of conversations of each form."""
    unread: list[str] = field(default_factory=list)
    """Keys that look like parts of a prompt and are not read."""

    def add(self, record: Mapping[str, Any], form: ChatForm | None) -> None:
        """Note a record of a form."""
        if form is None:
            return
        self.forms[form.sentence] = self.forms.get(form.sentence, 0) + 1
        for key in OF_PROMPTS.difference(form.keys, self.unread):
            if record.get(key):
                self.unread.append(key)

    def say(self, name: str) -> None:
        """Say in one line which forms `name` has, and warn of what is not read."""
        counted = (f"{form} ({count:,})" if len(self.forms) > 1 else form for form, count in self.forms.items())
        if self.forms:
            _LOGGER.info("conversations of %s are read as %s", name, "; ".join(counted))
        warn_of_unread(self.unread, name)


class ChatSource(Source, Protocol):
    """A source of conversations in a fixed order."""

    @property
    def notes(self) -> ChatNotes:
        """What was found when the conversations were last read to the end."""

    def conversations(self, label: str | None) -> Iterator[tuple[list[Message], str]]:
        """The messages of each conversation and its place; `label` names the progress bar, None shows none."""


_PROMPT_ROLES = ("system", "developer", "user", "tool")
"""Roles of messages that are not trained on, as a `weight` of 0 asks."""


def warn_of_unread(keys: Iterable[str], name: str) -> None:
    """Warn of keys that look like parts of a prompt, and are not read."""
    unread = sorted(OF_PROMPTS.intersection(keys))
    if unread:
        _LOGGER.warning(
            "%s has %s beside the messages, which is not read; put it into a message of role 'system' or 'user'",
            name,
            " and ".join(map(repr, unread)),
        )


class ChatFiles:
    """The conversations of JSONL files, one record per line.

    Args:
        files: the paths of the JSON-lines files.
        keys: the names of the fields that have the conversation.
    """

    def __init__(self, files: Sequence[Path], keys: ChatKeys) -> None:
        self.name = ", ".join(map(str, files[:3]))
        """Names of the first files."""
        self._files = files
        self._keys = keys
        self.notes = ChatNotes()

    def add_to(self, digest: Any) -> None:
        """Add the keys and the content of each file.

        Args:
            digest: a `hashlib` object, updated with what identifies the data.
        """
        digest.update(repr(self._keys).encode())
        for path in self._files:
            add_file(digest, path, "chat")

    def conversations(self, label: str | None) -> Iterator[tuple[list[Message], str]]:
        """One conversation per non-empty line.

        Args:
            label: the name of the data on the progress bar.
        """
        total = sum(path.stat().st_size for path in self._files)
        notes = ChatNotes()
        with reading_bar(label, total, "B") as bar:
            for path in self._files:
                with path.open("rb") as lines:
                    for number, line in read_lines(lines, MAX_RECORD_BYTES):
                        bar.update(len(line))
                        if line.strip():
                            place = f"{path}:{number}"
                            record = read_record(line, place)
                            yield self._keys.read(record, place), place
                            notes.add(record, self._keys.form_of(record))
        self.notes = notes


class ChatRows:
    """The conversations of a dataset of the `datasets` library, one per row.

    Args:
        dataset: a data set of `datasets`, or any sequence of dictionaries.
        keys: the names of the fields that have the conversation.
        name: its name in messages.
    """

    def __init__(self, dataset: Any, keys: ChatKeys, name: str) -> None:
        self.name = name
        self._dataset = dataset
        self._keys = keys
        self.notes = ChatNotes()

    def add_to(self, digest: Any) -> None:
        """Add the keys and the library's fingerprint of the dataset.

        Args:
            digest: a `hashlib` object, updated with what identifies the data.
        """
        digest.update(f"{self._keys!r}\0rows\0{fingerprint_of(self._dataset)}".encode())

    def conversations(self, label: str | None) -> Iterator[tuple[list[Message], str]]:
        """One conversation per row.

        Args:
            label: the name of the data on the progress bar.
        """
        notes = ChatNotes()
        for row, number in rows_of(self._dataset, self.name, label):
            place = f"{self.name}:{number}"
            yield self._keys.read(row, place), place
            notes.add(row, self._keys.form_of(row))
        self.notes = notes


class ChatTexts:
    """The contents of all messages as documents for training a tokenizer."""

    def __init__(self, source: ChatSource) -> None:
        self._source = source
        self.name = source.name

    def add_to(self, digest: Any) -> None:
        """Add what the conversations depend on."""
        digest.update(b"contents")
        self._source.add_to(digest)

    def documents(self, label: str | None) -> Iterator[Document]:
        """One document per message with text."""
        for messages, place in self._source.conversations(label):
            for message in messages:
                content = message.get("content")
                if isinstance(content, str) and content:
                    yield Document(content.encode("utf-8", "surrogatepass"), Path(place))


def _checked(messages: Any, place: str) -> list[Message]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise DataError(f"{place} must be a list of messages, got {brief(messages, 80)}")
    messages = [with_role(message, place) for message in messages]
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{place} must contain messages with 'role' and 'content', got {brief(message, 80)}")
        untrained = message["role"] in _PROMPT_ROLES and message.get("weight") == 0
        if message.get("weight") is not None and message["weight"] != 1 and not untrained:
            raise DataError(
                f"{place}: a message has weight={brief(message['weight'], 80)}, but answers are all trained on alike; "
                "leave the weight out, or such answers"
            )
    # A column of the `datasets` library has every key for every message, with None for those that were not given.
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _check_text(value: Any, place: str) -> None:
    """Refuse unpaired surrogates: JSON allows them, but neither tokenizers nor UTF-8 files accept them."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            around = value[max(error.start - 10, 0) : error.start + 10]
            raise DataError(
                f"{place}: {brief(around, 80)} contains an unpaired surrogate ({value[error.start]!r}); fix or remove "
                "this record"
            ) from error
    elif isinstance(value, Mapping):
        _check_text(list(value.values()), place)
    elif isinstance(value, (list, tuple)):
        for each in value:
            _check_text(each, place)
