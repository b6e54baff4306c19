"""Finds modules by their files and parses them; nothing is imported and no code of theirs runs."""

from __future__ import annotations

import ast
import importlib.util
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from onstep.errors import ConfigError

_CLOSED = (
    "torch torchvision numpy scipy pandas pyarrow sklearn matplotlib datasets tokenizers safetensors huggingface_hub "
    "pydantic fastapi typer rich requests transformers.models transformers.generation transformers.pipelines "
    "transformers.quantizers transformers.utils"
)
CLOSED = frozenset(_CLOSED.split()) | sys.stdlib_module_names
"""Modules and packages that are not looked into: no class of theirs derives from a Trainer or belongs to one."""


@dataclass(frozen=True, eq=False)
class Module:
    """A parsed module.

    Args:
        name: dotted name; `__main__` for a script.
        path: its file.
    """

    name: str
    path: Path
    tree: ast.Module
    text: str

    @property
    def is_package(self) -> bool:
        """Whether it is the `__init__.py` of a package."""
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        """The package that its relative imports start from."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    def imported(self, node: ast.ImportFrom) -> str:
        """The full name of the module in a `from ... import`."""
        if not node.level:
            return node.module or ""
        parents = self.package.split(".")
        kept = parents[: len(parents) - (node.level - 1)]
        return ".".join([*kept, *([node.module] if node.module else [])])

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All its nodes."""
        return list(ast.walk(self.tree))


class Sources:
    """The modules that an interpreter would find, by name.

    Args:
        roots: directories searched before those of `sys.path`.
    """

    def __init__(self, roots: Sequence[Path] = ()) -> None:
        self.roots = list(roots)
        self._modules: dict[str, Module | None] = {}
        self._places: dict[str, list[Path]] = {}

    def script(self, path: Path) -> Module:
        """A script, or a directory with a `__main__.py`; where it is is searched first from now on.

        Raises:
            ConfigError: if it can't be read, or isn't Python.
        """
        if zipfile.is_zipfile(path):
            raise ConfigError(f"{path} is an archive, whose modules are not read; unpack it, and name the directory.")
        if path.is_dir():
            path /= "__main__.py"
        if path.parent.absolute() not in self.roots:
            self.roots.insert(0, path.parent.absolute())
        try:
            text = path.read_text(encoding="utf-8")
            return Module("__main__", path, ast.parse(text, path.name), text)
        except (OSError, ValueError, SyntaxError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{path} must be a readable Python file: {why}; name another script.") from error

    def module(self, name: str) -> Module | None:
        """The module of this name; None if it is closed, isn't found, or isn't readable Python."""
        if name not in self._modules:
            path = None if is_closed(name) else self.path(name)
            self._modules[name] = None if path is None else self._parsed(name, path)
        return self._modules[name]

    def path(self, name: str) -> Path | None:
        """The file of a module; None if it isn't found or isn't Python source."""
        parent, _, last = name.rpartition(".")
        for place in self._directories(parent):
            for path in (place / last / "__init__.py", place / f"{last}.py"):
                if path.is_file():
                    return path
        return None if parent else _installed(name)

    def exists(self, name: str) -> bool:
        """Whether there is a module or a directory of modules of this name."""
        return self.path(name) is not None or bool(self._directories(name))

    def submodules(self, name: str) -> Iterator[str]:
        """A package and all modules in it."""
        for place in self._directories(name):
            for path in sorted(place.rglob("*.py")):
                parts = path.relative_to(place).with_suffix("").parts
                parts = parts[:-1] if parts[-1] == "__init__" else parts
                if all(part.isidentifier() for part in parts):
                    yield ".".join([name, *parts])

    def _directories(self, name: str) -> list[Path]:
        """Where the submodules of a package are; the roots for the name ''."""
        if not name:
            return self.roots
        if name not in self._places:
            self._places[name] = self._found_directories(name)
        return self._places[name]

    def _found_directories(self, name: str) -> list[Path]:
        parent, _, last = name.rpartition(".")
        places = [place / last for place in self._directories(parent)]
        whole = [place for place in places if (place / "__init__.py").is_file()]
        if whole:
            return whole[:1]
        if parent:
            return [place for place in places if place.is_dir()]
        path = _installed(name)
        if path is not None:
            return [path.parent] if path.name == "__init__.py" else []
        return [place for place in places if place.is_dir()]

    def _parsed(self, name: str, path: Path) -> Module | None:
        try:
            return _parsed(name, path, path.stat().st_mtime_ns)
        except (OSError, ValueError, SyntaxError):
            return None


@cache
def _parsed(name: str, path: Path, changed: int) -> Module:
    text = path.read_text(encoding="utf-8")
    return Module(name, path, ast.parse(text), text)


def is_closed(name: str) -> bool:
    """Whether a module is not looked into."""
    first, _, rest = name.partition(".")
    return first in CLOSED or f"{first}.{rest.partition('.')[0]}" in CLOSED


def _installed(name: str) -> Path | None:
    """The file of a top-level module of this interpreter."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    origin = None if spec is None else spec.origin
    return Path(origin) if origin is not None and origin.endswith(".py") else None
