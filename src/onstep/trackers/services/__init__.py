"""One tracker a file: W&B, MLflow, Comet, Trackio, TensorBoard and CSV."""
