"""A SLURM cluster of several nodes on this machine, for the time of a test: its own controller, ports and directory."""

from __future__ import annotations

import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.waiting import PATIENCE, until

COMMANDS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
MISSING = "requires SLURM: make slurm"
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"


def is_installed() -> bool:
    """Whether this machine has SLURM's programs."""
    return all(shutil.which(name, path=_PATH) for name in COMMANDS)


class Cluster:
    """Submits jobs to a running cluster, and asks for them.

    Args:
        directory: of its configuration, logs and spool.
        nodes: their names.
    """

    def __init__(self, directory: Path, nodes: list[str]) -> None:
        self.directory = directory
        self.nodes = nodes
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        self.environment = {**inherited, "PATH": _PATH, "SLURM_CONF": str(directory / "slurm.conf")}

    def ask(self, *words: str) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def submit(self, script: Path, *options: str) -> str:
        """The id of a new job, whose output goes to `<script>.out`."""
        return self.ask(
            "sbatch", "--parsable", f"--chdir={script.parent}", f"--output={script}.out", *options, str(script)
        )

    def value(self, job: str, name: str) -> str:
        """A value of `scontrol show job`."""
        words = self.ask("scontrol", "show", "job", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))


@contextmanager
def running_cluster(directory: Path, num_nodes: int) -> Iterator[Cluster]:
    """Start a cluster, and end it with its jobs."""
    nodes = [f"node{number + 1}" for number in range(num_nodes)]
    cluster = Cluster(directory, nodes)
    _write_configuration(cluster)
    with ExitStack() as stack:
        for number, command in enumerate([["slurmctld", "-D"], *(["slurmd", "-D", "-N", name] for name in nodes)]):
            output = stack.enter_context((directory / f"daemon-{number}.out").open("w"))
            daemon = subprocess.Popen(command, env=cluster.environment, stdout=output, stderr=output)
            stack.callback(_end, daemon)
        stack.callback(_cancel_all, cluster)
        until(lambda: _are_idle(cluster), lambda: _logs(directory))
        yield cluster


def _write_configuration(cluster: Cluster) -> None:
    place, host, user = cluster.directory, socket.gethostname().partition(".")[0], getpass.getuser()
    controller, *ports = _free_ports(len(cluster.nodes) + 1)
    (place / "state").mkdir()
    for name in cluster.nodes:
        (place / f"spool-{name}").mkdir()
    lines = [
        "ClusterName=onstep",
        f"FirstJobId={random.SystemRandom().randint(1, 60_000_000)}",  # ports of jobs are derived from their ids
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={controller}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/none",  # no munge: the sockets are this machine's
        "CredType=cred/none",
        "AuthInfo=cred_expire=6",  # a requeued job starts no sooner: 120 seconds by default
        "ProctrackType=proctrack/linuxproc",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "ReturnToService=2",
        "RequeueExit=75",
        "KillWait=5",
        f"StateSaveLocation={place}/state",
        f"SlurmdSpoolDir={place}/spool-%n",
        f"SlurmctldPidFile={place}/slurmctld.pid",
        f"SlurmdPidFile={place}/%n.pid",
        f"SlurmctldLogFile={place}/slurmctld.log",
        f"SlurmdLogFile={place}/%n.log",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0",
        *(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for name, port in zip(cluster.nodes, ports, strict=True)
        ),
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=60",
        "PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10",
    ]
    (place / "slurm.conf").write_text("\n".join(lines) + "\n")


def _free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _are_idle(cluster: Cluster) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--partition=main", "--Node", "--format=%T"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split() == ["idle"] * len(cluster.nodes)


def _cancel_all(cluster: Cluster) -> None:
    cluster.ask("scancel", "--me")
    until(lambda: not cluster.ask("squeue", "--noheader", "--me"))


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.send_signal(signal.SIGTERM)
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _logs(directory: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-2000:] for path in directory.glob("*.log"))
