"""The checkpoints in a directory: `discovery` finds the newest valid one, `retention` decides which are kept."""
