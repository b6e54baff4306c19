"""An object store in a process of its own: S3 by moto, or Azure by Azurite where `ONSTEP_AZURITE` names it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import azurite
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
KEY, SECRET = "marked-key-id", "marked-secret-credential"
BUCKET = "bucket"
AZURITE = os.environ.get("ONSTEP_AZURITE")
"""The directory where npm has installed it."""
STORE = f"az://{BUCKET}" if AZURITE else f"s3://{BUCKET}"
"""The URL of the bucket of `store_server`."""
SECRETS = [azurite.KEY] if AZURITE else [KEY, SECRET]


def _python() -> str | None:
    """The Python that has moto: the one that the environment names, or that of `make test-main`."""
    own = ROOT / ".venv-moto" / "bin" / "python"
    return os.environ.get("ONSTEP_MOTO_PYTHON") or (str(own) if own.exists() else None)


@contextmanager
def store_server() -> Iterator[str]:
    """Serve the empty bucket of `STORE`; yields the address, as `http://127.0.0.1:PORT`."""
    if AZURITE is None:
        with s3_server() as address:
            yield address
        return
    port = _free_port()
    process = azurite.start(Path(AZURITE), port)
    with _served(process, port, lambda address: azurite.container_request(address, BUCKET)) as address:
        yield address


@contextmanager
def s3_server() -> Iterator[str]:
    """Serve an empty bucket over S3; yields the address, as `http://127.0.0.1:PORT`."""
    python = _python()
    if python is None:
        pytest.skip("moto is not installed; make test-main installs it in .venv-moto")
    port = _free_port()
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    process = subprocess.Popen(
        [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    with _served(process, port, lambda address: urllib.request.Request(f"{address}/{BUCKET}", method="PUT")) as address:
        yield address


@contextmanager
def _served(
    process: subprocess.Popen[bytes], port: int, request: Callable[[str], urllib.request.Request]
) -> Iterator[str]:
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _is_done(request(address)), while_true=lambda: process.poll() is None)
        yield address
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _is_done(request: urllib.request.Request) -> bool:
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return bool(answer.status in (200, 201))
    except OSError:
        time.sleep(0.1)
        return False


def environment_of(address: str) -> dict[str, str]:
    """What a process needs to reach the server of `store_server`."""
    if AZURITE is not None:
        return azurite.environment_of(address)
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }
