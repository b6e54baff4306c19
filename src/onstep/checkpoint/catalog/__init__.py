"""The checkpoints of a directory: `discovery` finds the newest valid one, `retention` decides which are kept."""
