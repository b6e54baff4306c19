"""The directory of each node that is in its memory, and which ranks share it."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onstep.distributed import World
from onstep.distributed.outcomes import together
from onstep.errors import ConfigError

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_BOOT_ID, _MOUNTS = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/mounts")


@dataclass(frozen=True)
class NodeMemory:
    """A directory in the memory of this node, of which each node of a run has its own."""

    directory: Path
    """It survives the ranks, and is gone with the node."""
    nodes: tuple[tuple[int, ...], ...]
    """The ranks of each node."""
    index: int
    """This node among them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node; the first one acts for it."""
        return self.nodes[self.index]

    def partner(self, rank: int) -> int:
        """The rank of the next node that gets what a rank has written.

        Args:
            rank: any rank.
        """
        number = next(number for number, ranks in enumerate(self.nodes) if rank in ranks)
        others = self.nodes[(number + 1) % len(self.nodes)]
        return others[self.nodes[number].index(rank) % len(others)]

    def remove_if_empty(self) -> None:
        """Remove the directory, unless it has something."""
        _remove_if_empty(self.directory)

    @property
    def free_bytes(self) -> int:
        """What the file system has left."""
        return shutil.disk_usage(self.directory).free


def open_node_memory(world: World, parent: Path, name: str) -> NodeMemory:
    """Make the directory of this node. Collective.

    A node is what the launcher says it is (`$GROUP_RANK`), else a host.

    Args:
        world: the ranks.
        parent: a directory on a file system in memory, such as /dev/shm.
        name: of the run, and of nothing else on the machine.

    Raises:
        ConfigError: on all ranks, if a node has no such file system, or two nodes have the same one.
    """
    doing = "Opening the memory of each node"
    directory = parent / f"onstep-{os.geteuid()}-{name}"
    together(world, partial(check_memory_file_system, parent), doing)
    place = together(world, partial(_made, directory), doing)
    named = world.gather((os.environ.get("GROUP_RANK") or socket.gethostname(), place))
    names = [node for node, _ in named]
    nodes = {node: tuple(rank for rank, other in enumerate(names) if other == node) for node in names}
    places: dict[object, str] = {}
    for node, where in named:
        if places.setdefault(where, node) != node:
            _remove_if_empty(directory)
            raise ConfigError(
                f"nodes {places[where]} and {node} have the same memory, {directory}: the loss of one would be that of "
                f"both; start one launch a machine, or give each one a directory of its own by a variable in "
                f"checkpoint.memory_dir."
            )
    return NodeMemory(directory, tuple(nodes.values()), list(nodes).index(names[world.rank]))


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def check_memory_file_system(directory: Path) -> None:
    """Refuse a directory that is not in memory.

    Raises:
        ConfigError: naming the file system.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"checkpoint.memory_dir={directory} must be a directory on a file system in memory (tmpfs), but there is "
            f"none; name another one, or set checkpoint.non_persistent_place=disk."
        )
    kind = _file_system_of(directory)
    if kind not in MEMORY_FILE_SYSTEMS:
        raise ConfigError(
            f"checkpoint.memory_dir={directory} must be on a file system in memory (tmpfs), but is on {kind}; name a "
            f"directory on one, such as /dev/shm, or set checkpoint.non_persistent_place=disk."
        )


def _file_system_of(directory: Path) -> str:
    """The type of the file system, such as ext4; none is in memory where Linux does not list them."""
    resolved = directory.resolve()
    fields = [line.split(" ") for line in _MOUNTS.read_text().splitlines()] if _MOUNTS.exists() else []
    mounts = {Path(one[1].replace("\\040", " ")): one[2] for one in fields}  # of two, the upper one
    within = [mount for mount in mounts if resolved.is_relative_to(mount)]
    return mounts[max(within, key=lambda mount: len(mount.parts))] if within else "an unknown one"


def _made(directory: Path) -> tuple[str, int, int]:
    """Make the directory, which only this user can read; and return what no other directory has."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be made ({error.strerror}); name another directory in checkpoint.memory_dir."
        ) from None
    found = directory.lstat()
    if directory.is_symlink() or found.st_uid != os.geteuid():
        raise ConfigError(
            f"{directory} belongs to another user or is a link; remove it, or name another directory in "
            f"checkpoint.memory_dir."
        )
    return _BOOT_ID.read_text() if _BOOT_ID.exists() else socket.gethostname(), found.st_dev, found.st_ino
