"""Adapters that run what was written for other libraries on Onstep's `Trainer`, one package for each."""
