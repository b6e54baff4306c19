"""Hugging Face's methods that upload a model to the Hub."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onstep.checkpoint import checkpoints
from onstep.distributed import World
from onstep.errors import ConfigError, HubError
from onstep.hub.pusher import Pusher
from onstep.hub.repository import Repository
from onstep.hub.uploads import Uploads
from onstep.hub.waiting import finish_uploads
from onstep.trainer.methods.callbacks import CallbackMethods
from onstep.trainer.methods.saving import SavingMethods

logger = logging.getLogger(__name__)

_THEN = "The run continues, and uploads again with the next save."


@dataclass(frozen=True)
class Commit:
    """How `output_dir` is uploaded."""

    message: str
    token: str | None = None
    """In place of the repository's."""
    revision: str | None = None
    """In place of `hub_revision`."""
    blocking: bool = True
    """Whether to wait for it."""


class HubMethods(SavingMethods, CallbackMethods):
    """Hugging Face's methods that upload a model to the Hub. Only rank 0 does, in the background while a run trains."""

    hub_model_id: str | None
    """The full name of the repository, once it exists; on rank 0."""
    pusher: Pusher | None = None
    """What uploads, on rank 0 with `push_to_hub`, or after a call of it."""
    _of_directory: Future[Any] | None = None
    """The newest upload of `output_dir`, whose files are not written again before it has ended."""

    @property
    def push_in_progress(self) -> Uploads | None:
        """The uploads that have begun: `is_done()`, `wait_until_done()` and `jobs`; None before the first."""
        return None if self.pusher is None else self.pusher.uploads

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Create the repository `args.hub_model_id` (by default the name of `output_dir`) unless it exists, on rank 0.

        Args:
            token: one that may write there; None for `args.hub_token`, and else `huggingface_hub`'s own ways.
            private: whether a new repository is private; None for `args.hub_private_repo`.

        Raises:
            ConfigError: if the Hub refuses, as without a token.
            HubError: if it cannot be reached.
        """
        if not self.is_world_process_zero():
            return
        args = self.args
        repository = Repository(
            args.hub_model_id or Path(str(args.output_dir)).absolute().name,
            args.hub_token if token is None else token,
            args.hub_private_repo if private is None else private,
            args.hub_revision,
        )
        uploads = Uploads(repository, _THEN)
        self.pusher = Pusher(uploads, args.hub_strategy, always=args.hub_always_push)
        self.hub_model_id = repository.create()

    def open_hub(self) -> None:
        """Create the repository, as a Trainer with `push_to_hub` begins; one that cannot be reached costs a warning.

        Raises:
            ConfigError: if the Hub refuses, as without a token.
        """
        try:
            self.init_hf_repo()
        except HubError as error:
            logger.warning("%s Training can begin; each save tries again.", error)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As `SavingMethods.save_model`; with `push_to_hub`, and not during training, `output_dir` is then uploaded.

        A failed upload costs a warning: what was saved is on the disk.
        """
        is_own = output_dir is None or Path(output_dir).absolute() == Path(str(self.args.output_dir)).absolute()
        if is_own and self._of_directory is not None and not self._of_directory.done():
            self._finish_current_push()
        super().save_model(output_dir, _internal_call)
        if not self.args.push_to_hub or _internal_call or self.session is not None:
            return
        try:
            if is_own:
                self._upload_saved(Commit("Model save"), {})
            else:
                self.push_to_hub(commit_message="Model save")
        except (ConfigError, HubError) as error:
            logger.warning("%s The model is saved; trainer.push_to_hub() uploads it.", error)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the model to `output_dir` with its card, and upload that. All ranks call it if the model is sharded.

        The upload has what is in `output_dir`, except checkpoints, files whose names begin with `.` or `_`, and those
        that only Onstep reads.

        Args:
            commit_message: of the commit.
            blocking: whether to wait for the upload.
            token: one that may write there, in place of `args.hub_token`.
            revision: the branch, in place of `args.hub_revision`.
            private: whether a new repository is private, in place of `args.hub_private_repo`.
            kwargs: see `create_model_card`.

        Returns:
            The `CommitInfo` of `huggingface_hub`, or with `blocking=False` a future of it; None on other ranks.

        Raises:
            ConfigError: if the Hub refuses, as without a token.
            HubError: if it cannot be reached.
        """
        if self.hub_model_id is None:
            self.init_hf_repo(token=token, private=private)
        self.save_model(_internal_call=True)
        return self._upload_saved(Commit(commit_message or "End of training", token, revision, blocking), kwargs)

    def _upload_saved(self, commit: Commit, card: dict[str, Any]) -> Any:
        """Upload `output_dir`, where the model has just been saved."""
        self.callback_handler.on_push_begin(self.args, self.state, self.control)  # type: ignore[attr-defined]
        if self._pusher_of_run() is None:
            return None
        self._write_card(card)
        future = self._push_directory(Path(str(self.args.output_dir)), commit)
        if commit.blocking:
            self._finish_current_push()
        return future.result() if future.done() else future

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload what `hub_strategy` says of a committed checkpoint, in the background, on rank 0.

        While the upload before is unfinished, this one is skipped unless `hub_always_push`: its files come with a later
        one.
        """
        pusher = self._pusher_of_run()
        if pusher is None:
            return
        checkpoint = Path(checkpoint_folder)
        pusher.note(checkpoint)
        if not pusher.is_due():
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)  # type: ignore[attr-defined]
        at = f"step {checkpoint.name.rpartition('-')[2]}"
        if self.args.save_strategy == "epoch":
            at = f"epoch {int(self.state.epoch or 0)}"
        card = Path(str(self.args.output_dir), "README.md")
        try:
            future = pusher.push_checkpoint(checkpoint, f"Training in progress, {at}", [card] if card.is_file() else [])
        except OSError as error:
            logger.warning("%s is not uploaded: %s. %s", checkpoint, error, _THEN)
        else:
            self._note_name(future)

    def push_final(self, directory: Path) -> None:
        """Upload the final weights of a training, on rank 0; a failure costs a warning.

        Args:
            directory: has them, and what belongs to them.
        """
        if self._pusher_of_run() is None:
            return
        self._write_card({})
        try:
            future = self._push_directory(directory, Commit("End of training"))
        except OSError as error:
            logger.warning("the final weights are not uploaded: %s. They are in %s.", error, directory)
            return

        def warn(done: Future[Any]) -> None:
            if (error := done.exception()) is not None:
                logger.warning("%s The final weights are in %s; trainer.push_to_hub() uploads them.", error, directory)

        future.add_done_callback(warn)

    def sweep_uploads(self) -> None:
        """Delete what the uploads of a process that was killed have left in the directory of the run, on rank 0.

        The checkpoints that it has perhaps not uploaded come with the next upload.
        """
        pusher, state = self._pusher_of_run(), self.global_state
        if pusher is not None and state is not None and state.run_dir is not None:
            place = state.run_dir.checkpoints
            pusher.take_over(place, [one.path for one in sorted(checkpoints(place), key=lambda one: one.step)])

    def finish_pushes(self, world: World) -> None:
        """Wait for the uploads of rank 0 on all ranks. Collective."""
        if world.size > 1:
            finish_uploads(self.push_in_progress, world, self._is_interrupted)
        self._finish_current_push()

    def _finish_current_push(self) -> None:
        """Wait for the uploads that have begun; Ctrl-C leaves them."""
        if self.push_in_progress is not None and not self._is_interrupted():
            self.push_in_progress.finish(self._is_interrupted)

    def _is_interrupted(self) -> bool:
        """Whether a signal has asked the process to end."""
        handler = None if self.session is None else self.session.state.exits.handler
        return handler is not None and handler.received

    def _pusher_of_run(self) -> Pusher | None:
        """What uploads, on rank 0; None on other ranks."""
        if not self.is_world_process_zero():
            return None
        if self.pusher is None:
            try:
                self.init_hf_repo()
            except HubError as error:
                logger.warning("%s %s", error, _THEN)
        return self.pusher

    def _push_directory(self, directory: Path, commit: Commit) -> Future[Any]:
        assert self.pusher is not None
        own = self.pusher.uploads.repository
        chosen = own if commit.token is None else replace(own, token=commit.token)
        if commit.revision not in (None, own.revision):  # the name without `id`, so that the branch is created, too
            chosen = replace(chosen, name=own.id or own.name, revision=commit.revision, id=None)
        warns = not commit.blocking
        future = self._of_directory = self.pusher.push_directory(directory, commit.message, chosen, warns=warns)
        self._note_name(future)
        return future

    def _note_name(self, future: Future[Any] | None) -> None:
        """Learn the name of a repository that an upload has created."""

        def note(_: Future[Any]) -> None:
            if self.pusher is not None:
                self.hub_model_id = self.pusher.uploads.repository.id

        if future is not None and self.hub_model_id is None:
            future.add_done_callback(note)

    def _write_card(self, given: dict[str, Any]) -> None:
        """Write the model card, with the tags that the model has itself, and named as the repository."""
        tags = given.get("tags") or []
        own = getattr(self.model, "model_tags", None) or []
        tags = [*([tags] if isinstance(tags, str) else tags), *(one for one in own if one not in tags)]
        name = given.get("model_name") or (self.args.hub_model_id or Path(str(self.args.output_dir)).name)
        self.create_model_card(**{**given, "tags": tags, "model_name": name.rpartition("/")[2]})
