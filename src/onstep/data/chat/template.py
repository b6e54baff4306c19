"""Encodes conversations as token ids and marks which of them belong to the assistant."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from onstep.data.chat.forms import Message
from onstep.data.chat.limited_process import Limits
from onstep.data.chat.rendering import LIMITS, ChatRenderer, RenderedChat, Span
from onstep.data.corpus.tokenizer_library import Explained
from onstep.data.corpus.tokenizers import HuggingFaceTokenizer, Tokenizer
from onstep.errors import DataError

_GUARD = "\ue0f8\ue0f9"
"""Private-use characters placed around a special token that is to be read as text."""
_GUARDS = re.compile(_GUARD)
_MAX_SPECIAL = 10_000
"""Limit for the special tokens of a conversation that is encoded in parts."""

_NOT_PLAIN = ("tool_calls", "function_call", "reasoning_content")
"""Parts of a message that are more than its role and content."""

_Ids = npt.NDArray[np.int64]
_Encoded = tuple[_Ids, _Ids]
"""Ids (tokens), and the first character of each and the one after its last (tokens, 2)."""


class EncodedChat(NamedTuple):
    """The token ids of a conversation."""

    ids: npt.NDArray[np.int64]
    """Ids of the tokens, 1-d."""
    trained: npt.NDArray[np.bool_]
    """Whether each id belongs to the assistant, end tokens included."""


class ChatTemplate(Protocol):
    """Encodes conversations as token ids."""

    @property
    def fingerprint(self) -> str:
        """Changes whenever the ids of some conversation could change."""

    def encode(self, messages: Sequence[Message], place: str) -> EncodedChat:
        """Encode a conversation.

        Args:
            messages: the messages of a conversation, each with `role` and `content`.

        Raises:
            DataError: with `place`, for messages that the template does not accept.
        """

    def encode_prompt(self, messages: Sequence[Message], place: str) -> list[int]:
        """Encode a conversation up to where the assistant's next answer begins.

        Args:
            messages: the messages of a conversation, each with `role` and `content`.
            place: where the record is from, for errors: the file and its line.

        Raises:
            DataError: as for `encode`.
        """


def template_for(tokenizer: Tokenizer) -> ChatTemplate:
    """The chat template of a `transformers` tokenizer if it has one, else the plain template.

    Args:
        tokenizer: the tokenizer that encodes the texts.

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

    Args:
        tokenizer: the tokenizer that encodes the texts.

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
        """Encode a conversation; text after the last answer is kept, but not trained on.

        Args:
            messages: the messages of a conversation, each with `role` and `content`.
            place: where the record is from, for errors: the file and its line.
        """
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

    def encode_prompt(self, messages: Sequence[Message], place: str) -> list[int]:
        """Encode a conversation and the marker of the assistant.

        Args:
            messages: the messages of a conversation, each with `role` and `content`.
            place: where the record is from, for errors: the file and its line.
        """
        opened = [*messages, {"role": "assistant", "content": ""}]
        ids: list[int] = self.encode(opened, place).ids.tolist()
        return ids[:-1]  # without the end token of the empty answer

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

    The template runs in a process of its own, with limited time and memory (see `ChatRenderer`).

    If the template marks what the assistant generates (`{% generation %}`), that is trained on. Otherwise an answer
    extends from the end of its generation prompt (added by `add_generation_prompt`) to the end of its content, plus the
    special token that follows. It is located by rendering the conversation with the content replaced; a template in
    which that changes anything else is refused.

    A special token in message content is encoded as text; those of the template are tokens.

    Args:
        tokenizer: the tokenizer that encodes the texts.

    Raises:
        DataError: for a tokenizer that does not provide the character offsets of its tokens.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, limits: Limits = LIMITS) -> None:
        self._tokenizer = tokenizer.library_tokenizer
        self._encoding = Explained(f"the tokenizer {tokenizer.path} cannot encode this conversation")
        self._renderer = ChatRenderer(self._tokenizer, limits)
        names = [str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        self._special = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")
        self._special_ids = frozenset(self._tokenizer.all_special_ids)
        if not getattr(self._tokenizer, "is_fast", False):
            raise DataError(
                f"{type(self._tokenizer).__name__} does not provide character offsets, which are required to locate "
                "the answers; use a directory with a tokenizer.json"
            )
        digest = hashlib.blake2b(self._renderer.template.encode(), digest_size=16).hexdigest()
        version = 3 if self._renderer.has_marks else 2
        self.fingerprint = f"template {version} {tokenizer.fingerprint} {digest}"

    def encode(self, messages: Sequence[Message], place: str) -> EncodedChat:
        """Encode a conversation.

        Args:
            messages: the messages of a conversation, each with `role` and `content`.
            place: where the record is from, for errors: the file and its line.
        """
        chat = self._render(messages, place)
        ids, offsets = self._encode_chat(messages, chat.text, place)
        trained = np.zeros(ids.size, dtype=np.bool_)
        for span in chat.answers:
            trained[self._answer_tokens(chat.text, ids, offsets, span)] = True
        return EncodedChat(ids, trained)

    def encode_prompt(self, messages: Sequence[Message], place: str) -> list[int]:
        """Encode a conversation and what the template adds as the generation prompt.

        Args:
            messages: the messages of a conversation, each with `role` and `content`.
            place: where the record is from, for errors: the file and its line.
        """
        text = self._render(messages, place, wants_answers=False, opens_answer=True).text
        ids: list[int] = self._encode_chat(messages, text, place, opens_answer=True)[0].tolist()
        return ids

    def _encode_chat(
        self, messages: Sequence[Message], text: str, place: str, *, opens_answer: bool = False
    ) -> _Encoded:
        """Encode `text`, in which the template has rendered the messages."""
        whole = self._encode(text)
        if any(self._special.search(str(value)) for message in messages for value in message.values()):
            return self._encode_with_text(messages, text, whole, place, opens_answer)
        return whole

    def _encode(self, text: str, *, parses_special: bool = True, start: int = 0) -> _Encoded:
        """Ids and their character spans; `text` begins at character `start`."""
        with self._encoding:
            encoding = self._tokenizer(
                text,
                add_special_tokens=False,
                split_special_tokens=not parses_special,
                return_offsets_mapping=True,
                verbose=False,
            )
        offsets = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return np.array(encoding["input_ids"], dtype=np.int64), offsets + start

    def _encode_with_text(
        self, messages: Sequence[Message], text: str, whole: _Encoded, place: str, opens_answer: bool
    ) -> _Encoded:
        """The ids, with special tokens in the messages encoded as text and those of the template as tokens."""
        if sum(1 for _ in self._special.finditer(text)) > _MAX_SPECIAL:
            raise DataError(
                f"{place}: a message contains special tokens of the tokenizer, and the conversation has more than "
                f"{_MAX_SPECIAL:,}, the limit; remove them from the messages, or divide the conversation"
            )
        guarded = [{key: self._guarded(value) for key, value in message.items()} for message in messages]
        rendered = self._render(guarded, place, wants_answers=False, opens_answer=opens_answer)
        parts = _GUARDS.split(rendered.text)
        ends = np.cumsum([len(part) for part in parts]).tolist()
        texts = [(end - len(part), end) for part, end in zip(parts[1::2], ends[1::2], strict=False)]
        is_deeper = any(not isinstance(value, str) for message in messages for value in message.values())
        is_same = not (self._renderer.has_marks or is_deeper) and "".join(parts) == text
        if not is_same or not all(map(np.array_equal, self._encode_parts(text, []), whole)):
            found = self._special.findall(str(messages))[0]
            raise DataError(
                f"{place}: a message contains {found!r}, a special token of the tokenizer that cannot be distinguished "
                "from those of its chat template; remove it"
            )
        return self._encode_parts(text, texts)

    def _encode_parts(self, text: str, texts: Sequence[Span]) -> _Encoded:
        """The ids of `text`, split at its special tokens except those within the spans `texts`, which are in order."""
        encoded = [self._encode("")]
        at = 0
        within = iter([*texts, (len(text) + 1, len(text) + 1)])
        first, last = next(within)
        for found in [*self._special.finditer(text), None]:
            start, end = (len(text), len(text)) if found is None else found.span()
            while last < end:
                first, last = next(within)
            if first <= start and found is not None:
                continue
            for piece, begin, parses in ((text[at:start], at, False), (text[start:end], start, True)):
                if piece:
                    encoded.append(self._encode(piece, parses_special=parses, start=begin))
            at = end
        ids, offsets = zip(*encoded, strict=True)
        return np.concatenate(ids), np.concatenate(offsets)

    def _guarded(self, value: Any) -> Any:
        """The value, with guards around special tokens in its strings."""
        if not isinstance(value, str):
            return value
        return self._special.sub(lambda found: f"{_GUARD}{found.group()}{_GUARD}", value)

    def _answer_tokens(self, text: str, ids: _Ids, offsets: _Ids, span: Span) -> _Ids:
        """The tokens that hold characters of an answer, and the special token that ends it, unless it is marked."""
        begins, stops = offsets.T  # neither ever decreases
        first, last = np.searchsorted(stops, span[0], side="right"), np.searchsorted(begins, span[1])
        found = np.arange(first, last)
        if self._renderer.has_marks:
            return found
        for token in range(int(last), ids.size):
            if stops[token] > begins[token]:
                if int(ids[token]) in self._special_ids:
                    following = np.arange(last, token + 1)
                    return np.concatenate((found, following[stops[following] > begins[following]]))
                if text[begins[token] : stops[token]].strip():
                    break
        return found

    def _render(
        self, messages: Sequence[Message], place: str, *, wants_answers: bool = True, opens_answer: bool = False
    ) -> RenderedChat:
        try:
            return self._renderer.render(messages, wants_answers=wants_answers, opens_answer=opens_answer)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error
