"""A run's arguments and state, as callbacks see them."""

from tests.support.callback_views import args, make_state

__all__ = ["args", "make_state"]
