"""Makes the exchange of names in a process that a program under `onstep run` starts, before anything is imported."""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _exchange() -> None:
    try:
        from onstep.exchange.install import VARIABLE, install
    except ImportError:  # a Python without Onstep
        return
    if os.environ.get(VARIABLE) == "1":
        install(says_so=False)


def _import_next() -> None:
    """Import the `sitecustomize` that Python would have found without this directory."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != own]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


_exchange()
_import_next()
