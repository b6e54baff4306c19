"""Computes the steps of a Trainer: accelerator, options of model and torch, label smoothing, a user's own steps."""
