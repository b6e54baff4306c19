"""Says in a line why a request to a store failed."""

from __future__ import annotations

import re

from onstep.stores.urls import without_secrets

_ROLES = "169.254.169.254"
"""Where a machine of a cloud is asked for its role."""
_CHARACTERS = 300


def reason_of(error: BaseException) -> str:
    """What an error of the library says in its first line, and the store's word for it, without credentials.

    Args:
        error: of a request.
    """
    text = str(error).strip() or type(error).__name__
    line, code = re.split(r":?\s*<|\n", text, maxsplit=1)[0], re.search(r"<Code>(\w+)</Code>", text)
    if _ROLES in line:
        line = f"there are no credentials in the environment, and this machine has no role: {line}"
    named = f" ({code[1]})" if code else ""
    return without_secrets(line)[: _CHARACTERS - len(named)].rstrip(":. ") + f"{named}."
