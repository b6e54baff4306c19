"""Keeps the newest state of a run in the memory of its nodes, each part on two of them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from onstep.checkpoint.catalog.discovery import CheckpointInfo
from onstep.checkpoint.components import Placement, find_placement
from onstep.checkpoint.node_memory import NodeMemory
from onstep.checkpoint.saving import (
    EncodedState,
    SaveRequest,
    WrittenFile,
    backed_by,
    build_manifest,
    collect_states,
    report_left_out,
    write_durably,
)
from onstep.checkpoint.storage.manifest import MANIFEST, Manifest, check_file, parse_manifest
from onstep.checkpoint.storage.memory_copies import WarmBuffers
from onstep.checkpoint.storage.store import TEMPORARY, FileStore
from onstep.checkpoint.write_plans import WritePlans
from onstep.distributed import World
from onstep.distributed.file_exchange import Transfer, exchange_files
from onstep.distributed.outcomes import attempt, together
from onstep.distributed.process_group import gloo_group, leave_one
from onstep.errors import CheckpointError

logger = logging.getLogger(__name__)

Accepts = Callable[[Manifest], bool]
"""Whether a run may continue from the state with this manifest."""
SPACE_MARGIN = 1.05
"""Free space that a save requires, as a multiple of its bytes."""


@dataclass(frozen=True)
class _Held:
    """What a node has of a state."""

    manifest: bytes
    files: frozenset[str]
    """Those that are as the manifest says."""


@dataclass
class _Pending:
    """A state that is being written and copied."""

    request: SaveRequest
    directory: Path
    writing: Future[list[WrittenFile]]


class MemoryCheckpoints:
    """The newest state of a run, in the memory of its nodes; an older one only until it is replaced.

    A node has what its ranks have written, in the files of an ordinary checkpoint, and with `copies` of two what the
    node before it has: whichever node is lost, all files are left. All methods but `close` are collective.

    Args:
        memory: of this node.
        world: the ranks.
        run_id: recorded in manifests.
        copies: the number of nodes that have each file, 1 or 2.
        is_async: write and copy in a thread; training waits only while the tensors are copied.
        on_kept: called on all ranks with what all nodes have now.
    """

    def __init__(
        self,
        memory: NodeMemory,
        world: World,
        *,
        run_id: str = "",
        copies: int = 2,
        is_async: bool = False,
        on_kept: Callable[[SaveRequest], None] | None = None,
    ) -> None:
        self._on_kept = on_kept
        self._memory, self._world, self._run_id = memory, world, run_id
        self._copies, self._is_async = min(copies, len(memory.nodes)), is_async
        # its own group: the thread communicates while training does
        self._aside = World(world.rank, world.size, world.local_rank, control_group=gloo_group(), sizes=world.sizes)
        self._store, self._plans, self._buffers = FileStore(), WritePlans(world), WarmBuffers()
        self._placement: Placement | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._pending: _Pending | None = None
        self.newest: int | None = None
        """The step of the state that the nodes have."""

    @property
    def is_saving(self) -> bool:
        """Whether a state is being written; the same on all ranks."""
        return self._pending is not None

    @property
    def is_written(self) -> bool:
        """Whether this rank has written and copied its files of that state; True if there is none."""
        return self._pending is None or self._pending.writing.done()

    @property
    def _acts_for_node(self) -> bool:
        return self._world.rank == self._memory.ranks[0]

    def find(self, accepts: Accepts) -> CheckpointInfo | None:
        """The newest state of which all files are left, and none is damaged; None if there is none.

        Each node then has all of its files, those that it lacked from others. Everything else is deleted.

        Args:
            accepts: which states are the run's.

        Raises:
            CheckpointError: on all ranks, if a directory cannot be read or written.
        """
        doing = "Reading what the nodes have in memory"
        held = together(self._world, lambda: self._held(accepts) if self._acts_for_node else [], doing)
        everyone = {rank: found for rank, found in enumerate(self._world.gather(held)) if found}
        manifests = {
            one.manifest: parse_manifest(one.manifest, MANIFEST) for found in everyone.values() for one in found
        }
        info = None
        for content, manifest in sorted(manifests.items(), key=lambda one: -one[1].step):
            there = {rank: one.files for rank, found in everyone.items() for one in found if one.manifest == content}
            info = info or self._whole(content, manifest, there)
        self.drop(but=None if info is None else info.step)
        return info

    def drop(self, *, but: int | None = None) -> None:
        """Delete all states but that of one step.

        Raises:
            CheckpointError: on all ranks, if they cannot be deleted.
        """
        together(self._world, partial(self._delete, but), "Deleting states in memory")
        self.newest = but

    def save(self, request: SaveRequest) -> None:
        """Keep the state of this step in memory, in place of that of an earlier one; a failure is a warning.

        With `is_async`, on return the tensors have been copied and may change; `finalize` does the rest.

        Args:
            request: what is saved, and when.
        """
        self.finalize()
        with self._failures(request.step):
            self._pending = self._begin(request)
        if not self._is_async:
            self.finalize()

    def finalize(self) -> None:
        """Wait until all nodes have the files of a pending state, and let it replace the one before."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        with self._failures(pending.request.step):
            self._commit(pending)
            if self._on_kept is not None:
                self._on_kept(pending.request)

    def close(self) -> None:
        """Release threads, groups and buffers; not collective.

        A single rank keeps a pending state, several abandon it.
        """
        leave_one(self._aside.control_group, waits=self._pending is None)  # else others may have ended
        if self._writer is not None:
            self._writer.shutdown(wait=True)
        if self._pending is not None and self._world.size == 1:
            attempt(partial(self._commit, self._pending))
        self._pending = None
        self._buffers.release()

    def remove(self) -> None:
        """Delete what this node has, when nobody continues from it; not collective."""
        if self._acts_for_node:
            shutil.rmtree(self._memory.directory, ignore_errors=True)

    def _begin(self, request: SaveRequest) -> _Pending:
        world, doing = self._world, f"Collecting the state of step {request.step}"
        self._placement = self._placement or find_placement(world, {})
        taken = together(world, partial(collect_states, request.components, self._placement), doing)
        request = self._plans.add_shares(taken, request, doing)
        everywhere = world.gather((taken.size_bytes, taken.left_out))
        if world.is_main:
            report_left_out([left_out for _, left_out in everywhere])
        directory = self._memory.directory / f"{TEMPORARY}checkpoint-{request.step}"
        together(world, partial(self._prepare, directory, self._of_node([size for size, _ in everywhere])), doing)
        return _Pending(request.frozen(), directory, self._start_writing(directory, taken.encoded, request))

    def _of_node(self, sizes: Sequence[int]) -> int:
        """The bytes that this node gets, of those that each rank writes."""
        own, partner = self._memory.ranks, self._memory.partner
        given = [size for rank, size in enumerate(sizes) if self._copies > 1 and partner(rank) in own]
        return sum(sizes[rank] for rank in own) + sum(given)

    def _prepare(self, directory: Path, size: int) -> None:
        """Make the directory of a state, if this node has space for so many bytes."""
        needed, free = int(SPACE_MARGIN * size), self._memory.free_bytes
        if needed > free:
            raise CheckpointError(f"{self._memory.directory} has {free} bytes free, but {needed} are needed")
        self._store.make_dir(directory)

    def _start_writing(
        self, directory: Path, states: list[EncodedState], request: SaveRequest
    ) -> Future[list[WrittenFile]]:
        if not self._is_async:
            return _done(lambda: self._write(directory, states, request))
        snapshot = _done(lambda: self._buffers.copy([one for state in states for one in state.tensors.values()]))
        if self._writer is None:
            self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="onstep-memory")
        return self._writer.submit(lambda: self._write(directory, backed_by(states, snapshot.result()), request))

    def _write(self, directory: Path, states: list[EncodedState], request: SaveRequest) -> list[WrittenFile]:
        """Write this rank's files, and copy them to the node's partner. Collective, perhaps in a thread."""
        aside, doing = self._aside, f"Writing the state of step {request.step}"
        written = together(aside, partial(write_durably, self._store, directory, request.components, states), doing)
        everyone = aside.gather(written)
        if self._copies > 1:
            transfers = [
                Transfer(one.path, one.digest.size, rank, self._memory.partner(rank))
                for rank, files in enumerate(everyone)
                for one in files
            ]
            exchange_files(aside, directory, transfers, doing)
        return written

    def _commit(self, pending: _Pending) -> None:
        """Make the files a state on all nodes, and only then delete the state before."""
        world, step = self._world, pending.request.step
        doing = f"Keeping the state of step {step}"
        everyone = world.gather(together(world, pending.writing.result, doing))
        content = world.share(
            build_manifest(pending.request, self._run_id, world.size, everyone).to_bytes() if world.is_main else None
        )
        together(world, partial(self._name, pending.directory, content), doing)
        self.newest = step
        together(world, partial(self._delete, step), doing)

    def _name(self, directory: Path, manifest: bytes) -> None:
        """Give a complete directory its name, by a rename."""
        if self._acts_for_node:
            (directory / MANIFEST).write_bytes(manifest)
            self._store.rename(directory, directory.with_name(directory.name.removeprefix(TEMPORARY)))

    def _delete(self, but: int | None) -> None:
        """Delete what this node has, but for the state of one step."""
        if self._acts_for_node:
            for path in self._memory.directory.iterdir():
                if but is None or path.name != f"checkpoint-{but}":
                    self._store.remove_tree(path)

    def _held(self, accepts: Accepts) -> list[_Held]:
        """What this node has of states of the run."""
        found = []
        for path in self._memory.directory.glob("checkpoint-*"):
            try:
                content = (path / MANIFEST).read_bytes()
                manifest = parse_manifest(content, str(path / MANIFEST))
            except (OSError, CheckpointError) as error:
                logger.warning("%s is ignored: %s", path, error)
                continue
            if manifest.run_id == self._run_id and path.name == f"checkpoint-{manifest.step}" and accepts(manifest):
                found.append(_Held(content, frozenset(_intact(path, manifest))))
        return found

    def _whole(self, content: bytes, manifest: Manifest, there: dict[int, frozenset[str]]) -> CheckpointInfo | None:
        """A state, once each node has all files of it; None, with a warning, if that is impossible.

        Args:
            content: of the manifest.
            manifest: the same, read.
            there: the intact files of each node that has any, by its first rank.
        """
        lost = sorted(manifest.files.keys() - frozenset().union(*there.values()))
        try:
            if lost:
                raise CheckpointError(f"{len(lost)} of its {len(manifest.files)} files are on no node: {lost[0]}, ...")
            return self._fetched(content, manifest, there)
        except CheckpointError as error:  # the same on all ranks
            if self._world.is_main:
                logger.warning("the state of step %d in memory is ignored: %s", manifest.step, error)
            return None

    def _fetched(self, content: bytes, manifest: Manifest, there: dict[int, frozenset[str]]) -> CheckpointInfo:
        """Send each node the files that it lacks; see `_whole`.

        Raises:
            CheckpointError: on all ranks, if a node has no space, or a file has not arrived as it was.
        """
        world, memory, doing = self._world, self._memory, "Fetching its files"
        directory = memory.directory / f"checkpoint-{manifest.step}"
        transfers = list(_to_send(manifest, memory.nodes, there))
        of_node = sum(one.size for one in transfers if one.target in memory.ranks)
        together(world, partial(self._prepare, directory, of_node), doing)
        exchange_files(self._aside, directory, transfers, doing)
        own = [one.name for one in transfers if one.target == world.rank]
        together(world, partial(_check, directory, manifest, own), doing)
        if self._acts_for_node:
            (directory / MANIFEST).write_bytes(content)
        world.barrier()
        return CheckpointInfo(directory, manifest.step, manifest, in_memory=True)

    @contextmanager
    def _failures(self, step: int) -> Iterator[None]:
        """Continue after a failed save; all ranks see the same one."""
        try:
            yield
        except CheckpointError as error:
            if self._world.is_main:
                kept = "there is none" if self.newest is None else f"that of step {self.newest} stays"
                logger.warning("the state of step %d is not kept in memory, %s: %s", step, kept, error)
            together(self._world, partial(self._delete, self.newest), "Deleting an incomplete state")


