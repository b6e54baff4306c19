"""Features of every run, from its first line to its last: environment, signals, the wait for data, batch-size ramp-up
and the events that end it.

`environment.EnvironmentVariables`, `signal_handling.SignalHandling`, `rampup`, `endings.Endings`.
"""
