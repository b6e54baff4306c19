"""The methods of a client as functions, for the jobs of this user on this machine."""

from __future__ import annotations

from onstep.control.client.http_client import HTTPTrainerControlClient
from onstep.control.registry import JobInfo

_client = HTTPTrainerControlClient()  # has no state: address and token are read at every request

list_jobs = _client.list_jobs
"""`HTTPTrainerControlClient.list_jobs` for the jobs of this user on this machine."""
get_job_status = _client.get_status
"""`HTTPTrainerControlClient.get_status` for the jobs of this user on this machine."""
send_command = _client.send_command
"""`HTTPTrainerControlClient.send_command` for the jobs of this user on this machine."""
wait = _client.wait
"""`HTTPTrainerControlClient.wait` for the jobs of this user on this machine."""
metrics = _client.metrics
"""`HTTPTrainerControlClient.metrics` for the jobs of this user on this machine."""
events = _client.events
"""`HTTPTrainerControlClient.events` for the jobs of this user on this machine."""

# generated: functions
save_checkpoint = _client.save_checkpoint
"""`TrainerControlClient.save_checkpoint` for the jobs of this user on this machine."""
evaluate = _client.evaluate
"""`TrainerControlClient.evaluate` for the jobs of this user on this machine."""
pause = _client.pause
"""`TrainerControlClient.pause` for the jobs of this user on this machine."""
resume = _client.resume
"""`TrainerControlClient.resume` for the jobs of this user on this machine."""
skip_batch = _client.skip_batch
"""`TrainerControlClient.skip_batch` for the jobs of this user on this machine."""
set_value = _client.set_value
"""`TrainerControlClient.set_value` for the jobs of this user on this machine."""
generate = _client.generate
"""`TrainerControlClient.generate` for the jobs of this user on this machine."""
profile = _client.profile
"""`TrainerControlClient.profile` for the jobs of this user on this machine."""
stacks = _client.stacks
"""`TrainerControlClient.stacks` for the jobs of this user on this machine."""
graceful_stop = _client.graceful_stop
"""`TrainerControlClient.graceful_stop` for the jobs of this user on this machine."""
save_and_stop = _client.save_and_stop
"""`TrainerControlClient.save_and_stop` for the jobs of this user on this machine."""
rollback = _client.rollback
"""`TrainerControlClient.rollback` for the jobs of this user on this machine."""
abort = _client.abort
"""`TrainerControlClient.abort` for the jobs of this user on this machine."""
# end of generated part


def get_default_client() -> HTTPTrainerControlClient:
    """The client of the jobs of this user on this machine."""
    return _client


def list_jobs_remote(host: str, port: int, auth_token: str | None = None) -> list[JobInfo]:
    """The jobs on the machine of a control server, newest first.

    Raises:
        ControlError: if the server cannot be reached, or refuses the token.
    """
    return HTTPTrainerControlClient(host, port, auth_token).list_jobs()
