"""A repository on the Hugging Face Hub that a run commits to, through `huggingface_hub`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

from onstep.errors import ConfigError, HubError, MissingExtraError

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi

_REFUSALS = (400, 401, 403, 404, 409, 422)
"""Answers that another attempt with the same token and names would get again."""
_URL = re.compile(r"https?://\S+")
_LONGEST = 300
"""Characters that are shown of an error."""


@dataclass
class Repository:
    """A model repository, which is created when it is first needed."""

    name: str
    """As `owner/model`, or `model` for one of the token's owner."""
    token: str | None = field(default=None, repr=False)
    """None for the library's own ways: HF_TOKEN, and the file of `hf auth login`."""
    private: bool | None = None
    """Of a new repository; None is the owner's default."""
    revision: str | None = None
    """The branch, which is created if it is missing; None is `main`."""
    id: str | None = None
    """The full name, once the Hub has said it."""

    def create(self) -> str:
        """Create the repository and its branch, unless they exist; its full name.

        Raises:
            ConfigError: if the Hub refuses: the token is missing, unknown, or without the right to write there.
            HubError: if the Hub cannot be reached or fails, so that another attempt may succeed.
            MissingExtraError: without `huggingface_hub`.
        """
        api = self._api()
        with self._errors(f"the repository {self.name} cannot be created"):
            found = api.create_repo(self.name, private=self.private, exist_ok=True).repo_id
            if self.revision is not None and not self.revision.startswith("refs/"):
                api.create_branch(found, branch=self.revision, exist_ok=True)
        self.id = found
        return found

    def commit(self, files: Mapping[str, Path], message: str, cleared: str | None = None) -> CommitInfo:
        """Upload files and commit them together; those that the Hub has already are not sent again.

        Args:
            files: by their paths in the repository; nobody changes them meanwhile.
            message: of the commit.
            cleared: a directory in the repository that afterwards has only what is among `files`.

        Raises:
            ConfigError: as `create`.
            HubError: as `create`.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        name, api = self.id or self.create(), self._api()
        with self._errors(f"the commit to {name} failed"), _without_bars():
            adds = [CommitOperationAdd(path, str(file)) for path, file in files.items()]
            stale = []
            if cleared is not None:
                listed = api.list_repo_files(name, revision=self.revision)
                stale = [path for path in listed if path.startswith(f"{cleared}/") and path not in files]
            deletes = [CommitOperationDelete(path) for path in stale]
            return api.create_commit(name, [*deletes, *adds], commit_message=message, revision=self.revision)

    def _api(self) -> HfApi:
        try:
            from huggingface_hub import HfApi
        except ImportError:
            raise MissingExtraError(
                "push_to_hub requires huggingface_hub, which is not installed; pip install 'onstep[hf]'"
            ) from None
        return HfApi(token=self.token, library_name="onstep")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Raise what the library raises as ConfigError or HubError, in one line."""
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )

        # its bases are those of all errors of the HTTP client that this version uses
        of_client = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
        failures: tuple[type[Exception], ...] = (*of_client, OSError, ValueError, RuntimeError)

        try:
            yield
        except OfflineModeIsEnabled:
            raise ConfigError(
                "push_to_hub uploads to the Hub, and HF_HUB_OFFLINE=1 forbids every request; unset it, or leave "
                "push_to_hub=False and upload afterwards: hf upload REPO OUTPUT_DIR."
            ) from None
        except HFValidationError as error:
            raise ConfigError(f"{what}: {self._shown(error)}; correct hub_model_id.") from None
        except failures as error:
            if isinstance(error, RepositoryNotFoundError):
                self.id = None  # it was deleted: the next attempt creates it again
            status = _status(error)
            text = f"{what}: {self._shown(error)}"
            if status in _REFUSALS:
                raise ConfigError(f"{text}; {_remedy(status)}.") from None
            raise HubError(f"{text}.") from None

    def _shown(self, error: BaseException) -> str:
        """An error in one line, without the token and without URLs, which may be signed."""
        status, said = _status(error), getattr(error, "server_message", None)
        text = f"HTTP {status}" + (f", {said}" if said else "") if status else f"{type(error).__name__}: {error}"
        cause = error.__cause__
        if isinstance(error, RuntimeError) and cause is not None and not status:
            text += f" ({type(cause).__name__}: {cause})"
        text = _URL.sub("<url>", " ".join(text.split()))[:_LONGEST].rstrip(".; ")
        return text.replace(self.token, "<token>") if self.token else text


@contextmanager
def _without_bars() -> Iterator[None]:
    """The library's progress bars would mix with those of the training."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled() or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _status(error: BaseException) -> int | None:
    """The HTTP status of the answer that an error, or its cause, is about."""
    for one in (error, error.__cause__):
        status = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _remedy(status: int | None) -> str:
    if status in (401, 403):
        return "pass a token that may write there: hf auth login, HF_TOKEN, or hub_token"
    if status == 404:
        return "check hub_model_id, hub_revision and the rights of the token"
    return "check hub_model_id and what is uploaded"
