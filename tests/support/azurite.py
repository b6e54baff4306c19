"""Azure's blob storage as Azurite serves it, from where npm has installed it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import subprocess
import urllib.request
from email.utils import formatdate
from pathlib import Path

ACCOUNT = "devstoreaccount1"
KEY = base64.b64encode(b"marked-azure-credential").decode()


def start(place: Path, port: int) -> subprocess.Popen[bytes]:
    """Serve an account without containers.

    Args:
        place: the directory that npm has installed it in.
        port: of this machine.
    """
    program = place / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
    options = ["--blobHost=127.0.0.1", f"--blobPort={port}", "--inMemoryPersistence", "--silent"]
    return subprocess.Popen(
        ["node", str(program), *options, "--skipApiVersionCheck", "--disableTelemetry"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
    )


def container_request(address: str, name: str) -> urllib.request.Request:
    """What makes a container, signed with the shared key."""
    facts = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    headers = "".join(f"{key}:{value}\n" for key, value in facts.items())
    signed = ("PUT" + "\n" * 12 + headers + resource).encode()
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed, hashlib.sha256).digest()).decode()
    facts["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    return urllib.request.Request(f"{address}/{ACCOUNT}/{name}?restype=container", method="PUT", headers=facts)


def environment_of(address: str) -> dict[str, str]:
    """What a process needs to reach the server."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": address,
    }
