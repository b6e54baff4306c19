"""The command that `onstep launch` starts, and the nodes and ranks that run it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onstep.errors import ConfigError

ONSTEP_COMMANDS = ("train", "finetune", "run")
"""Commands of `onstep` that train, and so may have several ranks."""
PYTHONS = ("python", "python3")
_NODES = re.compile(r"([1-9]\d*)(?::([1-9]\d*))?")
_SETTINGS = (
    *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout", "read_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt"),
)
"""Settings of torchelastic's rendezvous, which ignores others; timeouts and the interval in seconds."""
_IS_HOST = "is_host"
"""Likewise: whether this node holds the store, where that does not follow from the host's name."""
_EXAMPLES = "onstep launch -- train tiny_gpt, or onstep launch -- python script.py"


@dataclass(frozen=True)
class Nodes:
    """How many nodes take part: from `least` to `most`."""

    least: int = 1
    most: int = 1

    @property
    def is_elastic(self) -> bool:
        """Whether the run may continue with another number of nodes."""
        return self.least < self.most

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Read `N` or `LEAST:MOST`.

        Raises:
            ConfigError: for anything else.
        """
        match = _NODES.fullmatch(text)
        nodes = cls(int(match[1]), int(match[2] or match[1])) if match else cls(1, 0)
        if nodes.least > nodes.most:
            raise ConfigError(f"--nnodes must be N or LEAST:MOST of at least 1, such as 2 or 1:4, got {text!r}.")
        return nodes


@dataclass(frozen=True)
class Rendezvous:
    """Where the nodes of a launch meet."""

    place: str
    """`HOST:PORT`, where one node holds a store, or the path of a file that all of them see."""
    id: str
    is_host: bool | None = None
    """Whether this node holds the store; None if that follows from the host's name."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of torchelastic's rendezvous, such as `last_call_timeout`."""

    @property
    def is_file(self) -> bool:
        """Whether the nodes meet in a file."""
        return "/" in self.place


@dataclass(frozen=True)
class Launch:
    """What one node of a launch runs."""

    command: tuple[str, ...]
    ranks: int
    """The number of ranks on this node."""
    nodes: Nodes
    max_restarts: int
    rendezvous: Rendezvous | None
    """None on a single node."""
    log_dir: Path | None
    """Where output of ranks is kept; None for a temporary directory, kept only after a failure."""


@dataclass(frozen=True)
class ClusterJob:
    """What a cluster is asked for, and runs; `words` is the command of each rank, as on the command line."""

    words: Sequence[str]
    name: str
    nodes: int = 1
    gpus_per_node: int | None = None
    ranks_per_node: int | None = None
    """None for one rank on each GPU, or one without GPUs."""
    max_restarts: int = 0


def require_words(words: Sequence[str]) -> None:
    """Refuse a launch of nothing.

    Raises:
        ConfigError: if there are no words.
    """
    if not words:
        raise ConfigError(f"onstep launch requires what to run: {_EXAMPLES}.")


def command_of(words: Sequence[str]) -> tuple[str, ...]:
    """The command line of each rank.

    Args:
        words: a command of `onstep` that trains, `python ...`, a script, or any program.

    Raises:
        ConfigError: if there is no such program or script.
    """
    require_words(words)
    first, rest = words[0], words[1:]
    if first in ONSTEP_COMMANDS:
        return (sys.executable, *_as_onstep_itself(), "-m", "onstep", *words)
    script = next(iter(rest), "") if first in PYTHONS else first
    if script.endswith(".py") and not os.path.isfile(script):
        raise ConfigError(f"{script}: the file does not exist; give the script to run.")
    if first in PYTHONS:
        return (sys.executable, *rest)
    if first.endswith(".py"):
        return (sys.executable, *words)
    program = shutil.which(first)
    if program is None:
        known = ", ".join(ONSTEP_COMMANDS)
        raise ConfigError(f"onstep launch starts one of {known}, a script, or a program, got {first!r}: {_EXAMPLES}.")
    return (program, *rest)


def _as_onstep_itself() -> list[str]:
    """The option of Python that keeps the working directory off the path of modules where `onstep` has it not."""
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


def rendezvous_of(place: str | None, id_: str | None, settings: str | None, nodes: Nodes) -> Rendezvous | None:
    """Where the nodes meet: as the options say, else as the environment of `torchrun` says (`PET_MASTER_ADDR`).

    Raises:
        ConfigError: if several nodes have no place to meet, or the options are invalid.
    """
    environment, is_host = os.environ, None
    if place is None and nodes.most > 1 and "PET_MASTER_ADDR" in environment:
        place = f"{environment['PET_MASTER_ADDR']}:{environment.get('PET_MASTER_PORT', '29500')}"
        is_host = environment.get("PET_NODE_RANK", "0") == "0"
    if place is None:
        if nodes.most > 1:
            raise ConfigError(
                f"--nnodes={nodes.most} requires --rdzv, where the nodes meet: HOST:PORT of one, or a file on a "
                f"file system that they share; the same on all nodes."
            )
        return None
    host, _, port = place.rpartition(":")
    if "/" in place and not Path(place).absolute().parent.is_dir():
        raise ConfigError(
            f"--rdzv={place} is in a directory that does not exist; create it, on a file system that all nodes share."
        )
    if "/" not in place and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ConfigError(f"--rdzv must be HOST:PORT or the path of a file, got {place!r}.")
    return Rendezvous(place, id_ or environment.get("SLURM_JOB_ID", "onstep"), is_host, _settings(settings))


def _settings(text: str | None) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")] if text else []
    for name, _, value in pairs:
        is_number = value.isdecimal() and (int(value) > 0 or name == _IS_HOST)
        if name not in (*_SETTINGS, _IS_HOST) or not is_number:
            raise ConfigError(
                f"--rdzv-conf must be NAME=NUMBER,NAME=NUMBER of {', '.join(_SETTINGS)} (at least 1) or {_IS_HOST} "
                f"(0 or 1), got {text!r}."
            )
    return {name: value for name, _, value in pairs}
