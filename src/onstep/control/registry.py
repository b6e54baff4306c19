"""Lists the jobs of this user: one directory each, with the address of its server and its token.

A running job holds a lock in its directory, which the kernel releases however the process ends. Only the owner of a
directory reads and writes it, and nothing follows a symbolic link in it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import lock_descriptor

from onstep.control.job_info import JobInfo, is_alive, is_endpoint_pid_alive, is_here
from onstep.errors import ConfigError, DataError, extra
from onstep.files.bounded_reading import parse_json
from onstep.files.durability import replace_durably
from onstep.processes.forking import release_in_forked_children

__all__ = [
    "JobInfo",
    "Registration",
    "check_job_id",
    "cleanup",
    "describe_jobs",
    "is_alive",
    "is_endpoint_pid_alive",
    "is_here",
    "list_infos",
    "read_info",
    "read_token",
    "registry_root",
]

logger: logging.Logger = logging.getLogger(__name__)

ENDPOINT, TOKEN, SOCKET, LOCK = "endpoint.json", "auth_token", "control.sock", "lock"
_OURS = (ENDPOINT, TOKEN, SOCKET, f"{ENDPOINT}.tmp", f"{TOKEN}.tmp", LOCK)
"""Everything that a job leaves in its directory; the lock goes last."""
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MOST_BYTES = 64 << 10
_ATTEMPTS = 100
ORPHAN_SECONDS = 3600.0
"""A directory without an endpoint may belong to a job that is starting; older ones are removed by `cleanup`."""


def registry_root() -> Path:
    """The directory with one directory per job: `ONSTEP_REGISTRY` if set, else in the user's configuration."""
    chosen = os.environ.get("ONSTEP_REGISTRY")
    if chosen:
        return Path(chosen).expanduser().absolute()
    with extra("control", "Controlling jobs requires platformdirs"):
        from platformdirs import user_config_path
    return user_config_path("onstep") / "jobs"


def is_job_id(value: object) -> bool:
    """Whether a value is the id of a job."""
    return isinstance(value, str) and _JOB_ID.fullmatch(value) is not None and ".." not in value


def check_job_id(job_id: str) -> str:
    """Return the id of a job.

    Raises:
        ConfigError: if it could not be the name of a directory everywhere.
    """
    if not is_job_id(job_id):
        shown = repr(job_id)
        raise ConfigError(
            f"job_id must have 1 to 128 letters, digits, dots, hyphens and underscores, start with a letter or digit "
            f"and not contain '..', got {shown if len(shown) < 160 else shown[:160] + '...'}; choose another."
        )
    return job_id


class Registration:
    """The entry of a job of this process: `open` claims its directory, `publish` makes it known, `close` removes it."""

    def __init__(self, job_id: str) -> None:
        self.job_id = check_job_id(job_id)
        self.directory = registry_root() / job_id
        self._lock: int | None = None

    @property
    def socket_path(self) -> Path:
        """Where a Unix socket of the job goes."""
        return self.directory / SOCKET

    def open(self) -> Registration:
        """Claim the directory of the job; what a dead one left in it is removed.

        Raises:
            ConfigError: if a live job has the same id; if the directory is a link, another user's, or not writable.
        """
        try:
            _make_private(self.directory.parent, allows_link=True)
            self._lock = self._claimed()
        except OSError as error:
            raise ConfigError(
                f"{self.directory} cannot be written ({error.strerror or error}); make it writable, or set "
                "ONSTEP_REGISTRY to another directory."
            ) from None
        release_in_forked_children(self, Registration._forget)
        _remove_files(self.directory, keep=(LOCK,))
        return self

    def publish(self, info: JobInfo, token: str | None) -> None:
        """Write the files by which clients find the job; both are readable by this user alone.

        Raises:
            OSError: if they cannot be written.
        """
        assert self._lock is not None, "open() comes first"
        if token is not None:
            replace_durably(self.directory / TOKEN, token, mode=0o600)
        replace_durably(self.directory / ENDPOINT, json.dumps(info.to_dict(), indent=2) + "\n", mode=0o600)

    def close(self) -> None:
        """Remove the entry; calling it twice is harmless."""
        if self._lock is None:
            return
        _remove_files(self.directory)
        self._forget()
        with suppress(OSError):  # another job with the same id may have begun, or files of others be there
            self.directory.rmdir()

    def __enter__(self) -> Registration:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _claimed(self) -> int:
        """The descriptor of the lock, which is held."""
        for _ in range(_ATTEMPTS):
            _make_private(self.directory)
            descriptor = _try_lock(self.directory)
            holder = read_info(self.job_id)
            is_live = holder is not None and is_alive(holder)
            if descriptor is not None and (not is_live or holder is None or holder.pid == os.getpid()):
                return descriptor
            if descriptor is not None:  # a file system without locks, or a job of another program
                os.close(descriptor)
            if is_live:
                break
            time.sleep(0.01)  # another process starts or ends a job with this id
        raise ConfigError(self._refusal())

    def _refusal(self) -> str:
        holder = read_info(self.job_id)
        who = ""
        if holder is not None:
            began = "" if holder.started_at is None else f", started {_local_time(holder.started_at)}"
            who = f" (process {holder.pid} on {holder.hostname or 'this machine'}{began})"
        return (
            f"A job with job_id={self.job_id!r} is running{who}; choose another job_id, or stop that one: "
            f"onstep control stop {self.job_id}"
        )

    def _forget(self) -> None:
        descriptor, self._lock = self._lock, None
        if descriptor is not None:
            os.close(descriptor)


