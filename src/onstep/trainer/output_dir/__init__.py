"""The `output_dir` of a Trainer: `claim` decides what happens to a run that is there, `identity` determines what a run
learns from, and `files` writes what Hugging Face's tools look for.
"""
