"""Megatron Bridge's import path of the tokenizer's configuration."""
