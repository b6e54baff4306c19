"""Non-finite and spiking losses or gradient norms: found before each update, attributed, and handled by policy.

`gate.AnomalyGate` is the feature; `anomaly.Anomaly` is one finding.
"""
