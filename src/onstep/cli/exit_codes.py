"""What the process's exit code says."""

OK = 0
"""Did what it was told: completed, stopped by request, or nothing left to do."""
ERROR = 1
PREEMPTED = 75
"""Interrupted from outside; start the same command again to resume."""
