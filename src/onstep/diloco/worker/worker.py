"""`DiLoCoWorker`: a model and its optimizer as one worker of a run, on all ranks of a job."""

from __future__ import annotations

import logging
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from onstep.diloco.client.connection import Connection
from onstep.diloco.client.membership import Client, Membership
from onstep.diloco.group.client import GroupClient, join_sites
from onstep.diloco.group.sites import Sites
from onstep.diloco.protocol.messages import Registered, Settings
from onstep.diloco.protocol.settings import warn_of_disagreements
from onstep.diloco.sizes import check_codec
from onstep.diloco.worker.defaults import DEFAULT_CODEC, DEFAULTS, check_one_way
from onstep.diloco.worker.exchange import Exchange
from onstep.diloco.worker.first_contact import check_server, seconds_of_retries
from onstep.diloco.worker.heartbeat import HeartbeatThread
from onstep.diloco.worker.kept_work import WorkKept, kept_path
from onstep.diloco.worker.metrics import SyncMetrics
from onstep.diloco.worker.pace import Pace
from onstep.diloco.worker.parameters import Parameters
from onstep.diloco.worker.ranks import on_main, open_world, world_of_site
from onstep.diloco.worker.synchronizer import Synchronizer
from onstep.distributed.world import World
from onstep.errors import ConfigError, require

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SILENCE_SECONDS = 60.0
"""A request without a byte of an answer for this long is sent again; a server holds none for more than 20 s."""


