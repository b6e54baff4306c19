"""Onstep: one training loop for PyTorch models, open at every moment to your own callbacks."""
