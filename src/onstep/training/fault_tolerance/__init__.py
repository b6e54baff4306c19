"""Times the sections of a run and learns their time limits.

`sections.FaultToleranceSections` is the feature, `learned_timeouts` works without `nvidia-resiliency-ext`.
"""
