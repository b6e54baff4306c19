"""Encodes conversations as token ids and marks which of them belong to the assistant."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from onstep.data.chat.records import Message
from onstep.data.corpus.tokenizers import HuggingFaceTokenizer, Tokenizer
from onstep.errors import DataError

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CONTENT_MARK = "onstep9c1f7e3answer"
"""Placeholder for an answer, used to find where a template puts it."""
_GUARD = "\ue0f8\ue0f9"
"""Private-use characters placed around a special token that is to be read as text."""
_GUARDS = re.compile(_GUARD)

_NOT_PLAIN = ("tool_calls", "function_call", "reasoning_content")
"""Parts of a message that are more than its role and content."""

_Encoded = tuple[list[int], list[tuple[int, int]]]
"""Ids, and the character span (start, end) of each."""


class EncodedChat(NamedTuple):
    """The token ids of a conversation."""

    ids: npt.NDArray[np.int64]
    trained: npt.NDArray[np.bool_]
    """Whether each id belongs to the assistant, end tokens included."""


class ChatTemplate(Protocol):
    """Encodes conversations as token ids."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the ids of some conversation could change."""

    def encode(self, messages: Sequence[Message], place: str) -> EncodedChat:
        """Encode a conversation.

        Raises:
            DataError: with `place`, for messages that the template does not accept.
        """


def template_for(tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a `transformers` tokenizer if it has one, else the plain template.

    Raises:
        DataError: if the tokenizer has no end token to terminate an answer.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer) and getattr(tokenizer.library_tokenizer, "chat_template", None):
        return TokenizerTemplate(tokenizer)
    return PlainTemplate(tokenizer)


