"""What the tests share: small real configurations and a small corpus."""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["ONSTEP_REGISTRY"] = os.path.join(tempfile.mkdtemp(prefix="onstep-tests-"), "jobs")
os.environ["ONSTEP_DILOCO_TOKENS"] = tempfile.mkdtemp(prefix="onstep-tests-tokens-")
os.environ["ONSTEP_DILOCO_WORK"] = tempfile.mkdtemp(prefix="onstep-tests-work-")

from onstep.config import ConfigContainer
from onstep.training.runs import provenance
from tests.support import power, results, workers
from tests.support.browser import chromium, new_page
from tests.support.forked_processes import Processes
from tests.support.small_configs import small_pretrain_config

__all__ = ["chromium", "new_page"]  # a process can drive one browser at a time

ROOT = Path(__file__).parents[1]
MEMORY, ENOUGH_BYTES = Path("/dev/shm"), 4 << 30
"""Where the directories of tests are, if there is as much room: a tenth of the time goes to making files on a disk."""
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
"""Processes that tests start import `tests.support` as the tests do."""


def pytest_configure(config: pytest.Config) -> None:
    """Write the results for the page of promises where the environment asks for them.

    A shell starts what runs in its background with SIGINT ignored, and programs that tests start would inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    results.register(config)
    power.never_cut()
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test and its fixtures draw depends on no test that ran before in the same process.

    Without a GPU only the CPU's generator is seeded: for others torch would keep a traceback of each call, for ever.
    """
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Workers of pytest-xdist share the compilation of the tests."""
    workers.compile_a_share(session.config)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under pytest-xdist long files come first: one that started last would keep one worker busy alone."""
    if hasattr(config, "workerinput"):
        items[:] = workers.mix(items)


def pytest_collection_finish() -> None:
    """What is imported and collected stays: the garbage collector need not look at it again in every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several test processes share two cores, and bits must not depend on how."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """A command that a test calls sets the levels of our messages, which the next test must not see."""
    logs = [logging.getLogger(name) for name in ("onstep", "onstep.trackers")]
    before = [log.level for log in logs]
    yield
    for log, level in zip(logs, before, strict=True):
        log.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def known_revision() -> Iterator[None]:
    """Runs in the repository itself need not ask git for its revision again and again: it stays the same."""
    ask = provenance.code_revision
    remembered = functools.cache(ask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "code_revision", lambda place: (remembered if place == ROOT else ask)(place))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 60 kB of real text: some modules of the standard library."""
    import json

    directory = tmp_path_factory.mktemp("corpus")
    library = Path(json.__file__).parent.parent
    for name in ("bisect.py", "colorsys.py", "heapq.py", "keyword.py", "sched.py", "textwrap.py"):
        shutil.copy(library / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests keep token files."""
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    """The server that forks the processes of all tests."""
    server = Processes()
    yield server
    server.close()


@pytest.fixture
def tiny_config(corpus: Path, token_cache: Path) -> ConfigContainer:
    """A run of 8 steps of a 2-layer model on the small corpus: seconds on one core."""
    config = small_pretrain_config(corpus, token_cache, layers=2, width=32)
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 8, 4, 4
    config.validation.eval_interval, config.validation.eval_iters = 5, 2
    config.logger.log_interval = 4
    return config
