"""Holds what a process shares with its children and with those that watch it."""
