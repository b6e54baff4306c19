"""Searches hyperparameters: the trials of `Trainer.hyperparameter_search`, each of which is a run of its own."""