class PlainTemplate:
    r"""The template for tokenizers without a chat template: ``<|role|>\ncontent\n`` for each message.

    An answer is ``<|assistant|>\n`` followed by its content and the end token, which are trained on. The text between
    two answers is encoded in one piece, like a prompt that ends with ``<|assistant|>\n``. A special token that appears
    in message content is encoded as text; a role marker that is a special token of the tokenizer is that token.

    Raises:
        DataError: if the tokenizer has no end token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.eos_id is None:
            raise DataError("chats require an end token, and this tokenizer has none; use a tokenizer that has one")
        self._tokenizer = tokenizer
        self._end_id = tokenizer.eos_id
        self._marks: dict[str, list[int] | None] = {}
        self.fingerprint = f"plain 2 {tokenizer.fingerprint} {tokenizer.eos_id}"

    def encode(self, messages: Sequence[Message], place: str) -> EncodedChat:
        """Encode a conversation; text after the last answer is kept, but not trained on."""
        pieces: list[tuple[Any, bool]] = []
        prompt: list[tuple[str, str]] = []
        for message in messages:
            content = message.get("content")
            unread = next((key for key in _NOT_PLAIN if message.get(key)), None)
            if unread is not None:
                raise DataError(
                    f"{place}: a message has {unread!r}, for which the plain template has no form; use a tokenizer "
                    "with a chat template, or write it into the content"
                )
            if not isinstance(content, str):
                raise DataError(f"{place}: 'content' must be a string, got {type(content).__name__}")
            if message["role"] != "assistant":
                prompt.append((f"<|{message['role']}|>", f"\n{content}\n"))
                continue
            pieces.append((self._encode_prompt([*prompt, ("<|assistant|>", "\n")]), False))
            pieces.append(([*self._tokenizer.encode_content(content), self._end_id], True))
            prompt = []
        if prompt:
            pieces.append((self._encode_prompt(prompt), False))
        ids = np.concatenate([np.asarray(piece, dtype=np.int64) for piece, _ in pieces])
        return EncodedChat(ids, np.repeat([trained for _, trained in pieces], [len(piece) for piece, _ in pieces]))

    def _encode_prompt(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """The ids of the role markers, each with the text after it."""
        ids: list[int] = []
        text = ""
        for mark, after in turns:
            special = self._special_mark(mark)
            if special is None:
                text += mark + after
                continue
            ids += [*self._tokenizer.encode_content(text), *special]
            text = after
        return [*ids, *self._tokenizer.encode_content(text)]

    def _special_mark(self, mark: str) -> list[int] | None:
        """The ids of a role marker that is a special token; None if it is plain text."""
        if mark not in self._marks:
            ids = self._tokenizer.encode_text(mark)
            self._marks[mark] = None if ids == self._tokenizer.encode_content(mark) else ids
        return self._marks[mark]


class TokenizerTemplate:
    """The chat template of a `transformers` tokenizer.

    If the template marks what the assistant generates (`{% generation %}`), that is trained on. Otherwise an answer
    extends from the end of its generation prompt (added by `add_generation_prompt`) to the end of its content, plus the
    special token that follows. It is located by rendering the conversation with the content replaced; a template in
    which that changes anything else is refused.

    A special token in message content is encoded as text; those of the template are tokens.

    Raises:
        DataError: for a tokenizer that does not provide the character offsets of its tokens.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self._tokenizer = tokenizer.library_tokenizer
        template = self._tokenizer.get_chat_template()
        self._has_marks = _GENERATION_MARK.search(template) is not None
        names = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                f"{type(self._tokenizer).__name__} does not provide character offsets, which are required to locate "
                "the answers; use a directory with a tokenizer.json"
            )
        digest = hashlib.blake2b(template.encode(), digest_size=16).hexdigest()
        self.fingerprint = f"template 2 {tokenizer.fingerprint} {digest}"

    def encode(self, messages: Sequence[Message], place: str) -> EncodedChat:
        """Encode a conversation."""
        text = self._render(messages, place)
        encoded = self._encode(text, parses_special=True)
        if any(self._special.search(str(value)) for message in messages for value in message.values()):
            encoded = self._encode_with_text(messages, text, encoded, place)
        ids, offsets = np.asarray(encoded[0], dtype=np.int64), encoded[1]
        if self._has_marks:
            return EncodedChat(ids, self._marked(messages, ids, place))
        trained = np.zeros(ids.size, dtype=np.bool_)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                start, end = self._answer(messages, number, text, place)
                trained[self._tokens_within(text, ids, offsets, start, end)] = True
        return EncodedChat(ids, trained)

    def _encode(self, text: str, parses_special: bool, start: int = 0) -> _Encoded:
        """Ids and their character spans; `text` begins at character `start`."""
        encoding = self._tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=not parses_special,
            return_offsets_mapping=True,
            verbose=False,
        )
        return list(encoding["input_ids"]), [(start + a, start + b) for a, b in encoding["offset_mapping"]]

    def _encode_with_text(self, messages: Sequence[Message], text: str, whole: _Encoded, place: str) -> _Encoded:
        """The ids, with special tokens in the messages encoded as text and those of the template as tokens."""
        guarded = [{key: self._guarded(value) for key, value in message.items()} for message in messages]
        parts = _GUARDS.split(self._render(guarded, place))
        ends = np.cumsum([len(part) for part in parts]).tolist()
        texts = [(end - len(part), end) for part, end in zip(parts[1::2], ends[1::2], strict=True)]
        is_deeper = any(not isinstance(value, str) for message in messages for value in message.values())
        if self._has_marks or is_deeper or "".join(parts) != text or self._encode_parts(text, []) != whole:
            found = self._special.findall(str(messages))[0]
            raise DataError(
                f"{place}: a message contains {found!r}, a special token of the tokenizer that cannot be distinguished "
                "from those of its chat template; remove it"
            )
        return self._encode_parts(text, texts)

    def _encode_parts(self, text: str, texts: Sequence[tuple[int, int]]) -> _Encoded:
        """The ids of `text`, split at its special tokens except those within the spans `texts`."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        at = 0
        for found in [*self._special.finditer(text), None]:
            start, end = (len(text), len(text)) if found is None else found.span()
            if any(first <= start and end <= last for first, last in texts) and found is not None:
                continue
            for piece, begin, parses in ((text[at:start], at, False), (text[start:end], start, True)):
                more = self._encode(piece, parses, begin) if piece else ([], [])
                ids, offsets = ids + more[0], offsets + more[1]
            at = end
        return ids, offsets

    def _guarded(self, value: Any) -> Any:
        """The value, with guards around special tokens in its strings."""
        if not isinstance(value, str):
            return value
        return self._special.sub(lambda found: f"{_GUARD}{found.group()}{_GUARD}", value)

    def _marked(self, messages: Sequence[Message], ids: npt.NDArray[np.int64], place: str) -> npt.NDArray[np.bool_]:
        encoded = self._tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        if list(encoded["input_ids"]) != ids.tolist():
            raise DataError(f"{place}: the chat template yields other tokens when it marks the assistant's; fix it")
        return np.asarray(encoded["assistant_masks"], dtype=np.bool_)

    def _answer(self, messages: Sequence[Message], number: int, text: str, place: str) -> tuple[int, int]:
        """The span in `text` of message `number`, from the end of its generation prompt to the end of its content."""
        marked = [*messages[:number], {**messages[number], "content": _CONTENT_MARK}, *messages[number + 1 :]]
        before, *after = self._render(marked, place).split(_CONTENT_MARK)
        shorter = self._render(messages[:number], place) if number else ""
        asked = self._render(messages[:number], place, add_generation_prompt=True) if number else ""
        prompt = asked[len(shorter) :] if asked.startswith(shorter) else ""
        at = before.rfind(prompt) if prompt else -1
        start = len(before) if at < 0 else at + len(prompt)
        if len(after) != 1 or not (text.startswith(before[:start]) and text.endswith(after[0])):
            raise DataError(
                f"{place}: cannot locate answer {number} in the output of the tokenizer's chat template; put "
                "{% generation %} and {% endgeneration %} around answers in the template"
            )
        return start, len(text) - len(after[0])

    def _tokens_within(
        self, text: str, ids: npt.NDArray[np.int64], offsets: Sequence[tuple[int, int]], start: int, end: int
    ) -> list[int]:
        """The tokens that hold characters of an answer, and the special token that ends it."""
        special = set(self._tokenizer.all_special_ids)
        found = [token for token, (begin, stop) in enumerate(offsets) if begin < end and stop > start]
        following = [token for token, (begin, stop) in enumerate(offsets) if begin >= end and stop > begin]
        for position, token in enumerate(following):
            if int(ids[token]) in special:
                return [*found, *following[: position + 1]]
            if text[offsets[token][0] : offsets[token][1]].strip():
                break
        return found

    def _render(self, messages: Sequence[Message], place: str, add_generation_prompt: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(f"{place}: the tokenizer's chat template rejects the messages: {error}") from error
        return text
