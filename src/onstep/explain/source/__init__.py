"""Reads Python sources without running them: modules by file, what names denote, classes and their attributes."""
