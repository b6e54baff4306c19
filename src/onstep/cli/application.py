"""Builds the Typer application of each `onstep` command, on first use."""

from __future__ import annotations

import importlib
import inspect
import itertools
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from onstep.cli.completed_words import complete_recipes, complete_words
from onstep.cli.script import ScriptCommand
from onstep.config import KEYS, nearest_key
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError

Imports = Annotated[list[str] | None, typer.Option("--import", help="Python file with your code; repeatable.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.yaml | RUN | RECIPE] [KEY=VALUE ...]",
        help="A file, a run or a recipe, and overrides.",
        autocompletion=complete_words,
    ),
]
Recipe = Annotated[
    str | None, typer.Option(help="Recipe to start from; default: tiny_gpt.", autocompletion=complete_recipes)
]
Labels = Annotated[
    list[str] | None, typer.Option(metavar="A,B", help="A label for each run; repeatable, once per run.")
]


WrongWords: Any = typer.BadParameter.__base__
"""What Typer raises for words that are not those of a command."""


def in_one_line(error: Any, arguments: list[str]) -> str:
    """What is wrong with the words of a command line, with the value of the option that it is about."""
    names = getattr(getattr(error, "param", None), "opts", ())
    texts = [word.partition("=")[2] for word in arguments if word.partition("=")[0] in names and "=" in word]
    texts += [after for word, after in itertools.pairwise(arguments) if word in names]
    text = error.format_message().rstrip(".").replace("Value error, ", "")
    value = f", got {texts[-1]!r}" if texts and repr(texts[-1]) not in text else ""
    command = error.ctx.command_path if error.ctx is not None else "onstep"
    return f"{text}{value}{' ' if text.endswith('?') else '; '}{command} --help describes it."


def application(**settings: Any) -> typer.Typer:
    """A Typer application with the settings shared by all commands."""
    names = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(
        add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=names, **settings
    )


class WordsCommand(TyperCommand):
    """A command that reads `[CONFIG.yaml] [KEY=VALUE ...]`; of an option that it lacks, it says what to write."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # the context's class has no public name
        """Refuse unknown options."""
        known = [*ctx.help_option_names, *(name for one in self.params for name in one.opts)]
        for position, word in enumerate(args):
            option, _, value = word.partition("=")
            if word == "--":
                break
            if word.startswith("--") and option not in known:
                following = next((each for each in args[position + 1 :] if not each.startswith("-")), "")
                remedy = _instead(option, value or following, known, ctx.command_path)
                raise ConfigError(f"{ctx.command_path} has no option {option}{remedy}")
        return super().parse_args(ctx, args)


_FILE_OPTIONS = ("--config", "--config-file", "--cfg", "--file", "--yaml")


def _instead(option: str, value: str, known: list[str], command: str) -> str:
    """What to write in place of an unknown option."""
    if option in _FILE_OPTIONS:
        return f"; name the file without an option: {command} {value or 'CONFIG.yaml'}"
    if option == "--script" and command.endswith(" fork"):
        return (
            "; a run of a Trainer is forked by its script: copy the checkpoint into another output_dir, and call "
            "train(resume_from_checkpoint=True)."
        )
    option = option.replace("_", "-")
    begins = [name for name in known if name.startswith(option)]
    hint = f" Did you mean {begins[0]!r}?" if len(begins) == 1 else nearest(option, known, cutoff=0.8)
    if hint:
        return f".{hint}"
    key = nearest_key(option.lstrip("-").replace("-", "_"), list(KEYS))
    if key is None:
        return f"; values are written as KEY=VALUE, options are listed by {command} --help."
    return f"; values are written as KEY=VALUE. Did you mean {key}={value or 'VALUE'}?"


def application_at(place: str) -> typer.Typer:
    """The application at ``module:name`` of this package; a function there becomes its single command."""
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(f"onstep.cli.{module}"), name)
    if isinstance(found, typer.Typer):
        return found
    single = application()
    parameters = inspect.signature(found).parameters
    cls = ScriptCommand if "script" in parameters else WordsCommand if "words" in parameters else None
    single.command(name.rstrip("_"), cls=cls)(found)
    return single
