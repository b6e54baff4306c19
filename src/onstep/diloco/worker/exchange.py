"""Submits a worker's pseudo-gradients and merges newer versions, on rank 0, without collectives."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from onstep.diloco.background import InOrder, in_thread
from onstep.diloco.client.membership import Membership, Tensors, Version, always_damaged
from onstep.diloco.codec.feedback import Encoder
from onstep.diloco.protocol.aging import reason_to_drop
from onstep.diloco.protocol.messages import Registered, Submit
from onstep.diloco.protocol.operations import RoundOpenError, ServerLostError
from onstep.diloco.worker.fragment import Fate, Lineage
from onstep.diloco.worker.kept_work import Unsent, num_steps, read_work, write_work
from onstep.diloco.worker.metrics import SyncMetrics

logger = logging.getLogger(__name__)
Correction = Literal["none", "undo", "forget"]
"""Of residuals in a checkpoint: the last encoding was not counted, or a submission that is not known contains them."""

Restored = Literal["all", "in flight", "nothing"]
"""What counts of the progress of a restored model: all since the fragment's version, the same with a submission that is
in flight, or nothing."""
_POLL_SECONDS = 1.0
"""Between two heartbeats with which a worker that ends, or has a command, asks how many others are registered."""
_FIRST_WORD_SECONDS = 5.0
"""Of waiting, after which it is logged what for; then each time that it has lasted twice as long."""
_NUM_POLLS = 2
"""Consecutive answers below the quorum after which it stops waiting."""


class Exchange:
    """The pending submissions of a worker, and the versions that have arrived for them: what rank 0 alone needs.

    Args:
        member: the worker's membership in the run.
        codec: of submissions; None for the server's.
        metrics: updated by each submission and merge.
        has_server: False if submissions are collective over sites, which all have to begin them in the same order.
    """

    def __init__(self, member: Membership, codec: str | None, metrics: SyncMetrics, *, has_server: bool = True) -> None:
        self.member = member
        self._has_server = has_server
        self._in_thread = in_thread if has_server else InOrder().in_thread
        self.fragments: list[Lineage] = []
        self._metrics = metrics
        self._codec = codec
        self._encoder: Encoder | None = None
        """Of the next submission."""
        self._waiting: dict[int, Future[Version]] = {}
        """Of threads that wait for the result of a fragment's submission."""
        self.arrived: dict[int, Version] = {}
        """Of fragments that are to be merged."""
        self._kept: list[Unsent] = []
        self._lost: set[int] = set()
        """Fragments about whose submission the server did not answer."""
        self._resubmitted: set[int] = set()
        """Fragments of which another session's submissions were sent at the start."""
        self._asked_at: dict[int, float] = {}
        """When these threads began."""

    def join(self) -> Registered:
        """Register; see `Membership.join`."""
        registered = self.member.join()
        self.fragments = [Lineage(specs) for specs in self.member.fragments]
        self._codec = self._codec or registered.settings.codec
        return registered

    def expect_kept(self, path: Path) -> None:
        """Before `join`: what `send_kept` will submit is work on this worker's share of the data."""
        found, session = read_work(path), self.member.session
        first = [] if found is None else [one.submit for one in found[1] if one.submit.fragment == 0]
        session.kept_from = min((submit.sequence for submit in first), default=None)
        session.kept_steps = sum(submit.steps for submit in first)
        session.step = max(session.step, session.kept_steps)  # a restored model has taken them

    def send_kept(self, path: Path) -> None:
        """Submit what an earlier session of this worker has kept in a file, and remove it once all has a result.

        What a restored model has of these steps does not count again.

        Raises:
            CheckpointError: for a file that is damaged.
            ServerLostError: if a round is not committed in time; the file remains.
        """
        found, registered = read_work(path), self.registered
        if found is None:
            return
        run_id, unsent = found
        if run_id != registered.run_id:
            logger.error("the steps in %s are of run %s, not of this one; remove the file", path, run_id)
            return
        kept_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        logger.info(
            "DiLoCo: %d steps of the last session, kept since %s, are submitted now", num_steps(unsent), kept_at
        )
        for one in unsent:
            submit = one.submit
            self._resubmitted.add(submit.fragment)
            if submit.sequence < registered.next_sequences[submit.fragment]:
                continue  # the server has its result
            self.member.session.resume(submit, one.body)
            version = self.member.result(submit.fragment)
            dropped = self.member.dropped.pop(submit.fragment, None)
            if dropped is None:
                logger.info("DiLoCo: %d steps of the last session are in version %d", submit.steps, version.number)
            else:
                logger.warning("%d steps of the last session are lost: %s", submit.steps, dropped.reason)
        path.unlink(missing_ok=True)

    @property
    def has_resent(self) -> bool:
        """Whether submissions of fragment 0 of another session were sent at the start."""
        return 0 in self._resubmitted

    def is_unsent(self, index: int) -> bool:
        """Whether the server did not answer about the fragment's submission."""
        return index in self._lost and self.member.session.pending(index) is not None

    def keep(self, index: int) -> None:
        """Keep the fragment's pending submission for `write_kept`."""
        submit, body = self.member.session.unsent(index)
        assert isinstance(body, bytes | bytearray)
        self._kept.append(Unsent(submit, body))

    def keep_later(self, index: int, *, tokens: int, steps: int, loss: float | None) -> None:
        """Keep what is encoded, which followed that submission, as one more."""
        assert self._encoder is not None
        submit, _ = self.member.session.unsent(index)
        later = replace(submit, sequence=submit.sequence + 1, tokens=max(tokens, 1), steps=steps, loss=loss)
        self._kept.append(Unsent(later, self._encoder.finish()))

    def write_kept(self, path: Path) -> int:
        """Write what was kept; returns the steps of the fragment that has the most."""
        write_work(path, self.registered.run_id, self._kept)
        return num_steps(self._kept)

    def register_again(self) -> Registered:
        """Register once more, which says where this worker's data continues; without an answer, what is known."""
        try:
            return self.member.join()
        except ServerLostError:
            return self.registered

    @property
    def registered(self) -> Registered:
        """The server's last answer to a registration."""
        registered = self.member.session.registered
        assert registered is not None
        return registered

    def outer(self, index: int) -> tuple[int, Registered]:
        """The number of workers that the fragment's next average is expected to have, and the outer optimizer."""
        registered = self.registered
        return self.fragments[index].num_contributors or registered.settings.num_workers, registered

    def open(self, index: int, state: Mapping[str, Any] | None, has_submitted: bool) -> tuple[Restored, Correction]:
        """Fetch a fragment's newest version into `arrived`.

        Args:
            index: the fragment's.
            state: of a checkpoint.
            has_submitted: whether the ranks have the parameters at the submission that was in flight.

        Returns:
            What of the progress of a restored model counts: all of it, if the model started from that very version and
            the server has not counted it already; if a submission was in flight, it is so again, once it is delivered,
            and its result will be merged as if nothing had happened. And what that means for restored residuals.
        """
        fragment, session = self.fragments[index], self.member.session
        version = self.arrived[index] = self.member.fetch(index)
        fragment.origin = version.number
        if index in self._resubmitted:
            return "nothing", "forget"
        if state is None or len(state["versions"]) != len(self.fragments):
            return "nothing", "none"
        if has_submitted and self._is_again_in_flight(index, state):
            return "in flight", "none"
        is_superseded = index in session.superseded
        is_pending = index in state["session"]["pending"]
        correction: Correction = "none"
        if not is_superseded and (is_pending or index in state["dropped"]):
            correction = "undo"
        elif is_superseded and not (is_pending and self._num_counted_since(index, state) == 1):
            correction = "forget"  # a later submission contains its residual
        still_counts = not is_superseded and bool(state["versions"][index] == version.number)
        if still_counts:
            fragment.origin = state.get("origins", state["versions"])[index]
        return "all" if still_counts else "nothing", correction

    def _is_again_in_flight(self, index: int, state: Mapping[str, Any]) -> bool:
        """Continue a submission that was in flight at the checkpoint, unless the server has a later one."""
        saved, fragment = state.get("in_flight", {}).get(str(index)), self.fragments[index]
        if saved is None or self.registered.next_sequences[index] > saved["submit"]["sequence"] + 1:
            return False
        if saved["submit"]["base_version"] > self.arrived[index].number:
            return False  # the server was restored from an older copy
        fragment.sent = Submit(**saved["submit"]), bytearray(saved["body"].numpy())
        self.member.session.resume(*fragment.sent)
        fragment.origin = state["origins"][index]
        fragment.knows_start = self.arrived[index].number == state["versions"][index]
        fragment.is_late = self.arrived[index].number > state["versions"][index] + 1
        return True

    def accept(self, index: int, digest: str, is_last: bool) -> bool:
        """Let the version that has arrived be the fragment's; if it is damaged, fetch it again. Whether it is not.

        Args:
            index: the fragment's.
            digest: of the decoded tensors.
            is_last: whether this is the last attempt.

        Raises:
            InvalidTensorsError: if it is damaged then.
        """
        version = self.arrived[index]
        if version.digest not in ("", digest):
            if is_last:
                raise always_damaged(version.number, index)
            self.arrived[index] = self.member.fetch(index)
            return False
        del self.arrived[index]
        fragment = self.fragments[index]
        fragment.number, fragment.num_contributors = version.number, version.num_contributors
        self._metrics.version, self._metrics.contributors = version.number, version.num_contributors
        return True

    def has_newer_work(self, index: int) -> bool:
        """Whether the server has a submission of the fragment that the restored state does not know to be counted."""
        return index in self.member.session.superseded or index in self._resubmitted

    def begin_encoding(self, index: int) -> str:
        """Begin to encode a fragment; returns the codec."""
        assert self._codec is not None  # once joined
        self._encoder = Encoder(self.fragments[index].specs, self._codec)
        return self._codec

    def encode(self, name: str, wanted: Tensor | None) -> Tensor | None:
        """Encode the next parameter; see `Encoder.add`."""
        assert self._encoder is not None
        assert wanted is not None
        return self._encoder.add(name, wanted)

    def submit(self, index: int, base: Tensors, *, tokens: int, steps: int, loss: float | None = None) -> None:
        """Send what is encoded in another thread; see `deliver`."""
        fragment, metrics, encoder = self.fragments[index], self._metrics, self._encoder
        assert encoder is not None
        body, self._encoder = encoder.finish(), None
        fragment.is_late = False
        self._lost.discard(index)
        metrics.quantization_error, metrics.last_send_bytes = encoder.relative_error, len(body)
        codec, version = encoder.codec, fragment.origin
        submit = self.member.session.begin(
            index, base_version=version, tokens=max(tokens, 1), steps=steps, codec=codec, body=body, loss=loss
        )
        fragment.sent = submit, body
        self.deliver(index, base)

    def deliver(self, index: int, base: Tensors) -> None:
        """Send the fragment's submission, unless the server has it, and wait for its result, in another thread.

        Args:
            index: the fragment's.
            base: its parameters in the version that the worker has; read if versions are decoded as they arrive.
        """
        if index not in self._waiting and index not in self.arrived:
            self._asked_at[index] = time.monotonic()
            version = Version(self.fragments[index].number, base)
            self._waiting[index] = self._in_thread(partial(self.member.result, index, base=version))

    def collect(
        self, indices: Iterable[int], wait: bool, unless_lost: bool = False
    ) -> tuple[dict[int, Fate], set[int]]:
        """Collect the versions that the threads have received; with `wait`, once they end, `unless_lost` the server is.

        A command of an operator is not kept waiting for a version that cannot come, since other workers have left.

        Returns:
            The fragments that can be merged, with the fate of their submission; and those still waited for.
        """
        indices = list(indices)
        for index in indices:
            future = self._waiting.get(index)
            if future is None or not (self._wait_for(index, unless_lost) if wait else future.done()):
                self.fragments[index].is_late = self.fragments[index].is_late or wait
                continue
            del self._waiting[index]
            try:
                self.arrived[index] = future.result()
                self._lost.discard(index)
                self.member.outage.end(has_submission=index not in self.member.dropped)
            except ServerLostError as error:
                if isinstance(error, RoundOpenError):
                    logger.warning("DiLoCo: training continues without a result of the server: %s", error)
                else:
                    self.member.outage.begin(str(error))
                self._metrics.sync_retries += 1
                self._lost.add(index)
                self.fragments[index].is_late = True
        arrived = {index: self._fate(index) for index in indices if index in self.arrived}
        return arrived, {index for index in indices if index in self._waiting}

    def _fate(self, index: int) -> Fate:
        dropped, fragment = self.member.dropped.get(index), self.fragments[index]
        if dropped is not None:
            return "given up" if dropped.is_anew or not fragment.knows_start else "dropped"
        behind = self.arrived[index].number - fragment.origin
        if not fragment.is_late:
            return "counted"
        return "late" if reason_to_drop(behind, self.registered.settings) is None else "outdated"

    def _wait_for(self, index: int, unless_lost: bool) -> bool:
        """Wait for a result, and say from time to time for what; whether there is one."""
        future, session = self._waiting[index], self.member.session
        started, told, num_polls = time.monotonic(), 0.0, 0
        while not future.done():
            if unless_lost and session.is_lost and time.monotonic() >= self._asked_at[index] + _POLL_SECONDS:
                self.member.outage.begin()
                return False
            if not wait_for([future], _POLL_SECONDS).not_done:
                break
            waited = time.monotonic() - started
            if waited >= _FIRST_WORD_SECONDS and waited >= 2 * told:
                awaits = "the server's answer" if session.is_lost else session.awaits
                awaits = awaits if self._has_server else "the other sites"
                logger.info("DiLoCo: waiting for %.0f s for %s", waited, awaits)
                told = waited
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
            "quorum are registered; give all workers as many steps, or start the server again with --min-workers 1 "
            "--change-settings"
        )

    def _can_commit(self) -> bool:
        """Whether all pending submissions may still be committed; True if the server does not answer."""
        try:
            beat = self.member.beat(0.0, _POLL_SECONDS)
        except ServerLostError:
            return True
        return all(self.member.session.can_commit(index, beat) for index in self._waiting)

    def merge(self, index: int, fate: Fate, has_moved: bool) -> None:
        """Note that the model continues from a newer version.

        Args:
            index: the fragment's.
            fate: of its submission.
            has_moved: whether a step was taken since the submission: after a late result, its progress began from the
                older version.
        """
        fragment, metrics, transfers = self.fragments[index], self._metrics, self.member.transfers
        dropped = self.member.dropped.pop(index, None)
        if dropped is not None:
            part = f" of fragment {index}" if len(self.fragments) > 1 else ""
            logger.warning("DiLoCo: a submission%s was dropped: %s", part, dropped.reason)
            metrics.dropped += 1
        if fate != "dropped" and not (fate == "late" and has_moved):
            fragment.origin = fragment.number
        fragment.sent, fragment.knows_start = None, True
        metrics.reconnections = self.member.session.num_rejoins
        metrics.last_recv_bytes = transfers.last_received_bytes
        metrics.total_send_bytes, metrics.total_recv_bytes = transfers.sent_bytes, transfers.received_bytes

    def note_lost(self, index: int, steps: int, submitted: int = 0) -> None:
        """Say and count that so many steps of this worker are given up, since the model is the newest version now.

        Of those that were `submitted`, the server knows that they are lost.
        """
        if index == 0:
            self._metrics.lost_steps += steps
            self.member.session.lost_steps += steps - submitted
        logger.warning(
            "DiLoCo: %d steps of this worker%s are given up, which began from a version that is too old now; it starts "
            "over from version %d",
            steps,
            f" on fragment {index}" if len(self.fragments) > 1 else "",
            self.fragments[index].number,
        )

    def leave(self, reason: str) -> None:
        """Deregister, with the reason for the server's log, and end all threads."""
        try:
            self.member.leave(reason)
        finally:
            self.member.close()

    def settle(self) -> None:
        """Wait until no submission is in a round; its result is merged later all the same."""
        wait_for(self._waiting.values())

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed worker requires, besides what ranks have parts of."""
        is_overlapped = self.registered.settings.is_overlapped
        return {
            "session": self.member.session.state_dict(),
            "versions": [fragment.number for fragment in self.fragments],
            "origins": [fragment.origin for fragment in self.fragments],
            "dropped": sorted(self.member.dropped.copy()),
            "in_flight": {
                str(index): {"submit": asdict(one.sent[0]), "body": torch.frombuffer(one.sent[1], dtype=torch.uint8)}
                for index, one in enumerate(self.fragments)
                if one.sent is not None and is_overlapped
            },
        }

    def _num_counted_since(self, index: int, state: Mapping[str, Any]) -> int:
        """Submissions that the server has and the checkpoint has not; one that was pending is the first."""
        return int(self.registered.next_sequences[index] - state["session"]["next_sequences"].get(str(index), 0))
