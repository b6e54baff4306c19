"""Reads the URLs of object stores, and keeps credentials out of what is shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from onstep.errors import ConfigError, without_credentials

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "file")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://")
_OTHER = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of another URL, or of one that lacks a slash; drives of Windows have one letter."""
_QUERY = re.compile(r"(:/[^\s?'\")]*)\?[^\s'\")]*")
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
    return _QUERY.sub(r"\1?...", without_credentials(text))


def check_place(key: str, place: str) -> None:
    """Refuse what is neither a path nor the plain URL of an object store.

    Args:
        key: what has the place as its value, for the message.
        place: a path or a URL.

    Raises:
        ConfigError: without credentials.
    """
    if is_url(place):
        check_url(key, place)
    elif _OTHER.match(place):
        raise ConfigError(
            f"{key}={without_secrets(place)} must be a path or the URL of an object store (s3://, gs://, az://, "
            f"file://); write ./{without_secrets(place)} if it is a path."
        )


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
    if not url.startswith(f"{parts.scheme}:"):
        raise ConfigError(f"{key}={shown} must have its scheme in small letters; write {parts.scheme}://...")
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
    """`$ONSTEP_CACHE`, or else `onstep` in `$XDG_CACHE_HOME` or `~/.cache`: what can be made or downloaded again."""
    own, shared = os.environ.get("ONSTEP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(os.path.expanduser(own)).absolute()
    return (Path(os.path.expanduser(shared or "~/.cache")) / "onstep").absolute()


def copies_directory() -> Path:
    """Where commands copy what they read of runs in object stores."""
    return cache_directory() / "copies"


def with_urls(text: str) -> str:
    """A text with the URLs of runs in place of the paths of their copies.

    Args:
        text: what may name paths in `copies_directory`.
    """
    copies = str(copies_directory())
    for scheme in SCHEMES if copies in text else ():
        text = text.replace(f"{copies}/{scheme}/", f"{scheme}://{'/' * (scheme == 'file')}")
    return text
