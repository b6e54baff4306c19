"""One tracker per module: W&B, MLflow, Comet, Trackio, TensorBoard and CSV."""
