"""Runs the ranks of a launch by Ray Train's TorchTrainer, or writes the program that does."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from onstep.errors import ConfigError, extra, named_text
from onstep.launch.plan import ONSTEP_COMMANDS, PYTHONS, Nodes

_ANSWER_SECONDS = 5.0
"""How long the head of a cluster may take to accept a connection."""
_NO_PRINT_PATCH = ("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
"""Ray Train else logs what ranks print, and prints it as well where a program has replaced `sys.stdout`, as ours."""
_PROGRAM = Template("""\
import os

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from onstep.integrations.ray import run_command

os.environ.setdefault($variable)
ray.init($init)
TorchTrainer(
    run_command,
    train_loop_config={
        "command": $command,
        "directory": $directory,
    },
    scaling_config=ScalingConfig($scaling),
    run_config=RunConfig(
        name=$name,
        storage_path=$storage,
        failure_config=FailureConfig(max_failures=$failures),
    ),
).fit()
""")

Options = dict[str, Any]


@dataclass(frozen=True)
class RayJob:
    """What Ray is asked for, and runs; `words` is the command of each rank, as on the command line."""

    words: Sequence[str]
    name: str
    address: str
    """`HOST:PORT` or `auto` for a cluster that runs, `local` for one of this launch."""
    nodes: Nodes
    ranks_per_node: int
    has_gpus: bool
    """Whether each rank has a GPU."""
    max_restarts: int
    directory: Path
    """Where the ranks run; also Ray keeps what it writes there, in `ray_results`."""

    @property
    def command(self) -> list[str]:
        """The words after `python`.

        Raises:
            ConfigError: if it is not Python that is to run.
        """
        first, rest = self.words[0], list(self.words[1:])
        if first in ONSTEP_COMMANDS:
            return ["-m", "onstep", *self.words]
        is_python = first in PYTHONS
        words = rest if is_python else list(self.words)
        if words and (words[0].endswith(".py") or (is_python and words[0] == "-m" and len(words) > 1)):
            return words
        raise ConfigError(
            f"--ray runs a command in Ray's own processes, which are Python: {', '.join(ONSTEP_COMMANDS)}, python "
            f"script.py or python -m MODULE, got {' '.join(self.words)!r}; drop --ray for other programs."
        )

    @property
    def head(self) -> tuple[str, int] | None:
        """Host and port of the cluster's head, if the address names them.

        Raises:
            ConfigError: for an invalid address.
        """
        if self.address in ("auto", "local"):
            return None
        host, _, port = self.address.rpartition(":")
        if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"--ray must be HOST:PORT, auto or local, got {self.address!r}.")
        return host, int(port)

    @property
    def init(self) -> Options:
        """Arguments of `ray.init`."""
        if self.address != "local":
            return {"address": self.address}
        return {"address": "local", "num_cpus": max(self.ranks_per_node * self.nodes.most, os.cpu_count() or 1)}

    @property
    def scaling(self) -> Options:
        """Arguments of `ScalingConfig`."""
        least, most = self.ranks_per_node * self.nodes.least, self.ranks_per_node * self.nodes.most
        return {"num_workers": (least, most) if self.nodes.is_elastic else most, "use_gpu": self.has_gpus}

    @property
    def settings(self) -> Options:
        """The argument of the training function."""
        return {"command": self.command, "directory": str(self.directory)}

    @property
    def storage(self) -> str:
        """Where Ray keeps what it writes."""
        return str(self.directory / "ray_results")


def program(job: RayJob) -> str:
    """The Python program that runs a job as `run` does."""
    parts = {**job.settings, "name": job.name, "storage": job.storage, "failures": job.max_restarts}
    shown = {name: _shown(value) for name, value in parts.items()}
    variable = ", ".join(map(_shown, _NO_PRINT_PATCH))
    return _PROGRAM.substitute(shown, variable=variable, init=_arguments(job.init), scaling=_arguments(job.scaling))


def run(job: RayJob, run_command: Callable[[Mapping[str, Any]], int]) -> int:
    """Run a job; its exit code.

    Args:
        job: what is run.
        run_command: the training function.

    Raises:
        MissingExtraError: if Ray is not installed.
        ConfigError: if the address does not answer.
    """
    settings, head = job.settings, job.head
    with extra("ray", f"--ray={job.address} requires Ray Train, which is not installed"):
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer
    os.environ.setdefault(*_NO_PRINT_PATCH)
    _connect(job, head)
    try:
        result = TorchTrainer(
            run_command,
            train_loop_config=settings,
            scaling_config=ScalingConfig(**job.scaling),
            run_config=RunConfig(
                name=job.name,
                storage_path=job.storage,
                failure_config=FailureConfig(max_failures=job.max_restarts),
            ),
        ).fit()
    except TrainingFailedError as error:
        sys.stderr.write(f"onstep launch: {_reason(error)}\n")
        return 1
    finally:
        ray.shutdown()
    return int(result.return_value or 0)


def _connect(job: RayJob, head: tuple[str, int] | None) -> None:
    """Join the cluster, or start one.

    Raises:
        ConfigError: if there is none.
    """
    import ray

    try:
        if head is not None:  # Ray itself waits much longer
            socket.create_connection(head, timeout=_ANSWER_SECONDS).close()
        ray.init(**job.init)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        token = "" if head is None else "; one with tokens requires RAY_AUTH_MODE=token"
        raise ConfigError(
            f"--ray={job.address}: no Ray cluster answers there ({reason}); start one by ray start --head, and run "
            f"this command on a node of it{token}, or give --ray=local."
        ) from None


def _reason(error: Exception) -> str:
    """Which rank has failed, in one line; one that was killed comes before those that miss it."""
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    if not failures:
        return " ".join(str(error).split())
    rank = min(failures, key=lambda rank: ("died" not in str(failures[rank]), rank))
    lines = [line.strip() for line in named_text(failures[rank]).splitlines() if line.strip()]
    return f"rank {rank} failed: {lines[0].rstrip('.')}; its output is above"


def _arguments(options: Options) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in options.items())


def _shown(value: Any) -> str:
    """A value as Python code, with texts as most programs quote them."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)
