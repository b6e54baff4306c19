"""Reads files within bounds, replaces them durably, and turns any value into JSON."""
