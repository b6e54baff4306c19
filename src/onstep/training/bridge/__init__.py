"""Megatron Bridge's names over the training loop: `GlobalState`, `train`, `train_step` and what goes with them.

The loop and its features never import this room.
"""
