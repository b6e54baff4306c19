"""Loaders whose position can be saved and restored.

`loader` (map-style), `listed_loader` (map-style, in the order of a torch sampler), `iterable_loader`, `hf_streams`
(parts of a stream of `datasets`), `eval_loader`; `epoch_orders`, `sample_order`, `micro_batch_reader`, `collate` and
`step_batches` are what they are made of; `step_source` is what the loop reads from.
"""
