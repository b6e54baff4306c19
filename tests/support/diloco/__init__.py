"""Drives the DiLoCo protocol without a network, and through faults."""
