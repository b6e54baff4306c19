"""Opens pages in a browser."""

from __future__ import annotations

import os
import sys
import webbrowser


def opens_in_browser(url: str) -> bool:
    """Open a page, unless the browser has no window: one in the terminal does not run its code. Whether it did."""
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return bool(sys.platform in ("darwin", "win32") or has_display) and webbrowser.open(url)
