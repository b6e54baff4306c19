"""`onstep config show|defaults|explain|schema`, and the configuration that the words of a command line describe."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import sys
from importlib.abc import InspectLoader
from pathlib import Path
from typing import Annotated, Any

import typer

from onstep.analysis.logs.run_status import run_record
from onstep.cli.application import WordsCommand, application
from onstep.cli.completed_words import complete_keys, complete_recipes, complete_words
from onstep.cli.runs import find_named, not_found, run_names
from onstep.config import ConfigContainer, apply_overrides, dump_yaml, explain, load_yaml, merge, resolve
from onstep.config.explanation import all_defaults, common_defaults
from onstep.config.recipe_rates import fit_min_lr
from onstep.config.sequence_lengths import SEQ_LENGTHS, fit_seq_length
from onstep.config.short_runs import fit_short_run
from onstep.config.suggestions import nearest, shown
from onstep.console.style import in_words
from onstep.errors import ConfigError
from onstep.recipes import RECIPES, get_recipe
from onstep.stores.urls import is_url


def configuration(words: list[str], recipe: str | None) -> tuple[ConfigContainer, list[str]]:
    """The recipe, overridden by a YAML file and `key=value` words; and the callbacks that `callbacks=` names.

    The recipe is `--recipe`, else the file's `run.recipe`, else `tiny_gpt`. In the place of a file, the name of a run
    means its stored configuration, and that of a recipe the recipe; a name that both have is the run's.
    `checkpoint.load` and `checkpoint.pretrained_checkpoint` may name a run too.

    Raises:
        ConfigError: for a word that is neither a file nor `key=value`, or an unknown or mistyped key.
    """
    config, names, _ = configuration_and_keys(words, recipe)
    return config, names


def configuration_and_keys(words: list[str], recipe: str | None) -> tuple[ConfigContainer, list[str], set[str]]:
    """As `configuration`, with the dotted keys that the file and the words set."""
    files = [word for word in words if "=" not in word]
    words = [f"run.{word}" if word.startswith("fresh=") else word for word in words]
    pairs = [word for word in words if "=" in word and not word.startswith("callbacks=")]
    if len(files) > 1:
        raise ConfigError(f"At most one configuration file, got {', '.join(files)}; write values as key=value.")
    if files and is_recipe(files[0]) and not is_file(files[0]) and run_directory(files[0]) is None:
        if recipe is not None:
            raise ConfigError(f"--recipe {recipe} and {files[0]} both name a recipe; drop one of them.")
        recipe = files.pop()
    values = _read(files[0]) if files else {}
    if "callbacks" in values or "imports" in values:
        raise ConfigError("A configuration file never imports code; name callbacks on the command line.")
    run = values.get("run")
    chosen = [pair.partition("=")[2] for pair in pairs if pair.partition("=")[0].strip() == "run.recipe"]
    if recipe is None:
        recipe = next(reversed(chosen), None)
    if recipe is None:
        recipe = run.get("recipe") if isinstance(run, dict) else values.get("run.recipe")
    name = "tiny_gpt" if recipe is None else recipe
    config = get_recipe(name)()
    merge(config, values)
    written = set(_keys_in(apply_overrides(config, pairs)))
    given = {*_keys_in(values), *written}
    fit_seq_length(config, written if written.intersection(SEQ_LENGTHS) else given)
    own = get_recipe(name)()
    empty = f"{files[0]} is empty; this is the recipe {name}" if files and not values else None
    notes = [empty, fit_short_run(config, own, given), fit_min_lr(config, own, given)]
    if os.environ.get("RANK", "0") == "0" and config.logger.console != "quiet":
        for note in filter(None, notes):
            print(in_words(note, sys.stderr), file=sys.stderr)
    for name in ("load", "pretrained_checkpoint"):
        value = getattr(config.checkpoint, name)
        if value and not is_url(value) and (run_dir := run_directory(value)) is not None:
            setattr(config.checkpoint, name, str(run_dir))
    callbacks = [word.partition("=")[2] for word in words if word.startswith("callbacks=")]
    return config, [each for text in callbacks for each in _names(text)], given


def _keys_in(values: dict[str, Any]) -> list[str]:
    """The dotted keys of values by section or by dotted key."""
    inner = ((key, value if isinstance(value, dict) else {}) for key, value in values.items())
    return [*values, *(f"{key}.{name}" for key, names in inner for name in names)]


def python_file(path: str) -> Path:
    """The file that `--import` names.

    Raises:
        ConfigError: if it does not exist.
    """
    if not Path(path).is_file():
        raise ConfigError(f"--import {path}: the file does not exist; give the path of a Python file.")
    return Path(path)


def import_file(path: str) -> None:
    """Run a Python file as the module of its name, so that `callbacks='[name:Class]'` finds what it defines.

    Raises:
        ConfigError: if the file does not exist.
    """
    file = python_file(path)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)


def check_callback_name(name: str) -> None:
    """Refuse a name that is not `module:attribute`, without importing anything.

    Raises:
        ConfigError: with the whole name of a built-in callback that was named without its module.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        remedy = f"; write callbacks=[onstep.callbacks:{name}]" if name in _built_in_callbacks() else ""
        raise ConfigError(f"A callback is named module:Class, got {name!r}{remedy}.")


