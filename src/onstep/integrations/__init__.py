"""Adapters for other libraries, one package for each: what was written for them runs on Onstep, or Onstep in them."""
