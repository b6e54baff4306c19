"""Saves that fail, die or lose power at a chosen operation, and runs that are killed at random instants."""
