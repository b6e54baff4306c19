"""Names data workers that died, which torch reports as an error at whatever the main process is doing."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onstep.errors import DataError

_DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\) (exited unexpectedly|is killed by signal: [^.]*)")
_SECONDS = 1.0
"""To wait for the end of a worker whose connection has broken."""
_REMEDIES = {
    "Killed": "the kernel kills a process when memory runs out (dmesg says so): use fewer workers, or smaller samples",
    "Bus error": "shared memory (/dev/shm) is probably full: enlarge it (docker run --shm-size), or use fewer workers",
}
_REMEDY = (
    "if it wrote an error, it is above; dataset.num_workers=0 reads in the main process, whose traceback shows the "
    "cause"
)


def is_death(error: BaseException) -> bool:
    """Whether torch raised the error because a worker of a DataLoader has ended."""
    return isinstance(error, RuntimeError) and _DEATH.search(str(error)) is not None


@contextmanager
def dead_workers_named() -> Iterator[None]:
    """Context in which torch's error about a dead worker becomes Onstep's.

    Raises:
        DataError: in its place.
    """
    try:
        yield
    except RuntimeError as error:
        found = _DEATH.search(str(error))
        if found is None:
            raise
        raise _died(found[1], found[2].replace("is killed", "was killed")) from error


def check_alive(workers: list[Any], error: Exception) -> None:
    """Check the workers, if their data could not be received because of `error`.

    Raises:
        DataError: if one has ended with an error, or by a signal.
    """
    for worker in workers if is_death(error) or isinstance(error, (OSError, EOFError)) else ():
        worker.join(_SECONDS)
        if worker.exitcode is not None and worker.exitcode < 0:
            raise _died(worker.pid, f"was killed by signal: {signal.strsignal(-worker.exitcode)}") from error
        if worker.exitcode:
            raise _died(worker.pid, f"exited with code {worker.exitcode}") from error


def _died(process: object, how: str) -> DataError:
    remedy = next((remedy for name, remedy in _REMEDIES.items() if name in how), _REMEDY)
    return DataError(f"a data worker died: process {process} {how}; {remedy}")
