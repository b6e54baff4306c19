"""Steers a run while it runs: `steering` is the feature, `repeats` reads what it was sent before an interruption."""
