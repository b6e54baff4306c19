"""Commands to a running job: what they are, how they reach it, and what it shows of itself. Does not import torch.

`commands` checks what is sent, by the table in `onstep.commands`; `inbox` hands it to the training thread, `feed` holds
what a job shows, `registry` lists the jobs of this user, `serving` is the server, `page` has the files of the page that
it serves, `client` finds jobs and sends them commands:

    from onstep.control import list_jobs, set_value

    for job in list_jobs():
        print(set_value(job.job_id, "lr_factor", 0.5, wait=60).message)
"""

# ruff: noqa: F403, F405 - the functions are those of the table of commands
from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.control.client.connection import ControlError
    from onstep.control.client.functions import *
    from onstep.control.client.http_client import HTTPTrainerControlClient
    from onstep.control.client.interface import ControlResponse, TrainerControlClient
    from onstep.control.registry import JobInfo, is_endpoint_pid_alive

# generated: names
__all__ = [
    "ControlError",
    "ControlResponse",
    "HTTPTrainerControlClient",
    "JobInfo",
    "TrainerControlClient",
    "abort",
    "evaluate",
    "events",
    "generate",
    "get_default_client",
    "get_job_status",
    "graceful_stop",
    "is_endpoint_pid_alive",
    "list_jobs",
    "list_jobs_remote",
    "metrics",
    "pause",
    "profile",
    "resume",
    "rollback",
    "save_and_stop",
    "save_checkpoint",
    "send_command",
    "set_value",
    "skip_batch",
    "stacks",
    "wait",
]
# end of generated part

HOMES = {
    "ControlError": "onstep.control.client.connection",
    "ControlResponse": "onstep.control.client.interface",
    "HTTPTrainerControlClient": "onstep.control.client.http_client",
    "JobInfo": "onstep.control.registry",
    "TrainerControlClient": "onstep.control.client.interface",
    "is_endpoint_pid_alive": "onstep.control.registry",
}
"""The modules of the names that are not functions of commands."""

__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, "onstep.control.client.functions") | HOMES)
