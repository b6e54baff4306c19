"""Lists the commands that a running job accepts, and the requests that they make to the training loop.

A row of `COMMANDS` is all that the clients, the command line, the server and its page have of a command: methods,
functions, options, buttons and schemas are made from it. `REQUESTS` has the words of what the loop is asked for, by
callbacks too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MOST_LR_FACTOR = 1000.0
"""From the end of a schedule to its peak; a learning rate that is further off belongs in the configuration."""


@dataclass(frozen=True)
class RequestKind:
    """A kind of request to the training loop."""

    asked: str
    """What the loop is asked to do, as a verb; `{key}` becomes a detail of the request."""
    decided: str | Callable[[Mapping[str, object]], str]
    """What it has decided, as `onstep why` shows it; a function receives the details."""
    changes_learning: bool = False
    """What is learned depends on it: an interrupted run repeats it, and a run that fails names it."""


def fill(text: str, details: Mapping[str, object]) -> str:
    """The text with details in place of their names in braces; one that is missing is None."""
    return text.format_map(_Details(details))


class _Details(dict[str, object]):
    def __missing__(self, name: str) -> None:
        return None


def _skipped(details: Mapping[str, object]) -> str:
    count = details.get("count", 1)
    return f"the batches of {count} {'step' if count == 1 else 'steps'} skipped"


def _was_set(details: Mapping[str, object]) -> str:
    value = details.get("value")
    return f"{details.get('key')} set to {'the configured value' if value is None else value}"


def _left_out(details: Mapping[str, object]) -> str:
    ids = details.get("sample_ids")
    return f"samples {ids} left out"


REQUESTS: dict[str, RequestKind] = {
    "should_log": RequestKind("log", "log"),
    "should_evaluate": RequestKind("evaluate", "evaluation"),
    "should_save": RequestKind("save", "save"),
    "should_epoch_stop": RequestKind("end the epoch", "end of the epoch"),
    "should_training_stop": RequestKind("stop", "stop"),
    "should_abort_without_save": RequestKind("abort", "abort, without a final save"),
    "skip": RequestKind("skip the update", "update skipped"),
    "rollback": RequestKind("roll back to a checkpoint", "rollback decided", changes_learning=True),
    "pause": RequestKind("pause", "paused"),
    "resume": RequestKind("resume", "resumed"),
    "skip_batch": RequestKind("skip the next batch", _skipped, changes_learning=True),
    "set": RequestKind("set {key} to {value!r}", _was_set, changes_learning=True),
    "leave_out": RequestKind("leave out samples {sample_ids}", _left_out, changes_learning=True),
    "command": RequestKind("{command}", "{command}"),
}
"""The requests by their flag."""


def asked_words(flag: str, details: Mapping[str, object]) -> str:
    """What a request asks for, as a verb."""
    return fill(REQUESTS[flag].asked, details) if flag in REQUESTS else flag


def decided_words(flag: str, details: Mapping[str, object]) -> str:
    """What was decided on a request."""
    if flag not in REQUESTS:
        return flag
    words = REQUESTS[flag].decided
    return fill(words, details) if isinstance(words, str) else words(details)


@dataclass(frozen=True)
class Parameter:
    """A value that is sent with a command."""

    name: str
    kind: type
    """int, float, str, or list for a list of str."""
    help: str
    required: bool = False
    default: Any = None
    least: float | None = None
    most: float | None = None
    may_be_null: bool = False
    options: tuple[str, ...] = ()
    """On the command line; () for `--` and its name."""
    detail: str = ""
    """Its name in the details of the request, if another."""

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        kinds = {int: "integer", float: "number", str: "string", list: "list of strings"}
        return {
            "name": self.name,
            "kind": kinds[self.kind],
            "help": self.help,
            "required": self.required,
            "default": self.default,
            "minimum": self.least,
            "maximum": self.most,
        }


@dataclass(frozen=True)
class Command:
    """A command: what it does, and what is sent with it."""

    name: str
    verb: str
    """Its name in `onstep control`; a command without one has no method in clients either."""
    help: str
    parameters: tuple[Parameter, ...] = ()
    requests: tuple[str, ...] = ("command",)
    """The flags of what the loop is asked for."""
    method: str = ""
    """Its method in clients and function in `onstep.control`; empty for its name."""
    button: str = ""
    """The text of its button; empty for its name."""
    loses: str = ""
    """What may be lost: clients ask for confirmation."""
    is_done_later: bool = False
    """Its outcome follows the decision: the loop has saved, evaluated, ..."""
    wait: float | None = None
    """Seconds that a client waits by default; the command line waits without limit."""

    @property
    def is_for_callbacks(self) -> bool:
        """Whether callbacks carry it out, in `on_command`."""
        return self.requests == ("command",)

    @property
    def ends_run(self) -> bool:
        """Whether the run stops."""
        return "should_training_stop" in self.requests

    @property
    def is_undone_by_rollback(self) -> bool:
        """Whether a rollback in the same step prevents it; a save before a stop is done first."""
        return self.is_done_later and not self.is_for_callbacks and not self.ends_run

    @property
    def function(self) -> str:
        """Its method in clients, and its function in `onstep.control`."""
        return self.method or self.name

    @property
    def label(self) -> str:
        """The text of its button."""
        return self.button or self.name.replace("_", " ").capitalize()

    @property
    def warning(self) -> str:
        """What to think about before it is sent; empty for nothing."""
        if self.loses:
            return f"{self.loses[0].upper()}{self.loses[1:]}."
        return "This ends the run." if self.ends_run else ""

    def describe(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "name": self.name,
            "label": self.label,
            "help": self.help,
            "parameters": [one.describe() for one in self.parameters],
            "warning": self.warning,
        }


COMMANDS: dict[str, Command] = {
    one.name: one
    for one in (
        Command(
            "save_checkpoint",
            "save",
            "Save a checkpoint after this step",
            requests=("should_save",),
            button="Save",
            is_done_later=True,
        ),
        Command("evaluate", "evaluate", "Evaluate after this step", requests=("should_evaluate",), is_done_later=True),
        Command("pause", "pause", "Pause after this step until resumed; nothing is released", requests=("pause",)),
        Command("resume", "resume", "Continue a paused run", requests=("resume",)),
        Command(
            "skip_batch",
            "skip",
            "Read the batches of the next steps without training on them",
            (Parameter("count", int, "How many steps", default=1, least=1, most=10_000, options=("--count", "-n")),),
            requests=("skip_batch",),
        ),
        Command(
            "set",
            "set",
            "Change a value from the next step on; none restores the configured one",
            (
                Parameter("key", str, "One of the job's settable keys", required=True),
                Parameter("value", float, "The new value", required=True, may_be_null=True),
            ),
            requests=("set",),
            method="set_value",
        ),
        Command(
            "generate",
            "generate",
            "Continue prompts with the current weights",
            (
                Parameter("prompts", list, "Texts to continue", required=True, options=("--prompt", "-p")),
                Parameter("max_new_tokens", int, "Tokens to add to each", default=64, least=1, most=4096),
            ),
            wait=60.0,
        ),
        Command(
            "profile",
            "profile",
            "Record the next steps with PyTorch's profiler, on every rank",
            (Parameter("steps", int, "How many steps", default=3, least=1, most=100),),
            is_done_later=True,
        ),
        Command(
            "stacks",
            "stacks",
            "Show the Python stacks of all threads of all ranks, at once, even if training hangs",
            wait=30.0,
        ),
        Command(
            "status",
            "",
            "Do nothing; tells whether the training thread answers, and at which step",
            requests=(),
            button="Ping",
        ),
        Command(
            "graceful_stop",
            "stop",
            "Stop after this step, with the final checkpoint, as if the run were complete",
            requests=("should_training_stop",),
            button="Stop",
        ),
        Command(
            "save_and_stop",
            "save-stop",
            "Save a checkpoint after this step, then stop",
            requests=("should_save", "should_training_stop"),
            is_done_later=True,
        ),
        Command(
            "rollback",
            "rollback",
            "Go back to the newest checkpoint at or before a step; data continues after the current one",
            (
                Parameter(
                    "step",
                    int,
                    "Step of the checkpoint; default: the newest before this step",
                    least=0,
                    may_be_null=True,
                    detail="to_step",
                ),
                Parameter(
                    "lr_factor",
                    float,
                    "Multiplies the learning-rate factor from there on",
                    default=1.0,
                    least=0,
                    most=MOST_LR_FACTOR,
                ),
            ),
            requests=("rollback",),
            button="Roll back",
            loses="what was trained since the checkpoint that it returns to is lost",
            is_done_later=True,
        ),
        Command(
            "abort",
            "abort",
            "Stop after this step without saving anything",
            requests=("should_abort_without_save", "should_training_stop"),
            loses="what was trained since the last checkpoint is lost",
        ),
    )
}
"""The commands by name, in the order in which clients show them."""
