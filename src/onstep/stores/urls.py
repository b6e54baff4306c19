"""Reads the URLs of object stores, and keeps credentials out of what is shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from onstep.errors import ConfigError, without_credentials

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_QUERY = re.compile(r"\?[^\s'\")]*")
"""May contain a signature."""


def is_url(text: str) -> bool:
    """Whether a path names an object store: `s3://bucket/runs`. Others, such as `https://`, are not meant.

    Args:
        text: a path or a URL.
    """
    match = _URL.match(text)
    return match is not None and match["scheme"].lower() in SCHEMES


def without_secrets(text: str) -> str:
    """A text, such as an error of a library, whose URLs have neither user, password nor query.

    Args:
        text: what may contain URLs.
    """
    return _QUERY.sub("?...", without_credentials(text))


def check_url(key: str, url: str) -> None:
    """Refuse a URL that has credentials, a query, or no place for a bucket.

    Args:
        key: what has the URL as its value, for the message.
        url: the URL of an object store.

    Raises:
        ConfigError: without the credentials.
    """
    parts = urlsplit(url)
    shown = without_secrets(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            f"{key}={shown} must be a plain URL without credentials, query or fragment; pass credentials by the "
            f"environment, the library's own files, or a role."
        )
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ConfigError(f"{key}={shown} must be file:// and an absolute path; write file:///{parts.netloc}...")
    if parts.scheme != "file" and not parts.netloc:
        raise ConfigError(f"{key}={shown} names no bucket; write {parts.scheme}://BUCKET/PATH.")
    if any(part in ("..", ".") for part in parts.path.split("/")):
        raise ConfigError(f"{key}={shown} must not have '.' or '..' in its path; write the path itself.")


def joined(url: str, *names: str) -> str:
    """The URL of something below another one.

    Args:
        url: the URL above.
        names: the parts of the path below it.
    """
    return "/".join([url.rstrip("/"), *names])


def local_place(url: str, cache: str | Path | None = None) -> Path:
    """The directory on this machine for what belongs to a URL.

    Args:
        url: of an object store.
        cache: the directory of all URLs; None is `onstep/stores` in the user's cache.
    """
    parts = urlsplit(url)
    root = Path(cache) if cache is not None else cache_directory() / "stores"
    return root.joinpath(parts.scheme, *filter(None, [parts.netloc, *parts.path.split("/")]))


def cache_directory() -> Path:
    """Where the user's programs keep what they can get again: `$XDG_CACHE_HOME/onstep`, else `~/.cache/onstep`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "onstep"
