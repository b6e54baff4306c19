"""Pipelines of stages: which chunk is which stage, and the passes of their micro-batches over the ranks."""
