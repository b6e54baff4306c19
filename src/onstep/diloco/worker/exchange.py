"""Joins a run on the main rank of a worker, submits differences, and fetches newer versions."""

from __future__ import annotations

import logging
import math
import platform
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onstep.diloco.client.link import Client, Link
from onstep.diloco.client.versions import Tensors, fetch_version, received
from onstep.diloco.codec import ErrorFeedback, write_body
from onstep.diloco.codec.choice import CodecChoice
from onstep.diloco.codec.sizes import encoded_bytes
from onstep.diloco.fragments import assign
from onstep.diloco.protocol.messages import Beat, ParameterSpec, Registered, fingerprint
from onstep.diloco.protocol.session import Counted, Unsettled, WorkerSession
from onstep.diloco.worker.fragment import Fragment, blended, kept
from onstep.diloco.worker.metrics import SyncMetrics
from onstep.diloco.worker.task import Task
from onstep.errors import OnstepError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Between two questions whether a worker that ends still has others to wait for."""
_NUM_LOOKS = 2
"""In a row without a quorum, after which it waits no longer."""


class ServerUnreachableError(OnstepError, ConnectionError):
    """The server did not answer when the worker joined."""


@dataclass(frozen=True)
class Landed:
    """A newer version, ready to be merged."""

    version: int
    base: Tensors
    is_counted: bool
    """Whether it, or one before it, has the worker's submission."""
    contributors: int = 0


