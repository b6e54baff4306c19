"""Gives the tasks of an `srun` step the environment variables that `torchrun` gives its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, MutableMapping

_FIRST_PORT, _NUM_PORTS = 20000, 10000
"""Ports of the ranks' store: below those that systems give to connections."""


def adopt_ranks(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make each task of an `srun` step of several tasks a rank, unless a launcher such as `torchrun` has done so.

    Sets `$RANK`, `$WORLD_SIZE`, `$LOCAL_RANK`, `$LOCAL_WORLD_SIZE` and `$GROUP_RANK`. Unless set, `$MASTER_ADDR` is the
    step's first node, and `$MASTER_PORT` is derived from the ids of the job and the step. A batch script itself is not
    a task of a step; tasks that shall be runs of one rank each set `WORLD_SIZE=1`.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment:
        return
    num_tasks = _number(environment, "SLURM_STEP_NUM_TASKS")
    if num_tasks < 2:
        return
    node = _number(environment, "SLURM_NODEID")
    per_node = list(_tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "")))
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = str(num_tasks)
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    environment["LOCAL_WORLD_SIZE"] = str(per_node[node] if node < len(per_node) else 1)
    environment["GROUP_RANK"] = str(node)
    port = (
        _FIRST_PORT + (10 * _number(environment, "SLURM_JOB_ID") + _number(environment, "SLURM_STEP_ID")) % _NUM_PORTS
    )
    environment.setdefault("MASTER_ADDR", first_host(environment.get("SLURM_STEP_NODELIST", "localhost")))
    environment.setdefault("MASTER_PORT", str(port))


def first_host(nodes: str) -> str:
    """The first host of SLURM's short form of a node list: `gpu007` of `gpu[007-010,12],login1`."""
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).partition(",")[0]


def _tasks_per_node(text: str) -> Iterator[int]:
    """The number of tasks on each node, from SLURM's short form: 2, 2, 2 and 1 of `2(x3),1`."""
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(tasks)] * int(nodes or 1)


def _number(environment: MutableMapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0
