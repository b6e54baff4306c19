"""Starts the ranks of this node by torchelastic's agent, and ends as the run ends."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed.elastic.rendezvous.registry as rendezvous_registry
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

from onstep.errors import PREEMPTED, ConfigError, OnstepError
from onstep.launch.failures import Failure, agreed, first_failure
from onstep.launch.outputs import Outputs
from onstep.launch.plan import Launch

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_OTHERS_SECONDS = 120.0
"""How long the other ranks may take to end once one has ended with 75."""
_CLOSING_SECONDS = 600
"""How long ranks may take to save when a node joins, and the run starts again on all."""
_LEAVING = "onstep/leaving"
"""Key in the store of an attempt: a node of it has received a signal."""
_ANNOUNCED_SECONDS = 3.0
"""How long after its signal a node has announced it at the latest."""
_ANSWER = timedelta(seconds=60)
"""How long the nodes that have met may take to say where and which their ranks are; in a file torch waits 5 minutes."""
_MEETINGS = 10
"""How often the nodes meet again because one was lost before it had said so."""
_BARRIER_SECONDS = 30.0
"""How long a node that is done waits for the others to be done."""


def run(launch: Launch) -> int:
    """Run a command on all ranks of this node; the exit code is that of the run.

    Raises:
        ConfigError: if the output of ranks cannot be written.
        OnstepError: if the nodes don't meet, or the place where they met is gone.
    """
    directory = launch.log_dir or Path(tempfile.mkdtemp(prefix="onstep-launch-"))
    _prepare(directory)
    _quieten_torch()
    if launch.ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _signals_restored():
        code = _run(launch, directory)
    if launch.log_dir is None and code in (0, PREEMPTED):
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _prepare(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ConfigError(
            f"--log-dir={directory} cannot be written to ({error.strerror}); give a directory that can be created."
        ) from None


def default_ranks() -> int:
    """One rank on each GPU, or one without GPUs."""
    return max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 1)


def _run(launch: Launch, directory: Path) -> int:
    try:
        handler: Any = rendezvous_registry.get_rendezvous_handler(_parameters(launch))
    except RendezvousError as error:
        raise OnstepError(_never_met(launch, error)) from None
    if launch.rendezvous is not None and launch.rendezvous.is_file:
        handler._store.set_timeout(_ANSWER)
    spec = WorkerSpec(
        role="rank",
        local_world_size=launch.ranks,
        rdzv_handler=handler,
        entrypoint=launch.command[0],
        args=launch.command[1:],
        max_restarts=launch.max_restarts,
        monitor_interval=0.1,
    )
    prefix = "[rank {}] " if launch.ranks * launch.nodes.most > 1 else ""
    agent = _Agent(spec, _Files(directory), Outputs(prefix), is_elastic=launch.nodes.is_elastic)
    try:
        result = agent.run()
    except SignalException as ended:  # no ranks were running
        return agent.failure.exit_code if agent.failure else 128 + int(ended.sigval)
    except RendezvousError as error:
        raise OnstepError(_never_met(launch, error)) from None
    if not agent.was_signalled:
        handler.shutdown()  # so that no node waits for others
    if not result.is_failed():
        return 0
    assert agent.failure is not None
    return agent.failure.exit_code


def _parameters(launch: Launch) -> RendezvousParameters:
    where = launch.rendezvous
    if where is None:
        return RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1, local_addr="localhost", is_host=True)
    settings: dict[str, Any] = {"join_timeout": "600", "last_call_timeout": "30", **where.settings}
    if where.is_file:
        settings["store_type"] = "file"
    if where.is_host is not None:
        settings["is_host"] = where.is_host
    nodes = launch.nodes
    return RendezvousParameters("c10d", where.place, where.id, nodes.least, nodes.most, **settings)


def _never_met(launch: Launch, error: RendezvousError) -> str:
    """Say why the nodes cannot meet, with the remedy."""
    where = launch.rendezvous
    if isinstance(error, RendezvousClosedError) and where is not None and where.is_file:
        return f"--rdzv={where.place} belongs to a launch that has ended; remove this file, or give another one."
    place = where.place if where else "this machine"
    reason = _in_one_line(error) or type(error).__name__
    return f"the nodes cannot meet at {place}: {reason}; start the launch on all of them again."


class _Agent(LocalElasticAgent):
    """torchelastic's agent, which forwards signals to its ranks, and does not restart a run that was preempted."""

    def __init__(self, spec: WorkerSpec, files: _Files, outputs: Outputs, *, is_elastic: bool) -> None:
        super().__init__(spec, files, exit_barrier_timeout=_BARRIER_SECONDS, shutdown_timeout=_CLOSING_SECONDS)
        self._files, self._outputs, self._is_elastic = files, outputs, is_elastic
        self._preempted_at: float | None = None
        self._has_announced = False
        self._num_starts = 0
        self.failure: Failure | None = None
        self.was_signalled = False
        self._ignored = [number for number in _FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
        self._forward_signals()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.failure = None
        handler: Any = worker_group.spec.rdzv_handler
        for _ in range(_MEETINGS):
            handler._bootstrap_store_info = None  # torch 2.13 keeps the address of the first store, which may be lost
            try:
                super()._rendezvous(worker_group)
            except RuntimeError as error:  # torch would end
                reason = _in_one_line(error)
                _say(f"a node was lost while the nodes met ({reason}); they meet again")
            else:
                return
        raise OnstepError(
            f"the nodes met {_MEETINGS} times, and each time one was lost: {reason}; start the launch again."
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._preempted_at = None
        self._num_starts += 1
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._forward_signals()  # in place of those that torch has just installed
        self._outputs.follow(self._files.stdouts, sys.stdout)
        self._outputs.follow(self._files.stderrs, sys.stderr)
        self._outputs.start()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self.was_signalled and self._is_elastic and not self._has_announced:
            self._has_announced = True
            self._attempt_store.set(_LEAVING, "")
        if self._is_taken_for_lost():
            _say("the other nodes have taken this one for lost; its ranks stop, and join them again")
            self._restart_workers(worker_group)
        failed = {rank: code for rank, code in self._exit_codes(worker_group).items() if code}
        if failed and self._end_by_themselves(failed, worker_group):
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._outputs.stop()
            codes = failed or {rank: one.exitcode for rank, one in result.failures.items()}
            self._decide(first_failure(codes, self._files.stdouts, self._files.stderrs, self._files.notes))
        elif result.state == WorkerState.SUCCEEDED:
            self._outputs.stop()
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = _CLOSING_SECONDS) -> None:
        super()._shutdown(death_sig, timeout)
        self._outputs.stop()

    def _exit_codes(self, worker_group: WorkerGroup) -> dict[int, int | None]:
        """The exit codes of this node's ranks, None of one that runs."""
        processes = getattr(self._pcontext, "subprocess_handlers", {})
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        return {ranks[local]: handler.proc.poll() for local, handler in processes.items()}

    def _end_by_themselves(self, failed: dict[int, int], worker_group: WorkerGroup) -> bool:
        """Whether the ranks are ending with 75, and may be left alone."""
        if set(failed.values()) != {PREEMPTED}:
            return False
        self._preempted_at = self._preempted_at or time.monotonic()
        is_running = None in self._exit_codes(worker_group).values()
        return is_running and time.monotonic() - self._preempted_at < _OTHERS_SECONDS

    def _decide(self, own: Failure) -> None:
        """Say what has failed, and whether the ranks are started again."""
        is_preempted = own.code == PREEMPTED
        if is_preempted and self._another_node_leaves():
            _say("another node leaves; the run continues with those that remain")
            self._remaining_restarts += 1  # the agent subtracts one, but this is not a failure
            return
        if is_preempted or self.was_signalled:
            self._remaining_restarts = 0
        self.failure = own
        if is_preempted:
            self._exit_barrier()  # type: ignore[no-untyped-call]
            return
        self.failure = self._of_all_nodes(own)
        if self.failure.is_refusal and self._num_starts == 1:  # later starts may be refused for their number of ranks
            self._remaining_restarts = 0
        number = self._worker_group.spec.max_restarts - self._remaining_restarts + 1
        again = f"; restart {number} of {self._worker_group.spec.max_restarts}" if self._remaining_restarts else ""
        _say(f"{self.failure}{again}")

    @property
    def _attempt_store(self) -> Any:
        """The store that the nodes of this attempt share."""
        return self._store

    def _is_taken_for_lost(self) -> bool:
        """Whether the nodes have met again without this one, whose heartbeats were late; torch does not look."""
        handler: Any = self._worker_group.spec.rdzv_handler
        return self._is_elastic and handler._this_node not in handler._state_holder.state.participants

    def _another_node_leaves(self) -> bool:
        """Whether the run was preempted because another node received a signal, so that this one may continue."""
        deadline = time.monotonic() + _ANNOUNCED_SECONDS
        while self._is_elastic and not self.was_signalled and time.monotonic() < deadline:
            if self._attempt_store.check([_LEAVING]):
                return True
            time.sleep(0.1)
        return False

    def _of_all_nodes(self, own: Failure) -> Failure:
        if self._worker_group.group_world_size in (None, 1):
            return own
        try:
            return agreed(own, self._attempt_store, socket.gethostname())
        except (RuntimeError, ValueError):  # the store is gone with its node
            return own

    def _forward_signals(self) -> None:
        """Handle all signals but those that `nohup` or a shell has made the launch ignore."""
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_IGN if number in self._ignored else self._forward)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.was_signalled = True
        processes = getattr(self._pcontext, "subprocess_handlers", {})
        running = [handler.proc.pid for handler in processes.values() if handler.proc.poll() is None]
        if not running:
            raise SignalException(signal.Signals(number).name, signal.Signals(number))
        for pid in running:
            os.killpg(pid, number)