class DiLoCoWorker:
    """Trains a model together with the other workers of a server; a context manager around any training loop.

        with DiLoCoWorker(model, optimizer, "host:8512") as worker:
            for batch in data:
                optimizer.zero_grad()
                model(batch).loss.backward()
                optimizer.step()

    Entering it registers the worker and gives the model the run's parameters. Then, every `sync_every` optimizer steps,
    the difference between the parameters at the start of the cycle and the current ones is submitted, and the model
    continues from the new version. Exiting without an error submits the remaining steps as well, so that workers that
    end together end with the same model; see `finish` for how long that waits. The optimizer's own state is kept. With
    several fragments, they are submitted in turn and are in flight while training continues; the version that arrives
    is blended with the model's progress since, or added to it if the run is eager. The server's `overlap_steps` says
    after how many steps.

    If the server cannot be reached, or a round does not end within `timeout`, training continues. The submission stays
    pending until the next one is due: if it was counted, later progress is added to the new version; if the server
    never received it, it is sent again; if it was dropped, its progress stays in the model and is part of the next
    submission. So no progress is lost, and none counts twice.

    All ranks of a job are one worker: create it on every rank. Rank 0 talks to the server.

    Args:
        model: a module, wrapped or sharded (DDP, FSDP2) or not; or the list of its chunks.
        optimizer: counts the steps, by a hook after `step()`; None if `end_step` is called after every step instead.
        server_addr: `host:port`, or a URL with `http` or `https`.
        sync_every: steps between two submissions; None for the server's.
        worker_id: unique in the run; by default the host name and random digits. A worker that restarts under its id
            gets its share of the data back; while the first process lives, another one is refused.
        bf16_comm: True submits bfloat16, False float32; None leaves it to the server.
        timeout: seconds to wait for a result.
        dylu: whether to take as many steps as the server recommends for a worker of this speed; None for the server's.
        heartbeat_interval: seconds between heartbeats, at most a third of the server's timeout; 0 for none. Without
            `stop`, they end with the worker object or the thread that started it, and pause after ten minutes without
            a step.
        num_fragments: if given, it must be the server's.
        max_sync_retries: an exchange ends after 2 + 4 + ... seconds without any answer, with this many terms.
        codec: `fp32`, `bf16`, `int8` or `int4`; wins over `bf16_comm`.
        auth_token: of the server; by default from the environment or the token file.
        verify: for `https`, the PEM file of the certification authority.
        client: used instead of a new one for the address, and closed at the end.
        group: of the sites, instead of a server: each of them performs the same outer step. `sync_every`, `codec` and
            `num_fragments` must then be the same at all sites; there are no retries, heartbeats and dynamic local
            updates, and a site that is lost ends the others.

    Raises:
        ConfigError: for an invalid value, a server and a group, or neither.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        server_addr: str = "",
        sync_every: int | None = None,
        worker_id: str | None = None,
        bf16_comm: bool | None = None,
        timeout: float = 600,
        dylu: bool | None = None,
        heartbeat_interval: float = 30.0,
        num_fragments: int | None = None,
        max_sync_retries: int = 3,
        *,
        codec: str | None = None,
        auth_token: str | None = None,
        verify: str | None = None,
        client: Any = None,
        group: Sites | ProcessGroup | str | None = None,
    ) -> None:
        require(sync_every is None or sync_every >= 1, "sync_every", ">= 1", sync_every, "; None for the server's.")
        require(timeout > 0, "timeout", "> 0 seconds", timeout)
        require(max_sync_retries >= 0, "max_sync_retries", ">= 0", max_sync_retries)
        if codec is not None:
            check_codec(codec)
        self.worker_id = worker_id or f"worker_{platform.node()}_{secrets.token_hex(4)}"
        self.server_addr = server_addr
        self.metrics = SyncMetrics()
        self._model, self._optimizer = model, optimizer
        self._codec = codec if codec is not None or bf16_comm is None else ("bf16" if bf16_comm else "fp32")
        self._sync_every, self._num_fragments, self._dylu = sync_every, num_fragments, dylu
        self._timeout, self._heartbeat_interval, self._max_retries = timeout, heartbeat_interval, max_sync_retries
        self._client, self._auth_token, self._verify = client, auth_token, verify
        self._sites = group if isinstance(group, Sites) or group is None else Sites(group)
        self._group: GroupClient | None = None
        check_one_way(server_addr, group)
        if not server_addr and group is None and client is None:
            raise ConfigError(
                "the worker has neither a server nor a group of sites; pass server_addr, such as host:8512, or group."
            )
        self._loaded: Mapping[str, Any] | None = None
        self._divided: Mapping[str, Any] = {}
        self._hook: Any = None
        self.kept: str | None = None
        """Of a worker that has ended: what it could not submit, and where that is kept."""
        self._pace = Pace()
        self._synchronizer: Synchronizer | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(merge=error is None)
        if error is None and self.kept is not None:
            raise WorkKept(self.kept)

    @property
    def is_active(self) -> bool:
        """Whether it has started and not stopped."""
        return self._synchronizer is not None

    def start(self, step: int = 0) -> None:
        """Register, and give the model the run's parameters. Collective.

        A model restored from a checkpoint keeps its parameters if the run has no newer version and `load_state_dict`
        was called.

        Args:
            step: optimizer steps that this worker has taken in earlier sessions.

        Raises:
            RefusedByServerError: if the server refuses this worker, for example because its model differs.
            ServerLostError: without an answer.
        """
        world = self._open_world()
        parameters = Parameters(self._model, world)
        made: list[Exchange] = []
        whole = {} if self._sites is None else parameters.whole()
        on_main(
            world, self, lambda worker: made.append(worker._new_exchange(world, parameters, whole, step))
        )  # its errors, too
        exchange = made[0] if made else None
        try:
            self._synchronizer = self._begin(world, parameters, exchange)
        except BaseException:
            if exchange is not None:
                exchange.member.close()
            raise
        if self._optimizer is not None:
            self._hook = self._optimizer.register_step_post_hook(lambda *_: self.end_step())

    def _open_world(self) -> World:
        if self._sites is None:
            return open_world()
        return world_of_site(
            self._sites.group, list(self._model) if isinstance(self._model, Sequence) else [self._model]
        )

    def _new_client(self, parameters: Parameters, whole: Mapping[str, Tensor]) -> Client:
        if self._sites is not None:
            loaded: Mapping[str, Any] = self._loaded or {}
            self._group = join_sites(
                self._sites,
                parameters.specs,
                whole,
                codec=self._codec or DEFAULT_CODEC,
                sync_every=self._sync_every or DEFAULTS["sync_every"],
                num_fragments=self._num_fragments or 1,
                timeout=self._timeout,
                state=loaded.get("group"),
            )
        elif self._client is None:
            lost_seconds = seconds_of_retries(self._max_retries)
            check_server(self.server_addr, lost_seconds=lost_seconds, auth_token=self._auth_token, verify=self._verify)
            silence = min(self._timeout, _SILENCE_SECONDS)
            return Connection(self.server_addr, silence, self._auth_token, self._verify)
        client: Client = self._group or self._client
        return client

    def _new_exchange(self, world: World, parameters: Parameters, whole: Mapping[str, Tensor], step: int) -> Exchange:
        member = Membership(
            self._new_client(parameters, whole),
            self.worker_id,
            parameters.specs,
            timeout=self._timeout,
            lost_seconds=seconds_of_retries(self._max_retries),
            decodes=world.size == 1,
            hostname=platform.node(),
            sync_every=self._sync_every,
            num_fragments=self._num_fragments,
        )
        member.session.step = step
        if self._loaded is not None and self._loaded.get("exchange"):
            member.session.load_state_dict(self._loaded["exchange"]["session"])
        codec = self._codec if self._sites is None else self._codec or DEFAULT_CODEC
        return Exchange(member, codec, self.metrics, has_server=self._sites is None)

    def _begin(self, world: World, parameters: Parameters, exchange: Exchange | None) -> Synchronizer:
        path = kept_path(self.server_addr, self.worker_id)
        on_main(world, exchange, lambda exchange: exchange.expect_kept(path))
        registered = on_main(world, exchange, Exchange.join)
        on_main(world, exchange, lambda exchange: exchange.send_kept(path))
        if world.is_main and self._sites is None:
            warn_of_disagreements(self.worker_id, registered.settings, self._sync_every, self._codec, self._dylu)
        synchronizer = Synchronizer(world, parameters, exchange, registered, self._sync_every)
        loaded, divided, self._loaded, self._divided = self._loaded, self._divided, None, {}
        synchronizer.holdings.load_state_dict(divided)
        synchronizer.resume(loaded, divided.get("tokens"))
        if exchange is not None and self._heartbeat_interval > 0 and self._sites is None:
            synchronizer.heartbeat = HeartbeatThread(exchange.member, self._heartbeat_interval, self._pace)
        return synchronizer

    def end_step(self, tokens: Tensor | float | None = None, loss: Tensor | float | None = None) -> None:
        """Count an optimizer step; exchange the fragments that are due after it. Collective.

        Args:
            tokens: that this rank has trained on, the weight of its work; in any unit, the same for all workers. None
                counts steps.
            loss: of this rank in the step, for the words of the server; None if it is not known.

        Raises:
            RefusedByServerError: if the server no longer accepts this worker.
            InvalidTensorsError: if the model is not finite.
        """
        synchronizer, metrics, started = self._started(), self.metrics, time.monotonic()
        cycle = synchronizer.cycle
        synchronizer.progress.count(1.0 if tokens is None else tokens, loss=loss)
        if synchronizer.exchange is not None:
            synchronizer.exchange.member.session.step += 1
        self._pace.count_step()
        has_waited = synchronizer.merge_due()
        fragments = cycle.advance()
        if fragments:
            synchronizer.exchange_due(fragments)
            metrics.fragment_syncs += len(fragments) if synchronizer.is_overlapped else 0
        if fragments or has_waited:
            metrics.last_sync_time = time.monotonic() - started
            metrics.total_sync_time += metrics.last_sync_time
        self._pace.leave_out(time.monotonic() - started)
        if cycle.step >= cycle.length:
            cycle.begin(self._next_length(synchronizer))
            metrics.sync_count += 1

    def _next_length(self, synchronizer: Synchronizer) -> int:
        """Steps of the next cycle: with dynamic local updates, the server's recommendation."""
        length, settings = synchronizer.cycle.length, synchronizer.registered.settings
        if not self._is_dynamic(settings):
            return length
        heartbeat = synchronizer.heartbeat
        recommended = synchronizer.world.share(heartbeat and heartbeat.recommended_sync_every) or length
        self.metrics.dylu_adjustments += recommended != length
        return int(recommended)

    def _is_dynamic(self, settings: Settings) -> bool:
        return settings.dylu if self._dylu is None else self._dylu and settings.dylu

    def take_commands(self) -> list[str]:
        """On rank 0, the commands for workers that the server has relayed since the last call; heartbeats bring them.

        They are `save_checkpoint`, `graceful_stop`, `save_and_stop` and `abort`, as in `onstep control`.
        """
        exchange = self._started().exchange
        return [] if exchange is None else exchange.member.session.take_commands()

    def force_sync(self) -> None:
        """Exchange all fragments that have a new step now, wait, and begin the next cycle. Collective.

        It counts in `sync_count`, unless there is no new step.

        Raises:
            RuntimeError: if it is not active.
        """
        synchronizer = self._started()
        has_steps = any(map(synchronizer.progress.num_steps, synchronizer.fragments))
        synchronizer.exchange_due(synchronizer.fragments)
        synchronizer.merge_arrived(wait=True)
        if has_steps:
            synchronizer.cycle.begin(synchronizer.cycle.length)
            self.metrics.sync_count += 1

    def finish(self) -> None:
        """Submit the steps since the last submission, and continue from the result: training is over. Collective.

        It waits until the round is committed, at most for `timeout`, and as long again if an earlier submission is
        still pending. It gives up two seconds after fewer workers than the quorum are registered. Then the last steps
        are in this worker's model only, or count without it knowing.
        """
        self._started().finish()

    def share(self, value: T) -> T:
        """Rank 0's value, on every rank. Collective.

        Args:
            value: the value on rank 0.
        """
        shared: T = self._started().world.share(value)
        return shared

    def merge_in_flight(self) -> None:
        """Wait for the fragments in flight, and merge them. Collective."""
        self._started().merge_arrived(wait=True)

    def stop(self, merge: bool = True, reason: str = "") -> None:
        """Leave the run; may be repeated.

        Args:
            reason: why, for the logs of the worker and the server.
            merge: whether to `finish` first, which is collective. Pass False to leave at once: after an error that
                other ranks might not share, or to continue later from a checkpoint.
        """
        synchronizer, self._synchronizer = self._synchronizer, None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if synchronizer is None:
            return
        try:
            if merge:
                synchronizer.finish()
                self._keep_unsent(synchronizer)
        finally:
            if synchronizer.heartbeat is not None:
                synchronizer.heartbeat.stop()
            if synchronizer.exchange is not None:
                if reason:
                    is_away = synchronizer.exchange.member.outage.is_on
                    unheard = "; the server does not answer, and sees it by its silence" if is_away else ""
                    logger.info("DiLoCo: %s leaves the run: %s%s", self.worker_id, reason, unheard)
                synchronizer.exchange.leave(reason)

    def keep_unsent(self) -> None:
        """After `finish`, write to disk what could not be submitted, and set `kept`; the next start submits it."""
        self._keep_unsent(self._started())

    def _keep_unsent(self, synchronizer: Synchronizer) -> None:
        path = kept_path(self.server_addr, self.worker_id)
        steps = synchronizer.keep_unsent(path)
        if not steps:
            return
        self.kept = (
            f"the server does not answer, and {steps} steps of this worker are in no round: they are kept in {path}, "
            f"and the next start as worker {self.worker_id!r} (--worker-id) submits them"
        )
        if synchronizer.world.is_main:
            logger.error("DiLoCo: %s", self.kept)

    def get_steps_per_second(self) -> float:
        """Speed of the last 100 steps, without the time spent waiting for the server; 0 before the second step."""
        return self._pace.steps_per_second()

    @property
    def sync_metrics(self) -> dict[str, float]:
        """The metrics so far; sizes and times of the network on rank 0 only."""
        logs = self.metrics.logs()
        logs["diloco/steps_per_second"] = self.get_steps_per_second()
        if self._synchronizer is not None:
            cycle, settings = self._synchronizer.cycle, self._synchronizer.registered.settings
            logs["diloco/local_step"] = cycle.step
            logs["diloco/sync_every"] = cycle.length
            if self._is_dynamic(settings):
                logs["diloco/dylu_adjustments"] = self.metrics.dylu_adjustments
            if self._synchronizer.is_overlapped:
                logs["diloco/num_fragments"] = settings.num_fragments
                logs["diloco/fragment_syncs"] = self.metrics.fragment_syncs
        return logs

    @property
    def registered(self) -> Registered:
        """The server's answer to the registration: its settings, this worker's share of the data, the run's step.

        A worker that was evicted and has registered again may have another share; it is here after the next exchange.
        """
        return self._started().registered

    @property
    def has_resumed(self) -> bool:
        """Whether work of an earlier process counts that was in no submission when this one registered.

        Fragment 0 decides, by whose submissions the share of the data is counted. If not, the steps since its last
        submission are lost, and their samples come again.
        """
        return self._started().has_resumed

    @property
    def times_over(self) -> int:
        """How often this worker has given up steps that were too old, and started over from a newer version."""
        return self._started().times_over

    def state_dict(self) -> dict[str, Any]:
        """Counts, position in the cycle, and as `divided` the residuals of the codec and the tokens of each rank.

        Each rank of several has a part of the latter, as DTensors, which torch.distributed.checkpoint and Onstep's
        checkpoints load on any number of ranks. The version that the model started from is not part of the state: the
        server has it.
        """
        synchronizer = self._started()
        exchange, progress = synchronizer.exchange, synchronizer.progress
        if exchange is not None and self._group is not None:
            exchange.settle()
        return {
            "worker_id": self.worker_id,
            "sync_every": synchronizer.cycle.length,
            "local_step": synchronizer.cycle.step,
            "since_base": [vars(progress.since_base(index)) for index in synchronizer.fragments],
            "since_submission": [vars(progress.since_submission(index)) for index in synchronizer.fragments],
            "exchange": None if exchange is None else exchange.state_dict(),
            "divided": synchronizer.divided_state(),
            **({} if self._group is None else {"group": self._group.state_dict()}),
            **self.metrics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an earlier process, whose parameters the model has; before `start`.

        Of all but `divided`, rank 0's state matters. What that contains is either whole, on rank 0, or on all ranks
        DTensors that are divided as the parameters are here; a rank may be given it alone.

        Args:
            state: what `state_dict()` returned.
        """
        exchange = state.get("exchange") or {}
        self._divided = state.get("divided") or exchange.get("feedback") or {}  # the latter up to version 0.5
        if "since_base" in state:
            self._loaded = state
            self.metrics.load_state_dict(state)

    def _started(self) -> Synchronizer:
        if self._synchronizer is None:
            raise RuntimeError("the worker is not active; call start(), or use it as a context manager.")
        return self._synchronizer
