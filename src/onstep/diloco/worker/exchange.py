"""Submits a worker's pseudo-gradients and merges newer versions, on rank 0, without collectives."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, TypeVar

import torch

from onstep.diloco.client.membership import Membership, Tensors, Version
from onstep.diloco.codec.body import write_body
from onstep.diloco.codec.choice import CodecChoice
from onstep.diloco.codec.feedback import ErrorFeedback
from onstep.diloco.protocol.messages import Registered
from onstep.diloco.protocol.session import ServerLostError
from onstep.diloco.sizes import encoded_bytes
from onstep.diloco.worker.fragment import Fragment, blended, kept
from onstep.diloco.worker.metrics import SyncMetrics

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_SECONDS = 1.0
"""Between two heartbeats with which a worker that ends, or has a command, asks how many others are registered."""
_NUM_POLLS = 2
"""Consecutive answers below the quorum after which it stops waiting."""


class Exchange:
    """The fragments of a worker, their pending submissions, and the versions that have arrived for them.

    Args:
        member: the worker's membership in the run.
        dtypes: of the model's parameters, by name.
        codec: of submissions; None for the server's.
        metrics: updated by each submission and merge.
    """

    def __init__(
        self, member: Membership, dtypes: Mapping[str, torch.dtype], codec: str | None, metrics: SyncMetrics
    ) -> None:
        self.member = member
        self.feedback = ErrorFeedback()
        self.fragments: list[Fragment] = []
        self._dtypes, self._metrics = dtypes, metrics
        self._codec, self._choice = codec, CodecChoice("fp32")
        self._waiting: dict[int, Future[Version]] = {}
        """Of threads that wait for the result of a fragment's submission."""
        self._arrived: dict[int, Version] = {}

    def join(self) -> Registered:
        """Register; see `Membership.join`."""
        registered = self.member.join()
        self.fragments = [Fragment(specs) for specs in self.member.fragments]
        self._choice = CodecChoice(self._codec or registered.settings.codec)
        return registered

    def open(self, index: int, state: Mapping[str, Any] | None) -> bool:
        """Fetch a fragment's newest version; whether the progress that a restored model has made still counts.

        It does if the model started from that very version and the server has not counted it already.
        """
        fragment, session = self.fragments[index], self.member.session
        fragment.advance(self.member.fetch(index))
        self._metrics.version = fragment.base.number
        if state is None or len(state["versions"]) != len(self.fragments):
            return False
        is_superseded = index in session.superseded
        is_pending = index in state["session"]["pending"]
        if not is_superseded and (is_pending or index in state["dropped"]):
            self.feedback.undo(fragment.names)
        elif is_superseded and not (is_pending and self._num_counted_since(index, state) == 1):
            self.feedback.forget(fragment.names)  # a later submission contains its residual
        return not is_superseded and bool(state["versions"][index] == fragment.base.number)

    def submit(self, index: int, local: Tensors, *, tokens: int, steps: int, cycle_seconds: float) -> None:
        """Encode the fragment's pseudo-gradient and send it in another thread.

        Raises:
            InvalidTensorsError: if the model is not finite.
        """
        fragment, metrics, transfers = self.fragments[index], self._metrics, self.member.transfers
        bandwidth = transfers.upload_bytes_per_second or transfers.download_bytes_per_second
        codec = self._choice.choose(fragment.specs, bandwidth, cycle_seconds)
        body = write_body(self.feedback.encode(fragment.difference(local, self._dtypes), codec))
        fragment.submitted, fragment.is_late = local, False
        metrics.quantization_error, metrics.last_send_bytes = self.feedback.relative_error, len(body)
        num_values = sum(math.prod(spec.shape) for spec in fragment.specs)
        metrics.bits_per_value = 8 * encoded_bytes(fragment.specs, codec) / max(1, num_values)
        base = fragment.base.number
        self.member.session.begin(index, base_version=base, tokens=max(tokens, 1), steps=steps, codec=codec, body=body)
        self.deliver(index)

    def deliver(self, index: int) -> None:
        """Send the fragment's submission, unless the server has it, and wait for its result, in another thread."""
        if index not in self._waiting and index not in self._arrived:
            self._waiting[index] = _in_thread(partial(self.member.result, index, base=self.fragments[index].base))

    def collect(self, indices: Iterable[int], wait: bool) -> tuple[dict[int, bool], set[int]]:
        """Collect the versions that the threads have received; with `wait`, once they end.

        A command of an operator is not kept waiting for a version that cannot come, since other workers have left.

        Returns:
            The fragments that can be merged, with whether their submission was counted; and those still waited for.
        """
        indices = list(indices)
        for index in indices:
            future = self._waiting.get(index)
            if future is None or not (self._wait_for(future) if wait else future.done()):
                continue
            del self._waiting[index]
            try:
                self._arrived[index] = future.result()
            except ServerLostError as error:
                logger.warning("training continues without a result of the server: %s", error)
                self._metrics.sync_retries += 1
                self.fragments[index].is_late = True
        arrived = {index: index not in self.member.dropped for index in indices if index in self._arrived}
        return arrived, {index for index in indices if index in self._waiting}

    def _wait_for(self, future: Future[Version]) -> bool:
        """Wait for a result; whether there is one."""
        num_polls = 0
        while wait_for([future], _POLL_SECONDS).not_done:
            is_in_vain = self.member.session.has_commands and not self._can_commit()
            num_polls = num_polls + 1 if is_in_vain else 0
            if num_polls == _NUM_POLLS:
                return False
        return True

    def wait_for_others(self) -> None:
        """Wait for all results, as long as enough workers are registered to commit them."""
        num_polls = 0
        while num_polls < _NUM_POLLS:
            if not wait_for(self._waiting.values(), _POLL_SECONDS).not_done:
                return
            num_polls = 0 if self._can_commit() else num_polls + 1
        logger.warning(
            "this worker's last steps are only in its own model: the other workers have left, and fewer than the "
            "quorum are registered"
        )

    def _can_commit(self) -> bool:
        """Whether all pending submissions may still be committed; True if the server does not answer."""
        try:
            beat = self.member.beat(0.0, _POLL_SECONDS)
        except ServerLostError:
            return True
        return all(self.member.session.can_commit(index, beat) for index in self._waiting)

    def merge(self, index: int, now: Tensors, local_share: float | None) -> Tensors:
        """Continue from the version that arrived; returns the model's new parameters.

        Progress made since a submission that was counted is kept, or blended in with `local_share`. Blending is meant
        for the few steps of an overlap, so what followed a late result is kept. The progress of a submission that was
        dropped stays in the model, and becomes part of the next pseudo-gradient.

        Args:
            now: the model's parameters; empty if no step was taken since the submission.
        """
        fragment, version = self.fragments[index], self._arrived.pop(index)
        new, reason = version.parameters, self.member.dropped.pop(index, None)
        if reason is not None:
            logger.warning("a submission was dropped: %s", reason)
            self._metrics.dropped += 1
            self.feedback.undo(fragment.names)
            merged = kept(new, now or fragment.submitted, fragment.start(self._dtypes))
        elif now and local_share is not None and not fragment.is_late:
            merged = blended(new, now, local_share)
        else:
            merged = kept(new, now, fragment.submitted)
        fragment.advance(version)
        metrics, transfers = self._metrics, self.member.transfers
        metrics.version, metrics.contributors = version.number, version.num_contributors
        metrics.reconnections = self.member.session.num_rejoins
        metrics.last_recv_bytes = transfers.last_received_bytes
        metrics.total_send_bytes, metrics.total_recv_bytes = transfers.sent_bytes, transfers.received_bytes
        return merged

    def leave(self) -> None:
        """Deregister, and end all threads."""
        try:
            self.member.leave()
        finally:
            self.member.close()

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed worker requires."""
        return {
            "session": self.member.session.state_dict(),
            "versions": [fragment.base.number for fragment in self.fragments],
            "feedback": self.feedback.state_dict(),
            "dropped": sorted(self.member.dropped.copy()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; before `join`."""
        self.member.session.load_state_dict(state["session"])
        self.feedback.load_state_dict(state["feedback"], {spec.name: spec.shape for spec in self.member.specs})

    def _num_counted_since(self, index: int, state: Mapping[str, Any]) -> int:
        """Submissions that the server has and the checkpoint has not; one that was pending is the first."""
        registered = self.member.session.registered
        assert registered is not None
        return int(registered.next_sequences[index] - state["session"]["next_sequences"].get(str(index), 0))


def _in_thread(work: Callable[[], T]) -> Future[T]:
    """The result of work in a thread of its own, which does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `result` in the thread that asks
            future.set_exception(error)

    threading.Thread(target=run, name="diloco", daemon=True).start()
    return future
