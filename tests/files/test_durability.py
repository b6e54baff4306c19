"""What is appended to a file is whole, or nothing of it is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.waiting import PATIENCE


def test_an_append_that_the_disk_refuses_halfway_leaves_the_file_unchanged(tmp_path: Path) -> None:
    """A limit of 10 bytes on files stands for a full disk: the first 4 of the 9 bytes are written."""
    path = tmp_path / "table.csv"
    path.write_bytes(b"1,2,3\n")
    code = (
        "import os, resource, signal, sys\n"
        "from onstep.files.durability import append_all\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "descriptor = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)\n"
        "try:\n"
        "    append_all(descriptor, b'4,55,666\\n')\n"
        "except OSError:\n"
        "    append_all(descriptor, b'4,5\\n')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=PATIENCE)
    assert path.read_bytes() == b"1,2,3\n4,5\n"
