"""Commands to a running job: what they are, how they reach it, and what it shows of itself. Does not import torch.

`commands` is the table of commands, `inbox` hands them to the training thread, `feed` holds what a job shows,
`registry` lists the jobs of this user, `serving` is the server, `page` has the files of the page that it serves,
`client` finds jobs and sends them commands:

    from onstep.control import list_jobs, set_value

    for job in list_jobs():
        print(set_value(job.job_id, "lr_factor", 0.5, wait=60).message)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onstep.lazy_names import lazy_names

if TYPE_CHECKING:
    from onstep.control.client.connection import ControlError
    from onstep.control.client.functions import (
        abort,
        evaluate,
        events,
        generate,
        get_default_client,
        get_job_status,
        graceful_stop,
        list_jobs,
        list_jobs_remote,
        metrics,
        pause,
        profile,
        resume,
        rollback,
        save_and_stop,
        save_checkpoint,
        send_command,
        set_value,
        skip_batch,
        stacks,
        wait,
    )
    from onstep.control.client.http_client import HTTPTrainerControlClient
    from onstep.control.client.interface import ControlResponse, TrainerControlClient
    from onstep.control.registry import JobInfo, is_endpoint_pid_alive

_FUNCTIONS = (
    "abort",
    "evaluate",
    "events",
    "generate",
    "get_default_client",
    "get_job_status",
    "graceful_stop",
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
)
_HOMES = {
    "ControlError": "onstep.control.client.connection",
    "ControlResponse": "onstep.control.client.interface",
    "HTTPTrainerControlClient": "onstep.control.client.http_client",
    "JobInfo": "onstep.control.registry",
    "TrainerControlClient": "onstep.control.client.interface",
    "is_endpoint_pid_alive": "onstep.control.registry",
    **dict.fromkeys(_FUNCTIONS, "onstep.control.client.functions"),
}

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

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
