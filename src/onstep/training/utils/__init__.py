"""Megatron Bridge's import path `training.utils`; see `train_utils`."""
