"""Reruns a suspicious step to tell a hardware fault from a true result.

`rerun.RerunMachine` is the feature, `machine.RerunStateMachine` Megatron's state machine, `snapshot` what is replayed.
"""
