"""Exit codes of the `onstep` process."""

OK = 0
"""Success: completed, stopped by request, or nothing left to do."""
ERROR = 1
INTERRUPTED = 130
"""Ctrl-C before there was anything to save."""
BROKEN_PIPE = 141
"""The reader of the output closed the pipe, as `head` does: a shell's code for SIGPIPE."""