class _Files(LogsSpecs):
    """Where ranks write: rank 0 to the terminal, if there is one, the others to files of their own."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self._directory = directory
        self.stdouts: dict[int, str] = {}
        """The file of each rank of this attempt; "" for the terminal."""
        self.stderrs: dict[int, str] = {}
        self.notes: dict[int, str] = {}
        """The file of each rank in which it may say why it ends."""

    @property
    def root_log_dir(self) -> str:
        """Where all files are."""
        return str(self._directory)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of an attempt, and set what ranks need to be readable."""
        attempt = next(
            path for number in itertools.count() if not (path := self._directory / f"attempt-{number}").exists()
        )
        attempt.mkdir()
        places, self.stdouts, self.stderrs, self.notes = LogsDest(), {}, {}, {}
        for local, environment in envs.items():
            rank = int(environment["RANK"])
            is_shown = rank == 0 and sys.stderr.isatty()
            out, err = ("", "") if is_shown else (str(attempt / f"rank-{rank}.{end}") for end in ("out", "err"))
            places.stdouts[local], places.stderrs[local] = out, err
            self.stdouts[rank], self.stderrs[rank] = out, err
            self.notes[rank] = str(attempt / f"rank-{rank}.json")
            places.error_files[local] = environment["TORCHELASTIC_ERROR_FILE"] = self.notes[rank]
            environment.setdefault("PYTHONUNBUFFERED", os.environ.get("PYTHONUNBUFFERED", "1"))
            if rank > 0 and "TQDM_DISABLE" not in os.environ:
                environment["TQDM_DISABLE"] = "1"
        return places


@contextmanager
def _signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    sys.stderr.write(f"onstep launch: {text}\n")
    sys.stderr.flush()


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error.__cause__ or error).split())


def _quieten_torch() -> None:
    """Leave what the agent logs to the one line of this command."""
    for name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api", "rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