def _built_in_callbacks() -> list[str]:
    """`onstep.callbacks.__all__` as its source has it, since importing the package imports torch."""
    spec = importlib.util.find_spec("onstep.callbacks")
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    for node in ast.parse(spec.loader.get_source(spec.name) or "").body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def can_be_imported(module: str) -> bool:
    """Whether the package of a module can be found, without importing it."""
    package = module.partition(".")[0]
    return package in sys.modules or importlib.util.find_spec(package) is not None


def load_callback(name: str) -> Any:
    """The callback that `module:attribute` names; a class is called without arguments.

    Raises:
        ConfigError: if the module or the attribute does not exist.
    """
    check_callback_name(name)
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"callbacks={name}: {error}; import a file with --import {module_name}.py, or install the package."
        ) from error
    if not hasattr(module, attribute):
        hint = nearest(attribute, [each for each in dir(module) if not each.startswith("_")])
        raise ConfigError(f"callbacks={name}: module {module_name} has no {attribute!r}.{hint}")
    found = getattr(module, attribute)
    return found() if isinstance(found, type) else found


def is_file(path: str) -> bool:
    """Whether there is something at a path that is read as a file; a pipe is (`<(...)`), a directory is not."""
    return os.path.lexists(path) and not os.path.isdir(path)


def _read(path: str) -> dict[str, Any]:
    if is_file(path):
        return load_yaml(path)
    stored = run_record(directory).get("config") if (directory := run_directory(path)) is not None else None
    if isinstance(stored, dict):
        run = stored.get("run")
        if isinstance(run, dict):
            run.pop("without_commands_from", None)  # of an earlier start; it is for that one alone
        return stored
    if os.path.isdir(path):
        raise ConfigError(f"{path!r} is a directory without a run.json; give a configuration file, or a run.")
    if Path(path).suffix in (".yaml", ".yml"):
        raise ConfigError(f"the configuration file {shown(path)} does not exist; correct its path.")
    raise ConfigError(
        f"{shown(path)} is neither a configuration file nor key=value, nor a run or a recipe.{_nearest_name(path)} "
        f"Write values as optimizer.lr=3e-4; `onstep config defaults` lists the keys."
    )


def is_recipe(word: str) -> bool:
    """Whether a word is the name of a recipe."""
    return word.removesuffix("_pretrain_config").removesuffix("_config") in RECIPES


def _nearest_name(word: str) -> str:
    """The run or recipe that was most likely meant, and the runs that there are."""
    recipe = nearest(word, list(RECIPES), cutoff=0.6)
    return not_found(word, run_names(), "") if not recipe or nearest(word, run_names()) else recipe


def run_directory(words: str) -> Path | None:
    """The directory of the run that a word names, if there is one."""
    return find_named(words, lambda one: os.path.isfile(one / "run.json"))


def _names(text: str) -> list[str]:
    """`[a:B, 'c:D']`, or a single name."""
    text = text.strip()
    if text.startswith("[") != text.endswith("]"):
        raise ConfigError(f"callbacks={shown(text)} lacks a bracket; write callbacks='[module:Class]'.")
    if not text.startswith("["):
        return [text]
    names = [name.strip().strip("'\"") for name in text.strip("[]").split(",")]
    return [name for name in names if name]


app = application(no_args_is_help=True)


@app.command(cls=WordsCommand)
def show(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG.yaml | RUN | RECIPE] [KEY=VALUE ...]", autocompletion=complete_words),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Named configuration to start from.", autocompletion=complete_recipes)
    ] = None,
    as_written: Annotated[bool, typer.Option(help="Do not fill in derived values.")] = False,
) -> None:
    """Print the configuration that `onstep train` with the same words would run, as YAML that it reads back."""
    config, _ = configuration(words or [], recipe)
    print(dump_yaml(config if as_written else resolve(config)), end="")


@app.command()
def defaults(
    every: Annotated[bool, typer.Option("--all", help="Every key, without help.")] = False,
    help_text: Annotated[bool, typer.Option("--help-text", help="Every key, with a line of help.")] = False,
) -> None:
    """Print the common keys with their defaults and help, as YAML that can be read back."""
    if help_text:
        print(all_defaults(), end="")
    else:
        print(dump_yaml(ConfigContainer()) if every else common_defaults(), end="")


@app.command("explain")
def explain_keys(keys: Annotated[list[str], typer.Argument(metavar="KEY ...", autocompletion=complete_keys)]) -> None:
    """Print a key's help, type, default, rules, consequence of a change and name in `TrainingArguments`."""
    print("\n\n".join(explain(key) for key in keys))


@app.command()
def schema() -> None:
    """Print a JSON schema of configuration files, with which editors complete and check them."""
    from onstep.config.json_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
