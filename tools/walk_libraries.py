"""Writes the tables of docs/coming-from/libraries.md: what ten libraries override and use of a Trainer, and what Onstep
does with it.

    make walk, or python tools/walk_libraries.py [--wheels DIRECTORY] [--check] [--json FILE]

The sources of the pinned wheels are read, as `onstep run --explain` reads a script; nothing of them is installed.
Wheels that DIRECTORY lacks are downloaded. The names of `transformers` and `accelerate` are those of the installed
versions. `--check` writes nothing, and exits with 1 if the page is stale.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from onstep.explain.explaining import Explanation, Row, count, exchanged_names, explain_modules
from onstep.explain.outcomes import Outcomes
from onstep.explain.source.modules import Sources
from onstep.explain.source.resolver import Resolver

PAGE = Path(__file__).parents[1] / "docs/coming-from/libraries.md"
PART = re.compile(r"(?<=<!-- walked: (\w{6}) -->\n\n).*?(?=\n\n<!-- end of walked part -->)", re.DOTALL)


@dataclass(frozen=True)
class Library:
    """A library in a wheel: its name and version there, and the package that is walked."""

    name: str
    distribution: str
    version: str
    package: str


LIBRARIES = (
    Library("TRL", "trl", "1.16.0", "trl"),
    Library("sentence-transformers", "sentence-transformers", "6.2.0", "sentence_transformers"),
    Library("SetFit", "setfit", "1.2.0", "setfit"),
    Library("PyLate", "pylate", "1.6.0", "pylate"),
    Library("GLiNER", "gliner", "0.2.29", "gliner"),
    Library("Unsloth", "unsloth", "2026.10.9", "unsloth"),
    Library("Axolotl", "axolotl", "0.19.0", "axolotl"),
    Library("ms-swift", "ms-swift", "4.6.0", "swift"),
    Library("LLaMA-Factory", "llamafactory", "0.9.5", "llamafactory"),
    Library("FlagEmbedding", "flagembedding", "1.4.2", "FlagEmbedding"),
)


def wheel_of(library: Library, directory: Path) -> Path:
    """The wheel of a library, downloaded unless it is there."""
    pattern = f"{library.distribution.replace('-', '_')}-{library.version}-*.whl"
    if not list(directory.glob(pattern)):
        pinned = f"{library.distribution}=={library.version}"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(directory), pinned], check=True)
    return next(directory.glob(pattern))


def walked(wheels: Path, unpacked: Path) -> dict[str, Explanation]:
    """The explanation of each library's package, by its name; the libraries find each other."""
    roots = []
    for library in LIBRARIES:
        roots.append(unpacked / library.package)
        with zipfile.ZipFile(wheel_of(library, wheels)) as wheel:
            wheel.extractall(roots[-1], [name for name in wheel.namelist() if name.endswith(".py")])
    sources = Sources(roots)
    outcomes, resolver = Outcomes(), Resolver(sources, exchanged_names())
    return {
        library.name: explain_modules(
            [module for name in sources.submodules(library.package) if (module := sources.module(name))],
            resolver,
            outcomes,
        )
        for library in LIBRARIES
    }


def tables(found: dict[str, Explanation]) -> dict[str, str]:
    """The tables of the page, by name."""
    return {
        "counts": _counts(found),
        "others": _others(found),
        "absent": _absent(found),
        "assign": _assigned(found),
        "import": _imported(found),
    }


def _counts(found: dict[str, Explanation]) -> str:
    rows = []
    overrides, attributes = list[Row](), list[Row]()
    for library in LIBRARIES:
        one = found[library.name]
        overrides += one.overrides
        attributes += one.attributes
        rows.append(
            [f"{library.name} {library.version}", str(len(one.classes)), *_shares(one.overrides, one.attributes)]
        )
    rows.append(["**all**", str(sum(len(one.classes) for one in found.values())), *_shares(overrides, attributes)])
    names = {(row.name, row.outcome) for row in overrides}, {(row.name, row.outcome) for row in attributes}
    distinct = [Row(name, "", "", "", 0, outcome) for name, outcome in names[0]]
    of_attributes = [Row(name, "", "", "", 0, outcome) for name, outcome in names[1]]
    rows.append(["each name once", "", *_shares(distinct, of_attributes)])
    head = ["library", "classes", "overrides", "honoured", "refused", "never called", "missing", ""]
    return _table([*head, "attributes", "there", "refused", "missing", ""], rows)


def _shares(overrides: Sequence[Row], attributes: Sequence[Row]) -> list[str]:
    first, second = count(overrides), count(attributes)
    return [
        str(len(overrides)),
        *(str(first[outcome]) for outcome in ("honoured", "refused", "never", "missing")),
        _percent(first["honoured"], len(overrides)),
        str(len(attributes)),
        *(str(second[outcome]) for outcome in ("honoured", "refused", "missing")),
        _percent(second["honoured"], len(attributes)),
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""


def _others(found: dict[str, Explanation]) -> str:
    """The overrides that are not always called."""
    rows = {name: [row for row in one.overrides if row.outcome != "honoured"] for name, one in found.items()}
    return _listed(rows, "override")


def _absent(found: dict[str, Explanation]) -> str:
    """The attributes that Onstep doesn't have, or refuses to set."""
    rows = {name: [row for row in one.attributes if row.outcome != "honoured"] for name, one in found.items()}
    return _listed(rows, "attribute")


def _assigned(found: dict[str, Explanation]) -> str:
    return _listed({name: one.assigned for name, one in found.items()}, "assigned to")


def _listed(rows: dict[str, list[Row]], head: str) -> str:
    """Each name once, with its outcome and the libraries that have it."""
    libraries: dict[tuple[str, ...], dict[str, None]] = {}
    for library, some in rows.items():
        for row in some:
            verb = {"set": " (set)", "source": " (its source)"}.get(row.verb, "")
            libraries.setdefault((f"`{row.name}`{verb}", row.words, row.remark), {})[library] = None
    table = [[*cells, ", ".join(users)] for cells, users in sorted(libraries.items())]
    return _table([head, "", "when, and what to do", "libraries"], table)


def _imported(found: dict[str, Explanation]) -> str:
    kinds = ("exchanged", "transformers' own", "not there")
    rows = [[name, *(str(one.imports.get(kind, 0)) for kind in kinds)] for name, one in found.items()]
    return _table(["library", *kinds], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path, help="write all rows")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        wheels = given.wheels or Path(directory) / "wheels"
        wheels.mkdir(exist_ok=True)
        found = walked(wheels, Path(directory))
        if given.json:
            given.json.write_text(json.dumps({name: asdict(one) for name, one in found.items()}, indent=1))
    parts = tables(found)
    print(parts["counts"])
    old = PAGE.read_text(encoding="utf-8")
    new = PART.sub(lambda part: parts[part[1]], old)
    new = re.sub(r"(?<=transformers )\d+\.\d+\.\d+(?= and accelerate)", version("transformers"), new)
    if given.check:
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
