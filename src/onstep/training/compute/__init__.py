"""One optimizer step on this rank: its micro-batches on the device and the arithmetic of their losses.

`step.Step`, `step.MicroBatches`; `losses.MeanLoss`, `losses.LossShare`.
"""
