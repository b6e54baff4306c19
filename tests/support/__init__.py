"""What the tests share: small models, data and configurations, recorders, and readers of what a run leaves.

`jobs` is what forked ranks run, `scripts` what is started as a process by itself, `faults` the killing and breaking.
"""
