"""Holds what a server knows of its run, and keeps it on disk: a server that is started again continues from there."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from onstep.diloco.protocol.coordinator import Coordinator
from onstep.diloco.protocol.messages import ParameterSpec, Settings, fingerprint
from onstep.diloco.protocol.settings import check_state
from onstep.diloco.server.initial import Origin, continued
from onstep.diloco.server.masters import Fragment
from onstep.diloco.server.served_run import rest_of
from onstep.diloco.server.store import Store
from onstep.errors import CheckpointError

logger: logging.Logger = logging.getLogger(__name__)


class RunState:
    """The settings, fragments and decisions of a run; those that its directory has, or new ones, which are saved.

    Args:
        settings: as given.
        specs: of all parameters.
        fragments: of the parameters.
        origin: what the server is started with.
        directory: where it is kept; None for nowhere.
        keep_versions: versions of each fragment that are kept beside the newest.
        may_change: whether settings and rates as given replace those of the directory.

    Raises:
        ConfigError: for other arguments than those of the directory, unless they may change it.
        CheckpointError: if the directory has the state of a different model, or cannot be written.
    """

    def __init__(
        self,
        settings: Settings,
        specs: Sequence[ParameterSpec],
        fragments: Sequence[Fragment],
        origin: Origin,
        directory: Path | None,
        *,
        may_change: bool,
        keep_versions: int = 0,
    ) -> None:
        self.settings, self.fragments = settings, fragments
        self._fingerprint, self._origin, self._may_change = fingerprint(specs), origin, may_change
        self.coordinator = self._new_coordinator(None)
        self.store = None if directory is None else Store(directory, keep_versions)
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def save_to(self, store: Store) -> None:
        """Write everything to a store.

        Raises:
            CheckpointError: if the disk refuses.
        """
        store.origin = asdict(self._origin)
        rest = rest_of(self.coordinator.state_dict(), self.fragments)
        for number, part in enumerate(self.fragments):
            store.commit(number, part.newest.number, part.state_dict(part.newest), rest)

    def load_from(self, store: Store) -> None:
        """Continue the run of another directory, with any parameters, and keep it in the own one.

        Raises:
            CheckpointError: if there is none, or it was saved with a different model.
        """
        if not self._load(store, self._origin.without_model()):
            raise CheckpointError(f"{store.directory} has no state of a DiLoCo server; give the directory of one.")
        if self.store is not None:
            self.save_to(self.store)

    def close(self) -> None:
        """Let another server use the directory; closing twice is harmless."""
        if self.store is not None:
            self.store.close()

    def _begin(self) -> None:
        if self.store is not None and not self._load(self.store, self._origin):
            self.save_to(self.store)
        elif self.store is not None and self._may_change:
            self.store.origin = asdict(self._origin)
            self.store.save(rest_of(self.coordinator.state_dict(), self.fragments))

    def _new_coordinator(self, state: Mapping[str, object] | None) -> Coordinator:
        return Coordinator(self.settings, run_id=secrets.token_hex(8), fingerprint=self._fingerprint, state=state)

    def _load(self, store: Store, given: Origin) -> bool:
        """Continue what is saved there; whether there is something."""
        saved = store.load()
        if saved is None:
            return False
        check_state(saved.rest, self._fingerprint, self.settings.num_fragments)
        self.settings = continued(saved, given, self.fragments, may_change=self._may_change)
        origin = Origin(**saved.origin)
        self._origin = origin.changed_to(given) if self._may_change else origin
        self.coordinator = self._new_coordinator(saved.rest)
        versions = tuple(part.newest.number for part in self.fragments)
        rounds = self.coordinator.versions
        if versions != rounds:
            raise CheckpointError(
                f"{store.directory} has the versions {_listed(versions)} of its fragments, and {_listed(rounds)} "
                "rounds of them; restore the directory."
            )
        known = ", ".join(sorted(self.coordinator.workers)) or "none"
        run_id, directory = self.coordinator.run_id, store.directory
        shown = f"{_listed(versions)}{' of its fragments' if len(versions) > 1 else ''}"
        logger.info("Continuing run %s after round %s from %s; its workers were: %s", run_id, shown, directory, known)
        return True


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
