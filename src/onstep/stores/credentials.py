"""Finds the credentials for S3 that `obstore` does not find itself."""

from __future__ import annotations

import importlib
import os
from typing import Any

from onstep.errors import StoreError

_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config")


def shared_credentials() -> dict[str, Any]:
    """The option of a store for the credentials of the files in `~/.aws`; none if the environment has some.

    Raises:
        StoreError: if there are such files, but nothing that reads them.
    """
    has_own = "AWS_ACCESS_KEY_ID" in os.environ or "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ
    files = [os.path.expanduser(os.environ.get(name, default)) for name, default in _FILES]
    if has_own or not any(map(os.path.isfile, files)):
        return {}
    try:
        auth: Any = importlib.import_module("obstore.auth.boto3")
        return {"credential_provider": auth.Boto3CredentialProvider()}
    except ImportError:
        raise StoreError(
            "the credentials in ~/.aws are read by boto3, which is not installed: pip install boto3, or pass "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment."
        ) from None
