"""Belongs to the process of a run: its directory and lock, its signals, its number of micro-batches.

`run_dir.RunDir`, `signals.DistributedSignalHandler`, `signals.Preempted`, `microbatches.NumMicroBatchesCalculator`,
`provenance.provenance`.
"""
