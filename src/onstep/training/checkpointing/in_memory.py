"""The newest state of a run in the memory of its nodes: which of the states there belong to it, and their size."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from onstep.checkpoint import CheckpointInfo, Manifest, SaveRequest
from onstep.checkpoint.memory_checkpoints import MemoryCheckpoints
from onstep.checkpoint.node_memory import NodeMemory, open_node_memory
from onstep.distributed import on_main
from onstep.distributed.outcomes import together
from onstep.errors import ConfigError, DataError
from onstep.files.bounded_reading import read_json
from onstep.files.durability import replace_durably
from onstep.metrics.memory.estimate import checkpoint_bytes
from onstep.metrics.memory.fitting import shown
from onstep.training.run import Run
from onstep.training.runs.hold import MEMORY_NOTE

logger = logging.getLogger(__name__)

_LINE = "line"
"""The entry of a manifest's `extra` that names the line of a state."""


def open_state_in_memory(run: Run, root: Path, on_kept: Callable[[SaveRequest], None]) -> StateInMemory | None:
    """The memory of the nodes, if the configuration keeps checkpoints there. Collective.

    Args:
        run: the run.
        root: the directory of its checkpoints on the disk.
        on_kept: see `MemoryCheckpoints`.

    Raises:
        ConfigError: on all ranks, for a node without a file system in memory, or one node where two are required.
    """
    config = run.cfg.checkpoint
    if config.non_persistent_place != "memory" or not config.non_persistent_save_interval:
        return None
    directory = root.absolute() if run.run_dir is None else run.run_dir.path.absolute()
    digest = hashlib.blake2b(str(directory).encode(), digest_size=6).hexdigest()
    name = f"{'run' if run.run_dir is None else directory.name}-{digest}"
    memory = open_node_memory(run.world, Path(os.path.expandvars(config.memory_dir)).expanduser(), name)
    if config.memory_partner and len(memory.nodes) == 1:
        memory.remove_if_empty()
        raise ConfigError(
            "checkpoint.memory_partner=true requires at least two nodes, but this run has one; set it to null, which "
            "copies where there is a second node."
        )
    return StateInMemory(run, memory, directory, on_kept)


class StateInMemory:
    """The newest state of a run in the memory of its nodes, and whether the run may continue from it.

    A node that was away may come back with a state of steps that the others have trained again meanwhile. So each start
    begins a line, and so does each rollback; each state has the name of its line. A note in the directory of the run
    says which line is the current one, and from which state of the one before it began: no others are used.

    Args:
        run: the run.
        memory: of this node.
        directory: where the note is.
        on_kept: see `MemoryCheckpoints`.
    """

    def __init__(self, run: Run, memory: NodeMemory, directory: Path, on_kept: Callable[[SaveRequest], None]) -> None:
        config = run.cfg.checkpoint
        self._run, self._memory, self._note = run, memory, directory / MEMORY_NOTE
        self._copies = 1 if config.memory_partner is False else min(2, len(memory.nodes))
        self._line: str | None = None
        self.newest: int | None = None
        """The step of the state that was saved last, or with which the line began."""
        self._start: CheckpointInfo | None = None
        self._checkpoints = MemoryCheckpoints(
            memory,
            run.world,
            run_id=run.run_dir.run_id if run.run_dir is not None else "",
            copies=self._copies,
            is_async=config.async_save,
            on_kept=on_kept,
        )

    @property
    def is_saving(self) -> bool:
        """Whether a state is being written; the same on all ranks."""
        return self._checkpoints.is_saving

    @property
    def is_writing(self) -> bool:
        """Whether this rank still writes or copies it."""
        return not self._checkpoints.is_written

    def find(self) -> CheckpointInfo | None:
        """The newest state of the run that is whole. Collective.

        Raises:
            CheckpointError: on all ranks, if a directory cannot be read or written.
        """
        note = on_main(self._run.world, self._noted)
        return self._checkpoints.find(partial(_is_of, note))

    def begin(self, start: CheckpointInfo | None) -> None:
        """Begin a line, and delete all states but that with which it begins. Collective.

        Args:
            start: the state from which the run continues; of another place, it is not kept.
        """
        kept = start if start is not None and start.in_memory else None
        before = None if kept is None else [kept.manifest.extra.get(_LINE), kept.step]
        line = self._run.world.share(secrets.token_hex(8))
        on_main(self._run.world, lambda: replace_durably(self._note, json.dumps({_LINE: line, "from": before})))
        self._checkpoints.drop(but=None if kept is None else kept.step)
        self._line, self._start = line, start
        self.newest = None if kept is None else kept.step

    def check_space(self, *, in_shards: bool) -> None:
        """Say how much memory the states take, and refuse a run whose states do not fit. Collective.

        Args:
            in_shards: whether the ranks write about equally many bytes, and not one of them all.

        Raises:
            ConfigError: on all ranks, naming the bytes needed and those there are.
        """
        config, world = self._run.cfg, self._run.world
        whole = checkpoint_bytes(config) if self._start is None else self._start.manifest.size_bytes
        if whole is None:
            return  # of a model without a known formula; each save checks its space
        of_node = -(-whole * self._copies // len(self._memory.nodes)) if in_shards else whole
        there = shown(self._memory.free_bytes)
        is_there = self._start is not None and self._start.in_memory  # and is replaced
        needed = of_node if is_there else 2 * of_node
        together(world, partial(self._check_fits, needed), "Keeping checkpoints in memory")
        if world.is_main:
            logger.info(
                "the newest state is kept in %s of each node: about %s there, twice that while it is replaced, of %s",
                self._memory.directory.parent,
                shown(of_node),
                there,
            )

    def save(self, request: SaveRequest) -> None:
        """Keep the state of this step in memory. Collective; a failure is a warning.

        Args:
            request: what is saved, and when.
        """
        request.extra[_LINE] = self._line
        self.newest = request.step
        self._checkpoints.save(request)

    def finish(self) -> None:
        """Wait for a state that is being written. Collective."""
        self._checkpoints.finalize()

    def close(self, *, saved: int | None, is_over: bool) -> None:
        """Release what is held. States that nobody will continue from are deleted; not collective.

        Args:
            saved: the step of the newest checkpoint on the disk, if this process knows of one.
            is_over: whether the run is finished and saved.
        """
        self._checkpoints.close()
        newest = self._checkpoints.newest  # perhaps one that was pending until now
        is_older = newest is None or (saved is not None and newest <= saved)
        if self._line is not None and (is_over or is_older):
            self._checkpoints.remove()
        self._memory.remove_if_empty()  # of a start that was refused
        if is_over and self._run.world.is_main:
            self._note.unlink(missing_ok=True)

    def _check_fits(self, needed: int) -> None:
        free = self._memory.free_bytes
        if needed > free:
            raise ConfigError(
                f"checkpoint.non_persistent_place=memory requires about {shown(needed)} in "
                f"{self._memory.directory.parent}, which has {shown(free)} free; make it larger, name another "
                f"directory in checkpoint.memory_dir, or set non_persistent_place=disk."
            )

    def _noted(self) -> dict[str, Any]:
        """The note of the last start; empty if there is none that can be read."""
        try:
            content = read_json(self._note)
        except (OSError, DataError):
            return {}
        return content if isinstance(content, dict) else {}


def _is_of(note: dict[str, Any], manifest: Manifest) -> bool:
    """Whether a state is of the current line, or the one from which it began."""
    line = manifest.extra.get(_LINE)
    return line is not None and (line == note.get(_LINE) or [line, manifest.step] == note.get("from"))
