"""The methods of a client as functions, for the jobs of this user on this machine."""

from __future__ import annotations

from onstep.control.client.http_client import HTTPTrainerControlClient
from onstep.control.registry import JobInfo

_client = HTTPTrainerControlClient()  # has no state: address and token are read at every request

list_jobs = _client.list_jobs
get_job_status = _client.get_status
send_command = _client.send_command
wait = _client.wait
metrics = _client.metrics
events = _client.events

graceful_stop = _client.graceful_stop
save_checkpoint = _client.save_checkpoint
save_and_stop = _client.save_and_stop
abort = _client.abort
evaluate = _client.evaluate
pause = _client.pause
resume = _client.resume
set_value = _client.set_value
skip_batch = _client.skip_batch
rollback = _client.rollback
generate = _client.generate
profile = _client.profile
stacks = _client.stacks


def get_default_client() -> HTTPTrainerControlClient:
    """The client of the jobs of this user on this machine."""
    return _client


def list_jobs_remote(host: str, port: int, auth_token: str | None = None) -> list[JobInfo]:
    """The jobs on the machine of a control server, newest first.

    Raises:
        ControlError: if the server cannot be reached, or refuses the token.
    """
    return HTTPTrainerControlClient(host, port, auth_token).list_jobs()
