"""Finds running jobs and sends them commands; requires `pip install 'onstep[control]'`.

`interface` has the commands as methods, `http_client` sends them over HTTP or a Unix socket, `connection` is one
server, `event_stream` follows what a job reports, `functions` are the same methods without a client object.
"""

from onstep.control.client.connection import ControlError
from onstep.control.client.http_client import HTTPTrainerControlClient
from onstep.control.client.interface import ControlResponse, TrainerControlClient

__all__ = ["ControlError", "ControlResponse", "HTTPTrainerControlClient", "TrainerControlClient"]
