"""Checks a release: the wheel works in an empty environment, outside of the clone.

    python tools/release_check.py [DIRECTORY]

Builds the source distribution and, from it, the wheel, compares the wheel with the repository, installs it with the
extras of the demo and the pages, and runs what a newcomer runs: the help of every command, a short demo, its report and
the dashboard. Everything happens in DIRECTORY, or else in a temporary directory; the two archives are in its `dist/`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
EXTRAS = "hf,control"
DEMO = ("train.train_iters=5", "scheduler.lr_warmup_iters=1", "validation.eval_iters=1")


class Environment:
    """An empty virtual environment, and an empty directory that its commands run in.

    Args:
        directory: must not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.path, self.work = directory / "environment", directory / "work"
        self.work.mkdir(parents=True)
        venv.create(self.path, with_pip=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ONSTEP"))}
        self.environment = {**kept, "PATH": f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def run(self, *command: str) -> str:
        """The output of a command of this environment.

        Raises:
            SystemExit: naming the command, with its output, if it fails.
        """
        print(f"  {' '.join(command)}", flush=True)
        program = [str(self.path / "bin" / command[0]), *command[1:]]
        done = subprocess.run(program, cwd=self.work, env=self.environment, text=True, check=False, capture_output=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    @contextmanager
    def serving(self, *command: str) -> Iterator[str]:
        """The address that a command prints, while it serves there."""
        print(f"  {' '.join(command)}", flush=True)
        program = [str(self.path / "bin" / command[0]), *command[1:]]
        options = {"cwd": self.work, "env": {**self.environment, "PYTHONUNBUFFERED": "1"}, "text": True}
        with subprocess.Popen(program, stdout=subprocess.PIPE, **options) as process:  # type: ignore[call-overload]
            try:
                line = process.stdout.readline()
                address = re.search(r"http://\S+", line)
                if address is None:
                    sys.exit(f"{' '.join(command)} printed no address, but {line!r}")
                yield address[0]
            finally:
                process.terminate()


def build(directory: Path) -> tuple[Path, Path]:
    """The wheel, made from the source distribution, and that one."""
    builder = Environment(directory / "builder")
    builder.run("python", "-m", "pip", "install", "--quiet", "build")
    builder.run("python", "-m", "build", "--outdir", str(directory / "dist"), str(ROOT))
    [wheel], [source] = (list((directory / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, source


def missing_files(wheel: Path) -> list[str]:
    """The tracked files of the package that the wheel lacks."""
    listed = subprocess.run(["git", "ls-files", "src/onstep"], cwd=ROOT, text=True, check=True, capture_output=True)
    with ZipFile(wheel) as archive:
        contained = set(archive.namelist())
    return [name for name in listed.stdout.splitlines() if name.removeprefix("src/") not in contained]


def install(installed: Environment, wheel: Path) -> None:
    """Install the wheel with the pinned versions; torch first, by its exact version, which is its CPU build."""
    constraints = ROOT / "constraints.txt"
    torch = next(line for line in constraints.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    installed.run("python", "-m", "pip", "install", "--quiet", torch)
    wanted = f"onstep[{EXTRAS}] @ {wheel.as_uri()}"
    installed.run("python", "-m", "pip", "install", "--quiet", "--constraint", str(constraints), wanted)


def check_version(installed: Environment) -> None:
    """Compare the printed version with that of `pyproject.toml`, and check that the package is the installed one."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert installed.run("onstep", "--version").strip() == f"onstep {version}"
    place = installed.run("python", "-c", "import onstep; print(onstep.__file__)")
    assert Path(place).is_relative_to(installed.path), f"onstep was imported from {place}"


def help_of_all_commands(installed: Environment, *words: str) -> int:
    """Print the help of a command and of those below it; the number of commands."""
    text = installed.run("onstep", *words, "--help")
    listed = re.search(r"^Commands:\n((?:  .*\n)+)", text, re.MULTILINE)
    names = re.findall(r"^  (\S+)", listed[1], re.MULTILINE) if listed else []
    return 1 + sum(help_of_all_commands(installed, *words, name) for name in names)


def check_demo(installed: Environment) -> None:
    """Run a short demo, and draw its report with the files beside the report's code."""
    text = installed.run("onstep", "demo", *DEMO)
    assert "runs/demo" in text, text
    installed.run("onstep", "logs", "report", "runs/demo", "--output", "report.html")
    report = (installed.work / "report.html").read_text(encoding="utf-8")
    for asset in sorted((ROOT / "src/onstep/analysis/reports/page").glob("*.[jc]s*")):
        line = max(asset.read_text(encoding="utf-8").splitlines(), key=len).strip()
        assert line in report, f"the report lacks {asset.name}"


def check_pages(installed: Environment) -> None:
    """Fetch the dashboard's page and every file that it names."""
    with installed.serving("onstep", "dashboard", "runs", "--no-browser", "--port", "0") as address:
        page = _fetched(address)
        files = re.findall(r'(?:src|href)="(/static/[^"]+)"', page)
        assert len(files) >= 4, page
        for name in dict.fromkeys(files):
            assert _fetched(address.rstrip("/") + name), name


def _fetched(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return str(answer.read().decode())


def check(directory: Path) -> None:
    """Build, install and try the release in a directory."""
    wheel, source = build(directory)
    missing = missing_files(wheel)
    if missing:
        sys.exit(f"{wheel.name} lacks {', '.join(missing)}")
    installed = Environment(directory / "installed")
    install(installed, wheel)
    check_version(installed)
    number = help_of_all_commands(installed)
    check_demo(installed)
    check_pages(installed)
    print(f"{wheel.name}, {source.name}: {number} texts of help, a demo, its report and the dashboard work")


def main(arguments: list[str]) -> int:
    """Check the release; 1 for wrong arguments."""
    if len(arguments) > 1:
        print(__doc__)
        return 1
    if arguments:
        check(Path(arguments[0]).resolve())
        return 0
    with tempfile.TemporaryDirectory() as directory:
        check(Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
