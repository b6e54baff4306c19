"""Makes TLS files for 127.0.0.1, whose certificate vouches for itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from onstep.http.server import TlsFiles


def make_tls_files(directory: Path) -> TlsFiles:
    """New files; skips the test where there is no `openssl` program."""
    if shutil.which("openssl") is None:
        pytest.skip("requires the openssl program")
    files = TlsFiles(directory / "server.pem", directory / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", files.key, "-out", files.certificate], check=True, capture_output=True)
    return files