class Exchange:
    """The server's versions and this worker's submissions; no collectives."""

    def __init__(
        self,
        client: Client,
        specs: Sequence[ParameterSpec],
        dtypes: Mapping[str, torch.dtype],
        *,
        worker_id: str,
        timeout: float,
        max_retries: int,
        sync_every: int | None,
        num_fragments: int | None,
        metrics: SyncMetrics,
    ) -> None:
        self._specs, self._dtypes, self._timeout, self._metrics = specs, dtypes, timeout, metrics
        self._client = client
        self.link = Link(client, specs, lost_seconds=float(2 ** (max_retries + 1) - 2))
        self.session = WorkerSession(
            worker_id,
            secrets.token_hex(8),
            fingerprint(specs),
            clock=time.monotonic,
            hostname=platform.node(),
            sync_every=sync_every,
            num_fragments=num_fragments,
        )
        self.feedback = ErrorFeedback()
        self.fragments: list[Fragment] = []
        self.codec: CodecChoice
        self._tasks: dict[int, Task[Landed | None]] = {}
        self._known: dict[int, bool] = {}
        """Of settled submissions whose version has not arrived: whether they were counted."""
        self._landed: dict[int, Landed] = {}
        self._dropped: set[int] = set()
        """Fragments whose submission was dropped, until that is merged."""

    def join(self, codec: str | None) -> Registered:
        """Register and divide the parameters into the server's fragments.

        Raises:
            SessionEndedError: if the server refuses this worker.
            ServerUnreachableError: without an answer.
        """
        registered = self.link.run(self.session.join(self._timeout))
        if isinstance(registered, Unsettled):
            raise ServerUnreachableError(f"no answer from the server: {registered.reason}; is it running?")
        settings = registered.settings
        parts = assign(self._specs, settings.num_fragments, settings.num_shares)
        self.fragments = [Fragment(index, part) for index, part in enumerate(parts)]
        self.codec = CodecChoice(codec or settings.codec)
        return registered

    def fetch(self, fragment: Fragment) -> tuple[int, Tensors]:
        """The newest version of a fragment and all of its parameters.

        Raises:
            ServerUnreachableError: without an answer.
            InvalidTensorsError: if what arrives is not what the server has, several times.
        """
        found = fetch_version(self.link, self.session, fragment.index, fragment.specs, self._timeout)
        if isinstance(found, Unsettled):
            raise ServerUnreachableError(f"no answer from the server: {found.reason}; is it running?")
        ready, tensors = found
        return ready.version, tensors

    def submit(self, fragment: Fragment, local: Tensors, *, tokens: int, steps: int, cycle_seconds: float) -> None:
        """Encode the fragment's difference and send it in another thread.

        Raises:
            InvalidTensorsError: if the model is not finite.
        """
        metrics, transfers = self._metrics, self.link.transfers
        bandwidth = transfers.upload_bytes_per_second or transfers.download_bytes_per_second
        codec = self.codec.choose(fragment.specs, bandwidth, cycle_seconds)
        body = write_body(self.feedback.encode(fragment.difference(local, self._dtypes), codec))
        fragment.submitted, fragment.is_late = local, False
        metrics.quantization_error, metrics.last_send_bytes = self.feedback.relative_error, len(body)
        num_values = sum(math.prod(spec.shape) for spec in fragment.specs)
        metrics.bits_per_value = 8 * encoded_bytes(fragment.specs, codec) / max(1, num_values)
        self.session.begin(
            fragment.index,
            base_version=fragment.version,
            tokens=max(tokens, 1),
            steps=steps,
            codec=codec,
            body=body,
        )
        self.settle(fragment)

    def settle(self, fragment: Fragment) -> None:
        """Find out in another thread what became of the fragment's submission."""
        if fragment.index not in self._tasks and fragment.index not in self._landed:
            self._tasks[fragment.index] = Task(lambda: self._bring(fragment))

    def _bring(self, fragment: Fragment) -> Landed | None:
        """The version that has the fragment's submission, or the newest if it was dropped; None: not known in time."""
        index = fragment.index
        if index not in self._known:
            settled = self.link.run(self.session.settle(index, self._timeout, have_version=fragment.version))
            if isinstance(settled, Unsettled):
                logger.warning("training continues without a result of the server: %s", settled.reason)
                return None
            self._known[index] = isinstance(settled, Counted)
            if isinstance(settled, Counted):
                ready = settled.ready
                base = received(ready, settled.body, fragment.specs, fragment.version, fragment.base)
                if base is not None:
                    return Landed(ready.version, base, self._known.pop(index), ready.num_contributors)
            else:
                self._dropped.add(index)
                logger.warning("a submission was dropped: %s", settled.reason)
        try:
            version, base = self.fetch(fragment)
        except ServerUnreachableError as error:
            logger.warning("training continues without the newest version: %s", error)
            return None
        return Landed(version, base, self._known.pop(index))

    def collect(self, fragment: Fragment, wait: bool) -> bool:
        """Whether there is something to merge into the fragment."""
        task = self._tasks.get(fragment.index)
        if task is not None and (wait or task.is_done):
            del self._tasks[fragment.index]
            landed = task.result()
            if landed is None:
                self._metrics.sync_retries += 1
                fragment.is_late = True
            else:
                self._landed[fragment.index] = landed
        return fragment.index in self._landed

    def wait_for_others(self) -> None:
        """Wait for all that is under way, as long as enough workers are registered to commit it."""
        num_looks = 0
        while num_looks < _NUM_LOOKS:
            if all(task.wait(_LOOK_SECONDS) for task in self._tasks.values()):
                return
            num_looks = 0 if self._can_settle() else num_looks + 1
        logger.warning(
            "this worker's last steps are only in its own model: the other workers have left, and fewer than the "
            "quorum are registered"
        )

    def _can_settle(self) -> bool:
        """Whether what is under way may still be committed, as far as the server can be asked."""
        beat = self.link.run(self.session.beat(0.0, _LOOK_SECONDS))
        return not isinstance(beat, Beat) or all(self.session.can_settle(index, beat) for index in self._tasks)

    def is_under_way(self, fragment: Fragment) -> bool:
        """Whether a thread is waiting for the fragment."""
        return fragment.index in self._tasks

    def merge(self, fragment: Fragment, now: Tensors, local_share: float | None) -> Tensors:
        """Continue from the version that landed; returns what the model gets.

        A submission that was counted leaves the progress that the model has made since: as it is, or blended in with
        `local_share`, which is meant for the few steps of an overlap: what followed a submission whose result came late
        stays as it is. One that was dropped stays in the model, so that the next difference has it.

        Args:
            now: the model's parameters, empty if no step was taken since the submission.
        """
        landed = self._landed.pop(fragment.index)
        if not landed.is_counted:
            self._dropped.discard(fragment.index)
            self._metrics.dropped += 1
            self.feedback.undo(fragment.names)
            merged = kept(landed.base, now or fragment.submitted, fragment.start(self._dtypes))
        elif now and local_share is not None and not fragment.is_late:
            merged = blended(landed.base, now, local_share)
        else:
            merged = kept(landed.base, now, fragment.submitted)
        fragment.advance(landed.version, landed.base)
        metrics, transfers = self._metrics, self.link.transfers
        metrics.version, metrics.contributors = landed.version, landed.contributors or metrics.contributors
        metrics.reconnections = self.session.num_rejoins
        metrics.last_recv_bytes = transfers.last_received_bytes
        metrics.total_send_bytes, metrics.total_recv_bytes = transfers.sent_bytes, transfers.received_bytes
        return merged

    def was_counted(self, fragment: Fragment) -> bool:
        """Whether what landed has the submission."""
        return self._landed[fragment.index].is_counted

    def leave(self) -> None:
        """Deregister, and end what is under way."""
        try:
            self.link.run(self.session.leave())
        finally:
            self.close()

    def close(self) -> None:
        """End what is under way, and close the connections."""
        self.link.close()
        self._client.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed worker needs."""
        return {
            "session": self.session.state_dict(),
            "versions": [fragment.version for fragment in self.fragments],
            "feedback": self.feedback.state_dict(),
            "dropped": sorted(self._dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; before `join`."""
        self.session.load_state_dict(state["session"])
        self.feedback.load_state_dict(state["feedback"], {spec.name: spec.shape for spec in self._specs})

    def open(self, fragment: Fragment, state: Mapping[str, Any] | None) -> bool:
        """Fetch the fragment's newest version; whether the progress that a restored model has made still counts.

        It does if the model started from that very version and the server has not counted it already.
        """
        fragment.advance(*self.fetch(fragment))
        self._metrics.version = fragment.version
        if state is None or len(state["versions"]) != len(self.fragments):
            return False
        is_superseded = fragment.index in self.session.superseded
        is_pending = fragment.index in state["session"]["pending"]
        if not is_superseded and (is_pending or fragment.index in state["dropped"]):
            self.feedback.undo(fragment.names)
        elif is_superseded and not (is_pending and self._num_known_since(fragment, state) == 1):
            self.feedback.forget(fragment.names)  # a later submission has sent what it had lost by then
        return not is_superseded and bool(state["versions"][fragment.index] == fragment.version)

    def _num_known_since(self, fragment: Fragment, state: Mapping[str, Any]) -> int:
        """Submissions that the server has and a checkpoint does not; one that was pending is the first."""
        assert self.session.registered is not None
        saved = state["session"]["next_sequences"].get(str(fragment.index), 0)
        return int(self.session.registered.next_sequences[fragment.index] - saved)
