"""Defines the parameters, the objective and the result of a trial of a hyperparameter search."""
