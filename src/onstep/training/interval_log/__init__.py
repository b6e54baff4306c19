"""Reports the steps of a logging interval as Megatron Bridge does.

`bridge_log.BridgeLog` is the feature, `interval` what it reports, `console_line` the line itself.
"""
