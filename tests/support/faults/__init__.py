"""Saves that fail, die or lose power at a chosen operation, runs that are killed at random instants, and `fuzz`."""
