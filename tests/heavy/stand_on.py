"""Lets this environment also import what another one has installed: stand_on.py OTHER/bin/python."""

import subprocess
import sys
import sysconfig
from pathlib import Path


def main(other: str) -> None:
    """Add the other environment's packages to this one's path, those that are installed as editable as well."""
    command = [other, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    own = Path(sysconfig.get_path("purelib"))
    (own / "stands_on.pth").write_text(f"import site; site.addsitedir({packages!r})\n")


if __name__ == "__main__":
    main(sys.argv[1])
