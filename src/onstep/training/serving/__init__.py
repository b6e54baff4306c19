"""Serves a run to those who watch and steer it: the callback between the loop and `onstep.control`."""
