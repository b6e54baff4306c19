"""Adapters for other libraries and services: what was written for them runs on Onstep, or Onstep in or with them."""
