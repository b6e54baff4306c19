"""Renders conversations with the chat template of a tokenizer, in a process with limited time and memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from onstep.data.chat.forms import Message
from onstep.data.chat.limited_process import LimitedProcess, Limits
from onstep.errors import DataError

LIMITS = Limits(cpu_seconds=5.0, memory_bytes=512 << 20)
"""Of all renderings of one conversation: one, and three for each answer unless the template marks the answers."""
NAME = "the tokenizer's chat template"
MAX_CHARACTERS = 8 << 20
"""Limit for the text of one conversation: some two million tokens."""

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CONTENT_MARK = "onstep9c1f7e3answer"
"""Placeholder for an answer, used to find where a template puts it."""

Span = tuple[int, int]
"""Characters of a text: the first, and the one after the last."""


class RenderedChat(NamedTuple):
    """The text of a conversation."""

    text: str
    answers: list[Span]
    """What the template marks as generated, or else the answers, from the end of the generation prompt on."""


class ChatRenderer:
    """Renders conversations with the chat template of a `transformers` tokenizer.

    Templates are programs that somebody else has written. They run in a `LimitedProcess`, so that they can neither
    loop for ever nor fill the memory.

    Args:
        tokenizer: a tokenizer of `transformers`.
        limits: for all renderings of one conversation.

    Raises:
        DataError: for a tokenizer without a template that is used by default.
    """

    def __init__(self, tokenizer: Any, limits: Limits = LIMITS) -> None:
        self.template = _template_of(tokenizer)
        self.has_marks = _GENERATION_MARK.search(self.template) is not None
        """Whether the template marks what the assistant generates."""
        locate = _marked if self.has_marks else _located
        self._process = LimitedProcess(lambda request: locate(tokenizer, *request), limits, NAME)

    def render(
        self, messages: Sequence[Message], *, wants_answers: bool = True, opens_answer: bool = False
    ) -> RenderedChat:
        """The text of a conversation, and where its answers are; with `opens_answer`, up to where the next one begins.

        Raises:
            DataError: for messages that the template does not accept, for answers that cannot be located, and if a
                limit is exceeded.
        """
        text, answers = self._process.call((list(messages), wants_answers, opens_answer))
        return RenderedChat(text, [(start, end) for start, end in answers])


def _template_of(tokenizer: Any) -> str:
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(f"the tokenizer has no chat template that can be used: {error}") from error
    if not isinstance(template, str):
        raise DataError(
            f"the chat template of the tokenizer must be a string, got {type(template).__name__}; fix chat_template in "
            "its tokenizer_config.json"
        )
    return template


def _marked(tokenizer: Any, messages: list[Message], wants_answers: bool, opens_answer: bool) -> tuple[str, list[Span]]:
    """The text, and what the template marks as generated."""
    from transformers.utils.chat_template_utils import render_jinja_template

    text = _text(tokenizer, messages, opens_answer)
    if not wants_answers:
        return text, []
    given = [{key: value for key, value in message.items() if value is not None} for message in messages]
    options = {"chat_template": tokenizer.get_chat_template(), "return_assistant_tokens_mask": True}
    rendered: Any = render_jinja_template(conversations=[given], **options, **tokenizer.special_tokens_map)
    [again], [spans] = rendered
    if again != text:
        raise DataError("the chat template yields another text when it marks the assistant's; fix it")
    return text, spans


def _located(
    tokenizer: Any, messages: list[Message], wants_answers: bool, opens_answer: bool
) -> tuple[str, list[Span]]:
    """The text, and the spans from the end of each generation prompt to the end of the content."""
    text = _text(tokenizer, messages, opens_answer)
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant" and wants_answers]
    return text, [_answer(tokenizer, messages, number, text) for number in numbers]


def _answer(tokenizer: Any, messages: list[Message], number: int, text: str) -> Span:
    marked = [*messages[:number], {**messages[number], "content": _CONTENT_MARK}, *messages[number + 1 :]]
    before, *after = _text(tokenizer, marked).split(_CONTENT_MARK)
    shorter = _text(tokenizer, messages[:number]) if number else ""
    asked = _text(tokenizer, messages[:number], add_generation_prompt=True) if number else ""
    prompt = asked[len(shorter) :] if asked.startswith(shorter) else ""
    at = before.rfind(prompt) if prompt else -1
    start = len(before) if at < 0 else at + len(prompt)
    if len(after) != 1 or not (text.startswith(before[:start]) and text.endswith(after[0])):
        raise DataError(
            f"cannot locate answer {number} in the output of the tokenizer's chat template; put "
            "{% generation %} and {% endgeneration %} around answers in the template"
        )
    return start, len(text) - len(after[0])


def _text(tokenizer: Any, messages: list[Message], add_generation_prompt: bool = False) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        text.encode("utf-8")
    except MemoryError:
        raise
    except Exception as error:  # a template can raise anything
        raise DataError(
            f"the tokenizer's chat template rejects the messages: {_words(error)}; fix the messages or the template"
        ) from error
    if len(text) > MAX_CHARACTERS:
        raise DataError(
            f"the tokenizer's chat template yields {len(text):,} characters for one conversation; the limit is "
            f"{MAX_CHARACTERS:,}. Fix it, or divide the conversation"
        )
    return text


def _words(error: Exception) -> str:
    from jinja2 import TemplateError

    return str(error) if isinstance(error, TemplateError) and str(error) else f"{type(error).__name__}: {error}"
