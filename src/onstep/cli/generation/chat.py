"""`onstep chat`: talks with a trained model in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from onstep.cli.generation.trained import (
    Name,
    RopeFactor,
    RopeScaling,
    Seed,
    Temperature,
    TopK,
    TopP,
    Trained,
    open_trained,
    show,
)
from onstep.errors import DataError
from onstep.stores.urls import with_urls

if TYPE_CHECKING:
    from onstep.data import ChatTemplate

MAX_NEW_TOKENS = 512
COMMANDS = "/reset forgets the conversation, /quit (or the end of the input) ends it"


def chat(
    name: Name,
    system: Annotated[str | None, typer.Option(help="Instructions for the model, before the conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = MAX_NEW_TOKENS,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 0.95,
    seed: Seed = None,
    rope_scaling: RopeScaling = None,
    rope_factor: RopeFactor = 2.0,
) -> None:
    """Talk with a model: a run, or a Hugging Face directory. /reset forgets the conversation, /quit ends it.

    Conversations have the form of the tokenizer's chat template. A model without one continues the text instead.
    """
    trained = open_trained(name, rope_scaling, rope_factor)
    from onstep.models.generation.generate import Sampling

    sampling = Sampling(temperature, top_k, top_p)
    talk = _conversation(trained, system)

    def answer(ids: list[int], number: int) -> Iterator[str]:
        return trained.pieces(ids, sampling, max_new_tokens, None if seed is None else seed + number)

    converse(talk, answer, is_terminal=sys.stdin.isatty())


class Conversation(Protocol):
    """What has been said, and its tokens."""

    def ask(self, text: str) -> list[int]:
        """The tokens after which the answer to `text` follows.

        Raises:
            DataError: for a text that the chat template does not accept.
        """

    def hear(self, text: str) -> None:
        """Add an answer."""

    def reset(self) -> None:
        """Forget everything."""


def converse(talk: Conversation, answer: Callable[[list[int], int], Iterator[str]], *, is_terminal: bool) -> None:
    """Read lines and print answers until the end of the input.

    Args:
        answer: the pieces of the answer that follows tokens; its second argument is the number of the turn.
        is_terminal: whether somebody types, who gets a prompt.
    """
    print(f"{COMMANDS}.")
    if is_terminal:
        import readline  # noqa: F401 - arrow keys and history in `input`
    number = 0
    while (line := _read("> " if is_terminal else "")) not in (None, "/quit"):
        assert line is not None
        if line == "/reset":
            talk.reset()
        elif line.startswith("/"):
            print(f"there is no command {line.split()[0]}: {COMMANDS}")
        elif line.strip():
            _turn(talk, answer, line, number)
            number += 1


def _turn(talk: Conversation, answer: Callable[[list[int], int], Iterator[str]], line: str, number: int) -> None:
    try:
        ids = talk.ask(line)
    except DataError as error:
        print(f"error: {error}")
        return
    said: list[str] = []
    try:
        show(_kept(answer(ids, number), said))
    except KeyboardInterrupt:  # ends the answer, not the conversation
        print()
    talk.hear("".join(said))


def _kept(pieces: Iterable[str], said: list[str]) -> Iterator[str]:
    for piece in pieces:
        said.append(piece)
        yield piece


def _read(prompt: str) -> str | None:
    """The next line; None at the end of the input."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _conversation(trained: Trained, system: str | None) -> Conversation:
    """A conversation in the form of the model's chat template, or one that continues the text."""
    from onstep.data import TokenizerTemplate, template_for
    from onstep.models.generation.context_window import context_length

    length = context_length(trained.model.config)
    template = None if trained.tokenizer.eos_id is None else template_for(trained.tokenizer)
    if template is not None and (trained.is_chat_run or isinstance(template, TokenizerTemplate)):
        return TemplateTalk(template, length, system)
    print(f"{with_urls(str(trained.directory))} has no chat template: it continues your text instead of answering.")
    if system is not None:
        print("--system has no effect without a chat template", file=sys.stderr)
    return PlainTalk(trained.tokenizer.encode_text)


class TemplateTalk:
    """A conversation in the form of a chat template.

    Turns that no longer fit are left out, the oldest first: a template's text that is cut anywhere else would begin in
    the middle of a turn.

    Args:
        length: the model's context, in tokens; a quarter of it is left to the answer.
    """

    def __init__(self, template: ChatTemplate, length: int, system: str | None = None) -> None:
        self._template = template
        self._most = max(1, length - length // 4)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, Any]] = []

    def ask(self, text: str) -> list[int]:
        """The tokens up to where the answer begins."""
        self._turns.append({"role": "user", "content": text})
        while True:
            try:
                ids = self._template.encode_prompt([*self._system, *self._turns], "the conversation")
            except DataError:
                del self._turns[-1]
                raise
            if len(ids) <= self._most or len(self._turns) == 1:
                return ids
            del self._turns[:2]  # a question and its answer

    def hear(self, text: str) -> None:
        """Add an answer, unless there is no question."""
        if self._turns and self._turns[-1]["role"] == "user":
            self._turns.append({"role": "assistant", "content": text})

    def reset(self) -> None:
        """Forget everything but the system's instructions."""
        self._turns.clear()


class PlainTalk:
    """A text that the model continues, without roles."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._text = ""

    def ask(self, text: str) -> list[int]:
        """The tokens of the whole text so far."""
        self._text += text
        return self._encode(self._text)

    def hear(self, text: str) -> None:
        """Add what the model wrote, and end the line, as the terminal does."""
        self._text += text + "\n"

    def reset(self) -> None:
        """Forget everything."""
        self._text = ""
