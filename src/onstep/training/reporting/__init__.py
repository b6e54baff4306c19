"""Measures a run and names what it measured; the loop's log step reads it.

`loss_accumulator` sums losses between logs, `timers` has clocks and timers, `bridge_tags` and `bridge_trackers` have
Megatron Bridge's tags and loggers, `gpu_telemetry` reads NVIDIA's driver.
"""
