"""The forms in which records hold conversations, recognised by their keys: messages, ShareGPT, Alpaca and pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onstep.errors import DataError
from onstep.files.bounded_reading import brief

Message = dict[str, Any]
"""`role`, `content`, and anything else that the chat template of a tokenizer reads."""

OF_PROMPTS = frozenset(
    {"system", "system_prompt", "input", "context", "history", "instruction", "tools", "functions", "documents"}
)
"""Keys of records that others render into prompts."""

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""Roles by who speaks in ShareGPT's form (`from`)."""


@dataclass(frozen=True)
class ChatForm:
    """One form of records."""

    name: str
    required: tuple[str, ...]
    """The keys by which it is recognised: all of them have a value."""
    optional: tuple[str, ...]
    """Further keys that it reads."""
    read: Callable[[Mapping[str, Any], str], list[Any]]
    """The messages of a record at a place, not checked yet."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it reads."""
        return (*self.required, *self.optional)

    @property
    def sentence(self) -> str:
        """The form with its keys, for a line."""
        optional = f" (with {_and(self.optional)})" if self.optional else ""
        return f"{self.name}: {_and(self.required)}{optional}"


def with_role(message: Any, place: str) -> Any:
    """A message of ShareGPT's form, `from` and `value`, with `role` and `content`; any other as it is.

    Raises:
        DataError: with `place`, for a speaker that no role corresponds to.
    """
    if not isinstance(message, Mapping) or message.get("from") is None or message.get("role") is not None:
        return message
    speaker = message["from"]
    role = _ROLES.get(speaker.lower()) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(
            f"{place}: a message is from {brief(speaker, 80)}, which corresponds to no role; write human, gpt, system "
            "or tool"
        )
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": role, "content": message.get("value"), **rest}


def text_of(record: Mapping[str, Any], key: str, place: str) -> str:
    """The text under a key of a record.

    Raises:
        DataError: with `place`, for anything else.
    """
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key!r} must be a string, got {type(value).__name__}")
    return value


def turn(prompt: str, answer: str) -> list[Message]:
    """A prompt and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _system(record: Mapping[str, Any], place: str) -> list[Message]:
    return [{"role": "system", "content": text_of(record, "system", place)}] if record.get("system") else []


def _sharegpt(record: Mapping[str, Any], place: str) -> list[Any]:
    messages = record["conversations"]
    if not isinstance(messages, (list, tuple)):
        raise DataError(f"{place}: 'conversations' must be a list of messages, got {brief(messages, 80)}")
    return [*_system(record, place), *messages]


def _alpaca(record: Mapping[str, Any], place: str) -> list[Any]:
    messages = _system(record, place)
    history = record.get("history") or ()
    for pair in history if isinstance(history, (list, tuple)) else (history,):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise DataError(f"{place}: 'history' must be a list of pairs of prompt and answer, got {brief(pair, 80)}")
        messages += turn(*pair)
    parts = [text_of(record, key, place) for key in ("instruction", "input") if record.get(key)]
    return [*messages, *turn("\n".join(parts), text_of(record, "output", place))]


def _completion(record: Mapping[str, Any], place: str) -> list[Any]:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple)):
        return [*prompt, *completion]
    return turn(text_of(record, "prompt", place), text_of(record, "completion", place))


FORMS = (
    ChatForm("ShareGPT's conversations", ("conversations",), ("system",), _sharegpt),
    ChatForm("prompt and completion", ("prompt", "completion"), (), _completion),
    ChatForm("Alpaca's instructions", ("instruction", "output"), ("input", "system", "history"), _alpaca),
)
"""Forms beside those of `dataset.messages_key`, `prompt_key` and `response_key`, in the order of their recognition."""


def recognised(record: Mapping[str, Any]) -> ChatForm | None:
    """The form of a record; None if it has another."""
    return next((form for form in FORMS if all(record.get(key) is not None for key in form.required)), None)


def recognised_columns(columns: Sequence[str]) -> ChatForm | None:
    """The form of a dataset with these columns; None if it has another."""
    return next((form for form in FORMS if set(form.required) <= set(columns)), None)


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(map(repr, names[:-1])), repr(names[-1]))))
