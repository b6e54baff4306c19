"""A disk that loses what was not fsynced: from a list of operations, the directories that POSIX allows after a power
cut.

What POSIX promises: the bytes of a file are safe after an fsync of the file, the entries of a directory (what was
created, renamed or removed in it) after an fsync of the directory. Everything else may or may not have happened, in any
order; only one rename is never half done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from onstep.checkpoint.storage.store import Operation

Tree = tuple[tuple[str, bytes | None], ...]
"""All paths below the root, in order, with the bytes of files and None for directories."""

LOSSES = ("nothing", "all", "half", "zeros")
"""What becomes of bytes that were not fsynced: all is there, none is, the first half, or zeros in their place."""


@dataclass
class FileNode:
    """A file as the processes see it, and as the disk surely has it."""

    content: bytes = b""
    durable: bytes = b""

    def after(self, loss: str) -> bytes:
        """The bytes after a power cut."""
        unsafe = self.content[len(self.durable) :]
        left = {"nothing": unsafe, "all": b"", "half": unsafe[: len(unsafe) // 2], "zeros": bytes(len(unsafe))}
        return self.durable + left[loss]


@dataclass
class Change:
    """One change of a directory's entries that no fsync has covered."""

    removed: str | None = None
    added: tuple[str, FileNode | DirNode] | None = None


@dataclass
class DirNode:
    """A directory: its entries as processes see them, as the disk surely has them, and what happened in between."""

    entries: dict[str, FileNode | DirNode] = field(default_factory=dict)
    durable: dict[str, FileNode | DirNode] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, change: Change) -> None:
        """Make a change that processes see at once."""
        self.pending.append(change)
        _apply(self.entries, change)


class Disk:
    """The file system below one directory."""

    def __init__(self, root: Path, at_start: Path) -> None:
        """All that lies below `at_start` is durable at the path `root` at first; a missing directory is an empty
        disk.
        """
        self._root = root
        self._top = _read(at_start) if at_start.is_dir() else DirNode()

    def apply(self, operation: Operation) -> None:
        """Let an operation of the store happen."""
        name = operation.path.name
        match operation.kind:
            case "fsync_dir":
                directory = self._directory(operation.path)
                directory.durable, directory.pending = dict(directory.entries), []
            case "write":
                self._file(operation.path).content += bytes(operation.data)
            case "fsync":
                self._file(operation.path).durable = self._file(operation.path).content
            case "mkdir":
                self._directory(operation.path.parent).change(Change(added=(name, DirNode())))
            case "open":
                self._directory(operation.path.parent).change(Change(added=(name, FileNode())))
            case "unlink" | "rmdir":
                self._directory(operation.path.parent).change(Change(removed=name))
            case "rename":
                assert operation.target is not None
                assert operation.target.parent == operation.path.parent, "the model knows renames in one directory"
                directory = self._directory(operation.path.parent)
                directory.change(Change(removed=name, added=(operation.target.name, directory.entries[name])))

    def after_power_loss(self, most_combinations: int) -> Iterator[Tree]:
        """States that the disk may be in; every one if there are at most this many choices, else the extreme ones."""
        pending = [change for directory in _directories(self._top) for change in directory.pending]
        for happened in _choices(len(pending), most_combinations):
            chosen = {id(change) for change, is_in in zip(pending, happened, strict=True) if is_in}
            for loss in LOSSES:
                yield tuple(sorted(_tree(self._top, chosen, loss, "")))

    def _directory(self, path: Path) -> DirNode:
        node = self._node(path)
        assert isinstance(node, DirNode)
        return node

    def _file(self, path: Path) -> FileNode:
        node = self._node(path)
        assert isinstance(node, FileNode)
        return node

    def _node(self, path: Path) -> FileNode | DirNode:
        node: FileNode | DirNode = self._top
        for part in path.relative_to(self._root).parts:
            assert isinstance(node, DirNode)
            node = node.entries[part]
        return node


def states_after_power_loss(
    disk: Disk, operations: Sequence[Operation], most_combinations: int, start: int = 0
) -> Iterator[tuple[int, Tree]]:
    """States at every moment, each with the number of operations (at least `start`) that had been done when the power
    went."""
    for done in range(len(operations) + 1):
        if done:
            disk.apply(operations[done - 1])
        if done < start:
            continue
        for tree in disk.after_power_loss(most_combinations):
            yield done, tree


def write_tree(tree: Tree, root: Path) -> None:
    """Make a state a real directory."""
    root.mkdir(parents=True)
    for name, content in tree:
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)


def _choices(number: int, most_combinations: int) -> Iterator[tuple[bool, ...]]:
    """Which of the changes happened: all combinations, or none, all, each alone, all but each, and each beginning."""
    if 2**number <= most_combinations:
        yield from product((False, True), repeat=number)
        return
    for place in range(number + 1):
        yield tuple(index < place for index in range(number))
    for place in range(number):
        yield tuple(index == place for index in range(number))
        yield tuple(index != place for index in range(number))


def _apply(entries: dict[str, FileNode | DirNode], change: Change) -> None:
    if change.removed is not None:
        entries.pop(change.removed, None)
    if change.added is not None:
        entries[change.added[0]] = change.added[1]


def _directories(top: DirNode) -> list[DirNode]:
    """All directories that may be on the disk, also those that were removed without an fsync."""
    found = [top]
    for directory in found:
        added = [change.added[1] for change in directory.pending if change.added is not None]
        for node in [*directory.entries.values(), *directory.durable.values(), *added]:
            if isinstance(node, DirNode) and not any(node is known for known in found):
                found.append(node)
    return found


def _tree(directory: DirNode, chosen: set[int], loss: str, prefix: str) -> Iterator[tuple[str, bytes | None]]:
    entries = dict(directory.durable)
    for change in directory.pending:
        if id(change) in chosen:
            _apply(entries, change)
    for name, node in entries.items():
        path = f"{prefix}{name}"
        if isinstance(node, FileNode):
            yield path, node.after(loss)
        else:
            yield path, None
            yield from _tree(node, chosen, loss, f"{path}/")


def _read(path: Path) -> DirNode:
    directory = DirNode()
    for entry in path.iterdir():
        content = None if entry.is_dir() else entry.read_bytes()
        directory.entries[entry.name] = _read(entry) if content is None else FileNode(content, content)
    directory.durable = dict(directory.entries)
    return directory
