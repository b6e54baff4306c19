"""`onstep demo`: `command`, what its run writes (`samples`) and its end (`ending`, `held_out`)."""
