"""Checkpoints: what they hold, how they are written so that no crash can harm them, and how they are read."""
