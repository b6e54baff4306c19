"""Tests that need packages which are heavy to import; `make test-heavy` runs them, the other targets leave them out."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchao") is not None else ["test_*.py"]
