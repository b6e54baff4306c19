"""Summaries, comparisons and the interactive report page: `summary`, `comparison`, `report`."""