def list_infos() -> list[JobInfo]:
    """The jobs in the registry, newest first, dead ones included."""
    infos = [info for name in _names() if (info := read_info(name)) is not None]
    return sorted(infos, key=lambda info: info.started_at or 0.0, reverse=True)


def describe_jobs() -> list[dict[str, Any]]:
    """The jobs in the registry as JSON: their endpoints, whether each lives, and whether it is on this machine."""
    return [{**info.to_dict(), "alive": is_alive(info), "is_here": is_here(info)} for info in list_infos()]


def read_info(job_id: str) -> JobInfo | None:
    """The endpoint of a job; None if there is none that can be trusted and read."""
    text = _read_privately(job_id, ENDPOINT)
    try:
        content = None if text is None else parse_json(text, ENDPOINT)
        return JobInfo.from_dict({**content, "job_id": job_id}) if isinstance(content, dict) else None
    except DataError:
        return None


def read_token(job_id: str) -> str | None:
    """The token of a job; None if it has none."""
    text = _read_privately(job_id, TOKEN)
    return text.decode("ascii", "replace").strip() or None if text else None


def cleanup(ttl_seconds: float = ORPHAN_SECONDS, *, force: bool = False, is_dry: bool = False) -> list[str]:
    """Remove what dead jobs have left; returns their ids.

    Args:
        ttl_seconds: a directory without an endpoint is removed if it is older.
        force: also jobs of other machines, about which nothing is known, and such directories of any age.
        is_dry: remove nothing.
    """
    root = registry_root()
    found = [name for name in _names() if _is_left(root / name, ttl_seconds, force)]
    return [name for name in found if is_dry or _remove_dead(root / name)]


def _names() -> list[str]:
    """The ids of jobs that have a directory."""
    try:
        return sorted(name for name in os.listdir(registry_root()) if _JOB_ID.fullmatch(name))
    except OSError:
        return []


def _is_left(directory: Path, ttl_seconds: float, force: bool) -> bool:
    """Whether a directory belongs to a job that is dead, as far as one can tell without its lock."""
    if not _is_private(directory):
        return False
    info = read_info(directory.name)
    if info is not None:
        return not is_alive(info) and (is_here(info) or force)
    return force or time.time() - directory.stat().st_mtime > ttl_seconds


def _remove_dead(directory: Path) -> bool:
    """Remove the directory of a job unless a live process holds its lock. Returns whether it is gone."""
    try:
        descriptor = _try_lock(directory)
        if descriptor is None:
            return False
        try:
            _remove_files(directory)
        finally:
            os.close(descriptor)
        directory.rmdir()
    except OSError:
        return not directory.exists()
    return True


def _try_lock(directory: Path) -> int | None:
    """The descriptor of the lock in a directory, held from now on; None if another process holds or replaces it."""
    path = directory / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except FileNotFoundError:  # the directory was just removed
        return None
    is_held = False
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        is_held = _locked(descriptor) and os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:  # the holder of before removed it while it ended
        is_held = False
    finally:
        if not is_held:
            os.close(descriptor)
    return descriptor if is_held else None


def _locked(descriptor: int) -> bool:
    try:
        return lock_descriptor(descriptor, blocking=False)
    except OSError:  # a file system without locks, such as some network mounts
        return True


def _remove_files(directory: Path, keep: tuple[str, ...] = ()) -> None:
    for name in _OURS:
        if name not in keep:
            try:
                (directory / name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s could not be removed: %s", directory / name, error.strerror)


def _make_private(directory: Path, *, allows_link: bool = False) -> None:
    """Create a directory, or check that an existing one is this user's; only the owner may enter it.

    Raises:
        ConfigError: if it is a link or another user's.
        OSError: if it cannot be created.
    """
    with suppress(FileExistsError):
        directory.mkdir(parents=True, mode=0o700)
    found = os.stat(directory, follow_symlinks=allows_link)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{directory} must be a directory of this user, not a link or another's; remove it, choose another job_id, "
            "or set ONSTEP_REGISTRY to a directory of your own."
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        directory.chmod(0o700)


def _is_private(directory: Path) -> bool:
    try:
        found = os.lstat(directory)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _read_privately(job_id: str, name: str) -> bytes | None:
    """The content of a small file of a job; None if it or its directory is not this user's own."""
    directory = registry_root() / check_job_id(job_id)
    if not _is_private(directory):
        return None
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
        content = file.read(_MOST_BYTES + 1) if is_ours else None
    return content if content is not None and len(content) <= _MOST_BYTES else None


def _local_time(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))
