"""Runs a user's script or module in this process as `python SCRIPT` and `python -m MODULE` do."""

from __future__ import annotations

import io
import os
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType, TracebackType
from typing import Any

from onstep.errors import ConfigError


class NoProgramError(ConfigError):
    """There is no such script or module."""


@dataclass(frozen=True)
class Program:
    """A script, or a module with `is_module`, and its arguments."""

    name: str
    is_module: bool
    words: Sequence[str]

    def check(self) -> None:
        """Refuse a script that does not exist.

        Raises:
            NoProgramError: naming it.
        """
        if self.is_module:
            return
        if not os.path.exists(self.name):
            raise NoProgramError(f"{self.name}: the file does not exist; give a script, or a module with -m.")
        if os.path.isdir(self.name) and PathFinder.find_spec("__main__", [self.name]) is None:
            raise NoProgramError(f"{self.name}: the directory has no __main__.py; give a script, or a module with -m.")


def run_as_main(program: Program) -> None:
    """Run a program as `__main__`, with its `sys.argv` and `sys.path[0]`, which remain so.

    Raises:
        NoProgramError: if there is no such module.
    """
    if program.is_module:
        _set_first_path(os.getcwd())
        sys.argv = ["-m", *program.words]
        spec, code = _module(program.name)
        sys.argv[0] = spec.origin or program.name
        main = _main_module(spec)
    elif os.path.isdir(program.name) or zipfile.is_zipfile(program.name):
        _set_first_path(os.path.abspath(program.name))
        sys.argv = [program.name, *program.words]
        spec, code = _code_of(PathFinder.find_spec("__main__", [program.name]), f"{program.name}/__main__")
        main = _main_module(spec)
    else:
        _set_first_path(os.path.dirname(os.path.realpath(program.name)))
        sys.argv = [program.name, *program.words]
        path = os.path.abspath(program.name)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        main = ModuleType("__main__")
        vars(main).update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
    if sys.version_info < (3, 14):
        vars(main)["__annotations__"] = {}
    sys.modules["__main__"] = main
    exec(code, vars(main))


def run_to_end(program: Program) -> None:
    """`run_as_main`, where the traceback of an error begins in the program, as if Python itself had run it."""
    try:
        run_as_main(program)
    except (SystemExit, NoProgramError):
        raise
    except BaseException as error:
        error.__traceback__ = _of_program(error.__traceback__)
        shown, show = error, sys.excepthook
        show(type(error), error, error.__traceback__)

        def show_others(kind: type[BaseException], other: BaseException, traceback: TracebackType | None) -> None:
            if other is not shown:
                show(kind, other, traceback)

        sys.excepthook = show_others
        raise  # so that Python ends as it does after this error


def _set_first_path(path: str) -> None:
    """Replace what Python has put first on the path for this command by what it puts there for a program."""
    if not sys.flags.safe_path:
        sys.path[:1] = [path]


def _module(name: str) -> tuple[ModuleSpec, CodeType]:
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
            if spec is None:
                raise NoProgramError(f"{name} is a package without a module __main__ to run; give one of its modules.")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    return _code_of(spec, name)


def _code_of(spec: ModuleSpec | None, name: str) -> tuple[ModuleSpec, CodeType]:
    loader: Any = None if spec is None else spec.loader
    code = loader.get_code(spec.name) if spec is not None and hasattr(loader, "get_code") else None
    if spec is None or code is None:
        raise NoProgramError(f"there is no module {name} to run; give a script, or a module with -m.")
    return spec, code


def _main_module(spec: ModuleSpec) -> ModuleType:
    main = ModuleType("__main__")
    vars(main).update(
        __file__=spec.origin, __loader__=spec.loader, __cached__=spec.cached, __spec__=spec, __package__=spec.parent
    )
    return main


def _of_program(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that lead to the program."""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file != __file__ and not file.startswith("<frozen "):
            break
        traceback = traceback.tb_next
    return traceback
