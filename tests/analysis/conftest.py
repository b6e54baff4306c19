"""A browser for the tests of pages."""

from __future__ import annotations

from tests.support.browser import chromium, new_page

__all__ = ["chromium", "new_page"]
