"""Loaders whose position can be saved and restored.

`loader` reads the rows of a source: of `train_loader` (map-style), `listed_rows` (map-style, in the order of a torch
sampler), `iterable_loader` or `hf_streams` (parts of a stream of `datasets`). `eval_loader` reads evaluation sets;
`epoch_orders`, `sample_order`, `micro_batch_reader`, `collate` and `step_batches` are what they are made of;
`step_source` is what the loop reads from.
"""
