"""How a Trainer computes: its accelerator, the options of model and torch, label smoothing, and a user's own steps."""
