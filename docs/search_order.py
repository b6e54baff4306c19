"""A hook of MkDocs: guides come before decisions and the reference in the results of the search."""

from __future__ import annotations

from typing import Any

LOWERED = {"adr/": 0.1, "reference/": 0.5, "guide/how-do-i": 0.7, "callbacks/": 0.7}
"""Factors for the rank of a page, by the beginning of its path: guides come before pages of single parts, and short
answers after the guides that they link."""


def on_page_markdown(markdown: str, page: Any, **further: object) -> str:
    """Lower the rank of a page; its text stays as it is."""
    for directory, boost in LOWERED.items():
        if page.file.src_uri.startswith(directory):
            page.meta.setdefault("search", {})["boost"] = boost
    return markdown
