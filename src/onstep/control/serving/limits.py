"""Defines what the clients of one job may ask for."""

MOST_STREAMS = 16
MOST_POINTS = 200_000
"""In one answer; with many curves each has fewer."""

STRANGERS_PER_SECOND, STRANGERS_AT_ONCE = 10.0, 100.0
"""Requests without a valid token."""
MOST_STRANGERS_WAITING = 16
"""Further requests without a valid token are refused at once, with their connection."""

MOST_WAIT_SECONDS = 60.0
"""For the outcome of a command."""
HEARTBEAT_SECONDS = 15.0
"""Between two signs of life in an event stream."""
LOGIN_SECONDS, LOGINS_AT_ONCE = 0.2, 2
