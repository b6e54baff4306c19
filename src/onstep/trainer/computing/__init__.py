"""The accelerator of a Trainer, the options of model and torch, label smoothing, and steps that a user overrides."""
