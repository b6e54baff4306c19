"""A directory for the `PYTHONPATH` of child processes, which import `sitecustomize` when they start."""
