"""Completes words for the shell: keys and their values, files, and names of runs and recipes.

Each function returns (word, help) for the words that begin with what has been typed. A word that is not complete yet,
such as `optimizer.` or `optimizer.lr=`, ends in one of `GOES_ON`. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onstep.config import Key

Offer = tuple[str, str]
GOES_ON = (".", "=", "/", "@")
"""The ends of words after which the shell sets no blank."""
_WITH_A_RUN = ("checkpoint.load", "checkpoint.pretrained_checkpoint", "run.name")
"""Keys whose value may be the name of a run."""


def complete_words(incomplete: str) -> list[Offer]:
    """For `[CONFIG.yaml | RUN | RECIPE] [KEY=VALUE ...]`."""
    if "=" in incomplete:
        return complete_pairs(incomplete)
    return [*complete_pairs(incomplete), *_files(incomplete), *complete_runs(incomplete), *complete_recipes(incomplete)]


def complete_pairs(incomplete: str) -> list[Offer]:
    """For `[KEY=VALUE ...]`: the sections, the keys of the section that is meant, and the values of a key."""
    from onstep.config import KEYS

    name, is_pair, _ = incomplete.partition("=")
    if is_pair:
        return [(f"{name}={value}", "") for value in _values(name)]
    return [(word if word.endswith(".") else f"{word}=", text) for word, text in _by_section(incomplete, KEYS)]


def complete_keys(incomplete: str) -> list[Offer]:
    """For `KEY ...`: keys and sections, of which `onstep config explain` says everything."""
    from onstep.config import KEYS

    return list(_by_section(incomplete, KEYS))


def complete_runs(incomplete: str) -> list[Offer]:
    """For `RUN`: the names of the runs below `runs/`."""
    from onstep.cli.runs import run_names

    return [(name, "run") for name in sorted(run_names()) if name.startswith(incomplete)]


def complete_checkpoints(incomplete: str) -> list[Offer]:
    """For `RUN` or `RUN@STEP`: the names of the runs and, once `@` is typed, the steps of their checkpoints."""
    from onstep.cli.runs import checkpoint_steps, find_named

    name, has_step, _ = incomplete.rpartition("@")
    if not has_step:
        return complete_runs(incomplete)
    run = find_named(name)
    return [] if run is None else [(f"{name}@{step}", "checkpoint") for step in checkpoint_steps(run)]


def complete_forks(incomplete: str) -> list[Offer]:
    """For `RUN@STEP [KEY=VALUE ...]`."""
    if "@" in incomplete:
        return complete_checkpoints(incomplete)
    return [*complete_pairs(incomplete), *((f"{name}@", text) for name, text in complete_runs(incomplete))]


def complete_recipes(incomplete: str) -> list[Offer]:
    """For `RECIPE`."""
    from onstep.recipes import RECIPES

    return [(name, "recipe") for name in RECIPES if name.startswith(incomplete)]


def _by_section(incomplete: str, keys: dict[str, Key]) -> Iterator[Offer]:
    """The keys that begin so; while several sections do, the sections and the keys outside of them."""
    begun = [key for key in keys.values() if key.name.startswith(incomplete)]
    sections = dict.fromkeys(key.name.partition(".")[0] for key in begun)
    if len(sections) <= 1:
        yield from ((key.name, key.option.help.partition(". ")[0]) for key in begun)
        return
    for section in sections:
        yield (section, keys[section].option.help.partition(". ")[0]) if section in keys else (f"{section}.", "section")


def _values(name: str) -> list[str]:
    """The values that a key may have, where they are few."""
    from onstep.config import KEYS

    if name == "run.recipe":
        return [recipe for recipe, _ in complete_recipes("")]
    if name in _WITH_A_RUN:
        return [run for run, _ in complete_runs("")]
    key = KEYS.get(name)
    if key is None:
        return []
    types = {part.strip() for part in str(getattr(key.annotation, "__name__", key.annotation)).split("|")}
    known = [*key.option.choices, *(["true", "false"] if "bool" in types else [])]
    return [*known, *(["null"] if known and key.default is None else [])]


def _files(incomplete: str) -> list[Offer]:
    """The YAML files and the directories whose path begins so."""
    head, _, begin = incomplete.rpartition("/")
    place = f"{head}/" if "/" in incomplete else ""
    try:
        entries = sorted(os.scandir(os.path.expanduser(place) or "."), key=lambda entry: entry.name)
    except OSError:  # it is not a directory, or cannot be listed
        return []
    entries = [one for one in entries if one.name.startswith(begin) and (begin or not one.name.startswith("."))]
    files = [(f"{place}{one.name}", "file") for one in entries if one.name.endswith((".yaml", ".yml"))]
    directories = [(f"{place}{one.name}/", "directory") for one in entries if incomplete and one.is_dir()]
    return files + directories
