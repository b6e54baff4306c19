"""An S3 server in a process of its own, over a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.waiting import until

KEY, SECRET = "marked-key-id", "marked-secret-credential"
BUCKET = "bucket"


def _python() -> str | None:
    """The Python that has moto: this one, or the one that the environment names."""
    own = os.environ.get("ONSTEP_MOTO_PYTHON")
    if own:
        return own
    return (
        sys.executable
        if subprocess.run([sys.executable, "-c", "import moto.server"], capture_output=True).returncode == 0
        else None
    )


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve an empty bucket; yields the address, as `http://127.0.0.1:PORT`."""
    python = _python()
    if python is None:
        pytest.skip("moto[server] is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    process = subprocess.Popen(
        [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _makes_bucket(address), while_true=lambda: process.poll() is None)
        yield address
    finally:
        process.terminate()
        process.wait()


def _makes_bucket(address: str) -> bool:
    request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        time.sleep(0.1)
        return False


def environment_of(address: str) -> dict[str, str]:
    """What a process needs to reach the server."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
