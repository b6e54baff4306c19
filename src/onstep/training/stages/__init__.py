"""The stages of the loop, in `loop.py`'s order: position in the data, forward and backward, agreement between ranks,
the actions that are due (roll back, log, evaluate, save, exit), the end.

`job.Job` is what they work with; `actions.act` is what follows a step, `record` a logged step; `evaluation`
evaluates what `evaluation_batches` reads, `best_metric` follows its metric; `exits` decides saves and exits.
"""