def _check(directory: Path, manifest: Manifest, names: Sequence[str]) -> None:
    """Refuse files that are not as the manifest has them."""
    for name in names:
        check_file(directory, name, manifest.files[name])


def _intact(directory: Path, manifest: Manifest) -> Iterator[str]:
    """The files of a state that are in a directory, as the manifest has them; of others, damaged ones are named."""
    for name, digest in manifest.files.items():
        if (directory / name).exists():
            try:
                check_file(directory, name, digest)
            except CheckpointError as error:
                logger.warning("%s Its copy on another node is used.", error)
            else:
                yield name


def _to_send(
    manifest: Manifest, nodes: Sequence[Sequence[int]], there: dict[int, frozenset[str]]
) -> Iterator[Transfer]:
    """Each file that a node lacks, from one that has it: not always from the same one."""
    for number, ranks in enumerate(nodes):
        lacking = sorted(manifest.files.keys() - there.get(ranks[0], frozenset()))
        for index, name in enumerate(lacking):
            sources = [others for others in nodes if name in there.get(others[0], frozenset())]
            source = sources[(number + index) % len(sources)]
            size = manifest.files[name].size
            yield Transfer(name, size, source[index % len(source)], ranks[index % len(ranks)])


def _done(work: Callable[[], Any]) -> Future[Any]:
    future: Future[Any] = Future()
    result, error = attempt(work)
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return future
