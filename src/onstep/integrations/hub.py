"""`HubCallback`: uploads the model of a run to the Hugging Face Hub, whichever entry point trains it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

from onstep.checkpoint import checkpoints
from onstep.errors import HubError, require
from onstep.events import Callback, CallbackContext
from onstep.hub.pusher import Pusher
from onstep.hub.repository import Repository
from onstep.hub.uploads import Uploads
from onstep.hub.waiting import finish_uploads

logger = logging.getLogger(__name__)

STRATEGIES = ("end", "checkpoint", "all_checkpoints")
_THEN = "The run continues, and uploads again with the next save."


class HubCallback(Callback):
    """Uploads the final weights of a run, and its checkpoints if asked to, in the background, on rank 0.

    A `Trainer` does the same by `push_to_hub=True`. The end of the run waits for the last upload; Ctrl-C leaves it.

    Args:
        model_id: the repository, as `owner/model`; it is created when training begins.
        strategy: `end` uploads the final weights, with their model card; `checkpoint` also the newest checkpoint, as
            `last-checkpoint`, with each save; `all_checkpoints` every checkpoint.
        token: one that may write there; None for `huggingface_hub`'s own ways, HF_TOKEN and `hf auth login`.
        private: whether a new repository is private; None is the owner's default.
        revision: the branch; None is `main`.
        always_push: whether a save is queued while the upload before is unfinished; else it is skipped.

    Raises:
        ConfigError: for another strategy; and when training begins, if the Hub refuses, as without a token.
    """

    def __init__(
        self,
        model_id: str,
        strategy: Literal["end", "checkpoint", "all_checkpoints"] = "end",
        *,
        token: str | None = None,
        private: bool | None = None,
        revision: str | None = None,
        always_push: bool = False,
    ) -> None:
        require(strategy in STRATEGIES, "strategy", f"one of {', '.join(STRATEGIES)}", strategy, ".")
        self._uploads = Uploads(Repository(model_id, token, private, revision), _THEN)
        self._pusher = Pusher(self._uploads, strategy, always=always_push)

    def on_train_start(self, context: CallbackContext) -> None:
        """Create the repository."""
        state: Any = context.state
        if context.rank != 0:
            return
        if state.run_dir is not None:
            place = state.run_dir.checkpoints
            self._pusher.take_over(state.run_dir.model)
            self._pusher.take_over(place, [one.path for one in sorted(checkpoints(place), key=lambda one: one.step)])
        try:
            self._uploads.repository.create()
        except HubError as error:
            logger.warning("%s %s", error, _THEN)

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Upload the checkpoint, if the strategy says so."""
        if context.rank != 0 or context.checkpoint_path is None:
            return
        path = Path(context.checkpoint_path)
        self._pusher.note(path)
        if self._pusher.is_due():
            self._pusher.push_checkpoint(path, f"Training in progress, step {context.checkpoint_step}")

    def on_run_end(self, context: CallbackContext) -> None:
        """Upload the final weights, and wait, on all ranks."""
        state: Any = context.state
        if context.reason != "completed":
            return
        is_main, directory = context.rank == 0, None if state.run_dir is None else state.run_dir.model
        if is_main and directory is not None and directory.is_dir():
            future = self._pusher.push_directory(directory, "End of training", warns=False)
            future.add_done_callback(lambda done: self._report(done.exception(), directory))
        handler = state.exits.handler
        finish_uploads(
            self._uploads if is_main else None, state.world, lambda: handler is not None and handler.received
        )

    def _report(self, error: BaseException | None, directory: Path) -> None:
        if error is not None:
            name = self._uploads.repository.name
            logger.warning("%s The final weights remain in %s: hf upload %s %s", error, directory, name, directory)
